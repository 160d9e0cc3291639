"""Validation batches: every token of the validation documents is scored exactly once.

    sets = open_validation(dataset, tokenizer, eval_tokens, folder, max_seq_len, batch_size)
    for inputs, targets in sets["val_bpb"]: ...

The tokens of all documents are one array, with `<|bos|>` before each document. The first process keeps it in
a file, which the other processes and the next start read.
"""

import contextlib
import hashlib
import itertools
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from nanochat import UserError
from nanochat.data.dataset import Dataset
from nanochat.data.parquet import Documents, footer_digest
from nanochat.data.tokenizer import Tokenizer
from nanochat.files import replacing
from nanochat.machine.transfers import to_device

FORMAT = 3  # of the file; its hash is in the file's name, so files of another format are ignored
TEXTS = 64  # documents that are tokenized at a time, on all cores


class ValidationBatches:
    """The batches (inputs, targets) of one process, both (rows, length) int64. Iterate as often as you like.

    tokens (n,) int32: the documents, each behind `<|bos|>`, which is tokens[0]. A document is cut into
    windows of at most max_seq_len tokens. A window is one row: its inputs begin with `<|bos|>`, and the rest
    of the row is padding, whose target is -1. Windows are sorted by length, longest first; the processes take
    them in turn. A batch is as long as its longest window, and has as many rows as fit into
    batch_size * max_seq_len tokens. So there is little padding, and batches take about the same time.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        max_seq_len: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        device: str | torch.device = "cpu",
    ):
        self._tokens, self._max_seq_len = tokens, max_seq_len
        self._bos_id = int(tokens[0])
        self._device = torch.device(device)
        # A GPU works in tiles of 128. A CPU does not: on 1000-character texts, 16 is 1.2 times as fast as 128
        self._multiple = 16 if self._device.type == "cpu" else 128
        starts = np.flatnonzero(tokens == self._bos_id) + 1  # of the documents
        lengths = np.diff(starts - 1, append=len(tokens)) - 1
        windows = _windows(starts, lengths, max_seq_len)
        longest_first = np.argsort(-windows[:, 1], kind="stable")
        self._windows = windows[longest_first[rank::world_size]]
        self._batches = list(self._plan(batch_size * max_seq_len))
        self.tokens = len(self._batches) * batch_size * max_seq_len  # that an evaluation reads, with padding

    def _plan(self, batch_tokens: int) -> Iterator[tuple[slice, int]]:
        """Which windows each batch has, and its length."""
        first = 0
        while first < len(self._windows):
            longest = int(self._windows[first, 1])
            length = min(-(-longest // self._multiple) * self._multiple, self._max_seq_len)
            rows = max(1, batch_tokens // length)
            yield slice(first, first + rows), length
            first += rows

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for windows, length in self._batches:
            first, n = (column[:, None] for column in self._windows[windows].T)
            positions = np.arange(length)
            scored = positions < n
            targets = np.where(scored, self._tokens[np.where(scored, first + positions, 0)], -1)
            inputs = np.full(targets.shape, self._bos_id, dtype=np.int64)
            inputs[:, 1:] = np.where(scored[:, 1:], targets[:, :-1], self._bos_id)
            batch = torch.from_numpy(inputs), torch.from_numpy(targets.astype(np.int64))
            yield tuple(to_device(tensor, self._device) for tensor in batch)


def _windows(starts: np.ndarray, lengths: np.ndarray, max_seq_len: int) -> np.ndarray:
    """The windows of documents, (windows, 2) int64: first token and number of tokens."""
    counts = -(-lengths // max_seq_len)
    document = np.repeat(np.arange(len(lengths)), counts)
    offset = (np.arange(len(document)) - np.repeat(counts.cumsum() - counts, counts)) * max_seq_len
    return np.stack([starts[document] + offset, np.minimum(lengths[document] - offset, max_seq_len)], axis=1)


def open_validation(
    dataset: Dataset, tokenizer: Tokenizer, eval_tokens: int, folder: Path, *shape_and_share
) -> dict[str, ValidationBatches]:
    """The batches of each validation set of a data set, by the name of its bits per byte: val_bpb, and
    val_bpb_NAME of further sets. eval_tokens: of each. shape_and_share: as ValidationBatches takes them."""
    return {
        name: ValidationBatches(tokenize_validation(s, tokenizer, eval_tokens, folder), *shape_and_share)
        for name, s in dataset.val_sets.items()
    }


def tokenize_validation(
    shards: Sequence[Path], tokenizer: Tokenizer, eval_tokens: int, folder: Path
) -> np.ndarray:
    """The tokens of the validation documents, (n,) int32, with `<|bos|>` before each document.

    They stop after `eval_tokens` tokens, `<|bos|>` not counted (-1: all). `folder` keeps the result in a file
    for the same shards, tokenizer and eval_tokens; a damaged file is made again, and a folder that cannot be
    written stays without. Raises UserError if there is no text.
    """
    key = [FORMAT, [footer_digest(shard)[0].hex() for shard in shards], tokenizer.fingerprint, eval_tokens]
    key = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    path = folder / f"validation-{key[:16]}.npz"
    with contextlib.suppress(OSError, ValueError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile):
        return np.load(path)["tokens"]  # a zip file has a checksum; this fails if it is missing or damaged
    tokens = _tokenize(shards, tokenizer, eval_tokens)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez(file, tokens=tokens)
    return tokens


def _tokenize(shards: Sequence[Path], tokenizer: Tokenizer, eval_tokens: int) -> np.ndarray:
    pieces, total, bos = [], 0, np.array([tokenizer.bos_id], dtype=np.int32)
    for document in _encoded(shards, tokenizer):
        if eval_tokens > 0:
            document = document[: eval_tokens - total]
        pieces += [bos, document.astype(np.int32)]
        total += len(document)
        if total == eval_tokens:
            break
    if not total:
        raise UserError("the validation data has no text; name other files with --val_data=PATH")
    return np.concatenate(pieces)


def _encoded(shards: Sequence[Path], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The tokens of each document in stored order."""
    texts = iter(Documents(shards))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # tiktoken releases the GIL
        while some := list(itertools.islice(texts, TEXTS)):
            yield from pool.map(tokenizer.encode, some)
