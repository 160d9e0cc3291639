"""One side of a comparison, ours or karpathy/nanochat's, in a process of its own that takes orders.

`Side` starts this file: ours with this project on PYTHONPATH, the peer's in the peer's folder, so `nanochat`
is another package in each. The first line of stdin is the job, a JSON object; every further line is an order.
Every answer is one line of JSON. What the code prints by itself goes to stderr.

    {"do": "first"}                          seconds of one micro-step, which compiles, and of a whole step
    {"do": "steps", "count": 3}              seconds a step, the peak of memory
    {"do": "trace", "path": "F", "count": 2} so many profiled steps, written as a Chrome trace
    {"do": "update"}                         seconds of one optimizer step, on gradients that stay the same
    {"do": "write", "rows": 8, "tokens": 9}  seconds to write so many tokens in each row; no steps after it
    {"do": "release"}                        gives unused memory back, so that the other side has it

A step is that of either training script: micro-steps forward and backward, then one update. Tokens are
random: their values do not change how long a step takes. They lie in page-locked memory and are copied to
the GPU at each micro-step, as a data loader does.

With "lock" in the job, a file, several sides prepare side by side on one GPU: see GpuLock.
"""

import contextlib
import gc
import itertools
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import torch

ROOT = Path(__file__).resolve().parent.parent
LAST_LINES = 6  # of what a process wrote before it ended, in a message
MEMORY_GIB = 56  # of a GPU that a plan may use, so that cards of 80 and of 141 GB run the same rows
# The settings that scaling.model_config takes, in its order
SHAPE = "depth", "aspect_ratio", "head_dim", "max_seq_len", "vocab_size", "window_pattern"
PROMPT = list(range(1, 17))  # ids
SAMPLING = {"temperature": 0.8, "top_k": 50}


# ------------------------------------------------------------------------------------------------------
# Here: start a side, give it orders


def peer_folder(checkout: str | Path | None) -> Path:
    """The folder of the peer. Raises UserError if it is another folder or none."""
    from nanochat import UserError
    from nanochat.files import user_path

    if not checkout:
        raise UserError("give --peer=FOLDER, a checkout of karpathy/nanochat")
    folder = user_path("peer", checkout).resolve()
    for name in ("scripts/base_train.py", "nanochat/__init__.py", "nanochat/gpt.py"):
        if not (folder / name).exists():
            raise UserError(f"{folder} has no {name}; --peer is a folder of karpathy/nanochat")
    return folder


