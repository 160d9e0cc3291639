"""Measure speed: variants interleaved in one run, medians over rounds, as ratios: machines are noisy.

    python -m scripts.bench --what=train     # tokens/s, MFU, the optimizer's share, by dtype, compiled or not
    python -m scripts.bench --what=start     # seconds from the command to the first optimizer step done
    python -m scripts.bench --what=loader    # packed tokens/s on one thread beside raw tiktoken encoding
    python -m scripts.bench --json           # one JSON object as the last line

docs/benchmarks.md holds the figures, each with its machine, date and command.
"""

import json as json_module
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import configurator
from nanochat import UserError, optim, precision, runtime, scaling
from nanochat.dataloader import TrainLoader
from nanochat.dataset import iterate_documents, open_dataset
from nanochat.gpt import GPT
from nanochat.lanes import open_lanes
from nanochat.shards import RowGroups
from nanochat.tokenizer import open_tokenizer

what: Literal["train", "start", "loader"] = "train"  # what to measure
json = False  # print one JSON object as the last line
rounds = 5  # times every variant is measured

# The model and the step (train)
depth = 4  # Transformer layers
aspect_ratio = 64  # width = depth * aspect_ratio
head_dim = 64  # channels of an attention head
max_seq_len = 512  # positions a row
window_pattern = "L"  # as in base_train
vocab_size = 4096  # tokens
device_batch_size = 8  # rows of a micro-batch, one micro-batch a step
steps = 5  # optimizer steps a round
variants = "bfloat16+compile,bfloat16,float32+compile"  # what is compared: dtypes, with +compile or without

# Text to batches (loader)
shapes = "8x512,32x2048"  # rows of a step x positions of a row
data = "embedded"  # as in base_train; its tokenizer has vocab_size tokens

# The command (start)
recipe = "runs/laptop.py"  # settings of the run that is started
base_dir = "~/.cache/nanochat"  # where its data and tokenizer are (environment: NANOCHAT_BASE_DIR)

# Machine
device_type: Literal["auto", "cuda", "cpu", "mps"] = "auto"  # auto = cuda, else mps, else cpu

settings = configurator.configure(globals())


class Training:
    """One variant of the training step on random tokens: model, optimizer, and the times of its steps."""

    def __init__(self, variant: str, machine: runtime.Runtime, config):
        self.name, self.machine, compiled = variant, machine, variant.endswith("+compile")
        name = variant.removesuffix("+compile")
        if name not in precision.DTYPES:
            raise UserError(
                f"unknown variant {variant}; use {', '.join(precision.DTYPES)}, with +compile or without"
            )
        self.dtype, _ = precision.resolve_dtype(name, machine.device)
        torch.manual_seed(0)
        self.model = GPT(config).to(machine.device)
        self.model.init_weights()
        self.forward = torch.compile(self.model, dynamic=False) if compiled else self.model
        rates = {"embedding_lr": 0.3, "unembedding_lr": 0.008, "scalar_lr": 0.5, "matrix_lr": 0.02}
        low = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        groups = optim.parameter_groups(self.model, {k: 0.1 * v for k, v in rates.items()}, 0.1)
        self.optimizer = optim.MuonAdamW(groups, low, compiled)
        shape = (device_batch_size, config.max_seq_len + 1)
        tokens = torch.randint(config.vocab_size, shape, device=machine.device)
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.step_times, self.optimizer_times = [], []

    def step(self):
        began = time.perf_counter()
        with precision.autocast(self.machine.device, self.dtype):
            loss = self.forward(self.inputs, self.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.machine.synchronize()
        forward_done = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.machine.synchronize()
        self.step_times.append(time.perf_counter() - began)
        self.optimizer_times.append(time.perf_counter() - forward_done)


def bench_train() -> dict:
    machine = runtime.start(device_type, seed=0)
    config = scaling.model_config(depth, aspect_ratio, head_dim, max_seq_len, vocab_size, window_pattern)
    trainings = [Training(name.strip(), machine, config) for name in variants.split(",")]
    for training in trainings:  # compile and warm up
        for _ in range(3):
            training.step()
        training.step_times, training.optimizer_times = [], []
    for _ in range(rounds):
        for training in trainings:
            for _ in range(steps):
                training.step()
    tokens, flops = device_batch_size * max_seq_len, scaling.on_meta(config).flops_per_token()
    results, base = {}, None
    for training in trainings:
        seconds = statistics.median(training.step_times)
        peak, source = runtime.peak_flops(machine.device, training.dtype)
        base = base or seconds
        results[training.name] = {
            "tok_per_sec": tokens / seconds,
            "step_ms": 1000 * seconds,
            "optimizer_share": statistics.median(training.optimizer_times) / seconds,
            "mfu": flops * tokens / seconds / peak,
            "peak_tflops": peak / 1e12,
            "peak_source": source,
            "speed_relative_to_first": base / seconds,
        }
    results["peak_memory_bytes"] = machine.peak_memory()
    return results


def bench_start() -> dict:
    """Run the training command for one step and watch its metrics.jsonl; the first run (cold caches) counts
    apart."""
    times = []
    for _ in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "scripts.base_train", recipe, f"--out_dir={folder}/run"]
            environment = os.environ | {"NANOCHAT_BASE_DIR": str(Path(base_dir).expanduser())}
            began = time.perf_counter()
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            records = Path(folder) / "run" / "metrics.jsonl"
            while not (records.exists() and records.stat().st_size):
                if process.poll() is not None:
                    raise UserError(
                        f"{' '.join(command)} ended early: {process.stderr.read().strip()[-500:]}"
                    )
                time.sleep(0.01)
            times.append(time.perf_counter() - began)
            process.kill()
            process.communicate()
    return {"first_s": times[0], "median_s": statistics.median(times[1:]), "slowest_s": max(times[1:])}


