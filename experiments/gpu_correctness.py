"""Parts of `python -m scripts.bench --what=gpu`: does a device compute the right numbers?

Each part returns `checks`: what was found, the limit, and whether it holds. The part is ok if all hold.
"""

import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import configurator
from experiments import peer_run
from experiments.sides import ROOT
from nanochat import optim
from nanochat.diagnostics import scaled_rates, training_step
from nanochat.files import temporary_folder
from nanochat.gpt import GPT
from nanochat.machine import runtime
from nanochat.machine.compiling import compile_parts
from nanochat.machine.precision import name_of
from nanochat.ops import attention as ways
from nanochat.plan import scaling
from nanochat.run.metrics import read_metrics

FIRST_STEPS = 5  # of 30 that are compared tightly; later ones amplify rounding
# Largest relative difference of a step's loss from float32 on a CPU: of the first steps, of all
TOLERANCES = {"float32": (1e-4, 1e-2), "bfloat16": (5e-3, 3e-2), "float16": (2e-2, 5e-2)}


def checked(checks: dict[str, tuple[float, float]], **more) -> dict:
    """The result of a part from {name: (found, the most allowed)}."""
    rows = {
        name: {"found": found, "limit": limit, "ok": bool(found <= limit)}  # a nan is not ok
        for name, (found, limit) in checks.items()
    }
    return {"ok": all(row["ok"] for row in rows.values()), "checks": rows} | more


# ------------------------------------------------------------------------------------------------------
# Losses of 30 steps


def losses(job: dict) -> dict:
    """30 steps of a small model, eager and compiled, in each dtype, beside eager float32 on the CPU.

    All start from the same weights and see the same tokens, which follow a rule that can be learned. float16
    runs with a GradScaler; its first scale is so low that no step is skipped.
    """
    T, rows, head_dim = (32, 4, 32) if job["small"] else (256, 8, 128)
    config = scaling.model_config(2, head_dim, head_dim, T, 512, "SL")
    torch.manual_seed(0)
    start = GPT(config)
    start.init_weights(torch.Generator().manual_seed(0))
    batches = [learnable(rows, T, 512, step) for step in range(6 if job["small"] else 30)]
    weights = start.state_dict()
    reference = train(config, weights, batches, runtime.Machine(torch.device("cpu")), torch.float32)
    machine, found, checks = runtime.start(job["device"], seed=0), {"cpu float32": reference}, {}
    # On a CPU, where this is for the tests, one without a C++ compiler
    backend = "aot_eager" if job["small"] else "inductor"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = name_of(dtype)
        for compiled in (False, True):
            if compiled and (dtype == torch.float16 or (job["small"] and dtype == torch.bfloat16)):
                continue  # it would show nothing new
            label = f"{name} {'compiled' if compiled else 'eager'}"
            found[label] = train(config, weights, batches, machine, dtype, backend if compiled else None)
            first, later = TOLERANCES[name]
            apart = [abs(a / b - 1) for a, b in zip(found[label], reference, strict=True)]
            checks[f"{label}, first {FIRST_STEPS} steps"] = max(apart[:FIRST_STEPS]), first
            checks[f"{label}, all steps"] = max(apart), later
    checks["last loss over first"] = reference[-1] / reference[0], 0.9
    ends = {label: [run[0], run[-1]] for label, run in found.items()}
    return checked(checks, first_and_last_loss=ends)


def learnable(rows: int, T: int, vocab_size: int, seed: int):
    """(inputs, targets), each (rows, T) int64: mostly a token is 5 x the one two before it + 1, modulo 64.

    Of the one before it, bigram rows would learn it within the first steps, where rounding then shows more.
    """
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (rows, T + 1), generator=draw)
    keep = torch.rand(rows, T + 1, generator=draw) < 0.1
    for t in range(2, T + 1):
        tokens[:, t] = torch.where(keep[:, t], tokens[:, t], (5 * tokens[:, t - 2] + 1) % 64)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(config, weights, batches, machine, dtype, backend: str | None = None) -> list[float]:
    """The losses of one step a batch, from those weights. backend: of torch.compile (None: eager)."""
    model = GPT(config)
    model.load_state_dict(weights)
    model.init_rotary()
    model.to(device := machine.device)
    compiled = backend is not None
    ways.use(model, ways.choose(config, machine, dtype, compiled, documents=False, resolved={}))
    defaults = configurator.defaults(ROOT / "scripts" / "base_train.py")
    tokens = batches[0][0].numel()
    groups = optim.parameter_groups(model, *scaled_rates(defaults, config, tokens, len(batches)))
    optimizer = optim.MuonAdamW(groups, dtype, 0 if backend == "inductor" else None)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=dtype == torch.float16)
    step_model = compile_parts(model, backend=backend) if compiled else model
    found = []
    for inputs, targets in batches:
        where = inputs.to(device), targets.to(device)
        found.append(training_step(step_model, optimizer, scaler, dtype, *where).detach())
        optimizer.zero_grad(set_to_none=True)
    return torch.stack(found).tolist()


# ------------------------------------------------------------------------------------------------------
# Attention