class Side:
    """A process of this file. `facts`: what its model says of itself; or what a function of the job returns,
    if `whose` is its name, "module.function". Raises RuntimeError if the process ends, MemoryError if the
    GPU's memory does not suffice, and the UserError that the process raised.

    folder: whose `nanochat` it imports; all else of ours can be imported, too.

    The last lines that it writes to stderr go to the message of an error. limit_s: the most seconds to wait
    for an answer; then the process is ended. alive: all that have not ended.
    """

    alive: ClassVar[set] = set()

    def __init__(self, whose: str, job: dict, folder: Path = ROOT, limit_s: float | None = None):
        path = os.pathsep.join(filter(None, [str(folder), str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path, "NANOCHAT_DTYPE": job.get("dtype", "")}
        environment |= job.get("environment", {})
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors, "text": True}
        command = [sys.executable, __file__, whose]
        self.whose = whose
        self.process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **pipes)
        Side.alive.add(self)
        try:
            self.facts = self.ask(job, limit_s)
        except BaseException:
            self.__exit__()
            raise

    def ask(self, order: dict, limit_s: float | None = None) -> dict:
        late = threading.Event()
        timer = threading.Timer(limit_s or threading.TIMEOUT_MAX, lambda: (late.set(), self.end()))
        timer.daemon = True
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps(order), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if late.is_set():
            raise RuntimeError(f"stopped after {limit_s:.3g} s")
        if not line:
            raise RuntimeError(f"the process of {self.whose} ended; {self._last_lines()}")
        answer = json.loads(line)
        if "out_of_memory" in answer:
            raise MemoryError(answer["out_of_memory"])
        if "refused" in answer:
            from nanochat import UserError

            raise UserError(answer["refused"])
        return answer

    def do(self, order: str, limit_s: float | None = None, **more) -> dict:
        return self.ask({"do": order, **more}, limit_s)

    def _last_lines(self) -> str:
        self.process.wait()
        self.errors.seek(0)
        lines = [line.strip()[:200] for line in self.errors.read().splitlines() if line.strip(" ^~")]
        return " / ".join(lines[-LAST_LINES:])

    def end(self):
        """End it and the processes that it has started, compilers say."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.end()
        self.process.communicate()
        Side.alive.discard(self)


@contextlib.contextmanager
def threads():
    """A pool of threads that wait for sides. What is alive at its end is ended."""
    pool = ThreadPoolExecutor(64)
    try:
        yield pool
    finally:
        for side in list(Side.alive):
            side.end()
        pool.shutdown(cancel_futures=True)


# ------------------------------------------------------------------------------------------------------
# In the process


class Ours:
    """Model and optimizer as scripts/base_train.py makes them from the same settings."""

    def __init__(self, job: dict):
        from nanochat import optim
        from nanochat.gpt import GPT
        from nanochat.machine import compiling, precision, runtime
        from nanochat.ops import attention

        self.machine = runtime.start(job["device"], seed=0)
        self.device = self.machine.device
        self.dtype, _ = precision.resolve_dtype(job["dtype"], self.device)
        self.plan = our_plan(job, self.machine, self.dtype)
        self.plan = replace(self.plan, kernels=use_kernels(job, self.plan.config, self.machine, self.dtype))
        with torch.device("meta"):
            model = GPT(self.plan.config)
        self.model = runtime.materialize(model, self.device, 0)
        if job.get("fp8"):
            from nanochat.ops.fp8 import convert_to_fp8

            convert_to_fp8(model)
        place = self.plan.config, self.machine, self.dtype, job["compile"]
        asked = job.get("attention", {})  # {kind: backend}, as in a checkpoint's `resolved`
        self.attention = attention.choose(*place, documents=False, resolved={"attention": asked})
        if any(self.attention.resolved[kind] != name for kind, name in asked.items()):
            raise RuntimeError(f"this attention cannot run here: {self.attention.reason}")
        attention.use(model, self.attention)
        groups = optim.parameter_groups(model, self.plan.rates, self.plan.weight_decay)
        self.optimizer = optim.MuonAdamW(groups, self.dtype, 0 if job["compile"] else None)
        if not job.get("kept_gradients", True):
            from nanochat.ops import tables

            self.optimizer.kept_gradients.clear()
            self.optimizer.used.clear()
            self.optimizer.zero_grad()
            # As in several processes; else the second micro-step would add to the gradients of the first
            tables.dist = SimpleNamespace(is_initialized=lambda: True)
        self.scaler = precision.make_scaler(self.device, self.dtype)
        if job.get("rows_in_loops"):  # as PyTorch's compiler chooses
            compiling.keep_rows_in_registers = lambda: None
        self.train_model = compiling.compile_parts(model) if job["compile"] else model
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
            "kernels": self.plan.kernels.reason,
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


def use_kernels(job: dict, config, machine, dtype):
    """Use the kernels written by hand that job["kernels"] names, "loss,mlp" say ("": none; "auto": those that
    base_train chooses). Returns a kernels.Kernels."""
    from nanochat.ops import kernels

    asked = job.get("kernels", "auto")
    if asked != "auto":
        names = tuple(name for name in asked.split(",") if name)
        kernels.use(names)
        return kernels.Kernels(names, f"{asked or 'none'}, as asked for")
    with GpuLock(job.get("lock")).held():  # it measures how fast they are
        chosen = kernels.choose(config, machine, dtype, {})
    kernels.use(chosen.names)
    return chosen


def our_plan(job: dict, machine, dtype):
    """The plan that base_train makes for the job's shape: a run as long as its defaults say, text enough."""
    import configurator
    from nanochat.machine.hardware import survey
    from nanochat.plan import planning

    settings = configurator.defaults(ROOT / "scripts" / "base_train.py")
    settings |= {name: job[name] for name in (*SHAPE, "total_batch_size")}
    settings |= {"device_batch_size": job["rows"], "copying": job.get("copying", "auto")}
    settings |= {"spelling": "off"}  # loading folds sub-word rows (engine.py), and `writer` loads nothing
    tokenizer = SimpleNamespace(vocab_size=job["vocab_size"])
    text = SimpleNamespace(estimated_tokens=lambda tokenizer: 10**12, text_bytes=0, more_text="")
    hardware = survey(machine, dtype)
    if machine.device.type == "cuda":  # as on a GPU where nothing else runs, so that all parts plan the same
        memory = torch.cuda.get_device_properties(machine.device).total_memory
        hardware = replace(hardware, memory=min(int(0.98 * memory), MEMORY_GIB * 2**30))
    plan = planning.derive(settings, tokenizer, text, hardware, {})
    return replace(plan, compiled=job["compile"]).with_largest_micro_batch()


