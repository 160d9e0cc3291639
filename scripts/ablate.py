"""Ablations: train variants on equally many tokens, with several seeds, and compare their bits per byte.

    python -m scripts.ablate --what=packing           # how documents become rows; minutes on two cores
    python -m scripts.ablate --what=precision         # compute dtypes against float32
    python -m scripts.ablate --what=documents         # does a token see earlier documents of its row?
    python -m scripts.ablate --what=packing --json    # one JSON object as the last line

Each training is a run of scripts/base_train.py. A variant is a set of its settings, or an edit of the
sources, made in a temporary copy. <base_dir>/ablations/ keeps every finished run: after a stop the same
command goes on, and a command with more seeds trains only the new ones. docs/ablations.md has the tables.
"""

import hashlib
import json as json_module
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import configurator
from nanochat import UserError, engine, precision, runtime
from nanochat.data.dataset import open_dataset
from nanochat.data.parquet import iterate_documents
from nanochat.data.tokenizer import open_tokenizer
from nanochat.data.validation import ValidationBatches
from nanochat.evaluate import bits_per_byte
from nanochat.metrics import read_metrics
from nanochat.paths import user_path

what: Literal["packing", "precision", "documents"] = "packing"  # what to compare
seeds = 3  # trainings of every variant, with the seeds 0, 1, ... [1..1000]
json = False  # print one JSON object as the last line

# The training: settings of base_train, the same for all variants
depth = 4  # Transformer layers [1..512]
aspect_ratio = 32  # width = depth * aspect_ratio [1..4096]
head_dim = 32  # channels of an attention head [2..1024]
max_seq_len = 256  # positions a row [1..2**20]
vocab_size = 1024  # tokens [256..2**20]
total_batch_size = 4096  # tokens an optimizer step [1..2**32]
num_iterations = 200  # optimizer steps [1..1e9]
eval_tokens = 65_536  # validation tokens scored (-1 = all) [-1, 1..1e12]
data = "embedded"  # as in base_train
val_data: str | None = None  # as in base_train
base_dir = "~/.cache/nanochat"  # where data, tokenizers and results are (environment: NANOCHAT_BASE_DIR)
device_type: Literal["auto", "cuda", "cpu", "mps"] = "auto"  # auto = cuda, else mps, else cpu
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # compute dtype, as in base_train

settings = configurator.configure(globals())

# ------------------------------------------------------------------------------------------------------
# The variants

FILL = "    def fill(self, row: np.ndarray) -> None:\n"
CUT = "    def _cut(self, gap: np.ndarray) -> None:\n"
CONCATENATION = '''\
    stream = np.empty(0, dtype=np.uint32)

    def fill(self, row: np.ndarray) -> None:
        """Documents follow one another, each behind its <|bos|>; rows are cut from that stream."""
        while len(self.stream) < len(row):
            if (item := self._feed.next(self.number)) is not None:  # None ends an epoch
                self.stream = np.concatenate([self.stream, [self._bos], self._encode(item[1])])
        row[:] = self.stream[: len(row)]
        self.stream = self.stream[len(row) - 1 :]  # the last target is the next row's first input

    def best_fit(self, row: np.ndarray) -> None:
'''
CROPPED = '''\
    def _cut(self, gap: np.ndarray) -> None:
        """Cut the shortest piece; the rest of its document is lost."""
        tokens = self.pieces.pop(0)[-1]
        gap[:] = tokens[: len(gap)]
        self._room += len(tokens)

    def _cut_and_keep(self, gap: np.ndarray) -> None:
'''
VARIANTS = {  # name: settings of base_train, and edits of the sources: (file, old text, new text)
    "packing": {
        "best fit, remainders kept": ({}, []),
        "best fit, cropped": ({}, [("nanochat/data/packing.py", CUT, CROPPED)]),
        "concatenation": ({}, [("nanochat/data/packing.py", FILL, CONCATENATION)]),
    },
    "precision": {"float32": ({"dtype": "float32"}, []), "bfloat16": ({"dtype": "bfloat16"}, [])},
    "documents": {"whole row": ({}, []), "own document": ({"document_mask": True}, [])},
}[what]

# ------------------------------------------------------------------------------------------------------
# One training

ROOT = Path(__file__).parent.parent


def edited_copy(edits, folder: Path) -> Path:
    """Copy the sources to `folder` and edit them; UserError unless a file has the old text exactly once."""
    for name in ("nanochat", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "configurator.py", folder)
    for name, old, new in edits:
        text = (folder / name).read_text("utf-8")
        if text.count(old) != 1:
            raise UserError(
                f"a variant replaces a text that {name} has {text.count(old)} times, and it must be there "
                f"once; correct the variant in scripts/ablate.py:\n{old}"
            )
        (folder / name).write_text(text.replace(old, new), "utf-8")
    return folder


