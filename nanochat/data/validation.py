"""Validation batches: every token of the validation documents is scored exactly once."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from nanochat import UserError
from nanochat.data.parquet import iterate_documents
from nanochat.data.tokenizer import Tokenizer


class ValidationBatches:
    """The batches (inputs, targets) of one process, both (B, T) int64. Iterate over them as often as you
    like.

    A document is cut into windows of T tokens, and each window fills one row: its inputs begin with
    `<|bos|>`, and the rest of the row is padding, whose target is -1. Window n belongs to rank n mod
    world_size. All ranks have the same number of batches.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        windows: np.ndarray,
        bos_id: int,
        max_seq_len: int,
        batch_size: int,
        rank: int,
        world_size: int,
        device: str | torch.device,
    ):
        self._tokens = tokens  # (n,) int32: all documents, one after another
        self._windows = windows  # (windows, 2): first token and number of tokens of each
        self._bos_id = bos_id
        self._shape = (batch_size, max_seq_len)
        self._rank = rank
        self._world_size = world_size
        self._device = torch.device(device)

    def __len__(self) -> int:
        per_rank = -(-len(self._windows) // self._world_size)
        return -(-per_rank // self._shape[0])

    @property
    def tokens(self) -> int:
        """The number of targets that all ranks score together."""
        return len(self._tokens)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        mine = self._windows[self._rank :: self._world_size]
        batch_size = self._shape[0]
        for i in range(len(self)):
            targets = np.full(self._shape, -1, dtype=np.int64)
            inputs = np.full(self._shape, self._bos_id, dtype=np.int64)
            for row, (first, n) in enumerate(mine[i * batch_size : (i + 1) * batch_size]):
                targets[row, :n] = self._tokens[first : first + n]
                inputs[row, 1:n] = self._tokens[first : first + n - 1]
            yield torch.from_numpy(inputs).to(self._device), torch.from_numpy(targets).to(self._device)


def validation_batches(
    shards: Sequence[Path],
    tokenizer: Tokenizer,
    max_seq_len: int,
    batch_size: int,
    eval_tokens: int = -1,
    rank: int = 0,
    world_size: int = 1,
    device: str | torch.device = "cpu",
) -> ValidationBatches:
    """Tokenize the validation documents, up to `eval_tokens` tokens in all (-1: all of them).

    Raises UserError if the documents have no text.
    """
    tokens, windows, total = [], [], 0
    for text in iterate_documents(shards):
        document = tokenizer.encode(text)
        if eval_tokens > 0:
            document = document[: eval_tokens - total]
        tokens.append(document.astype(np.int32))
        for first in range(0, len(document), max_seq_len):
            windows.append((total + first, min(max_seq_len, len(document) - first)))
        total += len(document)
        if total == eval_tokens:
            break
    if not total:
        raise UserError("the validation data has no text; name other files with --val_data=PATH")
    return ValidationBatches(
        np.concatenate(tokens),
        np.array(windows),
        tokenizer.bos_id,
        max_seq_len,
        batch_size,
        rank,
        world_size,
        device,
    )
