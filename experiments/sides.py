"""One side of a comparison, ours or karpathy/nanochat's, in a process of its own that takes orders.

`Side` starts this file: ours with this project on PYTHONPATH, the peer's in the peer's folder, so `nanochat`
is another package in each. The first line of stdin is the job, a JSON object; every further line is an order.
Every answer is one line of JSON. What the code prints by itself goes to stderr.

    {"do": "first"}                          the first step, which compiles: its seconds
    {"do": "steps", "count": 3}              seconds a step, the last loss, the peak of memory
    {"do": "trace", "path": "FILE"}          two profiled steps, written as a Chrome trace
    {"do": "update"}                         seconds of one optimizer step, on gradients that stay the same
    {"do": "write", "rows": 8, "tokens": 9}  seconds to write so many tokens in each row; no steps after it
    {"do": "release"}                        gives unused memory back, so that the other side has it

A step is that of either training script: micro-steps forward and backward, then one update. Tokens are
random: their values do not change how long a step takes. They lie in page-locked memory and are copied to
the GPU at each micro-step, as a data loader does.
"""

import contextlib
import gc
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parent.parent
PROFILED_STEPS = 2
PROMPT = list(range(1, 17))  # ids
SAMPLING = {"temperature": 0.8, "top_k": 50}


# ------------------------------------------------------------------------------------------------------
# Here: start a side, give it orders


def peer_folder(checkout: str | Path) -> Path:
    """The folder of the peer. Raises UserError if it is another folder."""
    from nanochat import UserError

    folder = Path(checkout).expanduser().resolve()
    for name in ("scripts/base_train.py", "nanochat/gpt.py"):
        if not (folder / name).exists():
            raise UserError(f"{folder} has no {name}; --peer is a folder of karpathy/nanochat")
    return folder


class Side:
    """A process of this file. `facts`: what its model says of itself. Raises RuntimeError if it ends, and
    MemoryError if the GPU's memory does not suffice."""

    def __init__(self, whose: str, job: dict, folder: Path = ROOT):
        environment = os.environ | {"PYTHONPATH": str(folder), "NANOCHAT_DTYPE": job["dtype"]}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, __file__, whose]
        self.whose = whose
        self.process = subprocess.Popen(command, cwd=folder, env=environment, **pipes)
        try:
            self.facts = self.ask(job)
        except BaseException:
            self.__exit__()
            raise

    def ask(self, order: dict) -> dict:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(order), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline() or "null")
        if answer is None:
            raise RuntimeError(f"the process of {self.whose} ended; its message stands above")
        if "out_of_memory" in answer:
            raise MemoryError(answer["out_of_memory"])
        return answer

    def do(self, order: str, **more) -> dict:
        return self.ask({"do": order, **more})

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.communicate()


# ------------------------------------------------------------------------------------------------------
# In the process


