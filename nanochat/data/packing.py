"""The lanes of a run: each packs its share of the documents into rows and knows its exact position.

The documents of an epoch, in an order that the seed gives, are dealt to the lanes (`Feed`). A lane buffers
some of them as pieces, the tokens of a document from some token on, and fills each row with the largest piece
that fits into what is left of it; where none does, a piece is drawn and cut and its rest stays in the buffer.
A position is small: the epoch, how many documents of it the lane has taken, and where its pieces begin.
"""

import functools
import itertools
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from nanochat import UserError
from nanochat.data.parquet import RowGroups
from nanochat.data.tokenizer import Tokenizer

BUFFER_PIECES = 32  # pieces that a lane chooses from: best fit wastes little, state and restore stay small
BUFFER_ROWS = 256  # rows' worth of tokens at which a lane waits with more: documents may be very long
GROUPS_PER_LANE = 8  # with at least so many row groups a lane takes whole ones, else every L-th document
MAX_BARREN_EPOCHS = 16  # in a row, of a lane, before it is told that it has no text


class Lane:
    """One lane: packs the documents of its feed into rows.

    `pieces` is sorted: (slots with <|bos|>, -serial, document number, first token, tokens). Comparisons end
    at the serial, which is unique; among equally long pieces the oldest is the last.
    """

    def __init__(self, number: int, feed: "Feed", tokenizer: Tokenizer, row_tokens: int, position: dict):
        self.number = number
        self.epoch = position["epoch"]
        self.taken = position["taken"]  # documents of this epoch that have been tokenized
        self.pieces: list[tuple] = []
        self._feed = feed
        self._encode = tokenizer.encode
        self._bos = tokenizer.bos_id
        self._room = BUFFER_ROWS * row_tokens  # tokens that may still be buffered
        self._exhausted = False  # every document of the epoch is taken
        self._barren = 0  # epochs in a row that held no token
        self._age = 0

    def add(self, document: int, first: int, tokens: np.ndarray) -> None:
        """Put a document's tokens from `first` on into the buffer."""
        if len(tokens) > first:
            self._barren = 0
            self._age += 1
            tokens = tokens[first:]
            insort(self.pieces, (len(tokens) + 1, -self._age, document, first, tokens))
            self._room -= len(tokens)

    def fill(self, row: np.ndarray) -> None:
        """Write the lane's next row: pieces by best fit, the last one cut where it does not fit."""
        pieces, at, space = self.pieces, 0, len(row)
        while space:
            if not pieces or (not self._exhausted and self._room > 0 and len(pieces) < BUFFER_PIECES):
                self._refill()
            fitting = bisect_right(pieces, (space, 1))
            if fitting:
                size, _, _, _, tokens = pieces.pop(fitting - 1)
                row[at] = self._bos
                row[at + 1 : at + size] = tokens
                self._room += size - 1
            else:
                size = space
                row[at] = self._bos  # alone where space is 1: a target, and no document token is spent
                if size > 1:
                    self._cut(row[at + 1 :])
            at += size
            space -= size

    def _cut(self, gap: np.ndarray) -> None:
        """Fill the gap from a piece drawn by its length: a batch is a fair sample of the buffered text.

        Cutting the longest, or the oldest, would train on a few huge files alone for many steps
        (docs/data.md).
        """
        sizes = [piece[0] for piece in self.pieces]
        slots, age, document, first, tokens = self.pieces.pop(drawn_piece(sizes, self.taken))
        n = len(gap)
        gap[:] = tokens[:n]
        insort(self.pieces, (slots - n, age, document, first + n, tokens[n:]))
        self._room += n

    def _refill(self) -> None:
        """Take documents until the buffer is full; those of the next epoch only when it is empty."""
        if self._exhausted:
            self._next_epoch()
        while self._room > 0 and len(self.pieces) < BUFFER_PIECES:
            item = self._feed.next(self.number)
            if item is not None:
                self.taken += 1
                self.add(item[0], 0, self._encode(item[1]))
            elif self.pieces:
                self._exhausted = True
                return
            else:
                self._next_epoch()

    def _next_epoch(self) -> None:
        self.epoch, self.taken, self._exhausted = self.epoch + 1, 0, False
        self._barren += 1
        if self._barren > MAX_BARREN_EPOCHS:
            raise UserError(
                f"row {self.number} of the batch gets documents without any text only; "
                "use a smaller total_batch_size or data with more text"
            )


def drawn_piece(sizes: list[int], salt: int) -> int:
    """Index of one of the pieces, each as likely as its size; the same for the same sizes' sum and salt."""
    ends = list(itertools.accumulate(sizes))
    mixed = (salt << 32 | ends[-1]) * 0x9E3779B97F4A7C15 % 2**64  # Fibonacci hashing
    return bisect_right(ends, (mixed >> 32) * ends[-1] >> 32)