def bench_loader() -> dict:
    """Packing, tokenization and reading included, on this thread; then raw tiktoken on the same documents.

    One stream of `rounds` epochs behind an epoch of warm-up, totals and no medians: lanes take documents in
    bursts, so a single round may encode far more or less than it places. Packed tokens are those placed in
    rows; `taken_over_placed` says how far the two are apart over all, above 1 at our expense.
    """
    base = Path(base_dir).expanduser()
    dataset = open_dataset(data, base_dir=base)
    folder = base / "tokenizers" / f"{dataset.name}-{dataset.fingerprint[:12]}"
    encoding = open_tokenizer("auto", vocab_size, folder, lambda: iterate_documents(dataset.train_shards))
    results = {"corpus": {"name": dataset.name, "fingerprint": dataset.fingerprint[:12]}}
    for shape in shapes.split(","):
        lane_count, length = map(int, shape.split("x"))
        start = [{"epoch": 0, "taken": 0, "pieces": []}] * lane_count
        groups = RowGroups(dataset.train_shards)
        buffer = np.empty((lane_count, length + 1), dtype=np.int32)
        epoch = sum(len(encoding.encode(text)) for text in iterate_documents(dataset.train_shards))
        steps_of_epoch = max(1, epoch // (lane_count * length))
        taken = Listener(encoding)
        lanes = open_lanes(groups, taken, lane_count, 0, range(lane_count), start, length + 1)
        packed_s = raw_s = encoded = waiting_before = 0
        for epoch_number in range(-1, rounds):  # -1 is the warm-up
            taken.texts = []
            began = time.perf_counter()
            for _ in range(steps_of_epoch):
                for lane, row in zip(lanes, buffer, strict=True):
                    lane.fill(row)
            done = time.perf_counter()
            tokens = sum(len(encoding.encode_ordinary(text)) for text in taken.texts)
            waiting = sum(len(piece[4]) for lane in lanes for piece in lane.pieces)
            if epoch_number < 0:
                waiting_before = waiting
            else:
                packed_s, raw_s = packed_s + done - began, raw_s + time.perf_counter() - done
                encoded += tokens
        placed = encoded - (waiting - waiting_before)
        threaded = []
        with TrainLoader(dataset.train_shards, encoding, lane_count, length, lane_count) as loader:
            for _ in range(rounds + 1):
                began = time.perf_counter()
                for _ in range(steps_of_epoch):
                    next(loader)
                threaded.append(steps_of_epoch * lane_count * length / (time.perf_counter() - began))
        results[shape] = {
            "packed_tok_per_sec": placed / packed_s,
            "raw_tok_per_sec": encoded / raw_s,
            "packed_over_raw": (placed / packed_s) / (encoded / raw_s),
            "taken_over_placed": encoded / placed,
            "threaded_tok_per_sec": statistics.median(threaded[1:]),
        }
    return results


class Listener:
    """A tokenizer that keeps the texts it encodes."""

    def __init__(self, tokenizer):
        self.bos_id, self._encode, self.texts = tokenizer.bos_id, tokenizer.encode, []

    def encode(self, text: str):
        self.texts.append(text)
        return self._encode(text)


results = {"train": bench_train, "start": bench_start, "loader": bench_loader}[what]()
for name, row in results.items():
    row = row if isinstance(row, dict) else {"": row}
    print(
        f"{name:20s} "
        + "  ".join(f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
    )
if json:
    machine = {"device": runtime.device_name(torch.device("cpu")), "torch": torch.__version__}
    print(
        json_module.dumps({"what": what, "machine": machine, "settings": settings.values, "results": results})
    )
