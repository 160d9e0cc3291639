"""How fast a part is by itself: `python -m scripts.bench --what=loader`, optimizer, generate and checkpoint.

A function here has the name of its part. It gets the settings of bench.py and returns a row of figures for
each thing that it measured. With --peer=FOLDER optimizer and generate take turns with karpathy/nanochat's.
The last section is a part of `python -m scripts.bench --what=gpu`.
"""

import contextlib
import os
import re
import shutil
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from experiments.gpu_parts import each, model_job
from experiments.sides import PROMPT, ROOT, SHAPE, Batches, Ours, Side, peer_folder, write
from nanochat import UserError
from nanochat import checkpoint as checkpoints
from nanochat.checkpoint.files import CHUNK
from nanochat.data.packing import open_lanes
from nanochat.data.parquet import Documents
from nanochat.data.sources import open_dataset
from nanochat.evals.bits_per_byte import bits_per_byte
from nanochat.files import temporary_folder, user_path
from nanochat.machine import precision, runtime

TOKENS = 128  # that generate writes in each row
BATCH_SIZES = 1, 8  # rows


def seconds(action, *arguments, **keywords) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    action(*arguments, **keywords)
    return time.perf_counter() - began


# ------------------------------------------------------------------------------------------------------
# Text to batches


def loader(settings: dict) -> dict:
    """Tokens a second of reading, tokenizing and packing on one thread, and of tiktoken alone."""
    shapes = settings["shapes"].split(",")
    if wrong := [shape for shape in shapes if not re.fullmatch(r"\s*[1-9]\d*x[1-9]\d*\s*", shape)]:
        raise UserError(f"--shapes has {wrong[0]!r}; give rows x positions, such as 8x512,32x2048")
    base = user_path("base_dir", settings["base_dir"])
    dataset = open_dataset(settings["data"], base_dir=base)
    tokenizer = dataset.open_tokenizer("auto", settings["vocab_size"], base)
    results = {"corpus": {"name": dataset.name, "fingerprint": dataset.fingerprint[:12]}}
    for shape in shapes:
        rows, length = map(int, shape.split("x"))
        results[shape] = loader_speed(dataset, tokenizer, rows, length, settings["rounds"])
    return results


