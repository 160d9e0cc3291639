"""Training batches from conversations: whole conversations, packed into rows.

In each epoch every conversation comes up as often as its weight says, in an order drawn from the seed. They
are packed into rows of max_seq_len + 1 tokens, the longest first, by best fit; then the rows are shuffled.
The end of a row is padding, which is never a target. A conversation longer than a row loses its end, and is
dropped if it has no target then. So every row has targets.

The rows of an epoch depend on the conversations, the tokenizer, the seed and max_seq_len alone. Row n of a
step goes to rank n mod world_size, so any number of processes sees the same batches, and the position is two
numbers: the epoch and the row in it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from nanochat import UserError
from nanochat.data.chat_format import Conversations, render
from nanochat.data.loader import check_division, check_stream
from nanochat.data.tokenizer import Tokenizer
from nanochat.machine.transfers import to_device

PACKING = "conversations-1"  # version of the packing; a saved position of another version is refused


@dataclass(frozen=True)
class Rendered:
    """Conversations as tokens, one after another."""

    ids: np.ndarray  # (n,) int32
    is_target: np.ndarray  # (n,) bool
    first: np.ndarray  # (conversations + 1,) int64: the first token of each, and n
    weights: np.ndarray  # (conversations,) float64
    cut: int  # conversations that lost their end
    dropped: int  # conversations without a target in their first max_seq_len + 1 tokens

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each conversation, (conversations,)."""
        return np.diff(self.first)

    def epoch_rows(self, epoch: int, seed: int, max_seq_len: int) -> list[list[int]]:
        """The rows of an epoch, at least one, each a list of conversations, in the order of training. Raises
        UserError if the weights are too small for that."""
        if (expected := self.weights.sum()) < 1 - 1e-9:
            raise UserError(
                f"with its weights --data has {expected:.2g} conversations an epoch; give larger weights"
            )
        generator = np.random.default_rng([seed, epoch])
        # Each floor(weight) times, and once more with probability weight - floor(weight)
        times = np.floor(self.weights + generator.random(len(self.weights))).astype(np.int64)
        order = generator.permutation(np.repeat(np.arange(len(self.weights)), times))
        if not len(order):  # chance has left all out
            order = generator.choice(len(self.weights), 1, p=self.weights / expected)
        rows = pack(self.sizes, order, max_seq_len + 1)
        return [rows[i] for i in generator.permutation(len(rows))]

    def summary(self, loss_on: str) -> str:
        """One line for the plan: what is a target, and what was cut."""
        share = f"{100 * self.is_target.mean():.0f} % of {len(self.ids):,} tokens are targets"
        which = "the answers" if loss_on == "assistant" else "all but <|bos|>"
        cut = f"; {self.cut:,} conversations lose their end to the row" if self.cut else ""
        dropped = f", {self.dropped:,} of them are left out, without an answer" if self.dropped else ""
        return f"{which}; {share}{cut}{dropped}"


def render_all(
    conversations: Conversations, tokenizer: Tokenizer, max_seq_len: int, loss_on: str
) -> Rendered:
    """Tokenize conversations, at most max_seq_len + 1 tokens of each. Raises UserError if none is left."""
    kept, cut = [], 0
    for messages, weight in zip(conversations.messages, conversations.weights, strict=True):
        tokens, are_targets = render(tokenizer, messages, loss_on)
        cut += len(tokens) > max_seq_len + 1
        tokens, are_targets = tokens[: max_seq_len + 1], are_targets[: max_seq_len + 1]
        if are_targets.any():
            kept.append((tokens, are_targets, weight))
    if not kept:
        raise UserError(
            f"no conversation has an answer within its first {max_seq_len} tokens; use shorter ones, or a "
            "larger max_seq_len"
        )
    ids, is_target, weights = zip(*kept, strict=True)
    first = np.concatenate([[0], np.cumsum(list(map(len, ids)))])
    dropped = len(conversations.messages) - len(kept)
    return Rendered(np.concatenate(ids), np.concatenate(is_target), first, np.array(weights), cut, dropped)


def pack(sizes: np.ndarray, order: np.ndarray, room: int) -> list[list[int]]:
    """Best fit: rows of conversations. Each of `order`, the longest first, goes into the fullest row that has
    space for it.

    sizes (conversations,) at most `room`, the tokens of a row. Rows are listed by their free space, and bit n
    of an integer says whether a row has n free tokens. So the fullest row is found without a search.
    """
    rows, with_free, frees = [], [[] for _ in range(room + 1)], 0
    for conversation in order[np.argsort(-sizes[order], kind="stable")].tolist():
        size = int(sizes[conversation])
        if large_enough := frees >> size:
            free = size + (large_enough & -large_enough).bit_length() - 1  # the lowest bit: the smallest
            row = with_free[free].pop()
            if not with_free[free]:
                frees ^= 1 << free
        else:
            free, row = room, []
            rows.append(row)
        row.append(conversation)
        with_free[free - size].append(row)
        frees |= 1 << free - size
    return rows