def train(variant: str, seed: int, run: Path):
    """Run base_train from start to end; `run` becomes the run's folder."""
    own_settings, edits = VARIANTS[variant]
    chosen = shared | {"seed": seed, "resume": "never", "compile": "off", **own_settings}
    chosen |= dict.fromkeys(("eval_every", "sample_every", "save_every", "core_metric_every"), -1)
    chosen |= {"base_dir": base_path, "out_dir": run}
    for name in ("data", "val_data"):  # absolute: the copy of the sources is another working directory
        if name in chosen and (path := user_path(name, chosen[name])).exists():
            chosen[name] = path.resolve()
    command = [sys.executable, "-m", "scripts.base_train", *(f"--{k}={v}" for k, v in chosen.items())]
    with tempfile.TemporaryDirectory() as folder:
        where = edited_copy(edits, Path(folder)) if edits else ROOT
        done = subprocess.run(
            command, cwd=where, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
    if done.returncode:
        raise UserError(f"{variant}, seed {seed} failed: {' '.join(command)}\n{done.stderr.strip()[-2000:]}")


def first_windows() -> ValidationBatches:
    """The first window of each validation document: nothing that came before it is missing."""
    bos, tokens = np.array([tokenizer.bos_id], dtype=np.int32), []
    for text in iterate_documents(dataset.val_shards):
        tokens += [bos, tokenizer.encode(text)[:max_seq_len].astype(np.int32)]
    place = machine.rank, machine.world_size, machine.device
    return ValidationBatches(np.concatenate(tokens), max_seq_len, total_batch_size // max_seq_len, *place)


def reached(variant: str, run: Path) -> dict:
    """What a finished run reached."""
    records = read_metrics(run / "metrics.jsonl")
    last_step = next(record for record in reversed(records) if "loss" in record)
    checkpoint = engine.find_source(str(run), base_path)
    model = engine.load_for_inference(checkpoint, machine.device, torch.float32)
    compute_dtype, _ = precision.resolve_dtype(VARIANTS[variant][0].get("dtype", dtype), machine.device)
    token_bytes = torch.from_numpy(tokenizer.token_bytes()).to(machine.device)
    first = bits_per_byte(model, first_windows(), token_bytes, compute_dtype, machine)
    return {
        "loss": last_step["loss"],
        "val_bpb": next(record["val_bpb"] for record in reversed(records) if "val_bpb" in record),
        "first_window_bpb": first.bpb,
        "seconds": last_step["train_time_s"],
    }


# ------------------------------------------------------------------------------------------------------
# Train what has no result yet

if "RANK" in os.environ:
    raise UserError("ablate trains with one process; start it without torchrun")
for _, edits in VARIANTS.values():  # an edit that no longer fits is noticed before the first training
    with tempfile.TemporaryDirectory() as folder:
        edited_copy(edits, Path(folder))
machine = runtime.start(device_type, seed=0)
base_path = user_path("base_dir", base_dir).resolve()
dataset = open_dataset(data, val_data, base_dir=base_path)
tokenizer = open_tokenizer("auto", vocab_size, dataset.tokenizer_folder(base_path), dataset.train_texts)
shared = {k: v for k, v in settings.values.items() if k not in ("what", "seeds", "json", "base_dir")}
shared = {name: value for name, value in shared.items() if value is not None}

results = {}
for seed in range(seeds):  # seeds outside: after a stop all variants have about equally many results
    for variant, contents in VARIANTS.items():
        # A result counts for the same variant, settings, data and kind of device only
        same = [variant, contents, shared, dataset.fingerprint, tokenizer.fingerprint, machine.device.type]
        key = hashlib.sha256(json_module.dumps(same).encode()).hexdigest()[:12]
        run = base_path / "ablations" / what / f"{variant.replace(',', '').replace(' ', '-')}-{seed}-{key}"
        kept = run / "ablation.json"
        if not kept.exists():
            train(variant, seed, run)
            result = {"variant": variant, "seed": seed, **reached(variant, run), "settings": shared}
            result["git_commit"] = runtime.git_commit()
            kept.with_suffix(".tmp").write_text(json_module.dumps(result), "utf-8")
            os.replace(kept.with_suffix(".tmp"), kept)
            figures = f"{result['val_bpb']:.4f} bits per byte, {result['seconds']:.0f} s"
            print(f"{variant}, seed {seed}: {figures}", flush=True)
        results[variant, seed] = json_module.loads(kept.read_text("utf-8"))

# ------------------------------------------------------------------------------------------------------
# The table


def values_of(variant: str, key: str) -> list[float]:
    return [results[variant, seed][key] for seed in range(seeds)]


def mean_and_spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values) if seeds > 1 else 0:.4f}"


base = statistics.mean(values_of(next(iter(VARIANTS)), "val_bpb"))
lines = [
    f"d{depth}, T={max_seq_len}, {num_iterations * total_batch_size:,} tokens in batches of "
    f"{total_batch_size:,}, {seeds} seeds, {dataset.name}",
    "",
    "| variant | bits per byte | difference | of first windows |",
    "|---|---|---|---|",
]
for variant in VARIANTS:
    bits = values_of(variant, "val_bpb")
    difference, first = statistics.mean(bits) - base, mean_and_spread(values_of(variant, "first_window_bpb"))
    lines.append(f"| {variant} | {mean_and_spread(bits)} | {difference:+.4f} | {first} |")
table = "\n".join(lines) + "\n"
path = base_path / "ablations" / f"{what}.md"
path.write_text(table, "utf-8", "replace")
print(f"\n{table}\nwritten: {path}")
if json:
    print(json_module.dumps({"what": what, "settings": settings.values, "results": [*results.values()]}))
machine.close()