class Ours:
    """Model and optimizer as scripts/base_train.py makes them from the same settings."""

    def __init__(self, job: dict):
        from nanochat import optim
        from nanochat.gpt import GPT
        from nanochat.machine import precision, runtime
        from nanochat.machine.compiling import compile_parts
        from nanochat.ops import attention

        self.machine = runtime.start(job["device"], seed=0)
        self.device = self.machine.device
        self.dtype, _ = precision.resolve_dtype(job["dtype"], self.device)
        self.plan = our_plan(job, self.machine, self.dtype)
        with torch.device("meta"):
            model = GPT(self.plan.config)
        self.model = runtime.materialize(model, self.device, 0)
        if job.get("fp8"):
            from nanochat.ops.fp8 import convert_to_fp8

            convert_to_fp8(model)
        place = self.plan.config, self.machine, self.dtype, job["compile"]
        self.attention = attention.choose(*place, documents=False, resolved={})
        attention.use(model, self.attention)
        groups = optim.parameter_groups(model, self.plan.rates, self.plan.weight_decay)
        self.optimizer = optim.MuonAdamW(groups, self.dtype, 0 if job["compile"] else None)
        self.scaler = precision.make_scaler(self.device, self.dtype)
        self.train_model = compile_parts(model) if job["compile"] else model
        self.rows, self.micro_steps = self.plan.device_batch_size, self.plan.grad_accum_steps

    def facts(self) -> dict:
        """What follows from the settings: the plan's numbers."""
        plan = self.plan
        return {
            "rows": self.rows,
            "micro_steps": self.micro_steps,
            "parameters": plan.parameters["total"],
            "flops_per_token": plan.flops_per_token,
            "peak_flops": plan.hardware.peak_flops,
            "expected_bytes": plan.expected_bytes,
            "attention": self.attention.reason,
        }

    def step(self, batches) -> torch.Tensor:
        from nanochat import optim
        from nanochat.gradients import clip_grad_norm_
        from nanochat.machine import precision

        losses = torch.zeros(self.micro_steps, device=self.device)
        for i, (inputs, targets) in enumerate(batches):
            with precision.autocast(self.device, self.dtype):
                loss = self.train_model(inputs, targets) / self.micro_steps
            self.scaler.scale(loss).backward()
            losses[i] = loss.detach()
        self.scaler.unscale_(self.optimizer)
        norm = clip_grad_norm_(self.model, self.optimizer, 1.0)
        optim.skip_if_not_finite(self.optimizer, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return losses.sum()

    def writer(self):
        """A function of rows and tokens that yields what the model writes in all rows, token by token."""
        from nanochat.engine import cast_weights, generate_batch

        model = cast_weights(self.model, self.dtype).requires_grad_(False)
        return lambda rows, tokens: generate_batch(model, [PROMPT] * rows, tokens, **SAMPLING)


def our_plan(job: dict, machine, dtype):
    """The plan of a long run of base_train with the job's shape: text and tokens have no end."""
    import configurator
    from nanochat.machine.hardware import survey
    from nanochat.plan import planning

    shape = {name: job[name] for name in ("depth", "aspect_ratio", "head_dim", "max_seq_len")}
    shape |= {"window_pattern": job["window_pattern"], "device_batch_size": job["rows"]}
    settings = configurator.defaults(ROOT / "scripts" / "base_train.py") | shape
    settings |= {"num_iterations": 100_000, "total_batch_size": job["total_batch_size"]}
    tokenizer = SimpleNamespace(vocab_size=job["vocab_size"])
    text = SimpleNamespace(estimated_tokens=lambda tokenizer: 10**12, more_text="")
    hardware = survey(machine, dtype)
    if machine.device.type == "cuda":  # as on a GPU where nothing else runs, so that all parts plan the same
        memory = torch.cuda.get_device_properties(machine.device).total_memory
        hardware = replace(hardware, memory=int(0.98 * memory))
    plan = planning.derive(settings, tokenizer, text, hardware)
    return replace(plan, compiled=job["compile"]).with_largest_micro_batch()


class Peer:
    """The peer's model and optimizer, built in the order of its scripts/base_train.py."""

    def __init__(self, job: dict):
        from nanochat import flash_attention
        from nanochat.gpt import GPT, GPTConfig

        self.device = torch.device(job["device"])
        torch.manual_seed(42)
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        width = -(-job["depth"] * job["aspect_ratio"] // job["head_dim"]) * job["head_dim"]
        heads = width // job["head_dim"]
        config = GPTConfig(
            sequence_len=job["max_seq_len"], vocab_size=job["vocab_size"], n_layer=job["depth"],
            n_head=heads, n_kv_head=heads, n_embd=width, window_pattern=job["window_pattern"],
        )  # fmt: skip
        with torch.device("meta"):
            self.model = GPT(config)
        self.model.to_empty(device=self.device)
        self.model.init_weights()
        self.train_model = torch.compile(self.model, dynamic=False) if job["compile"] else self.model
        self.optimizer = self.model.setup_optimizer(weight_decay=0.1)
        self.rows = job["rows"]
        self.micro_steps = job["total_batch_size"] // (self.rows * job["max_seq_len"])
        self.attention = "FA3" if flash_attention.USE_FA3 else "SDPA"

    def facts(self) -> dict:
        counts = self.model.num_scaling_params()
        return {
            "rows": self.rows,
            "micro_steps": self.micro_steps,
            "parameters": counts["total"],
            "flops_per_token": self.model.estimate_flops(),
            "attention": self.attention,
        }

    def step(self, batches) -> torch.Tensor:
        for inputs, targets in batches:
            loss = self.train_model(inputs, targets)
            last = loss.detach()
            (loss / self.micro_steps).backward()
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return last

    def writer(self):
        """As that of Ours. No token ends a text, so both write as many."""
        sys.modules["nanochat.checkpoint_manager"] = SimpleNamespace(load_model=None)  # needs its tokenizer
        from nanochat.engine import Engine

        nothing = SimpleNamespace(encode_special=lambda name: -1, get_bos_token_id=lambda: -1)
        engine = Engine(self.model.eval(), nothing)
        return lambda rows, tokens: engine.generate(PROMPT, num_samples=rows, max_tokens=tokens, **SAMPLING)


class Batches:
    """As many random batches as a step has micro-steps; iterating copies each to the device."""

    def __init__(self, job: dict, rows: int, micro_steps: int, device: torch.device):
        shape, self.device, self.pin = (rows, job["max_seq_len"] + 1), device, device.type == "cuda"
        draw = torch.Generator().manual_seed(0)
        tokens = [torch.randint(job["vocab_size"], shape, generator=draw) for _ in range(micro_steps)]
        self.pairs = [(self._ready(t[:, :-1]), self._ready(t[:, 1:])) for t in tokens]

    def _ready(self, tokens):
        tokens = tokens.contiguous()
        return tokens.pin_memory() if self.pin else tokens

    def __iter__(self):
        for pair in self.pairs:
            yield tuple(tokens.to(self.device, non_blocking=self.pin) for tokens in pair)


def synchronize(device: torch.device):
    """Wait until the device has finished all its work."""
    if device.type != "cpu":
        {"cuda": torch.cuda, "mps": torch.mps}[device.type].synchronize()


# ------------------------------------------------------------------------------------------------------
# Orders


def first(side, batches) -> dict:
    step_s = steps(side, batches, 1)["step_s"]
    gc.collect()
    gc.freeze()
    return {"first_step_s": step_s}


def steps(side, batches, count: int) -> dict:
    """Run whole steps and time them together by the clock. The device is waited for at the end alone, as
    base_train waits for no step before it has given the next one."""
    synchronize(side.device)
    began = time.perf_counter()
    for _ in range(count):
        loss = side.step(batches)
    loss = loss.item()
    synchronize(side.device)
    step_s = (time.perf_counter() - began) / count
    if not math.isfinite(loss):
        raise RuntimeError(f"the loss is {loss}")
    peak = reserved = 0  # bytes that tensors have taken at most, and that torch has reserved, on a GPU
    if side.device.type == "cuda":
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"step_s": step_s, "loss": loss, "peak_bytes": peak, "reserved_bytes": reserved}


def trace(side, batches, path: str) -> dict:
    """Two steps under torch.profiler, without stacks and shapes, which would slow them down."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if side.device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        side.step(batches)  # the first step under a profiler waits for it
        synchronize(side.device)
        with torch.profiler.record_function("profiled steps"):
            for _ in range(PROFILED_STEPS):
                side.step(batches)
            synchronize(side.device)
    profile.export_chrome_trace(path)
    return {"steps": PROFILED_STEPS}


def update(side, batches) -> dict:
    for p in side.model.parameters():
        if p.grad is None:
            p.grad = torch.randn_like(p) * 1e-3
    synchronize(side.device)
    began = time.perf_counter()
    side.optimizer.step()
    synchronize(side.device)
    return {"seconds": time.perf_counter() - began}


def write(side, batches, rows: int, tokens: int) -> dict:
    """Streaming, after a short prompt."""
    if not hasattr(side, "written_by"):
        with torch.no_grad():
            for p in side.model.parameters():  # fresh projections are zero, and the logits all alike
                p.add_(0.05 * torch.randn_like(p))
        side.written_by = side.writer()
    synchronize(side.device)
    began = time.perf_counter()
    written = sum(1 for _ in side.written_by(rows, tokens))
    seconds = time.perf_counter() - began
    if written != tokens:
        raise RuntimeError(f"{written} tokens instead of {tokens}")
    return {"seconds": seconds}


def release(side, batches) -> dict:
    """Memory that no tensor uses goes back to the GPU. Weights and state stay."""
    if side.device.type == "cuda":
        torch.cuda.empty_cache()
    return {}


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # print() of either side must not stand between the answers
    job = json.loads(sys.stdin.readline())

    def answer(values: dict):
        print(json.dumps(values), file=answers, flush=True)

    try:
        side = {"ours": Ours, "peer": Peer}[sys.argv[1]](job)
        batches = Batches(job, side.rows, side.micro_steps, side.device)
        answer(side.facts())
        orders = {order.__name__: order for order in (first, steps, trace, update, write, release)}
        for line in sys.stdin:
            order = json.loads(line)
            answer(orders[order.pop("do")](side, batches, **order))
    except Exception as error:
        if "out of memory" not in str(error):  # the compiler wraps torch.OutOfMemoryError
            raise
        sys.stderr.write(f"{error}\n")
        answer({"out_of_memory": str(error).splitlines()[0]})
        sys.exit(1)


if __name__ == "__main__":
    main()
