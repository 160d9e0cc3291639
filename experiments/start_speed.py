"""How soon a run begins: `python -m scripts.bench --what=start`.

Each run is the command of a recipe, from its start to its first record in metrics.jsonl. All runs share a
cache of compiled code that is empty at first. So the first run is the cold one, and the others are warm; data
and tokenizer are there in all of them. Three commands that end earlier say where the time goes: Python with
torch alone, base_train with all its imports (--help), and up to the plan (--plan). With --peer=FOLDER
karpathy/nanochat's base_train takes turns with ours, with the same shape, text and tokenizer, in bfloat16.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import configurator
from experiments import peer_run
from nanochat import UserError
from nanochat.paths import user_path

TRAIN = [sys.executable, "-m", "scripts.base_train"]
SHAPE = "depth", "aspect_ratio", "head_dim", "max_seq_len", "device_batch_size", "total_batch_size"


def bench(settings: dict) -> dict[str, float]:
    """Seconds to the end of the first step: cold (first_s), then the median and the slowest of `rounds` warm
    runs; medians of the seconds to the end of each earlier phase; and the peer's first step."""
    recipe, base = settings["recipe"], user_path("base_dir", settings["base_dir"])
    phases = {
        "torch_s": [sys.executable, "-c", "import torch; print()"],
        "imports_s": [*TRAIN, "--help"],
        "plan_s": [*TRAIN, recipe, f"--base_dir={base}", "--plan"],
    }
    times: dict = {name: [] for name in phases}
    ours, peers = [], []
    with own_cache() as place:
        for number in range(settings["rounds"] + 1):
            ours.append(first_step(recipe, base, place / f"ours{number}"))
            for name, command in phases.items():
                times[name].append(first_output(command))
            if settings["peer"]:
                peers.append(peer_first_step(settings["peer"], recipe, base, place / f"peer{number}"))
    found = {"first_s": ours[0], "median_s": statistics.median(ours[1:]), "slowest_s": max(ours[1:])}
    if peers:
        found |= {"peer_first_s": peers[0], "peer_median_s": statistics.median(peers[1:])}
    return found | {name: statistics.median(of_phase[1:]) for name, of_phase in times.items()}


@contextlib.contextmanager
def own_cache():
    """A folder whose `compiled` is torch's cache of compiled code for all that is started meanwhile."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{place}/compiled"
        try:
            yield Path(place)
        finally:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
            if before is not None:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def first_step(recipe: str, base: Path, run: Path) -> float:
    """Seconds until a run has written the record of its first step; then it is killed."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    began = time.perf_counter()
    process = subprocess.Popen([*TRAIN, recipe, f"--base_dir={base}", f"--out_dir={run}"], **pipes)
    seconds = until_first_step(process, records := run / "metrics.jsonl") - began
    if not (records.exists() and records.stat().st_size):
        raise UserError(f"base_train ended early: {process.stderr.read().strip()[-500:]}")
    process.kill()
    process.communicate()
    return seconds


def until_first_step(process: subprocess.Popen, records: Path) -> float:
    """When, on time.perf_counter(), a run's records have their first one, or the process has ended."""
    while process.poll() is None and not (records.exists() and records.stat().st_size):
        time.sleep(0.01)
    return time.perf_counter()


def first_output(command: list[str]) -> float:
    """Seconds until a command prints something; it then runs to its end."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process.stdout.read(1)
    seconds = time.perf_counter() - began
    process.communicate()
    return seconds


def peer_first_step(checkout: str, recipe: str, base: Path, place: Path) -> float:
    """Seconds until karpathy/nanochat prints its first step, a run of one step at the recipe's shape."""
    values = configurator.defaults(Path("scripts/base_train.py")) | configurator.defaults(Path(recipe))
    size = values["vocab_size"] if values["vocab_size"] != -1 else 4096
    text = peer_run.text_of(values["data"], size, base)
    shape = {name: values[name] for name in SHAPE} | {"num_iterations": 1}
    return peer_run.train(peer_run.check(checkout), text, place, shape, "bfloat16").first_step_s
