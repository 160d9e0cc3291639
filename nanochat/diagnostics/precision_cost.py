"""What each precision costs on this machine: tokens per second, memory, loss, and deviation of the logits.

Each variant (a precision, in training or in inference) has a process of its own, because the peak memory of
a process never decreases. The processes take turns, so other work on the machine slows all of them alike, and
medians over turns are compared. `scripts/precision_report.py --measure` prints the result.
"""

import contextlib
import json
import math
import statistics
import subprocess
import sys
import time
from dataclasses import asdict

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nanochat import UserError, optim
from nanochat.diagnostics import training_step
from nanochat.engine import cast_weights, generate
from nanochat.gpt import GPT, GPTConfig
from nanochat.machine import memory, precision, runtime
from nanochat.terminal import table

PROMPT = 16  # tokens that the generated ones follow


# ------------------------------------------------------------------------------------------------------
# In the worker's process


def build(config, device, seed, dtype=torch.float32):
    with torch.device("meta"):
        model = cast_weights(GPT(config), dtype)
    return runtime.materialize(model, device, seed)


class Training:
    """base_train's steps on the batches of a file, with constant rates and without weight decay."""

    def __init__(self, machine, config, job):
        self.machine, self.dtype = machine, precision.DTYPES[job["dtype"]]
        self.model = build(config, machine.device, job["seed"])
        groups = optim.parameter_groups(self.model, job["rates"], weight_decay=0.0)
        self.optimizer = optim.MuonAdamW(groups, self.dtype)
        self.scaler = precision.make_scaler(machine.device, self.dtype)
        self.batches = iter(load_file(job["tokens"])["tokens"])

    def step(self) -> float:
        rows = next(self.batches).to(self.machine.device)  # (B, T + 1)
        inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        loss = training_step(self.model, self.optimizer, self.scaler, self.dtype, inputs, targets)
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def turn(self, steps: int, seconds: float) -> dict:
        """Make up to `steps` steps until `seconds` have passed, but at least two."""
        times, losses = [], []
        while len(losses) < steps and (len(losses) < 2 or sum(times) < seconds):
            times.append(_seconds(self.machine, lambda: losses.append(self.step())))
        return {"seconds": times[1:], "losses": losses}  # the first step of a turn warms up

    def save(self, path: str):
        save_file(self.model.state_dict(), path)


class Inference:
    """Reading a batch and generating tokens, under autocast or with weights cast once."""

    def __init__(self, machine, config, job):
        self.machine, dtype = machine, precision.DTYPES[job["dtype"]]
        self.dtype = torch.float32 if job["cast"] else dtype  # of autocast
        self.model = build(config, machine.device, 0, dtype if job["cast"] else torch.float32)
        for name, tensor in self.model.state_dict().items():  # one at a time: memory never holds two copies
            with safe_open(job["weights"], framework="pt") as file:
                tensor.copy_(file.get_tensor(name))
        self.rows = load_file(job["tokens"])["tokens"][-1, :, :-1].contiguous().to(machine.device)

    @torch.inference_mode()
    def read(self, rows):
        with precision.autocast(rows.device, self.dtype):
            return self.model(rows)

    def turn(self, tokens: int) -> dict:
        prompt = self.rows[0, :PROMPT].tolist()
        ways = {
            "read": lambda: self.read(self.rows),
            "generate": lambda: list(generate(self.model, prompt, tokens, self.dtype)),
        }
        # The second call counts: the first warms up
        return {name: [_seconds(self.machine, way) for _ in range(2)][1] for name, way in ways.items()}

    def logits(self, path: str):
        save_file({"logits": self.read(self.rows[:1]).float().cpu()}, path)


def _seconds(machine, function) -> float:
    machine.synchronize()
    began = time.perf_counter()
    function()
    machine.synchronize()
    return time.perf_counter() - began


def work():
    """The worker's program. stdin has lines of JSON, the job and then commands; stdout gets the answers."""
    job = json.loads(sys.stdin.readline())
    machine = runtime.start(job["device_type"], job["seed"])
    before = 0 if machine.device.type == "cuda" else memory.peak(machine.device)
    kind = {"training": Training, "inference": Inference}[job["kind"]]
    worker = kind(machine, GPTConfig(**job["config"]), job)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        if name == "memory":
            answer = {"peak": memory.peak(machine.device), "before": before}
        else:
            answer = getattr(worker, name)(**arguments)
        print(json.dumps(answer), flush=True)


# ------------------------------------------------------------------------------------------------------
# In the script's process


class Worker:
    """A process that runs a Training or Inference: wait for `receive()`, then `ask()` it to run methods."""

    def __init__(self, name: str, **job):
        self.name, self.job, self.answers = name, job, []
        command = [sys.executable, "-c", f"from {__name__} import work; work()"]
        how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        # With a session of its own it does not get a terminal's Ctrl-C: this process gets it and kills it
        self.process = subprocess.Popen(command, start_new_session=True, **how)
        self._send(job)

    def _send(self, message):
        with contextlib.suppress(BrokenPipeError):  # the process has ended: receive() says so
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def receive(self) -> dict | None:
        if line := self.process.stdout.readline():
            return json.loads(line)
        raise UserError(
            f"the process that measures {self.name} ended with status {self.process.wait()}; its own message "
            "is above. If memory ran out, lower --depth or --device_batch_size"
        )

    def ask(self, name, **arguments) -> dict | None:
        self._send([name, arguments])
        return self.receive()

    def turn(self, **arguments):
        self.answers.append(self.ask("turn", **arguments))

    def close(self):
        self.process.kill()  # it has answered, or this process has an error
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


