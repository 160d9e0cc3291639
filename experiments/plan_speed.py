"""What the plan says of memory and time, beside what runs of base_train then take. On a CPU.

    python -m experiments.plan_speed                          # a table for docs/benchmarks.md
    python -m experiments.plan_speed --variants=float32 --shapes=2x16x4x128 --steps=6

GB are the largest resident memory of the process, ms those of the median step.
"""

import json
import re
import statistics
import tempfile
from pathlib import Path

import configurator
from experiments import train_speed
from nanochat import UserError

shapes = "4x48x4x512,4x64x8x512,6x64x4x512"  # depth x aspect_ratio x rows x positions, separated by commas
variants = "bfloat16,bfloat16+compile,float32,float32+compile"  # dtypes, with +compile or without
steps = 30  # optimizer steps, of one micro-step each; the first third does not count [3..1e6]
head_dim = 64  # channels of an attention head [2..1024]
vocab_size = 4096  # tokens [256..2**20]
base_dir = "~/.cache/nanochat"  # where data and tokenizer are (environment: NANOCHAT_BASE_DIR)


def compare(shape: str, variant: str) -> dict[str, dict[str, float]]:
    """Of a run, `GB` at its peak and `ms` of its median step: as planned, as it was, and their ratio."""
    depth, aspect_ratio, rows, positions = map(int, shape.split("x"))
    names = "steps", "head_dim", "vocab_size", "base_dir"
    asked = {name: globals()[name] for name in names} | {"depth": depth, "aspect_ratio": aspect_ratio}
    asked |= {"max_seq_len": positions, "device_batch_size": rows}
    with tempfile.TemporaryDirectory() as place:
        found = train_speed.train(asked, variant, Path(place) / "run")
        said = json.loads((found["run"] / "config.json").read_text())["derived"]
    step = statistics.median(record["step_time_s"] for record in found["records"])
    both = {
        "GB": (said["memory"] / 1e9, found["peak_memory_bytes"] / 1e9),
        "ms": (1000 * said["seconds"] / said["num_iterations"], 1000 * step),
    }
    return {unit: {"plan": plan, "run": run, "ratio": plan / run} for unit, (plan, run) in both.items()}


def main():
    configurator.configure(globals())
    print("| depth x ratio x rows x positions | in | GB: plan | run | ratio | ms: plan | run | ratio |")
    print("|:--|:--|--:|--:|--:|--:|--:|--:|")
    for shape in shapes.split(","):
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){3}", shape):
            raise UserError(f"--shapes has {shape!r}; a shape is four numbers from 1, such as 4x48x4x512")
        for variant in variants.split(","):
            found = compare(shape, variant)
            cells = (f"{value:.3g}" for of_unit in found.values() for value in of_unit.values())
            print("|", " | ".join((shape, variant, *cells)), "|", flush=True)


if __name__ == "__main__":
    main()
