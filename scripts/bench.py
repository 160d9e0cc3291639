"""Measure speed: variants interleaved in one run, medians over rounds, as ratios: machines are noisy.

    python -m scripts.bench --what=train     # tokens/s, MFU, the optimizer's share, by dtype, compiled or not
    python -m scripts.bench --what=start     # seconds from the command to the first optimizer step done
    python -m scripts.bench --what=loader    # packed tokens/s on one thread beside raw tiktoken tokenizer
    python -m scripts.bench --what=optimizer --depth=12 --peer=FOLDER    # a step of it, beside the peer's
    python -m scripts.bench --what=checkpoint --depth=12    # how long a save stalls a step
    torchrun --standalone --nproc_per_node=4 -m scripts.bench --what=communication    # bytes a step
    python -m scripts.bench --json           # one JSON object as the last line

docs/benchmarks.md holds the figures, each with its machine, date and command.
"""

import gc
import json as json_module
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import configurator
from nanochat import UserError, checkpoint, optim, precision, runtime, scaling
from nanochat.data.dataset import open_dataset
from nanochat.data.loader import TrainLoader
from nanochat.data.packing import open_lanes
from nanochat.data.parquet import RowGroups, iterate_documents
from nanochat.data.tokenizer import open_tokenizer
from nanochat.gpt import GPT

# What to measure
what: Literal["train", "start", "loader", "optimizer", "checkpoint", "communication"] = "train"
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

# The optimizer
dtypes = "bfloat16,float32"  # compute dtypes in which it is compared
peer: str | None = None  # folder of karpathy/nanochat, whose optimizer is timed in turns with ours

