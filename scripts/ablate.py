"""Ablations: variants trained at equal tokens over several seeds, compared by bits per byte.

    python -m scripts.ablate --what=packing           # how documents become rows; minutes on two cores
    python -m scripts.ablate --what=precision         # compute dtypes against float32
    python -m scripts.ablate --what=packing --json    # one JSON object as the last line

Every finished training is kept in <base_dir>/ablations/, so a command that was stopped goes on, and one with
more seeds adds to what is there. docs/ablations.md holds the tables, each with its machine, date and command.
"""

import json as json_module
import os
import statistics
import time
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import configurator
from nanochat import UserError, optim, precision, runtime, scaling
from nanochat.data.dataset import open_dataset
from nanochat.data.loader import validation_batches
from nanochat.data.packing import Lane, open_lanes
from nanochat.data.parquet import RowGroups, iterate_documents
from nanochat.data.tokenizer import open_tokenizer
from nanochat.evaluate import bits_per_byte
from nanochat.gpt import GPT

what: Literal["packing", "precision"] = "packing"  # what to compare
seeds = 3  # trainings of every variant, with the seeds 0, 1, ...
json = False  # print one JSON object as the last line

# The model and its training
depth = 4  # Transformer layers
aspect_ratio = 32  # width = depth * aspect_ratio
head_dim = 32  # channels of an attention head
max_seq_len = 256  # positions a row
vocab_size = 1024  # tokens
total_batch_size = 4096  # tokens an optimizer step
num_iterations = 200  # optimizer steps
eval_tokens = 65_536  # validation tokens scored (-1 = all)

# Data
data = "embedded"  # as in base_train
val_data: str | None = None  # as in base_train
base_dir = "~/.cache/nanochat"  # where data, tokenizers and results are (environment: NANOCHAT_BASE_DIR)

# Machine
device_type: Literal["auto", "cuda", "cpu", "mps"] = "auto"  # auto = cuda, else mps, else cpu
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # compute dtype, as in base_train

settings = configurator.configure(globals())

# ------------------------------------------------------------------------------------------------------
# The variants, as arguments of train(): for packing kinds of nanochat.data.packing.Lane, for precision dtypes


class Concatenated(Lane):
    """Documents one after another, each behind its <|bos|>; rows are cut from that wherever they end."""

    stream = np.empty(0, dtype=np.uint32)

    def fill(self, row: np.ndarray) -> None:
        while len(self.stream) < len(row):
            if (item := self._feed.next(self.number)) is not None:  # None ends an epoch
                self.stream = np.concatenate([self.stream, [self._bos], self._encode(item[1])])
        row[:] = self.stream[: len(row)]
        self.stream = self.stream[len(row) - 1 :]  # the last target is the next row's first input


class Cropped(Lane):
    """Best fit where, when nothing fits, the shortest piece is cut and the rest of its document is lost."""

    def _cut(self, gap: np.ndarray) -> None:
        _, _, _, _, tokens = self.pieces.pop(0)
        gap[:] = tokens[: len(gap)]
        self._room += len(tokens)


VARIANTS = {
    "packing": {
        "best fit, remainders kept": {},
        "best fit, cropped": {"kind": Cropped},
        "concatenation": {"kind": Concatenated},
    },
    "precision": {
        "float32": {"dtype": torch.float32},
        "bfloat16": {"dtype": torch.bfloat16},
    },
}[what]

# ------------------------------------------------------------------------------------------------------
# Set up

machine = runtime.start(device_type, seed=0)
if machine.world_size > 1:
    raise UserError("ablations are trained by one process; start this without torchrun")
device = machine.device
compute_dtype, _ = precision.resolve_dtype(dtype, device)
base_path = Path(base_dir).expanduser()
dataset = open_dataset(data, val_data, base_dir=base_path)
tokenizer = open_tokenizer("auto", vocab_size, dataset.tokenizer_folder(base_path), dataset.train_texts)
if total_batch_size % max_seq_len:
    raise UserError(f"total_batch_size {total_batch_size} is not a multiple of max_seq_len {max_seq_len}")
