"""A part of `python -m scripts.bench --what=gpu`: a save, an evaluation and a sample of one model."""

import shutil
import statistics
import tempfile
import time

import torch

from experiments.gpu_parts import each, model_job


def save_evaluate_sample(job: dict, depth: int) -> dict:
    """All three with one model, not compiled; the sample last, since it casts the weights."""
    from experiments.gpu_step import Ours

    side = Ours(model_job(job, depth, compile=False) | {"rows": 2 if job["small"] else 16})
    return each(
        save=lambda: save(side),
        evaluation=lambda: evaluation(side, job["small"]),
        sample=lambda: sample(side, job["small"]),
    )


def evaluation(side, small: bool) -> dict:
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


def save(side) -> dict:
    """How long a step stands still for a save in the background, and how long that takes."""
    from nanochat import checkpoint

    tensors = {"model": side.model.state_dict(), "optimizer": side.optimizer.named_state()}
    size = sum(t.nbytes for kind in tensors.values() for t in kind.values())
    stalls, whole = [], []
    with tempfile.TemporaryDirectory() as place:
        if shutil.disk_usage(place).free < 2.2 * size:
            raise OSError(f"two checkpoints of {size / 1e9:.1f} GB do not fit on the disk of {place}")
        saver = checkpoint.AsyncSaver(place)
        saver.reserve(**tensors)
        saver.wait()
        for step in (1, 2, 3):
            side.machine.synchronize()
            began = time.perf_counter()
            saver.submit(step, **tensors, state={})
            stalls.append(time.perf_counter() - began)
            saver.wait()
            whole.append(time.perf_counter() - began)
            checkpoint.prune(place, 1)
        saver.close()
    return {"stall_s": statistics.median(stalls), "whole_s": statistics.median(whole), "gb": size / 1e9}


def sample(side, small: bool) -> dict:
    """Tokens a second that the model writes after a prompt of 16, one row and eight."""
    from nanochat.engine import cast_weights, generate_batch

    model = cast_weights(side.model, side.dtype).requires_grad_(False)
    with torch.no_grad():
        for p in model.parameters():  # a fresh model's projections are zero, and its logits all alike
            p.add_(0.05 * torch.randn_like(p))
    count, speeds = 16 if small else 128, {}
    for rows in (1, 8):
        times = []
        for _ in range(2 if small else 3):
            began = time.perf_counter()
            prompts = [list(range(1, 17))] * rows
            written = len(list(generate_batch(model, prompts, count, temperature=0.8, top_k=50)))
            times.append(time.perf_counter() - began)
        speeds[f"tok_per_sec_batch_{rows}"] = rows * written / min(times[1:])
    return speeds