# Checkpoints
folder: str | None = None  # where they are written, on the disk in question (none = the system's /tmp)

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

    def __init__(self, variant: str, machine: runtime.Machine, config):
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
        groups = optim.parameter_groups(self.model, {k: 0.1 * v for k, v in rates.items()}, 0.1)
        self.optimizer = optim.MuonAdamW(groups, self.dtype, compiled)
        shape = (device_batch_size, config.max_seq_len + 1)
        tokens = torch.randint(config.vocab_size, shape, device=machine.device)
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.step_times, self.optimizer_times = [], []

    def step(self):
        began = time.perf_counter()
        with precision.autocast(self.machine.device, self.dtype):
            loss = self.forward(self.inputs, self.targets)
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.found_inf = 1 - grad_norm.isfinite().float()
        self.machine.synchronize()
        clipped = time.perf_counter()
        self.optimizer.step()
        self.machine.synchronize()
        self.optimizer_times.append(time.perf_counter() - clipped)
        self.optimizer.zero_grad(set_to_none=True)
        self.step_times.append(time.perf_counter() - began)


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
    tokenizer = open_tokenizer("auto", vocab_size, dataset.tokenizer_folder(base), dataset.train_texts)
    results = {"corpus": {"name": dataset.name, "fingerprint": dataset.fingerprint[:12]}}
    for shape in shapes.split(","):
        lane_count, length = map(int, shape.split("x"))
        start = [{"epoch": 0, "taken": 0, "pieces": []}] * lane_count
        groups = RowGroups(dataset.train_shards)
        buffer = np.empty((lane_count, length + 1), dtype=np.int32)
        epoch = sum(len(tokenizer.encode(text)) for text in iterate_documents(dataset.train_shards))
        steps_of_epoch = max(1, epoch // (lane_count * length))
        taken = Listener(tokenizer)
        lanes = open_lanes(groups, taken, lane_count, 0, range(lane_count), start, length + 1)
        packed_s = raw_s = encoded = waiting_before = 0
        for epoch_number in range(-1, rounds):  # -1 is the warm-up
            taken.texts = []
            began = time.perf_counter()
            for _ in range(steps_of_epoch):
                for lane, row in zip(lanes, buffer, strict=True):
                    lane.fill(row)
            done = time.perf_counter()
            tokens = sum(len(tokenizer.encode_ordinary(text)) for text in taken.texts)
            waiting = sum(len(piece[4]) for lane in lanes for piece in lane.pieces)
            if epoch_number < 0:
                waiting_before = waiting
            else:
                packed_s, raw_s = packed_s + done - began, raw_s + time.perf_counter() - done
                encoded += tokens
        placed = encoded - (waiting - waiting_before)
        threaded = []
        with TrainLoader(dataset.train_shards, tokenizer, lane_count, length, lane_count) as loader:
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


def optimizer_model(machine):
    """A model of the settings' shapes with random gradients."""
    config = scaling.model_config(depth, aspect_ratio, head_dim, max_seq_len, vocab_size, window_pattern)
    model = GPT(config).to(machine.device)
    model.init_weights()
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    return model


def make_optimizer(model, dtype: str, machine, compile: bool = True):
    compute_dtype, _ = precision.resolve_dtype(dtype, machine.device)
    rates = {"embedding_lr": 0.01, "unembedding_lr": 0.001, "scalar_lr": 0.01, "matrix_lr": 0.001}
    groups = optim.parameter_groups(model, rates, 0.1)
    return optim.MuonAdamW(groups, compute_dtype, compile, machine.rank, machine.world_size)


# The peer's optimizer in a process of its own, on the same shapes, embeddings in the dtype its model has
PEER = """
import json, os, sys, time
import torch
from nanochat.common import COMPUTE_DTYPE
from nanochat.optim import MuonAdamW

matrices, tables, head = json.loads(sys.stdin.readline())

def parameter(shape, dtype=torch.float32):
    p = torch.nn.Parameter(torch.randn(*shape, dtype=dtype) * 0.02)
    p.grad = torch.randn_like(p) * 1e-3
    return p

adamw = dict(kind="adamw", lr=0.001, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.01)
muon = dict(kind="muon", lr=0.001, momentum=0.95, ns_steps=5, beta2=0.9, weight_decay=0.1)
groups = [{**adamw, "params": [parameter(head)]}]
groups += [{**adamw, "params": [parameter(t, COMPUTE_DTYPE)]} for t in tables]
for shape in sorted(set(map(tuple, matrices))):
    groups.append({**muon, "params": [parameter(m) for m in matrices if tuple(m) == shape]})
optimizer = MuonAdamW(groups)
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    optimizer.step()
    print(time.perf_counter() - began, flush=True)
"""


def start_peer(model, dtype: str) -> subprocess.Popen:
    shapes = {name: list(p.shape) for name, p in model.named_parameters() if p.ndim == 2}
    tables = [shape for name, shape in shapes.items() if "embedding" in name]
    matrices = [shape for name, shape in shapes.items() if name.startswith("blocks.")]
    process = subprocess.Popen(
        [sys.executable, "-c", PEER],
        cwd=peer,
        env=os.environ | {"PYTHONPATH": str(Path(peer).resolve()), "NANOCHAT_DTYPE": dtype},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    print(json_module.dumps([matrices, tables, shapes["head.weight"]]), file=process.stdin, flush=True)
    if process.stdout.readline().strip() != "ready":
        raise UserError(f"the optimizer in {peer} did not start; --peer is a folder of karpathy/nanochat")
    return process


def bench_optimizer() -> dict:
    """One step on gradients that stand still, compiled: ours and the peer's in turns."""
    machine = runtime.start(device_type, seed=0)
    if peer and not (Path(peer) / "nanochat" / "optim.py").exists():
        raise UserError(f"{peer} has no nanochat/optim.py; --peer is a folder of karpathy/nanochat")
    results = {}
    for dtype in map(str.strip, dtypes.split(",")):
        model = optimizer_model(machine)
        ours = make_optimizer(model, dtype, machine)
        theirs = start_peer(model, dtype) if peer else None

        def our_step(step=ours.step, wait=machine.synchronize):
            began = time.perf_counter()
            step()
            wait()
            return time.perf_counter() - began

        def peer_step(process=theirs):
            print(file=process.stdin, flush=True)
            return float(process.stdout.readline())

        variants = {"ours": our_step} | ({"peer": peer_step} if peer else {})
        times = {name: [] for name in variants}
        for turn in range(rounds + 2):  # the first two compile and warm up
            for name, step in variants.items():
                seconds = step()
                if turn >= 2:
                    times[name].append(seconds)
        row = {f"{name}_ms": 1000 * statistics.median(t) for name, t in times.items()}
        if theirs:
            theirs.kill()
            theirs.wait()
            pairs = zip(times["ours"], times["peer"], strict=True)
            row["ours_over_peer"] = statistics.median(a / b for a, b in pairs)
        results[dtype] = row
        del model, ours, our_step, variants
        gc.collect()
    return results


def bench_checkpoint() -> dict:
    """Stall of a step by a background save, beside a blocking save and a bare write of the same bytes."""
    machine = runtime.start(device_type, seed=0)
    model = optimizer_model(machine)
    optimizer = make_optimizer(model, "float32", machine, compile=False)
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
            began = time.perf_counter()
            saver.submit(step, **tensors, state={})
            times["stall_s"].append(time.perf_counter() - began)
            saver.wait()
            times["background_s"].append(time.perf_counter() - began)
            began = time.perf_counter()
            checkpoint.save(place, step, **tensors, state={})
            times["blocking_s"].append(time.perf_counter() - began)
            began = time.perf_counter()
            with open(Path(place) / "bare", "wb") as f:
                for kind in tensors.values():
                    for tensor in kind.values():
                        f.write(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
                f.flush()
                os.fsync(f.fileno())
            times["bare_write_s"].append(time.perf_counter() - began)
            checkpoint.prune(place, 1)
            (Path(place) / "bare").unlink()
        saver.close()
    row = {name: statistics.median(t) for name, t in times.items()}
    row["stall_over_blocking"] = row["stall_s"] / row["blocking_s"]
    row["stall_over_bare_write"] = row["stall_s"] / row["bare_write_s"]
    return {f"{size / 1e9:.2f} GB": row}


def bench_communication() -> dict:
    """Bytes a step that processes on this machine send each other, read off the loopback interface."""
    machine = runtime.start("cpu", seed=0)
    if machine.world_size == 1:
        raise UserError("one process sends nothing; start this with torchrun --nproc_per_node=2 or more")
    model = optimizer_model(machine)
    train_model = DistributedDataParallel(model, **runtime.DDP_OPTIONS)
    optimizer = make_optimizer(model, "float32", machine, compile=False)
    tokens = torch.randint(vocab_size, (1, max_seq_len + 1))

    def backward():
        optimizer.zero_grad(set_to_none=True)
        train_model(tokens[:, :-1], tokens[:, 1:]).backward()

    def sent(action) -> float:
        machine.all_gather(None)
        before = loopback_bytes()
        for _ in range(steps):
            action()
        machine.all_gather(None)
        return (loopback_bytes() - before) / steps / machine.world_size

    for action in (backward, optimizer.step):
        action()
    size = sum(4 * p.numel() for p in model.parameters())
    gradients, weights, w = sent(backward), sent(optimizer.step), machine.world_size
    machine.close()
    row = {
        "weights_mb": size / 1e6,
        "gradients_mb": gradients / 1e6,
        "new_weights_mb": weights / 1e6,
        "expected_gradients_mb": 2 * (w - 1) / w * size / 1e6,
        "expected_new_weights_mb": (w - 1) / w * size / 1e6,
        "relative_to_plain_ddp": (gradients + weights) / gradients,
    }
    return {f"a process of {w}": row} if machine.is_main else {}


def loopback_bytes() -> int:
    """Bytes sent over the loopback interface since the machine started (Linux)."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[9])


results = globals()[f"bench_{what}"]()
for name, row in results.items():
    row = row if isinstance(row, dict) else {"": row}
    print(
        f"{name:20s} "
        + "  ".join(f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
    )
if json and results:
    machine = {"device": runtime.device_name(torch.device("cpu")), "torch": torch.__version__}
    print(
        json_module.dumps({"what": what, "machine": machine, "settings": settings.values, "results": results})
    )
