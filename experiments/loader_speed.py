"""How fast text becomes rows, beside tiktoken alone: `python -m scripts.bench --what=loader`."""

import time

import numpy as np

from nanochat.data.packing import open_lanes
from nanochat.data.parquet import RowGroups, iterate_documents


def seconds(action) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def loader_speed(dataset, tokenizer, rows: int, length: int, rounds: int) -> dict:
    """Lanes and tiktoken take turns, an epoch each; the first epoch fills buffers and does not count."""
    texts = list(iterate_documents(dataset.train_shards))
    epoch = sum(len(tokenizer.encode(text)) for text in texts)  # tokens
    steps_of_epoch = max(1, epoch // (rows * length))
    start = [{"epoch": 0, "taken": 0, "pieces": []}] * rows
    lanes = open_lanes(RowGroups(dataset.train_shards), tokenizer, rows, 0, range(rows), start, length + 1)
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
            tokenizer.encode_ordinary(text)

    turns = [(seconds(pack), seconds(encode)) for _ in range(rounds + 1)][1:]
    # Sums, not medians: lanes take documents in bursts, so an epoch may encode more or less than it places
    packing_s, encoding_s = map(sum, zip(*turns, strict=True))
    packed, raw = sum(placed[1:]) / packing_s, epoch * rounds / encoding_s
    return {"packed_tok_per_sec": packed, "raw_tok_per_sec": raw, "packed_over_raw": packed / raw}
