"""What all parts of `python -m scripts.bench --what=gpu` share, and the first of them: the machine.

A part is a function of the job (gpu_speed.py makes it: device, small, peer and places) that returns its
figures, ready for JSON; `ok` and `skipped` mean something there. It may raise whatever it likes: each runs in
a process of its own.
"""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

from experiments.sides import our_plan
from nanochat.machine import hardware, runtime
from nanochat.ops import attention_backends

PACKAGES = ["triton", "flash-attn", "flash_attn_3", "flash-attn-4", "kernels", "torchao", "numpy"]
DEPTHS = 12, 24


def each(**actions) -> dict:
    """The results of several small measurements as one part; one that fails stops no other."""
    found: dict = {"ok": True}
    for name, action in actions.items():
        try:
            found[name] = action()
        except Exception as error:  # whatever it is, the report has it
            found[name], found["ok"] = {"error": f"{type(error).__name__}: {error}"[:300]}, False
    return found


def model_job(job: dict, depth: int, **settings) -> dict:
    """The job of sides.py: a model as base_train makes it, or a tiny one for tests on a CPU.

    d24 takes half of the tokens a step, to save time; the update is 1 % of its step.
    """
    shape = {"aspect_ratio": 64, "head_dim": 128, "max_seq_len": 2048, "vocab_size": 32768}
    rows = job.get("sizes", {}).get(str(depth), {}).get("rows", -1)
    tokens = 2**19 if depth < 20 else 2**18
    batch = {"rows": rows, "total_batch_size": tokens, "dtype": "bfloat16", "compile": True}
    if job["small"]:
        depth = depth // 6
        shape = {"aspect_ratio": 32, "head_dim": 32, "max_seq_len": 64, "vocab_size": 320}
        batch = {"rows": 2, "total_batch_size": 256, "dtype": "float32", "compile": False}
    return {"device": job["device"], "depth": depth, "window_pattern": "L"} | shape | batch | settings


# ------------------------------------------------------------------------------------------------------
# The machine


def machine(job: dict) -> dict:
    """What there is: GPU, driver, memory, versions, the peak that MFU is measured against."""
    here = runtime.start(job["device"], seed=0)
    jobs = {depth: model_job(job, depth) for depth in DEPTHS}
    peak, source = hardware.peak_flops(here.device, getattr(torch, jobs[DEPTHS[0]]["dtype"]))
    sizes = {str(depth): size(job, here) for depth, job in jobs.items()}
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
            "flash": [v for v in ("FA3", "FA4") if not attention_backends.activate_flash(v)],
        }
    return found | {"sizes": sizes}


def size(step_job: dict, here) -> dict:
    """Rows of a micro-batch as the plan has them, and GiB of the GPU while the model trains, and between."""
    plan = our_plan(step_job, here, getattr(torch, step_job["dtype"]))
    kept = 12 * plan.parameters["total"]  # float32 weights and states of the optimizer
    return {
        "rows": plan.device_batch_size,
        "peak_gib": 1 + plan.expected_bytes / 2**30,  # 1: CUDA and cuBLAS
        "kept_gib": 1 + kept / 2**30,
    }


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
