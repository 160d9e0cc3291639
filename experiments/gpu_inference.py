"""A part of `python -m scripts.bench --what=gpu`: a save, an evaluation and a sample of one model."""

import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from experiments.gpu_parts import each, model_job
from experiments.sides import Ours, write


def save_evaluate_sample(job: dict, depth: int) -> dict:
    """All three with one model, not compiled; the sample last, since it casts the weights."""
    side = Ours(model_job(job, depth, compile=False) | {"rows": 2 if job["small"] else 16})
    return each(
        save=lambda: save(side),
        evaluation=lambda: evaluation(side, job["small"]),
        sample=lambda: sample(side, job["small"]),
    )


def evaluation(side: Ours, small: bool) -> dict:
    """Tokens a second of bits per byte on rows of random tokens, as base_train evaluates."""
    from nanochat.evals.bits_per_byte import bits_per_byte

    config = side.plan.config
    shape, draw = (side.rows, config.max_seq_len + 1), torch.Generator().manual_seed(0)
    batches = [
        torch.randint(config.vocab_size, shape, generator=draw).to(side.device)
        for _ in range(2 if small else 16)
    ]
    pairs = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in batches]
    token_bytes = torch.full((config.vocab_size,), 4, device=side.device)
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
    with tempfile.TemporaryDirectory() as place:
        times = save_times(tensors, Path(place), rounds=3)
    return {name: statistics.median(taken) for name, taken in times.items()} | {"gb": size / 1e9}


def save_times(tensors: dict, place: Path, rounds: int, blocking: bool = False) -> dict[str, list[float]]:
    """Seconds that a step stands still for a save in the background (`stall_s`) and that it takes in all
    (`background_s`); with `blocking` also those of a save that is waited for, and of a bare write."""
    from nanochat import checkpoint

    times = {"stall_s": [], "background_s": []} | ({"blocking_s": [], "bare_write_s": []} if blocking else {})

    def seconds(action, *arguments, **keywords) -> float:
        began = time.perf_counter()
        action(*arguments, **keywords)
        return time.perf_counter() - began

    saver = checkpoint.AsyncSaver(place)
    saver.reserve(**tensors)
    for step in range(1, rounds + 1):
        saver.wait()
        times["stall_s"].append(seconds(saver.submit, step, **tensors, state={}))
        times["background_s"].append(times["stall_s"][-1] + seconds(saver.wait))
        if blocking:
            times["blocking_s"].append(seconds(checkpoint.save, place, step, **tensors, state={}))
            times["bare_write_s"].append(seconds(bare_write, tensors, place / "bare"))
            (place / "bare").unlink()
        checkpoint.prune(place, 1)
    saver.close()
    return times


def bare_write(tensors: dict, path: Path):
    """The same bytes in one file, synced."""
    with open(path, "wb") as file:
        for tensor in (tensor for kind in tensors.values() for tensor in kind.values()):
            file.write(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
        file.flush()
        os.fsync(file.fileno())


def sample(side: Ours, small: bool) -> dict:
    """Tokens a second that the model writes after a short prompt, one row and eight."""
    count, speeds = 16 if small else 128, {}
    for rows in (1, 8):
        times = [write(side, None, rows, count)["seconds"] for _ in range(2 if small else 3)]
        speeds[f"tok_per_sec_batch_{rows}"] = rows * count / min(times[1:])
    return speeds
