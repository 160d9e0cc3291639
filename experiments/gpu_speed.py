"""Everything to check and time on a GPU, figures first: `python -m scripts.bench --what=gpu`.

Models that train (gpu_parts.groups) are prepared side by side, each in a process of its own: it compiles on
a CPU, makes its first steps when no other computes, and waits. As soon as those of a group are ready they
take turns on the quiet GPU, while later ones compile. Then come parts with other figures, one after another,
and at last the checks of correctness, side by side. Each figure is printed as a line of JSON when it is
known. Nothing is started that cannot end in time; what crashes, hangs or runs out of memory stops nothing.

On a CPU the same parts run with tiny models, so that tests hold them. docs/benchmarks.md says what each
figure means and what it is read against.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from experiments import gpu_variants
from experiments.gpu_turns import Report, Turns
from experiments.sides import ROOT, peer_folder

ERROR_LINES = 12  # of what a part that failed wrote last


@dataclass(frozen=True)
class Part:
    """A Python program that does one thing: `arguments` follow `python`, then the job as JSON.

    The last line that it prints is a JSON object with figures, of which `ok` and `skipped` mean something
    here. It is expected to take expected_s, and stopped after limit_s. Checks run side by side. needs: names
    of packages, and "cuda".
    """

    name: str
    expected_s: float
    limit_s: float
    arguments: tuple[str, ...]
    is_check: bool = False
    needs: tuple[str, ...] = ()

    def missing(self, device: str) -> str:
        """Why it cannot run; empty if it can."""
        lacks = [name for name in self.needs if not (device == name if name == "cuda" else find_spec(name))]
        return f"needs {' and '.join(lacks)}" if lacks else ""


def call(name: str, path: str, expected_s: float, is_check=False, needs=(), **keywords) -> Part:
    """A part that calls `module.function` of this folder with the job and keywords."""
    arguments = "-m", "experiments.gpu_speed", path, json.dumps(keywords)
    return Part(name, expected_s, 3 * expected_s, arguments, is_check, needs)


TEXT = "pyarrow", "tiktoken", "safetensors"  # what a run of base_train needs besides torch and numpy
# Name, function, expected seconds
PARTS = [
    call("machine", "gpu_parts.machine", 10),
    call("save_evaluate_sample", "gpu_inference.save_evaluate_sample", 50, needs=("safetensors",), depth=12),
    call("ceilings", "gpu_ceilings.ceilings", 45, depths=[12, 24]),
    call("base_train_d12", "gpu_correctness.base_train_speed", 60, needs=("cuda", *TEXT), depth=12),
    call("losses", "gpu_correctness.losses", 95, is_check=True),
    call("attention", "gpu_correctness.attention", 35, is_check=True),
    call("waits", "gpu_correctness.waits", 50, is_check=True, needs=TEXT),
    call("resume", "gpu_correctness.resume", 55, is_check=True, needs=TEXT),
]
GROUPS = ("d12", "d24", "levers", "windows", "fp8")  # behind the machine, before the other parts
NAMES = ("machine", *GROUPS, *(part.name for part in PARTS[1:]))


class Running:
    """A part's process. What it prints goes to files, so that it never waits for a reader."""

    def __init__(self, part: Part, job: dict):
        self.began = time.perf_counter()
        self.output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *part.arguments, json.dumps(job)],
            cwd=ROOT,
            env=os.environ | job.get("environment", {}),
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.errors,
            start_new_session=True,  # so that its own processes can be ended with it
        )

    def finish(self, limit_s: float) -> dict:
        """Wait for its figures, at most so long; whatever it started ends with it."""
        late = False
        try:
            self.process.wait(max(0.0, limit_s - (time.perf_counter() - self.began)))
        except subprocess.TimeoutExpired:
            late = True
        finally:
            self.stop()
        result = {"ok": False, "seconds": time.perf_counter() - self.began}
        lines = self._read(self.output)
        if late:
            result["error"] = f"stopped after {limit_s:.3g} s"
        elif self.process.returncode:
            result["error"] = f"exit status {self.process.returncode}"
        else:
            try:
                result |= {"ok": True} | json.loads(lines[-1])
            except (IndexError, ValueError, TypeError):
                result["error"] = "its last line is no JSON object"
        if "error" in result:
            last = (self._read(self.errors) or lines)[-ERROR_LINES:]
            result["last_lines"] = [line[:300] for line in last]
        return result

    def stop(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _read(self, file) -> list[str]:
        file.seek(0)
        return [line for line in file.read().splitlines() if line.strip()]


def run_parts(report: Report, parts: list[Part], job: dict, start=Running):
    """One after another; the checks side by side when all others have ended."""
    checks = {}
    try:
        for part in sorted(parts, key=lambda part: part.is_check):
            if lacks := part.missing(job["device"]):
                report.take(part.name, {"ok": True, "seconds": 0.0, "skipped": lacks})
            elif why := report.cannot_end(part.expected_s):
                report.take(part.name, {"ok": False, "seconds": 0.0, "error": why})
            elif part.is_check:
                checks[part.name] = start(part, job)
            else:
                report.take(part.name, start(part, job).finish(min(part.limit_s, report.left())))
        with ThreadPoolExecutor() as pool:
            limit_s = max((part.limit_s for part in parts if part.name in checks), default=0.0)
            limit_s = min(limit_s, report.left())
            ending = {pool.submit(check.finish, limit_s): name for name, check in checks.items()}
            for check in as_completed(ending):
                report.take(ending[check], check.result())
    finally:
        for check in checks.values():
            check.stop()


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
    run_parts(report, PARTS[:1], job)
    machine = report.results["machine"]
    job |= {key: machine[key] for key in ("sizes", "memory_gib", "flash") if key in machine}
    groups = gpu_variants.groups(job)
    with Turns(report, job) as turns:
        turns.run({name: groups[name] for name in GROUPS if not names or name in names})
    run_parts(report, [part for part in PARTS[1:] if not names or part.name in names], job)
    results = {name: report.results[name] for name in NAMES if name in report.results}
    print(*summary(results), sep="\n", flush=True)
    return results


def make_job(settings: dict, names: list[str]) -> dict:
    """What all parts get. Raises UserError for names of no part, and for what cannot be measured here."""
    import torch

    from nanochat import UserError
    from nanochat.files import user_path

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
        "folder": str(user_path("folder", settings["folder"])) if settings["folder"] else None,
        "environment": environment,
    }


def main():
    """Run one part: `python -m experiments.gpu_speed MODULE.FUNCTION KEYWORDS JOB`."""
    from experiments.gpu_parts import Skipped

    path, keywords, job = sys.argv[1:]
    module, _, name = path.partition(".")
    part = getattr(import_module(f"experiments.{module}"), name)
    try:
        result = part(json.loads(job), **json.loads(keywords))
    except Skipped as reason:
        result = {"skipped": str(reason)}
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
