"""Measure speed: variants take turns, medians over rounds are compared, as ratios: machines are noisy.

    python -m scripts.bench --what=train     # tokens/s and MFU of base_train, and where a step's time goes
    python -m scripts.bench --what=start     # seconds from the command to the first optimizer step done
    python -m scripts.bench --what=loader    # packed tokens/s on one thread, and raw tiktoken's
    python -m scripts.bench --what=optimizer --depth=12 --peer=FOLDER    # one of its steps, and the peer's
    python -m scripts.bench --what=generate --peer=FOLDER    # tokens written a second, and the peer's
    python -m scripts.bench --what=evaluate  # bits per byte, tokens/s, beside a plain way to score
    python -m scripts.bench --what=core      # examples/s of CORE's evaluation, and of one at a time
    python -m scripts.bench --what=checkpoint --depth=12    # how long a save stalls a step
    torchrun --standalone --nproc_per_node=4 -m scripts.bench --what=communication    # bytes a step
    python -m scripts.bench --what=race --minutes=5 --peer=FOLDER    # bits per byte after N minutes
    python -m scripts.bench --what=gpu --peer=FOLDER    # checks and times everything on a GPU in ten minutes
    python -m scripts.bench --json           # one JSON object as the last line

docs/benchmarks.md holds the figures, each with its machine, date and command.
"""

import json as json_module
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Literal

import torch

import configurator
from nanochat import UserError, checkpoint, optim
from nanochat.data.sources import open_dataset
from nanochat.data.tokenizer import open_tokenizer
from nanochat.diagnostics.step import scaled_rates
from nanochat.files import user_path
from nanochat.gpt import GPT
from nanochat.machine import precision, runtime
from nanochat.plan import scaling

# What to measure
what: (
    Literal["train", "start", "loader", "optimizer", "checkpoint", "communication"]
    | Literal["generate", "evaluate", "core", "gpu", "race"]
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
dtypes = "bfloat16,float32"  # optimizer, generate, evaluate: compute dtypes
peer: str | None = None  # train, start, optimizer, generate, race, gpu: karpathy/nanochat's, for turns
parts = ""  # gpu: only these parts, separated by commas (empty = all)
minutes = 9.5  # gpu: all parts together; what is not done by then is stopped. race: of each run [0.01..1e4]
shapes = "8x512,32x2048"  # loader: rows of a step x positions of a row
recipe = "runs/laptop.py"  # start, race: settings of the run

# Places
data = "embedded"  # as in base_train; its tokenizer has vocab_size tokens
base_dir = "~/.cache/nanochat"  # where data and tokenizer are (environment: NANOCHAT_BASE_DIR)
folder: str | None = None  # checkpoint, race: a folder to write in (none = the system's /tmp)
device_type: Literal["auto", "cuda", "cpu", "mps"] = "auto"  # auto = cuda, else mps, else cpu

settings = configurator.configure(globals())

ROOT = Path(__file__).resolve().parent.parent
DEFAULTS = configurator.defaults(ROOT / "scripts" / "base_train.py")


def model_config():
    return scaling.model_config(depth, aspect_ratio, head_dim, max_seq_len, vocab_size, window_pattern)


def seconds(action, *arguments, **keywords) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    action(*arguments, **keywords)
    return time.perf_counter() - began


# ------------------------------------------------------------------------------------------------------
# Text to batches


def bench_loader() -> dict:
    """Tokens a second of reading, tokenizing and packing on one thread, and of tiktoken alone."""
    from experiments.loader_speed import loader_speed

    dataset, tokenizer = open_text()
    results = {"corpus": {"name": dataset.name, "fingerprint": dataset.fingerprint[:12]}}
    for shape in shapes.split(","):
        results[shape] = loader_speed(dataset, tokenizer, *map(int, shape.split("x")), rounds)
    return results


def open_text():
    """The data set and its tokenizer."""
    base = user_path("base_dir", base_dir)
    dataset = open_dataset(data, base_dir=base)
    return dataset, open_tokenizer("auto", vocab_size, dataset.tokenizer_folder(base), dataset.train_texts)


def bench_evaluate() -> dict:
    """Bits per byte on documents of about 1000 characters, ours and a plain way in turn."""
    from experiments.evaluate_speed import evaluate_speed

    machine, names = runtime.start(device_type, seed=0), [name.strip() for name in dtypes.split(",")]
    return evaluate_speed(model_config(), *open_text(), device_batch_size, names, rounds, machine)


# ------------------------------------------------------------------------------------------------------
# The optimizer


def make_optimizer(dtype: str, machine, compile: bool = True):
    """A model of the settings' shapes with random gradients, and base_train's optimizer for it."""
    compute_dtype, _ = precision.resolve_dtype(dtype, machine.device)
    config = model_config()
    model = GPT(config).to(machine.device)
    model.init_weights()
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    batch_tokens = device_batch_size * max_seq_len * machine.world_size
    groups = optim.parameter_groups(model, *scaled_rates(DEFAULTS, config, batch_tokens, steps))
    return model, optim.MuonAdamW(
        groups, compute_dtype, 0 if compile else None, machine.rank, machine.world_size
    )


def start_peer(model, dtype: str, device: torch.device) -> subprocess.Popen:
    """The optimizer of karpathy/nanochat in a process of its own, on the same shapes."""
    shapes = {name: list(p.shape) for name, p in model.named_parameters() if p.ndim == 2}
    tables = [shape for name, shape in shapes.items() if "embedding" in name]
    matrices = [shape for name, shape in shapes.items() if name.startswith("blocks.")]
    command = [sys.executable, ROOT / "experiments" / "peer_optimizer.py"]
    environment = os.environ | {"PYTHONPATH": str(Path(peer).resolve()), "NANOCHAT_DTYPE": dtype}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=peer, env=environment, **pipes)
    job = [str(device), matrices, tables, shapes["head.weight"]]
    print(json_module.dumps(job), file=process.stdin, flush=True)
    if process.stdout.readline().strip() != "ready":
        raise UserError(f"the optimizer in {peer} did not start; --peer is a folder of karpathy/nanochat")
    return process


