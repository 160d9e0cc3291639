"""How soon a run begins: `python -m scripts.bench --what=start`.

Each run is the command of a recipe, from its start until it prints its first step, and until it runs as fast
as it will: on a CPU ten eager steps come first, one that compiles and one more. All runs share a cache of
compiled code that is empty at first. So the first run is the cold one, and the others are warm; data and
tokenizer are there in all of them. Three commands that end earlier say where the time goes: Python with torch
alone, base_train with all its imports (--help), and up to the plan (--plan). A last run, with an empty cache
of its own, is evaluated twice: its first evaluation compiles.
"""

import contextlib
import os
import statistics
import sys
from pathlib import Path
from unittest import mock

from experiments import peer_run
from nanochat.files import temporary_folder, user_path
from nanochat.run.metrics import read_metrics

TRAIN = [sys.executable, "-m", "scripts.base_train"]


def bench(settings: dict) -> dict[str, float]:
    """Seconds to the end of the first step: cold (first_s), then the median and the slowest of `rounds` warm
    runs; the same to full speed (full_first_s, full_median_s), for which the recipe needs twelve steps;
    medians of the seconds to the end of each earlier phase; and seconds of a run's first evaluation and its
    second."""
    recipe, base = settings["recipe"], user_path("base_dir", settings["base_dir"])
    phases = {
        "torch_s": [sys.executable, "-c", "import torch; print()"],
        "imports_s": [*TRAIN, "--help"],
        "plan_s": [*TRAIN, recipe, f"--base_dir={base}", "--plan"],
    }
    times: dict = {name: [] for name in phases}
    ours = []
    with own_cache() as place:
        for number in range(settings["rounds"] + 1):
            command = [*TRAIN, recipe, f"--base_dir={base}", f"--out_dir={place / f'ours{number}'}"]
            ours.append(peer_run.until_steps(command, (1, peer_run.FULL_SPEED)))
            for name, command in phases.items():
                times[name].append(first_line(command))
    with own_cache() as place:
        found = evaluations([*TRAIN, recipe, f"--base_dir={base}"], place / "evaluated")
    first, full = zip(*ours, strict=True)
    found |= {"first_s": first[0], "median_s": statistics.median(first[1:]), "slowest_s": max(first[1:])}
    found |= {"full_first_s": full[0], "full_median_s": statistics.median(full[1:])}
    return found | {name: statistics.median(of_phase[1:]) for name, of_phase in times.items()}


@contextlib.contextmanager
def own_cache():
    """A folder whose `compiled` is torch's cache of compiled code for all that is started meanwhile."""
    with (
        temporary_folder() as place,
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=f"{place}/compiled"),
    ):
        yield place


def evaluations(command: list[str], out: Path) -> dict[str, float]:
    """Seconds of the first and the second evaluation of a run. Raises UserError if it fails."""
    settings = {"num_iterations": 3 * peer_run.FULL_SPEED, "eval_every": peer_run.FULL_SPEED}
    settings |= {"eval_tokens": 20_000, "core_metric_every": -1, "sample_every": -1, "save_every": -1}
    first_line([*command, *(f"--{name}={value}" for name, value in settings.items()), f"--out_dir={out}"])
    first, second, _ = (r["eval_time_s"] for r in read_metrics(out / "metrics.jsonl") if "eval_time_s" in r)
    return {"evaluation_first_s": first, "evaluation_second_s": second}


def first_line(command: list[str]) -> float:
    """Seconds until a command prints a line; it then runs to its end. Raises UserError if it fails."""
    return peer_run.watch(command, failed=f"{' '.join(command)} failed").lines[0][0]
