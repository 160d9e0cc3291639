"""How fast an evaluation is, beside a plain one, on documents of about 1000 characters.

Run by `python -m scripts.bench --what=evaluate`; --aspect_ratio=48 --device_batch_size=4 are the model of
runs/laptop.py at width 192, and 2,048 tokens. The plain way is what nanochat did until commit d0bcffb: a
window of a document fills a row of max_seq_len tokens, the logits of a batch are in memory at once, and each
batch is waited for.
"""

import math
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F

from nanochat.data.parquet import iterate_documents
from nanochat.data.validation import ValidationBatches
from nanochat.evals.bits_per_byte import bits_per_byte
from nanochat.gpt import GPT
from nanochat.machine.precision import autocast, resolve_dtype

DOCUMENTS = 100
CHARACTERS = 500, 1500  # of a document, drawn evenly


def documents(dataset, tokenizer) -> list[np.ndarray]:
    """The first validation documents, cut into pieces: the tokens of each, (n,) int32."""
    draw, pieces = np.random.default_rng(0), []
    for text in iterate_documents(dataset.val_shards):
        while text and len(pieces) < DOCUMENTS:
            size = draw.integers(*CHARACTERS)
            pieces.append(tokenizer.encode(text[:size]).astype(np.int32))
            text = text[size:]
    return pieces


@torch.no_grad()
def plain_bits_per_byte(model, pieces, bos_id, batch_size, token_bytes, dtype, device) -> float:
    """One window a row, all rows of max_seq_len tokens."""
    T = model.config.max_seq_len
    windows = [piece[first : first + T] for piece in pieces for first in range(0, len(piece), T)]
    nats, scored_bytes = 0.0, 0
    for first in range(0, len(windows), batch_size):
        inputs = torch.full((batch_size, T), bos_id)
        targets = torch.full((batch_size, T), -1)
        for row, window in enumerate(windows[first : first + batch_size]):
            targets[row, : len(window)] = torch.from_numpy(window)
            inputs[row, 1 : len(window)] = targets[row, : len(window) - 1]
        inputs, targets = inputs.to(device), targets.to(device)
        with autocast(device, dtype):
            logits = model(inputs).flatten(0, 1)  # (B * T, V)
            nats += F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="sum").item()
        scored_bytes += token_bytes[targets.clamp_min(0)].mul(targets >= 0).sum().item()
    return nats / math.log(2) / scored_bytes


def evaluate_speed(config, dataset, tokenizer, batch_size: int, dtypes: list[str], rounds: int, machine):
    """{dtype: figures}: the two ways take turns; the first turn warms up. `machine` is one process.

    Ours runs without torch.compile, as it does on a CPU.
    """
    model = GPT(config).to(machine.device)
    model.init_weights(torch.Generator(machine.device).manual_seed(0))
    torch.nn.init.normal_(model.head.weight, std=0.05)  # logits that differ from token to token
    pieces = documents(dataset, tokenizer)
    bos = np.array([tokenizer.bos_id], dtype=np.int32)
    tokens = np.concatenate([part for piece in pieces for part in (bos, piece)])
    batches = ValidationBatches(tokens, config.max_seq_len, batch_size, device=machine.device)
    token_bytes = torch.from_numpy(tokenizer.token_bytes()).to(machine.device)
    results = {}
    for name in dtypes:
        (dtype, _), times = resolve_dtype(name, machine.device), []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            place = tokenizer.bos_id, batch_size, token_bytes, dtype, machine.device
            plain = plain_bits_per_byte(model, pieces, *place)
            between = time.perf_counter()
            ours = bits_per_byte(model, batches, token_bytes, dtype, machine).bpb
            times.append((between - started, time.perf_counter() - between))
        plain_s, ours_s = (statistics.median(side) for side in zip(*times[1:], strict=True))
        results[name] = {
            "plain_tok_per_sec": batches.tokens / plain_s,
            "ours_tok_per_sec": batches.tokens / ours_s,
            "ours_over_plain": statistics.median(a / b for a, b in times[1:]),
            "difference_of_bpb": abs(ours / plain - 1),
        }
    return results
