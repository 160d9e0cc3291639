"""What the tests of the stream share: corpora whose tokens are all different, and batches joined again."""

import itertools
from pathlib import Path

import numpy as np
import torch
from shards import flat, write_shard

from nanochat.data import packing
from nanochat.data.loader import TrainLoader
from nanochat.data.parquet import Documents

BOS = (1 << 20) - 1  # the last one: no row has it without being told


class Numbers:
    """A tokenizer for texts that are numbers: "7 8 9" -> [7, 8, 9]."""

    bos_id = BOS
    fingerprint = "numbers"
    vocab_size = BOS + 1

    def encode(self, text: str) -> np.ndarray:
        return np.array(text.split(), dtype=np.uint32)

    def copy(self) -> "Numbers":
        return self


class Corpus:
    """Documents of given lengths in shards of given row groups; all their tokens differ, and none is BOS."""

    def __init__(self, folder: Path, lengths: list[int], group_size: int, shards: int = 1):
        numbers = itertools.count(1)
        self.documents = [[next(numbers) for _ in range(n)] for n in lengths]
        texts = [" ".join(map(str, document)) for document in self.documents]
        per_shard = -(-len(texts) // shards)
        shares = [texts[i * per_shard : (i + 1) * per_shard] for i in range(shards)]
        self.shards = [
            write_shard(Path(folder) / f"s{i}.parquet", share, row_group_size=group_size)
            for i, share in enumerate(shares)
        ]
        self._stored = Documents(self.shards)
        self.sizes = self._stored.sizes

    def passes(self, T: int) -> int:
        return packing.passes_of(self._stored, T)

    def deal(self, n_lanes: int, T: int, seed: int, epoch: int, order=None) -> list[list[list[list[int]]]]:
        """The documents of each lane in an epoch, dealt one by one, or by row groups if these are many: of
        each the windows that its pass takes. order: of the row groups, in one pass (None: shuffled)."""
        sizes, starts = self.sizes, np.cumsum([0, *self.sizes])
        passes = 1 if order else self.passes(T)
        dealt = []
        for number in range(passes):
            for g in order or packing.permutation(len(sizes), seed, epoch, 0).tolist():
                shuffled = packing.permutation(sizes[g], seed, epoch, number * len(sizes) + g + 1)
                dealt.append([self.windows(starts[g] + i, T, number, passes) for i in shuffled])
        if order or len(sizes) < 8 * n_lanes:
            dealt = [[document] for group in dealt for document in group]
        return [flat(dealt[lane::n_lanes]) for lane in range(n_lanes)]

    def windows(self, number: int, T: int, of_pass: int, passes: int) -> list[list[int]]:
        """The windows of a document that a pass takes; all of it if there is one pass."""
        document = self.documents[number]
        windows = [document[at : at + T] for at in range(0, len(document), T)]
        return windows[(of_pass - number) % passes :: passes] if passes > 1 else [document]


def run(shards, steps, *, n_lanes, T, B=None, W=1, seed=0, state=None) -> tuple[np.ndarray, list]:
    """The rows of `steps` global batches, (steps, n_lanes, T + 1), put together from W ranks, and states.

    B is the rows of a micro-batch (None: all rows of a process at once).
    """
    rows = np.zeros((steps, n_lanes, T + 1), dtype=np.int64)
    states = []
    B = B or n_lanes // W
    for rank in range(W):
        with TrainLoader(shards, Numbers(), n_lanes, T, B, rank, W, seed, state=state) as loader:
            for step in range(steps):
                batches = [next(loader) for _ in range(n_lanes // W // B)]
                inputs = torch.cat([inputs for inputs, _ in batches])
                targets = torch.cat([targets for _, targets in batches])
                assert torch.equal(inputs[:, 1:], targets[:, :-1])
                rows[step, rank::W, :-1] = inputs
                rows[step, rank::W, -1] = targets[:, -1]
            states.append(loader.state())
    return rows, states