def loader_speed(dataset, tokenizer, rows: int, length: int, rounds: int) -> dict:
    """Lanes and tiktoken take turns, an epoch each; the first epoch fills buffers and does not count."""
    texts = list(Documents(dataset.train_shards))
    epoch = sum(len(tokenizer.encode(text)) for text in texts)  # tokens
    steps_of_epoch = max(1, epoch // (rows * length))
    start = [{"epoch": 0, "taken": 0, "pieces": []}] * rows
    documents, passes = Documents(dataset.train_shards), 1  # with more, tokens are kept
    lanes = open_lanes(documents, tokenizer, rows, 0, range(rows), start, passes, length + 1)
    buffer = np.empty((rows, length + 1), dtype=np.int32)
    placed = []  # tokens without <|bos|>, by epoch

    def pack():
        placed.append(0)
        for _ in range(steps_of_epoch):
            for lane, row in zip(lanes, buffer, strict=True):
                lane.fill(row)
            placed[-1] += np.count_nonzero(buffer != tokenizer.bos_id)

    def encode():
        for text in texts:
            tokenizer._encoding.encode_ordinary(text)

    turns = [(seconds(pack), seconds(encode)) for _ in range(rounds + 1)][1:]
    # Sums, not medians: lanes take documents in bursts, so an epoch may encode more or less than it places
    packing_s, encoding_s = map(sum, zip(*turns, strict=True))
    packed, raw = sum(placed[1:]) / packing_s, epoch * rounds / encoding_s
    return {"packed_tok_per_sec": packed, "raw_tok_per_sec": raw, "packed_over_raw": packed / raw}


# ------------------------------------------------------------------------------------------------------
# Beside the peer


def optimizer(settings: dict) -> dict:
    """Milliseconds of one compiled update, by compute dtype."""
    return in_turns(settings, {"": {"do": "update"}}, row_of_updates)


def generate(settings: dict) -> dict:
    """Tokens a second that are written after a prompt, by batch size and compute dtype."""
    tokens = min(TOKENS, settings["max_seq_len"] - len(PROMPT))
    if tokens < 1:
        raise UserError(f"a prompt of {len(PROMPT)} tokens fills the row; give a larger --max_seq_len")
    orders = {f"batch {rows}": {"do": "write", "rows": rows, "tokens": tokens} for rows in BATCH_SIZES}
    return in_turns(settings, orders, row_of_texts)


def in_turns(settings: dict, orders: dict[str, dict], row_of) -> dict:
    """Both sides follow the same orders, {name: order}, `rounds` times in turns, after two that warm up.

    row_of(order, {"ours": seconds of each turn, "peer": the same}) makes a row of the results. Raises
    UserError if `peer` is no folder of karpathy/nanochat, or if one of the two fails.
    """
    folders = {"ours": ROOT} | ({"peer": peer_folder(settings["peer"])} if settings["peer"] else {})
    device, results = runtime.start(settings["device_type"], seed=0).device, {}
    dtypes = [dtype.strip() for dtype in settings["dtypes"].split(",")]
    for dtype in dtypes:
        precision.resolve_dtype(dtype, device)  # refuses an unknown one, before any is measured
    for dtype in dtypes:
        job = side_job(settings, device.type, dtype)
        try:
            with contextlib.ExitStack() as stack:
                sides = {
                    whose: stack.enter_context(Side(whose, job, folder)) for whose, folder in folders.items()
                }
                for name, order in orders.items():
                    turns = [
                        {whose: side.ask(order)["seconds"] for whose, side in sides.items()}
                        for _ in range(settings["rounds"] + 2)
                    ]
                    taken = {whose: [turn[whose] for turn in turns[2:]] for whose in sides}
                    results[", ".join(filter(None, (name, dtype)))] = row_of(order, taken)
        except (RuntimeError, MemoryError) as error:
            raise UserError(str(error)) from None
    return results


def side_job(settings: dict, device_type: str, dtype: str) -> dict:
    """The job of sides.py: a model of the settings' shape, one micro-batch a step."""
    rows = settings["device_batch_size"]
    job = {name: settings[name] for name in SHAPE}
    job |= {"rows": rows, "total_batch_size": rows * settings["max_seq_len"], "compile": True}
    return job | {"device": device_type, "dtype": dtype}


def row_of_updates(order: dict, seconds: dict[str, list[float]]) -> dict[str, float]:
    row = {f"{whose}_ms": 1000 * statistics.median(taken) for whose, taken in seconds.items()}
    if "peer" in seconds:
        row["ours_over_peer"] = median_ratio(seconds["ours"], seconds["peer"])
    return row


def row_of_texts(order: dict, seconds: dict[str, list[float]]) -> dict[str, float]:
    tokens = order["rows"] * order["tokens"]
    row = {f"{whose}_tok_per_sec": tokens / statistics.median(taken) for whose, taken in seconds.items()}
    if "peer" in seconds:
        row["speed_relative_to_peer"] = median_ratio(seconds["peer"], seconds["ours"])
    return row


def median_ratio(some: list[float], others: list[float]) -> float:
    """Of neighbouring turns: a machine's speed changes between rounds."""
    return statistics.median(a / b for a, b in zip(some, others, strict=True))


# ------------------------------------------------------------------------------------------------------
# Checkpoints


def checkpoint(settings: dict) -> dict:
    """How long a background save stalls a step, how long a blocking save takes, and a bare write."""
    device = runtime.start(settings["device_type"], seed=0).device
    side = Ours(side_job(settings, device.type, "float32") | {"compile": False})
    tensors = {"model": side.model.state_dict(), "optimizer": side.optimizer.named_state()}
    size = sum(t.nbytes for kind in tensors.values() for t in kind.values())
    with temporary_folder(settings["folder"]) as place:
        if shutil.disk_usage(place).free < 2.2 * size:
            raise UserError(f"two checkpoints of {size / 1e9:.1f} GB do not fit; give another --folder")
        times = save_times(tensors, place, settings["rounds"], blocking=True)
    row = {name: statistics.median(taken) for name, taken in times.items()}
    row["stall_over_blocking"] = row["stall_s"] / row["blocking_s"]
    row["stall_over_bare_write"] = row["stall_s"] / row["bare_write_s"]
    return {f"{size / 1e9:.2f} GB": row}


def save_times(tensors: dict, place: Path, rounds: int, blocking: bool = False) -> dict[str, list[float]]:
    """Seconds that a step stands still for a save in the background (`stall_s`) and that it takes in all
    (`background_s`); with `blocking` also those of a save that is waited for, and of a bare write."""
    times = {"stall_s": [], "background_s": []} | ({"blocking_s": [], "bare_write_s": []} if blocking else {})

    saver = checkpoints.AsyncSaver(place)
    saver.reserve(**tensors)
    for step in range(1, rounds + 1):
        saver.wait()
        times["stall_s"].append(seconds(saver.submit, step, **tensors, state={}))
        times["background_s"].append(times["stall_s"][-1] + seconds(saver.wait))
        if blocking:
            times["blocking_s"].append(seconds(checkpoints.save, place, step, **tensors, state={}))
            times["bare_write_s"].append(seconds(bare_write, tensors, place / "bare"))
            (place / "bare").unlink()
        checkpoints.prune(place, 1)
    saver.close()
    return times


def bare_write(tensors: dict, path: Path):
    """The same bytes in one file, in pieces as large as a checkpoint's, synced."""
    with open(path, "wb") as file:
        for tensor in (tensor for kind in tensors.values() for tensor in kind.values()):
            for piece in tensor.detach().cpu().reshape(-1).view(torch.uint8).split(CHUNK):
                file.write(piece.numpy())
        file.flush()
        os.fsync(file.fileno())


# ------------------------------------------------------------------------------------------------------
# On a GPU


def save_evaluate_sample(job: dict) -> dict:
    """All three with d12, not compiled; the sample last, since it casts the weights."""
    small = job["small"]
    step_job = model_job(job, 12, compile=False) | {"rows": 2 if small else 16}
    side = Ours(step_job)
    return each(
        save=lambda: save(side),
        evaluation=lambda: evaluation(side, step_job, small),
        sample=lambda: sample(side, small),
    )


def evaluation(side: Ours, step_job: dict, small: bool) -> dict:
    """Tokens a second of bits per byte on rows of random tokens, as base_train evaluates."""
    pairs = list(Batches(step_job, side.rows, 2 if small else 16, side.device))
    token_bytes = torch.full((side.plan.config.vocab_size,), 4, device=side.device)
    times = []
    for _ in range(3):  # the first compiles
        began = time.perf_counter()
        bpb = bits_per_byte(side.model, pairs, token_bytes, side.dtype, side.machine, compiled=not small).bpb
        times.append(time.perf_counter() - began)
    tokens = len(pairs) * pairs[0][0].numel()
    return {"tok_per_sec": tokens / min(times[1:]), "first_s": times[0], "bpb": bpb, "tokens": tokens}


def save(side: Ours) -> dict:
    """How long a step stands still for a save in the background, and how long that takes."""
    tensors = {"model": side.model.state_dict(), "optimizer": side.optimizer.named_state()}
    size = sum(t.nbytes for kind in tensors.values() for t in kind.values())
    side.machine.synchronize()
    with temporary_folder() as place:
        times = save_times(tensors, place, rounds=3)
    return {name: statistics.median(taken) for name, taken in times.items()} | {"gb": size / 1e9}


def sample(side: Ours, small: bool) -> dict:
    """Tokens a second that the model writes after a short prompt, one row and eight."""
    count, speeds = 16 if small else 128, {}
    for rows in (1, 8):
        times = [write(side, None, rows, count)["seconds"] for _ in range(2 if small else 3)]
        speeds[f"tok_per_sec_batch_{rows}"] = rows * count / min(times[1:])
    return speeds