class Feed:
    """The documents of an epoch in its order, dealt to the lanes served here; every row group is read once.

    `order` gives an epoch's row groups. `shares` maps the lanes served to their share: the running document
    numbers r of an epoch with r mod `stride` == share. `start` maps them to (epoch, documents taken of it).
    """

    def __init__(
        self,
        groups: RowGroups,
        seed: int,
        order: Callable[[int], list[int]],
        stride: int,
        shares: dict[int, int],
        start: dict[int, tuple[int, int]],
    ):
        self._groups = groups
        self._seed = seed
        self._order = order
        self._stride = stride
        self._shares = shares
        self._start = start
        self._queues: dict[int, deque] = {lane: deque() for lane in shares}
        self._epoch = min(epoch for epoch, _ in start.values())
        self._begin_epoch()
        behind = [lane for lane, (epoch, _) in start.items() if epoch == self._epoch]
        running = min(start[lane][1] * stride + shares[lane] for lane in behind)
        while self._at < len(self._groups_now) and self._running + self._size_now() <= running:
            self._running += self._size_now()
            self._at += 1

    def next(self, lane: int) -> tuple[int, str] | None:
        """The lane's next (document number, text); None once at the end of every epoch."""
        mine = self._queues[lane]
        while not mine:
            self._deal()
        return mine.popleft()

    def _begin_epoch(self) -> None:
        self._groups_now = self._order(self._epoch)
        self._at = 0  # index of the next row group
        self._running = 0  # documents of the epoch before it

    def _size_now(self) -> int:
        return self._groups.sizes[self._groups_now[self._at]]

    def _deal(self) -> None:
        """Read one row group, or end the epoch, and give each lane what it does not have yet."""
        if self._at == len(self._groups_now):
            for lane, waiting in self._queues.items():
                if self._epoch >= self._start[lane][0]:
                    waiting.append(None)
            self._epoch += 1
            self._begin_epoch()
            return
        group = self._groups_now[self._at]
        texts = self._groups.read(group)
        shuffled = _permutation(len(texts), self._seed, self._epoch, group + 1).tolist()
        first_document = self._groups.starts[group]
        for lane, share in self._shares.items():
            epoch, taken = self._start[lane]
            if self._epoch < epoch:
                continue
            skip = (share - self._running) % self._stride
            if self._epoch == epoch:  # running numbers below this one were taken before the restart
                skip += max(0, taken * self._stride + share - (self._running + skip))
            self._queues[lane].extend((first_document + i, texts[i]) for i in shuffled[skip :: self._stride])
        self._running += len(texts)
        self._at += 1


def open_lanes(
    groups: RowGroups,
    tokenizer: Tokenizer,
    rows_per_step: int,
    seed: int,
    lanes: Sequence[int],
    positions: list[dict],
    row_tokens: int,
) -> list[Lane]:
    """The lanes at their positions. One feed serves them all, or each has its own where groups are many."""

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> list[int]:
        return _permutation(len(groups.sizes), seed, epoch, 0).tolist()

    def own_order(lane: int) -> Callable[[int], list[int]]:
        return lambda epoch: order(epoch)[lane::rows_per_step]

    start = {lane: (p["epoch"], p["taken"]) for lane, p in zip(lanes, positions, strict=True)}
    if len(groups.sizes) >= GROUPS_PER_LANE * rows_per_step:
        feeds = {n: Feed(groups, seed, own_order(n), 1, {n: 0}, {n: start[n]}) for n in lanes}
    else:
        feed = Feed(groups, seed, order, rows_per_step, {n: n for n in lanes}, start)
        feeds = dict.fromkeys(lanes, feed)
    opened = [
        Lane(lane, feeds[lane], tokenizer, row_tokens, position)
        for lane, position in zip(lanes, positions, strict=True)
    ]
    _restore_pieces(opened, groups, tokenizer, positions)
    return opened


def _restore_pieces(
    lanes: list[Lane], groups: RowGroups, tokenizer: Tokenizer, positions: list[dict]
) -> None:
    """Tokenize again the documents that the lanes' pieces come from, reading every row group once."""
    wanted = sorted({document for position in positions for document, _ in position["pieces"]})
    tokens, group, texts = {}, -1, []
    for document in wanted:
        at = bisect_right(groups.starts, document) - 1
        if at != group:
            group, texts = at, groups.read(at)
        tokens[document] = tokenizer.encode(texts[document - groups.starts[at]])
    for lane, position in zip(lanes, positions, strict=True):
        for document, first in position["pieces"]:
            lane.add(document, first, tokens[document])


def _permutation(n: int, *seeds: int) -> np.ndarray:
    """A permutation fixed by the seeds. numpy promises its raw bits for ever, but not its shuffles."""
    bits = np.random.PCG64(np.random.SeedSequence([seed % 2**64 for seed in seeds])).random_raw(n)
    return np.argsort(bits, kind="stable")
