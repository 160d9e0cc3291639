"""Everything to check and time on a GPU, in ten minutes: `python -m scripts.bench --what=gpu`.

Each part runs in a process of its own with a limit of time, so that one that crashes, hangs or runs out of
memory stops nothing. Its figures are printed as one JSON line as soon as it ends. The order is that of
importance: what the time does not suffice for is at the end, and `--parts=NAME,NAME` runs it alone.

On a CPU the same parts run with tiny models, so that tests hold them. docs/benchmarks.md says what each
figure means and what it is read against.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module

from experiments.sides import ROOT, peer_folder

ERROR_LINES = 12  # of what a part that failed wrote last


@dataclass(frozen=True)
class Part:
    """A Python program that does one thing: `arguments` follow `python`, then the job as JSON.

    The last line that it prints is a JSON object with figures, of which `ok` and `skipped` mean something
    here. `kind`: "check" or "figure"; or "beside", which runs while the checks behind it run, and ends before
    the first figure. needs: "cuda", "peer", or nothing.
    """

    name: str
    limit_s: float
    arguments: tuple[str, ...]
    kind: str = "figure"
    needs: str = ""

    def missing(self, job: dict) -> str:
        """Why it cannot run; empty if it can."""
        if self.needs == "cuda" and job["device"] != "cuda":
            return "needs CUDA"
        if self.needs == "peer" and not job["peer"]:
            return "give --peer=FOLDER, a checkout of karpathy/nanochat"
        return ""


def call(name: str, path: str, limit_s: float, kind="figure", needs="", **keywords) -> Part:
    """A part that calls `module.function` of this folder with the job and keywords."""
    arguments = "-m", "experiments.gpu_speed", path, json.dumps(keywords)
    return Part(name, limit_s, arguments, kind, needs)


# Name, function, most seconds on a GPU. What comes last may get no time; `--parts` runs it alone
PARTS = [
    call("machine", "gpu_parts.machine", 60, "check"),
    call("warm_up", "gpu_parts.warm_up", 300, "beside", "cuda", depths=[12, 24], peer_depth=12),
    call("losses", "gpu_correctness.losses", 150, "check"),
    call("attention", "gpu_correctness.attention", 120, "check"),
    call("waits", "gpu_correctness.waits", 120, "check"),
    call("resume", "gpu_correctness.resume", 150, "check"),
    call("speed_d12", "gpu_parts.speed", 120, depth=12, trace=True),
    call("speed_d24", "gpu_parts.speed", 180, needs="cuda", depth=24, trace=True),
    call("speed_d20", "gpu_parts.speed", 150, needs="cuda", depth=20),
    call("peer_d12", "gpu_parts.beside_peer", 150, needs="peer", depth=12),
    call("ceilings", "gpu_ceilings.ceilings", 100, depths=[12, 20, 24]),
    call("save_evaluate_sample", "gpu_inference.save_evaluate_sample", 150, depth=12),
    call("speed_d12_windows", "gpu_parts.speed", 120, needs="cuda", depth=12, window_pattern="SSSL"),
    call("speed_d12_fp8", "gpu_parts.speed", 120, needs="cuda", depth=12, fp8=True),
    call("peer_d24", "gpu_parts.beside_peer", 300, needs="peer", depth=24),
    call("base_train_d12", "gpu_correctness.base_train_speed", 150, needs="cuda", depth=12),
    call("peer_d20", "gpu_parts.beside_peer", 240, needs="peer", depth=20),
    call("speed_d24_fp8", "gpu_parts.speed", 180, needs="cuda", depth=24, fp8=True),
]


class Running:
    """A part's process. What it prints goes to files, so that it never waits for a reader."""

    def __init__(self, part: Part, job: dict):
        self.part, self.began = part, time.perf_counter()
        self.output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        # A tiny model has no work for a second thread
        environment = os.environ | ({"OMP_NUM_THREADS": "1"} if job.get("small") else {})
        self.process = subprocess.Popen(
            [sys.executable, *part.arguments, json.dumps(job)],
            cwd=ROOT,
            env=environment,
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


def run_parts(parts: list[Part], job: dict, minutes: float, say) -> dict[str, dict]:
    """Run the parts in order within so many minutes: {name: {"ok", "seconds", figures...}}.

    `say` gets each part's figures, as JSON, when it ends. A part for which no time is left is not ok and says
    so. A part that lacks something is skipped, and is ok.
    """
    deadline, results, beside = time.perf_counter() + 60 * minutes, {}, None

    def take(name: str, result: dict):
        results[name] = rounded(result)
        say(json.dumps({"part": name} | results[name]))

    def finish(running: Running):
        left = deadline - running.began
        take(running.part.name, running.finish(min(running.part.limit_s, left)))

    try:
        for part in parts:
            if beside and part.kind == "figure":
                finish(beside)
                beside = None
            if missing := part.missing(job):
                take(part.name, {"ok": True, "seconds": 0.0, "skipped": missing})
            elif time.perf_counter() > deadline - 1:
                take(part.name, {"ok": False, "seconds": 0.0, "error": "not run: no time is left"})
            elif part.kind == "beside":
                beside = Running(part, job)
            else:
                finish(Running(part, job))
        if beside:
            finish(beside)
            beside = None
    finally:
        if beside:
            beside.stop()
    return {part.name: results[part.name] for part in parts}


def rounded(value):
    """Floats to 4 digits; JSON has no infinity and no NaN, so these become words."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)
    return value


def summary(results: dict[str, dict]) -> list[str]:
    """A line for each part: what it found in a few words."""
    lines = []
    for name, row in results.items():
        state = "skipped" if "skipped" in row else "ok" if row["ok"] else "FAILED"
        words = row.get("skipped") or row.get("error") or ""
        facts = ("tok_per_sec", "mfu", "ours_over_peer", "peak_gib", "expected_gib")
        words = words or "  ".join(f"{key} {row[key]}" for key in facts if key in row)
        lines.append(f"{name:18} {state:8} {row['seconds']:6.1f} s  {words}".rstrip())
    return lines


def bench(settings: dict) -> dict[str, dict]:
    """The parts that --parts names, or all. Raises UserError for a name that is none."""
    import torch

    from nanochat import UserError
    from nanochat.files import user_path

    names = [name.strip() for name in settings["parts"].split(",") if name.strip()]
    if unknown := sorted(set(names) - {part.name for part in PARTS}):
        known = ", ".join(part.name for part in PARTS)
        raise UserError(f"no part is called {', '.join(unknown)}; --parts takes some of: {known}")
    peer = str(peer_folder(settings["peer"])) if settings["peer"] else None
    device = settings["device_type"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "mps" or (device == "cuda" and not torch.cuda.is_available()):
        raise UserError(f"device_type {device} cannot be measured here; leave it out, or give cpu")
    job = {
        "device": device,
        "small": device != "cuda",
        "peer": peer,
        "data": settings["data"],
        "vocab_size": settings["vocab_size"],
        "base_dir": str(user_path("base_dir", settings["base_dir"])),
    }
    parts = [part for part in PARTS if not names or part.name in names]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running part ends too
    results = run_parts(parts, job, settings["minutes"], lambda line: print(line, flush=True))
    print(*summary(results), sep="\n", flush=True)
    return results


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