def peer_config(job: dict) -> dict:
    """The fields of the peer's GPTConfig for the job's shape."""
    width = -(-job["depth"] * job["aspect_ratio"] // job["head_dim"]) * job["head_dim"]
    heads = width // job["head_dim"]
    return {
        "sequence_len": job["max_seq_len"], "vocab_size": job["vocab_size"], "n_layer": job["depth"],
        "n_head": heads, "n_kv_head": heads, "n_embd": width, "window_pattern": job["window_pattern"],
    }  # fmt: skip


class Peer:
    """The peer's model and optimizer, built in the order of its scripts/base_train.py."""

    def __init__(self, job: dict):
        from nanochat import flash_attention
        from nanochat.gpt import GPT, GPTConfig

        self.device = torch.device(job["device"])
        torch.manual_seed(42)
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        with torch.device("meta"):
            self.model = GPT(GPTConfig(**peer_config(job)))
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
        self.lock, self.compile = job.get("lock"), job["compile"]
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


class GpuLock:
    """The right to compute on the GPU, for processes that prepare side by side: a lock on a file, or none.

    One has it while its compiled code runs, so that only one has activations in memory, and none while it
    compiles, which takes a CPU.
    """

    def __init__(self, path: str | None):
        from filelock import FileLock  # torch brings it

        self.file, self.waited_s = FileLock(path, thread_local=False) if path else None, 0.0

    def take(self, *_):
        began = time.perf_counter()
        if self.file and not self.file.is_locked:
            self.file.acquire(poll_interval=0.02)
        self.waited_s += time.perf_counter() - began

    def give(self, *_):
        if self.file and self.file.is_locked:
            release()
            self.file.release()

    def give_to_compile(self, *_):
        """With activations in memory it stays here."""
        weights = self.weights  # 0 without a GPU
        if not weights or torch.cuda.memory_allocated() < 4 * weights:  # gradients and states too
            self.give()

    @contextlib.contextmanager
    def held(self):
        self.take()
        try:
            yield
        finally:
            self.give()

    @contextlib.contextmanager
    def held_unless_compiling(self):
        """Have it whenever the body computes."""
        self.weights = torch.cuda.memory_allocated()
        handler = torch._dynamo.callback.callback_handler
        handler.register_start_callback(self.give_to_compile)
        handler.register_end_callback(self.take)
        try:
            # Both passes are compiled before the first runs, and leaves activations in memory
            with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
                yield
        finally:
            handler.remove_start_callback(self.give_to_compile)
            handler.remove_end_callback(self.take)
            self.give()


# ------------------------------------------------------------------------------------------------------
# Orders


def first(side, batches) -> dict:
    """What is not yet compiled after the first step is after the second. Without the time that it waited."""
    lock, began = GpuLock(batches.lock), time.perf_counter()
    with lock.held_unless_compiling() if batches.compile else lock.held():
        side.step(itertools.islice(batches, 1))
        synchronize(side.device)
        first_step_s = time.perf_counter() - began - lock.waited_s
        second = steps(side, batches, 1)
    gc.collect()
    gc.freeze()
    release()
    return second | {"first_step_s": first_step_s}


def steps(side, batches, count: int, warm_up: bool = False) -> dict:
    """Run whole steps and time them together by the clock. The device is waited for at the end alone, as
    base_train waits for no step before it has given the next one. warm_up: one of a single micro-step first,
    which gets back the memory that was released."""
    if warm_up:
        side.step(itertools.islice(batches, 1))
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
    return {"step_s": step_s, "peak_bytes": peak, "reserved_bytes": reserved}


def trace(side, batches, path: str, count: int) -> dict:
    """Steps under torch.profiler, without stacks, which would slow them down."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if side.device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds, record_shapes=True) as profile:
        side.step(itertools.islice(batches, 1))  # the first step under a profiler waits for it
        synchronize(side.device)
        with torch.profiler.record_function("profiled steps"):
            for _ in range(count):
                side.step(batches)
            synchronize(side.device)
    profile.export_chrome_trace(path)
    return {}


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


def release(side=None, batches=None) -> dict:
    """Memory that no tensor uses goes back to the GPU. Weights and state stay."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return {}


def take_orders(orders: queue.SimpleQueue):
    """Put each line of stdin into a queue. The end of the process that started this one closes stdin, and
    ends this one too, whatever it is doing."""
    with open(0, "rb", buffering=0) as stdin:  # Python cannot end while a thread waits in a buffer
        for line in stdin:
            orders.put(json.loads(line))
    os.killpg(0, signal.SIGKILL)


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # print() of either side must not stand between the answers
    job = json.loads(sys.stdin.readline())
    if job.get("nice"):
        os.nice(job["nice"])  # those that are measured first compile first

    def answer(values: dict):
        print(json.dumps(values), file=answers, flush=True)

    given = queue.SimpleQueue()
    threading.Thread(target=take_orders, args=(given,), daemon=True).start()
    try:
        if sys.argv[1] not in ("ours", "peer"):
            module, _, name = sys.argv[1].rpartition(".")
            return answer(getattr(import_module(module), name)(job))
        side = {"ours": Ours, "peer": Peer}[sys.argv[1]](job)
        batches = Batches(job, side.rows, side.micro_steps, side.device)
        answer(side.facts())
        orders = {order.__name__: order for order in (first, steps, trace, update, write, release)}
        while order := given.get():
            answer(orders[order.pop("do")](side, batches, **order))
    except Exception as error:
        if type(error).__name__ == "UserError":  # ours: the peer has no such class
            return answer({"refused": str(error)})
        if "out of memory" not in str(error):  # the compiler wraps torch.OutOfMemoryError
            raise
        sys.stderr.write(f"{error}\n")
        answer({"out_of_memory": str(error).splitlines()[0]})
        sys.exit(1)


if __name__ == "__main__":
    main()