row_count = total_batch_size // max_seq_len
config = scaling.model_config(depth, aspect_ratio, head_dim, max_seq_len, tokenizer.vocab_size, "L")
horizon = scaling.derive_horizon(
    config, num_iterations, -1, -1, total_batch_size, scaling.on_meta(config).flops_per_token()
)
rate_scale = scaling.rate_scale(total_batch_size, horizon.tokens, horizon.d12_tokens)
adam_scale = rate_scale * scaling.adam_width_scale(config.width)
rates = {
    "embedding_lr": 0.3,
    "unembedding_lr": 0.004,
    "scalar_lr": 0.1,
    "matrix_lr": 0.02,
}  # as in base_train
rates = {name: rate * (adam_scale if "embed" in name else rate_scale) for name, rate in rates.items()}
decay = scaling.scaled_weight_decay(0.28, rate_scale, total_batch_size, horizon.tokens, horizon.d12_tokens)
warmup_steps = min(40, num_iterations // 10)
validation = validation_batches(
    dataset.val_shards, tokenizer, max_seq_len, row_count, eval_tokens, device=device
)
token_bytes = torch.from_numpy(tokenizer.token_bytes()).to(device)


def first_windows():
    """Batches as `validation`, of the first window of each document alone: it has no context to lack."""
    inputs, targets = [], []
    for text in iterate_documents(dataset.val_shards):
        ids = tokenizer.encode(text)[:max_seq_len].astype(np.int64)
        padding = max_seq_len - len(ids)
        inputs.append(
            np.concatenate([[tokenizer.bos_id], ids[: max_seq_len - 1], [0] * (padding - 1)])[:max_seq_len]
        )
        targets.append(np.concatenate([ids, [-1] * padding]))
    for first in range(0, len(inputs), row_count):
        chunk = np.stack(inputs[first : first + row_count]), np.stack(targets[first : first + row_count])
        yield tuple(torch.from_numpy(array.astype(np.int64)).to(device) for array in chunk)


def batches(kind: type[Lane], seed: int):
    """Endless (inputs, targets) of one step, (rows, max_seq_len) int64, packed by lanes of that kind."""
    start = [{"epoch": 0, "taken": 0, "pieces": []}] * row_count
    groups = RowGroups(dataset.train_shards)
    lanes = open_lanes(groups, tokenizer, row_count, seed, range(row_count), start, max_seq_len + 1, kind)
    while True:
        rows = np.empty((row_count, max_seq_len + 1), dtype=np.int64)
        for lane, row in zip(lanes, rows, strict=True):
            lane.fill(row)
        rows = torch.from_numpy(rows).to(device)
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def train(seed: int, kind: type[Lane] = Lane, dtype: torch.dtype = compute_dtype) -> dict:
    """One training from start to end, and what it reaches."""
    torch.manual_seed(seed)
    model = GPT(config).to(device)
    model.init_weights(torch.Generator(device).manual_seed(seed))
    optimizer = optim.MuonAdamW(optim.parameter_groups(model, rates, decay), dtype)
    scaler = precision.make_scaler(device, dtype)
    stream = batches(kind, seed)
    began = time.perf_counter()
    for step in range(num_iterations):
        multiplier = scaling.lr_multiplier(step, num_iterations, warmup_steps, 0.65, 0.05)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * multiplier
            if group["method"] == "muon":
                group["betas"] = (scaling.muon_momentum(step, num_iterations), group["betas"][1])
                group["weight_decay"] = decay * scaling.weight_decay_multiplier(step, num_iterations)
        inputs, targets = next(stream)
        with precision.autocast(device, dtype):
            loss = model(inputs, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return {
        "loss": loss.item(),
        "val_bpb": bits_per_byte(model, validation, token_bytes, dtype, machine),
        "first_window_bpb": bits_per_byte(model, first_windows(), token_bytes, dtype, machine),
        "seconds": time.perf_counter() - began,
    }


# ------------------------------------------------------------------------------------------------------
# Train what is not there yet

folder = base_path / "ablations"
folder.mkdir(parents=True, exist_ok=True)
kept = folder / f"{what}.jsonl"
same = {  # a result counts where all of this is as now
    "depth": depth,
    "width": config.width,
    "head_dim": head_dim,
    "max_seq_len": max_seq_len,
    "total_batch_size": total_batch_size,
    "num_iterations": num_iterations,
    "eval_tokens": eval_tokens,
    "data": dataset.fingerprint,
    "tokenizer": tokenizer.fingerprint,
    "dtype": str(compute_dtype),
    "device": device.type,
}
results = {}
if kept.exists():
    for line in kept.read_text("utf-8").splitlines():
        try:
            record = json_module.loads(line)
        except ValueError:  # cut off when the machine stopped
            continue
        if record["settings"] == same:
            results[record["variant"], record["seed"]] = record
for seed in range(seeds):  # seeds outside: every variant has as many when it is stopped
    for variant, options in VARIANTS.items():
        if (variant, seed) not in results:
            record = {"variant": variant, "seed": seed, **train(seed, **options), "settings": same}
            record["git_commit"] = runtime.git_commit()
            with open(kept, "a", encoding="utf-8") as file:
                file.write("\n" * (kept.stat().st_size > 0 and not kept.read_bytes().endswith(b"\n")))
                file.write(json_module.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
            results[variant, seed] = record
            print(
                f"{variant}, seed {seed}: {record['val_bpb']:.4f} bits per byte, {record['seconds']:.0f} s",
                flush=True,
            )

# ------------------------------------------------------------------------------------------------------
# The table


def mean_and_spread(variant: str, key: str) -> str:
    values = [results[variant, seed][key] for seed in range(seeds)]
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values) if seeds > 1 else 0:.4f}"


best = next(iter(VARIANTS))
lines = [
    f"d{depth}, width {config.width}, T={max_seq_len}, {horizon.tokens:,} tokens in batches of "
    f"{total_batch_size:,}, {seeds} seeds, {dataset.name}",
    "",
    "| variant | bits per byte | difference | of first windows |",
    "|---|---|---|---|",
]
for variant in VARIANTS:
    difference = statistics.mean(
        results[variant, seed]["val_bpb"] - results[best, seed]["val_bpb"] for seed in range(seeds)
    )
    lines.append(
        f"| {variant} | {mean_and_spread(variant, 'val_bpb')} | {difference:+.4f} | "
        f"{mean_and_spread(variant, 'first_window_bpb')} |"
    )
table = "\n".join(lines) + "\n"
(folder / f"{what}.md").write_text(table, "utf-8")
print(f"\n{table}\nwritten: {folder / f'{what}.md'}")
if json:
    runs = [results[variant, seed] for variant in VARIANTS for seed in range(seeds)]
    print(json_module.dumps({"what": what, "settings": settings.values, "results": runs}))
machine.close()