@contextlib.contextmanager
def working(jobs):
    """Workers for (name, job) pairs, all ready; they end with the block."""
    workers = [Worker(name, **job) for name, job in jobs]
    try:
        for worker in workers:
            worker.receive()
        yield workers
    finally:
        for worker in workers:
            worker.close()


def possible(device) -> list[str]:
    """The precisions of this device. float32 is first: the others are compared with it."""
    names = []
    for name in ("float32", "bfloat16", "float16"):
        with contextlib.suppress(UserError):
            precision.resolve_dtype(name, device)
            names.append(name)
    return names


def measure_training(names, tokens, folder, config, device, rates, seed, rounds, seconds) -> list[dict]:
    """Train in every precision on the same batches, and save the weights of the first in `folder`.

    tokens (steps, B, T + 1) int64. The first precision makes all steps. Another one that takes longer than
    `seconds` a round makes fewer, and has no loss. The last row is the first precision again with other
    initial weights: it shows how much losses differ by chance.
    """
    steps = len(tokens) // rounds
    common = {"kind": "training", "config": asdict(config), "device_type": device.type}
    common |= {"rates": rates, "tokens": str(folder / "tokens.safetensors")}
    save_file({"tokens": tokens}, common["tokens"])
    jobs = [(name, common | {"dtype": name, "seed": seed}) for name in names]
    again = common | {"dtype": names[0], "seed": seed + 1}
    with working([*jobs, (f"{names[0]}, other initial weights", again)]) as workers:
        for round_number in range(rounds):
            print(f"training, round {round_number + 1} of {rounds}", file=sys.stderr)
            for worker in workers:
                limit = math.inf if worker.job["dtype"] == names[0] else seconds
                worker.turn(steps=steps, seconds=limit)
        workers[0].ask("save", path=str(folder / "weights.safetensors"))
        return [_training_row(worker, steps * rounds, tokens[0, :, 1:].numel()) for worker in workers]


def _training_row(worker, steps, tokens_a_step):
    times = [s for answer in worker.answers for s in answer["seconds"]]
    losses = [loss for answer in worker.answers for loss in answer["losses"]]
    last = worker.answers[-1]["losses"]
    return {
        "name": worker.name,
        "tok_per_sec": tokens_a_step / statistics.median(times),
        "steps": len(losses),
        "loss": statistics.mean(last) if len(losses) == steps else None,
        **worker.ask("memory"),
    }


def measure_inference(names, folder, config, device, rounds, new_tokens) -> list[dict]:
    """Read a batch and generate in every precision, by autocast and with cast weights.

    The weights are those that `measure_training` left in `folder`.
    """
    common = {"kind": "inference", "config": asdict(config), "device_type": device.type, "seed": 0}
    common |= {key: str(folder / f"{key}.safetensors") for key in ("tokens", "weights")}
    jobs = []
    for name in names:
        ways = {"": False} if name == "float32" else {", autocast": False, ", weights cast once": True}
        jobs += [(name + way, common | {"dtype": name, "cast": cast}) for way, cast in ways.items()]
    with working(jobs) as workers:
        for round_number in range(rounds):
            print(f"inference, round {round_number + 1} of {rounds}", file=sys.stderr)
            for worker in workers:
                worker.turn(tokens=new_tokens)
        return _inference_rows(workers, folder, new_tokens)


def _inference_rows(workers, folder, new_tokens) -> list[dict]:
    rows, base, shape = [], None, load_file(folder / "tokens.safetensors")["tokens"].shape
    for worker in workers:
        read, made = (statistics.median(a[key] for a in worker.answers) for key in ("read", "generate"))
        taken = worker.ask("memory")
        worker.ask("logits", path=str(folder / "logits.safetensors"))
        logits = load_file(folder / "logits.safetensors")["logits"]
        base = logits if base is None else base
        row = {
            "name": worker.name,
            "read": shape[1] * (shape[2] - 1) / read,
            "generate": new_tokens / made,
            "deviation": (logits - base).abs().max().item(),
            "size": base.abs().max().item(),
            "same_choice": (logits.argmax(-1) == base.argmax(-1)).double().mean().item(),
        }
        rows.append(row | taken)
    return rows


# ------------------------------------------------------------------------------------------------------
# Markdown tables, in which each row is compared with the first one


def against(value, base) -> str:
    return f"x {value / base:.2f}" if base else "-"


def _memory(row, base) -> list[str]:
    """Cells: a process's peak memory, the part since before the model, and that part over the base's."""
    own, base_own = (r["peak"] - r["before"] for r in (row, base))
    return [f"{row['peak'] / 2**30:.2f} GiB", f"{own / 2**30:.2f} GiB", against(own, base_own)]


def training_table(rows: list[dict]) -> str:
    head = ["training in", "tokens/s", "", "memory", "of weights and step", "", "loss", "difference"]
    base, lines = rows[0], [head]
    for row in rows:
        speed = [f"{row['tok_per_sec']:,.0f}", against(row["tok_per_sec"], base["tok_per_sec"])]
        losses = ["-", "-"]
        if row["loss"] is not None:
            losses = [f"{row['loss']:.4f}", f"{row['loss'] - base['loss']:+.4f}"]
        lines.append([row["name"], *speed, *_memory(row, base), *losses])
    return table(lines)


def inference_table(rows: list[dict]) -> str:
    head = ["inference in", "read, tokens/s", "", "generated, tokens/s", "", "memory", "of weights and batch"]
    head += ["", "logits off by up to", "same likeliest token"]
    base, lines = rows[0], [head]
    for row in rows:
        speeds = [cell for k in ("read", "generate") for cell in (f"{row[k]:,.4g}", against(row[k], base[k]))]
        logits = [f"{row['deviation']:.3g}", f"{100 * row['same_choice']:.1f} %"]
        lines.append([row["name"], *speeds, *_memory(row, base), *logits])
    return table(lines)
