"""Everything to check and time on a GPU, figures first: `python -m scripts.bench --what=gpu`.

Models that train (gpu_variants.groups) take turns (gpu_turns.py). Then come parts with other figures, one
after another, and at last the checks of correctness, side by side. Each figure is printed as a line of JSON
when it is known. Nothing is started that cannot end in time; what crashes, hangs or runs out of memory stops
nothing.

On a CPU the same parts run with tiny models, so that tests hold them. docs/benchmarks.md says what each
figure means and what it is read against.
"""

import os
import signal
import sys
import time
from concurrent.futures import as_completed
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from experiments import gpu_variants
from experiments.gpu_turns import Report, Turns
from experiments.sides import Side, peer_folder, threads
from nanochat import UserError
from nanochat.files import user_path


@dataclass(frozen=True)
class Part:
    """A function, "module.function", that runs in a process of its own. It is expected to take so many
    seconds, and stopped after three times as many. Checks run side by side. needs: packages, and "cuda"."""

    name: str
    function: str
    expected_s: float
    is_check: bool = False
    needs: tuple[str, ...] = ()

    def missing(self, device: str) -> str:
        """Why it cannot run; empty if it can."""
        lacks = [name for name in self.needs if not (device == name if name == "cuda" else find_spec(name))]
        return f"needs {' and '.join(lacks)}" if lacks else ""


CHECKS = "experiments.gpu_correctness"
TEXT = "pyarrow", "tiktoken", "safetensors"  # what a run of base_train needs besides torch and numpy
# Name, function, expected seconds
PARTS = [
    Part("machine", "experiments.gpu_parts.machine", 10),
    Part("save_evaluate_sample", "experiments.part_speed.save_evaluate_sample", 50, needs=("safetensors",)),
    Part("ceilings", "experiments.gpu_ceilings.ceilings", 45),
    Part("base_train_d12", f"{CHECKS}.base_train_speed", 80, needs=("cuda", *TEXT)),
    Part("losses", f"{CHECKS}.losses", 95, is_check=True),
    Part("attention", f"{CHECKS}.attention", 35, is_check=True),
    Part("waits", f"{CHECKS}.waits", 50, is_check=True, needs=TEXT),
    Part("resume", f"{CHECKS}.resume", 55, is_check=True, needs=TEXT),
]
GROUPS = ("d12", "d24", "levers", "windows", "fp8")  # behind the machine, before the other parts
NAMES = ("machine", *GROUPS, *(part.name for part in PARTS[1:]))


def run_part(part: Part, job: dict, limit_s: float) -> dict:
    """Its figures, {"ok", "seconds", ...}; whatever it started ends with it."""
    began = time.perf_counter()
    try:
        with Side(part.function, job, limit_s=limit_s) as side:
            result = {"ok": True} | side.facts
    except (RuntimeError, MemoryError, ValueError) as error:
        result = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
    return result | {"seconds": time.perf_counter() - began}


def run_parts(report: Report, parts: list[Part], job: dict, pool, run=run_part):
    """One after another; then the checks, side by side."""
    checks = {}
    for part in sorted(parts, key=lambda part: part.is_check):
        limit_s = min(3 * part.expected_s, report.left())
        if lacks := part.missing(job["device"]):
            report.take(part.name, {"ok": True, "seconds": 0.0, "skipped": lacks})
        elif why := report.cannot_end(part.expected_s):
            report.take(part.name, {"ok": False, "seconds": 0.0, "error": why})
        elif part.is_check:
            checks[pool.submit(run, part, job, limit_s)] = part.name
        else:
            report.take(part.name, run(part, job, limit_s))
    for check in as_completed(checks):
        report.take(checks[check], check.result())


def summary(results: dict[str, dict]) -> list[str]:
    """A line for each part and each variant: what it found in a few words."""
    lines = []
    for name, row in results.items():
        lines.append(line_of(name, row, f"{row['seconds']:6.1f} s"))
        if "skipped" not in row:
            lines += [line_of(f"  {who}", of_one) for who, of_one in row.get("variants", {}).items()]
    return lines


def line_of(name: str, row: dict, seconds: str = "") -> str:
    state = "skipped" if "skipped" in row else "ok" if row.get("ok", "error" not in row) else "FAILED"
    words = row.get("skipped") or row.get("error") or ""
    facts = ("tok_per_sec", "mfu", "over_base", "over_ours", "ours_over_peer", "peak_gib", "expected_gib")
    facts = "  ".join(f"{key} {row[key]}" for key in facts if key in row)
    return f"{name:22} {state:8} {seconds:9} {words or facts}".rstrip()


def bench(settings: dict) -> dict[str, dict]:
    """The parts that --parts names, or all. Raises UserError for a name that is none."""
    names = [name.strip() for name in settings["parts"].split(",") if name.strip()]
    job = make_job(settings, names)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running parts end too
    report = Report(settings["minutes"], lambda line: print(line, flush=True), small=job["small"])
    with threads() as pool:
        run_parts(report, PARTS[:1], job, pool)
        machine = report.results["machine"]
        job |= {key: machine[key] for key in ("sizes", "memory_gib", "flash") if key in machine}
        groups = gpu_variants.groups(job)
        chosen = {name: groups[name] for name in GROUPS if not names or name in names}
        Turns(report, job, pool).run(chosen)
        run_parts(report, [part for part in PARTS[1:] if not names or part.name in names], job, pool)
    results = {name: report.results[name] for name in NAMES if name in report.results}
    print(*summary(results), sep="\n", flush=True)
    return results


def make_job(settings: dict, names: list[str]) -> dict:
    """What all parts get. Raises UserError for names of no part, and for what cannot be measured here."""
    if unknown := sorted(set(names) - set(NAMES)):
        raise UserError(f"no part is called {', '.join(unknown)}; --parts takes some of: {', '.join(NAMES)}")
    peer = str(peer_folder(settings["peer"])) if settings["peer"] else None
    device = settings["device_type"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "mps" or (device == "cuda" and not torch.cuda.is_available()):
        raise UserError(f"device_type {device} cannot be measured here; leave it out, or give cpu")
    small = device != "cuda"
    # A tiny model has no work for a second thread. A compiler starts as many workers as there are cores
    environment = {"OMP_NUM_THREADS": "1"} if small else {}
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(2, (os.cpu_count() or 1) // 4))
    return {
        "device": device,
        "small": small,
        "peer": peer,
        "data": settings["data"],
        "vocab_size": settings["vocab_size"],
        "base_dir": str(user_path("base_dir", settings["base_dir"])),
        "folder": settings["folder"],
        "environment": environment,
    }