class ConversationLoader:
    """Endless micro-batches (inputs, targets), each (device_batch_size, max_seq_len) int64 on `device`.

    A target of -1 is not scored. `step_targets` is the number of targets in the current step, over all
    micro-batches and processes: the loss is divided by it. `documents` is what boundaries(inputs, bos_id)
    returns for the last micro-batch, on `device`, or None without that function. Raises UserError for
    numbers that do not divide, and for a `state` of other conversations or settings.
    """

    def __init__(
        self,
        rendered: Rendered,
        tokenizer: Tokenizer,
        rows_per_step: int,
        max_seq_len: int,
        device_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        device: str | torch.device = "cpu",
        state: dict | None = None,
        boundaries: Callable | None = None,
    ):
        check_division(rows_per_step, world_size, device_batch_size)
        self._rendered, self._bos_id, self._seed = rendered, tokenizer.bos_id, seed
        self._shape = (rows_per_step, max_seq_len, device_batch_size)
        self._share = slice(rank, None, world_size)
        self._device = torch.device(device)
        self._stream = {
            "rows_per_step": rows_per_step,
            "max_seq_len": max_seq_len,
            "seed": seed,
            "tokenizer": tokenizer.fingerprint,
            "packing": PACKING,
            "conversations": len(rendered.weights),
        }
        if state is not None:
            check_stream(self._stream, state)
        epoch, row = (state["epoch"], state["row"]) if state else (0, 0)
        self._open_epoch(epoch, row)
        self._after = (epoch, row)  # the position after the last complete step
        self._batches: list[tuple[torch.Tensor, torch.Tensor]] = []  # the rest of the current step
        self._boundaries, self.documents = boundaries, None
        self.step_targets = 0
        self.wait_s = 0.0  # seconds that next() has spent on making batches, in all

    @property
    def epoch(self) -> int:
        """The epoch, from 0, in which the next step begins."""
        return self._after[0]

    def state(self) -> dict:
        """The position after the last complete step, ready for JSON; the same on every rank."""
        return {**self._stream, "epoch": self._after[0], "row": self._after[1]}

    def __iter__(self) -> "ConversationLoader":
        return self

    @torch.profiler.record_function("data")  # its name in a trace
    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        started = time.perf_counter()
        if not self._batches:
            self._batches = self._step()
        batch = self._batches.pop(0)
        if self._boundaries:
            self.documents = to_device(self._boundaries(batch[0], self._bos_id), self._device)
        if not self._batches:
            self._after = (self._epoch, self._row)
        self.wait_s += time.perf_counter() - started
        return tuple(to_device(tensor, self._device) for tensor in batch)

    def close(self) -> None:
        """Does nothing: unlike TrainLoader, this loader has no thread."""

    def _open_epoch(self, epoch: int, row: int = 0):
        self._rows = self._rendered.epoch_rows(epoch, self._seed, self._shape[1])
        self._epoch, self._row = epoch, row

    def _step(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The micro-batches of the next step, in host memory."""
        rows_per_step, max_seq_len, device_batch_size = self._shape
        rows = []
        while len(rows) < rows_per_step:
            if self._row >= len(self._rows):
                self._open_epoch(self._epoch + 1)
            taken = self._rows[self._row : self._row + rows_per_step - len(rows)]
            rows += taken
            self._row += len(taken)
        inputs, targets = as_batch(rows, self._rendered, max_seq_len, self._bos_id)
        self.step_targets = int((targets >= 0).sum())
        micro_batches = (tensor[self._share].split(device_batch_size) for tensor in (inputs, targets))
        return list(zip(*micro_batches, strict=True))


class ConversationBatches:
    """The validation batches (inputs, targets) of one process, both (rows, length) int64.

    Every conversation has a row of its own, with the targets of training. Rows are sorted by length, and a
    batch is as long as its longest row. Iterate as often as you like.
    """

    def __init__(
        self,
        rendered: Rendered,
        bos_id: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        device: str | torch.device = "cpu",
    ):
        self._rendered, self._bos_id, self._device = rendered, bos_id, torch.device(device)
        mine = np.argsort(-rendered.sizes, kind="stable")[rank::world_size].tolist()
        self._batches = [mine[first : first + batch_size] for first in range(0, len(mine), batch_size)]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self):
        for conversations in self._batches:
            length = int(self._rendered.sizes[conversations[0]]) - 1
            rows = [[conversation] for conversation in conversations]
            batch = as_batch(rows, self._rendered, length, self._bos_id)
            yield tuple(to_device(tensor, self._device) for tensor in batch)


def as_batch(
    rows: list[list[int]], rendered: Rendered, max_seq_len: int, bos_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets) of rows, both (rows, max_seq_len) int64: the conversations of a row one after
    another, then padding; a target of -1 is not scored."""
    ids = np.full((len(rows), max_seq_len + 1), bos_id, np.int64)
    is_target = np.zeros(ids.shape, bool)
    for n, row in enumerate(rows):
        tokens = np.concatenate([np.arange(rendered.first[c], rendered.first[c + 1]) for c in row])
        ids[n, : len(tokens)] = rendered.ids[tokens]
        is_target[n, : len(tokens)] = rendered.is_target[tokens]
    return torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(np.where(is_target[:, 1:], ids[:, 1:], -1))