def attention(job: dict) -> dict:
    """Each way to compute attention, forward and backward, against float64, and why others cannot run."""
    shape = (1, 2, 64, 32) if job["small"] else (2, 6, 2048, 128)
    checks, cannot = {}, {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = name_of(dtype)
        compiled = dtype == torch.bfloat16 and not job["small"]  # it takes long
        for way, row in ways.check_backends(job["device"], dtype, shape, compiled).items():
            if isinstance(row, str):
                cannot.setdefault(row, []).append(f"{way}, {name}")
            else:
                worst = max(row["forward_error"], row["backward_error"])
                checks[f"{way}, {name}"] = worst, ways.TOLERANCE[dtype]
    return checked(checks, cannot_run=cannot)


# ------------------------------------------------------------------------------------------------------
# Waits


def waits(job: dict) -> dict:
    """Steps of base_train in which anything that waits for the GPU is counted (device_waits.py). On a CPU a
    step waits once, for what the log needs."""
    size = {"depth": 2, "head_dim": 64, "max_seq_len": 256, "total_batch_size": 1024, "device_batch_size": 2}
    settings = size | {"num_iterations": 8, "window_pattern": "SL"}
    settings |= {"dtype": "float32", "compile": "off"} if job["small"] else {"compile": "on"}
    with temporary_folder() as place:
        process = base_train(job, place, "experiments.device_waits", subprocess.PIPE, **settings)
        said = process.stdout.read().splitlines()
        finish(process)
    found = json.loads(said[-1])
    return found | {"ok": found["steps"] > 0 and bool(found["waits"]) == job["small"]}


# ------------------------------------------------------------------------------------------------------
# Whole runs of scripts.base_train


def base_train(job: dict, out_dir: Path, module="scripts.base_train", stdout=None, **settings):
    """Start the script on the job's text and device, with evaluations, samples and saves off. It is a
    subprocess.Popen whose stdout is this process's stderr, or as asked for."""
    names = ("data", "base_dir", "vocab_size")
    places = {name: job[name] for name in names} | {"device_type": job["device"], "out_dir": out_dir}
    python, _, _, *arguments = peer_run.our_command(places | settings)
    output = sys.stderr.fileno() if stdout is None else stdout
    return subprocess.Popen([python, "-m", module, *arguments], cwd=ROOT, stdout=output, text=True)


def finish(process: subprocess.Popen):
    """Wait for a run; RuntimeError if it failed. Its output is this process's stderr."""
    if status := process.wait():
        raise RuntimeError(f"base_train ended with status {status}; its message stands above")


def records(out_dir: Path) -> list[dict]:
    """The training steps of a run."""
    path = out_dir / "metrics.jsonl"
    return [record for record in read_metrics(path) if "loss" in record] if path.exists() else []


def stop_after(process: subprocess.Popen, out_dir: Path, steps: int):
    """Send SIGTERM to a run when it has logged so many steps, and wait for its end."""
    while process.poll() is None and len(records(out_dir)) < steps:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    finish(process)


def resume(job: dict) -> dict:
    """A float32 run that SIGTERM stops and that is then resumed, beside one left alone."""
    size = {"depth": 4, "num_iterations": 200, "total_batch_size": 4 * 2048}
    if job["small"]:
        size = {"depth": 2, "aspect_ratio": 32, "head_dim": 32, "max_seq_len": 64}
        size |= {"num_iterations": 15, "total_batch_size": 4 * 64}
    settings = size | {"device_batch_size": 2, "dtype": "float32", "compile": "off"}
    with temporary_folder() as place:
        alone, stopped = place / "alone", place / "stopped"
        finish(base_train(job, alone, **settings))
        process = base_train(job, stopped, **settings)
        stop_after(process, stopped, steps=5)
        done = len(records(stopped))
        finish(base_train(job, stopped, **settings))
        first, second = ([record["loss"] for record in records(run)] for run in (alone, stopped))
    apart = [abs(a / b - 1) for a, b in zip(first, second, strict=True)]
    checks = {
        "loss, the steps before and the first 5 after": (max(apart[: done + 5]), 1e-4),
        "loss, all steps": (max(apart), 1e-2),  # a GPU may add up in another order; later steps amplify it
        "steps missing": (size["num_iterations"] - len(second), 0),
        "steps done when it stopped": (done, size["num_iterations"] - 1),
    }
    return checked(checks, bit_for_bit=first == second)


def base_train_speed(job: dict) -> dict:
    """On CUDA, the script itself at d12, with loader and log: tokens a second by its records, its wait for
    data.

    It is stopped after 9 steps, of which the first 3 do not count; so it evaluates nothing at its end.
    """
    size = {"depth": 12, "compile": "on", "total_batch_size": 2**19}
    with temporary_folder() as place:
        out_dir = place / "run"
        process = base_train(job, out_dir, num_iterations=100_000, accept="epochs", **size)
        stop_after(process, out_dir, steps=9)
        found = records(out_dir)[3:9]
        config = json.loads((out_dir / "config.json").read_text())
    middle = {
        name: statistics.median(record[name] for record in found)
        for name in ("tok_per_sec", "mfu", "step_time_s", "data_wait_s")
    }
    said = ("device", "compiled", "batch", "memory", "attention")
    return middle | {"plan": [line for line in config["plan"] if line.startswith(said)]}