def optimizer_times(dtype: str, machine) -> dict:
    """One step of ours, and with --peer one of the peer's in turn; compiled, the gradients stay the same."""
    model, optimizer = make_optimizer(dtype, machine)
    theirs = start_peer(model, dtype, machine.device) if peer else None
    times = {"ours": [], "peer": []}  # seconds

    def step():
        optimizer.step()
        machine.synchronize()

    for _ in range(rounds + 2):  # the first two compile and warm up
        times["ours"].append(seconds(step))
        if theirs:
            print(file=theirs.stdin, flush=True)
            times["peer"].append(float(theirs.stdout.readline()))
    ours, others = times["ours"][2:], times["peer"][2:]
    result = {"ours_ms": 1000 * statistics.median(ours)}
    if theirs:
        theirs.kill()
        theirs.wait()
        result["peer_ms"] = 1000 * statistics.median(others)
        result["ours_over_peer"] = statistics.median(a / b for a, b in zip(ours, others, strict=True))
    return result


def bench_optimizer() -> dict:
    if peer and not (Path(peer) / "nanochat" / "optim.py").exists():
        raise UserError(f"{peer} has no nanochat/optim.py; --peer is a folder of karpathy/nanochat")
    machine = runtime.start(device_type, seed=0)
    return {dtype: optimizer_times(dtype, machine) for dtype in map(str.strip, dtypes.split(","))}


# ------------------------------------------------------------------------------------------------------
# Checkpoints


def bench_checkpoint() -> dict:
    """How long a background save stalls a step, how long a blocking save takes, and a bare write."""
    machine = runtime.start(device_type, seed=0)
    model, optimizer = make_optimizer("float32", machine, compile=False)
    tensors = {"model": model.state_dict(), "optimizer": optimizer.named_state()}
    size = sum(t.nbytes for kind in tensors.values() for t in kind.values())
    times = {"stall_s": [], "background_s": [], "blocking_s": [], "bare_write_s": []}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        if shutil.disk_usage(place).free < 2.2 * size:
            raise UserError(f"two checkpoints of {size / 1e9:.1f} GB do not fit; give another --folder")
        saver = checkpoint.AsyncSaver(place)
        saver.reserve(**tensors)
        for step in range(1, rounds + 1):
            saver.wait()
            times["stall_s"].append(seconds(saver.submit, step, **tensors, state={}))
            times["background_s"].append(times["stall_s"][-1] + seconds(saver.wait))
            times["blocking_s"].append(seconds(checkpoint.save, place, step, **tensors, state={}))
            times["bare_write_s"].append(seconds(bare_write, tensors, Path(place) / "bare"))
            checkpoint.prune(place, 1)
            (Path(place) / "bare").unlink()
        saver.close()
    row = {name: statistics.median(t) for name, t in times.items()}
    row["stall_over_blocking"] = row["stall_s"] / row["blocking_s"]
    row["stall_over_bare_write"] = row["stall_s"] / row["bare_write_s"]
    return {f"{size / 1e9:.2f} GB": row}


def bare_write(tensors: dict, path: Path):
    """The same bytes in one file, synced."""
    with open(path, "wb") as file:
        for tensor in (tensor for kind in tensors.values() for tensor in kind.values()):
            file.write(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
        file.flush()
        os.fsync(file.fileno())


def bench_elsewhere() -> dict:
    """What a module of experiments/ measures by itself: `generate`, `core`, `race`, `gpu` and others."""
    return import_module(f"experiments.{what}_speed").bench(settings.values)


bench_train = bench_generate = bench_core = bench_start = bench_gpu = bench_elsewhere
bench_communication = bench_race = bench_elsewhere


results = globals()[f"bench_{what}"]()
for name, row in results.items() if what not in ("gpu", "train") else ():  # these print their own lines
    row = row if isinstance(row, dict) else {"": row}
    cells = (f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
    print(f"{name:20s} " + "  ".join(cells))
if json and results:
    key = "parts" if what == "gpu" else "results"
    on_device = what in ("train", "optimizer", "generate", "evaluate", "core")  # parts of `gpu` name theirs
    device = runtime.start(device_type, seed=0).device if on_device else torch.device("cpu")
    here = {"device": runtime.device_name(device), "torch": torch.__version__}
    single = {name: value for name, value in results.items() if not isinstance(value, dict)}
    record = {"what": what, "machine": here, "settings": settings.values, key: results}
    print(json_module.dumps(record | single))
if what == "gpu" and not all(part["ok"] for part in results.values()):
    sys.exit(1)
