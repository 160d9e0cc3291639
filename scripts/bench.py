"""Measure speed: variants take turns, medians over rounds are compared, as ratios: machines are noisy.

    python -m scripts.bench --what=train     # tokens/s and MFU of base_train, and where a step's time goes
    python -m scripts.bench --what=start     # seconds from the command to the first optimizer step done
    python -m scripts.bench --what=loader    # packed tokens/s on one thread, and raw tiktoken's
    python -m scripts.bench --what=optimizer --depth=12 --peer=FOLDER    # one of its steps, and the peer's
    python -m scripts.bench --what=generate --peer=FOLDER    # tokens written a second, and the peer's
    python -m scripts.bench --what=checkpoint --depth=12    # how long a save stalls a step
    torchrun --standalone --nproc_per_node=4 -m scripts.bench --what=communication    # bytes a step
    python -m scripts.bench --what=race --minutes=5 --peer=FOLDER    # bits per byte after N minutes
    python -m scripts.bench --what=gpu --peer=FOLDER    # times and checks everything on a GPU
    python -m scripts.bench --what=traffic --depth=12 --peer=FOLDER    # bytes, launches of a GPU's micro-step
    python -m scripts.bench --json           # one JSON object as the last line

docs/benchmarks.md holds the figures, each with its machine, date and command.
"""

import json as json_module
import sys
from importlib import import_module
from typing import Literal

import torch

import configurator
from nanochat import UserError
from nanochat.files import user_path
from nanochat.machine import runtime

# What to measure
what: (
    Literal["train", "start", "loader", "optimizer", "checkpoint", "communication"]
    | Literal["generate", "gpu", "race", "traffic"]
) = "train"
json = False  # print one JSON object as the last line
rounds = 5  # times every variant is measured (race: at most 3) [1..1e4]
steps = 12  # optimizer steps of a round (train: the first third warms up and does not count) [1..1e6]

# The model and the step
depth = 4  # Transformer layers [1..512]
aspect_ratio = 64  # width = depth * aspect_ratio [1..4096]
head_dim = 64  # channels of an attention head [2..1024]
max_seq_len = 512  # positions a row [2..2**20]
window_pattern = "L"  # as in base_train
vocab_size = 4096  # tokens [256..2**20]
device_batch_size = 8  # rows of a micro-batch, one micro-batch a step [1..2**20]

# What takes turns
variants = "bfloat16+compile,bfloat16,float32+compile"  # train: dtypes, with +compile or without
gradient_dtype: Literal["float32", "bfloat16"] = "float32"  # communication: as in base_train
dtypes = "bfloat16,float32"  # optimizer, generate: compute dtypes
peer: str | None = None  # karpathy/nanochat: train, optimizer, generate, race, gpu, traffic
parts = ""  # gpu: only these parts, traffic: only these kernels by hand, after commas (empty = all)
minutes = 9.5  # gpu: all parts together; what cannot end by then is not run. race: of each run [0.01..1e4]
shapes = "8x512,32x2048"  # loader: rows of a step x positions of a row
recipe = "runs/laptop.py"  # start, race: settings of the run

# Places
data = "embedded"  # as in base_train; its tokenizer has vocab_size tokens
base_dir = "~/.cache/nanochat"  # where data and tokenizer are (environment: NANOCHAT_BASE_DIR)
folder: str | None = None  # to write in: checkpoint, race (none = /tmp); gpu: tables; traffic: code
device_type: Literal["auto", "cuda", "cpu", "mps"] = "auto"  # auto = cuda, else mps, else cpu

settings = configurator.configure(globals())

MODULES = {"loader": "part", "optimizer": "part", "generate": "part", "checkpoint": "part"}  # else its own
ON_A_CPU = ("loader", "communication", "race", "traffic")


def record(results: dict) -> dict:
    """What --json prints: results, and where they were measured. Single figures stand at the top too."""
    device = torch.device("cpu") if what in ON_A_CPU else runtime.start(device_type, seed=0).device
    here = {"device": runtime.device_name(device), "torch": torch.__version__}
    here["git_commit"] = runtime.git_commit()
    found = {"what": what, "machine": here, "settings": settings.values}
    found["parts" if what == "gpu" else "results"] = results
    return found | {name: value for name, value in results.items() if not isinstance(value, dict)}


if folder:
    place = user_path("folder", folder).resolve()
    settings.values["folder"] = str(place)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--folder={folder} cannot be made ({error.strerror}); name another one") from None
measure = import_module(f"experiments.{MODULES.get(what, what)}_speed")
for name, value in getattr(measure, "SETTINGS", {}).items():  # its own, in place of the defaults
    if settings.sources[name] == "default":
        settings.values[name] = value
results = getattr(measure, what if what in MODULES else "bench")(settings.values)
if what not in ("gpu", "train"):  # these print their own lines
    for name, row in results.items():
        row = row if isinstance(row, dict) else {"": row}
        cells = (f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print(f"{name:20s} " + "  ".join(cells))
if json and results:
    print(json_module.dumps(record(results)))
if what == "gpu" and not all(part["ok"] for part in results.values()):
    sys.exit(1)
