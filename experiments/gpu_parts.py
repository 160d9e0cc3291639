"""Parts of `python -m scripts.bench --what=gpu`: the machine, and the speed of training steps.

A part is a function of the job (gpu_speed.py makes it: device, small, peer and places) that returns its
figures, ready for JSON. It may raise whatever it likes: each runs in a process of its own.
"""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

from experiments.sides import Side
from experiments.step_split import time_split

PACKAGES = ["triton", "flash-attn", "flash_attn_3", "flash-attn-4", "kernels", "torchao", "numpy"]


class Skipped(Exception):
    """A part that cannot run here; the message says why."""


def each(**actions) -> dict:
    """The results of several small measurements as one part; one that fails stops no other."""
    found: dict = {"ok": True}
    for name, action in actions.items():
        try:
            found[name] = action()
        except Exception as error:  # whatever it is, the report has it
            found[name], found["ok"] = {"error": f"{type(error).__name__}: {error}"[:300]}, False
    return found


# ------------------------------------------------------------------------------------------------------
# The machine


def machine(job: dict) -> dict:
    """What there is: GPU, driver, memory, versions, the peak that MFU is measured against."""
    from nanochat.machine import hardware, runtime

    here = runtime.start(job["device"], seed=0)
    peak, source = hardware.peak_flops(here.device, torch.bfloat16)
    found = {
        "device": runtime.device_name(here.device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "peak_tflops": peak / 1e12,
        "peak_source": source,
        "packages": {name: version for name in PACKAGES if (version := version_of(name))},
        "cores": os.cpu_count(),
        "compiler": shutil.which("gcc") or shutil.which("cc"),  # Triton builds its launchers with it
        "python_headers": Path(sysconfig.get_paths()["include"], "Python.h").exists(),
        "git_commit": runtime.git_commit(),
    }
    if here.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(here.device)
        properties = torch.cuda.get_device_properties(here.device)
        found |= {
            "capability": ".".join(map(str, torch.cuda.get_device_capability(here.device))),
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": total / 2**30,
            "free_gib": free / 2**30,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nvidia_smi": nvidia_smi(),
        }
    return found


def version_of(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def nvidia_smi() -> str:
    """Driver, clocks, power and temperature in the words of nvidia-smi, or why it did not answer."""
    query = "driver_version,pstate,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"no answer: {error}"


# ------------------------------------------------------------------------------------------------------
# Training steps, ours and the peer's


def model_job(job: dict, depth: int, **more) -> dict:
    """The job of sides.py: a model as base_train makes it, or a tiny one for tests on a CPU."""
    shape = {"aspect_ratio": 64, "head_dim": 128, "max_seq_len": 2048, "vocab_size": 32768}
    batch = {"rows": -1, "total_batch_size": 2**19, "dtype": "bfloat16", "compile": True}
    if job["small"]:
        depth = depth // 6
        shape = {"aspect_ratio": 32, "head_dim": 32, "max_seq_len": 64, "vocab_size": 256}
        batch = {"rows": 2, "total_batch_size": 256, "dtype": "float32", "compile": False}
    return {"device": job["device"], "depth": depth, "window_pattern": "L"} | shape | batch | more


def halving(step_job: dict, run) -> dict:
    """run(step_job), with half the rows as long as they do not fit. The result says what was halved."""
    said: dict = {}
    while True:
        try:
            return run(step_job) | said
        except MemoryError as error:
            tried = step_job["rows"] if step_job["rows"] > 0 else 32
            if tried == 1:
                raise
            step_job = step_job | {"rows": tried // 2}
            said = {"rows_halved_to": tried // 2, "because": str(error)[:200]}


def speed(job: dict, depth: int, trace: bool = False, **more) -> dict:
    """Tokens a second of whole optimizer steps by the clock, MFU, memory beside the plan's estimate.

    trace: also where the time of two profiled steps goes, by kind of kernel.
    """

    def run(step_job: dict) -> dict:
        with Side("ours", step_job) as side:
            side.facts |= side.do("first")
            side.do("steps", count=1)
            row = figures(step_job, side.facts, side.do("steps", count=4 if depth < 20 else 3))
            return row | ({"time_split": split(side)} if trace else {})

    return halving(model_job(job, depth, **more), run)


def split(side: Side) -> dict:
    """Where the time of two profiled steps goes; an error leaves the other figures as they are."""
    try:
        with tempfile.TemporaryDirectory() as place:
            steps = side.do("trace", path=f"{place}/trace.json")["steps"]
            return time_split(f"{place}/trace.json", steps)
    except (RuntimeError, MemoryError, ValueError, KeyError, OSError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def figures(step_job: dict, facts: dict, answer: dict) -> dict:
    """The figures of a side from its facts and the times of its steps."""
    step_s = answer["step_s"]
    rate = step_job["total_batch_size"] / step_s
    row = {
        "tok_per_sec": rate,
        "step_s": step_s,
        "model": f"d{step_job['depth']}, {facts['parameters'] / 1e6:,.0f} M parameters",
        "micro_batch": f"{facts['rows']} x {step_job['max_seq_len']}, {facts['micro_steps']} a step",
        "first_step_s": facts["first_step_s"],
        "attention": facts["attention"],
    }
    if "peak_flops" in facts:
        row["mfu"] = rate * facts["flops_per_token"] / facts["peak_flops"]
    if answer["peak_bytes"]:
        row["peak_gib"] = answer["peak_bytes"] / 2**30
        row["reserved_gib"] = answer["reserved_bytes"] / 2**30
    if "expected_bytes" in facts:
        row["expected_gib"] = facts["expected_bytes"] / 2**30
        if answer["peak_bytes"]:
            row["expected_over_peak"] = facts["expected_bytes"] / answer["peak_bytes"]
    return row


def beside_peer(job: dict, depth: int) -> dict:
    """Ours and the peer's take turns on the same device: same tokens, micro-batch, shape, both compiled.

    Between turns each gives the memory back that its tensors do not use, so the first step of a turn warms
    up and does not count.
    """

    def run(step_job: dict) -> dict:
        with Side("ours", step_job) as ours:
            ours.facts |= ours.do("first")
            ours.do("release")
            with Side("peer", step_job | {"rows": ours.facts["rows"]}, Path(job["peer"])) as theirs:
                theirs.facts |= theirs.do("first")
                return take_turns(step_job, ours, theirs, rounds=2 if depth < 20 else 1)

    return halving(model_job(job, depth), run)


def take_turns(step_job: dict, ours: Side, theirs: Side, rounds: int) -> dict:
    """The figures of both sides and the ratio of their speeds."""
    sides = {"ours": ours, "peer": theirs}
    times: dict = {name: [] for name in sides}
    theirs.do("release")
    for _ in range(rounds):
        for name, side in sides.items():
            side.do("steps", count=1)
            times[name].append(side.do("steps", count=2))
            side.do("release")
    rows = {}
    for name, side in sides.items():
        middle = statistics.median(answer["step_s"] for answer in times[name])
        rows[name] = figures(step_job, side.facts, times[name][-1] | {"step_s": middle})
    ratios = [b["step_s"] / a["step_s"] for a, b in zip(*times.values(), strict=True)]
    return {"ours_over_peer": statistics.median(ratios), "of_each_round": ratios, **rows}


def warm_up(job: dict, depths: list[int], peer_depth: int) -> dict:
    """Compile the models while the checks of correctness run, so that later parts find them in the cache."""
    taken = {}

    def compile_(name: str, *of_side) -> dict:
        with contextlib.suppress(RuntimeError, MemoryError), Side(*of_side) as side:
            taken[name] = side.do("first")["first_step_s"]
            return {"rows": side.facts["rows"]}
        return {}

    for depth in depths:
        step_job = model_job(job, depth)
        step_job |= compile_(f"d{depth}", "ours", step_job)
        if job["peer"] and depth == peer_depth:
            compile_(f"peer's d{depth}", "peer", step_job, Path(job["peer"]))
    return {"first_step_s": taken}
