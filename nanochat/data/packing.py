"""The lanes of a run: each packs its share of the documents into rows.

The seed gives the order of the documents in each epoch; document n of it goes to lane n mod L. A lane keeps
some documents in a buffer. A *piece* is a document in the buffer, from some token on. To fill a row,
the lane takes the largest piece that fits, again and again. If no piece fits, it draws one, cuts it, and
keeps the rest. A position is small: the epoch, how many of its documents the lane has taken, and where its
pieces begin.

Where documents are longer than rows, an epoch has several *passes* over them. Each takes other windows of T
tokens from a document, and each window is a piece. So a run that ends within an epoch has read some of every
document, not all of some (docs/ablations.md).
"""

import functools
import itertools
import sys
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nanochat import UserError
from nanochat.data.parquet import Documents
from nanochat.data.tokenizer import Tokenizer

BUFFER_PIECES = 32  # pieces that a lane chooses from: enough for a good fit, few enough for a small state
BUFFER_ROWS = 256  # rows; a lane with more tokens than that takes no more documents: some are very long
GROUPS_PER_LANE = 8  # with at least so many row groups, a lane takes whole ones, else single documents
MOST_PASSES = 8
KEPT_BYTES = 1 << 28  # of text; its tokens are kept for the next pass. With more text, there is one pass
MAX_EMPTY_EPOCHS = 16  # more epochs in a row without a token are an error


class Lane:
    """One lane: it packs the documents of its feed into rows.

    `pieces` is a sorted list of (slots in a row: the tokens and `<|bos|>`, -serial number, document number,
    first token, tokens). Serial numbers are unique, so no comparison reaches the tokens. The last one of
    equally long pieces is the oldest.
    """

    def __init__(
        self, number: int, feed: "Feed", encode: Callable, bos_id: int, row_tokens: int, position: dict
    ):
        self.number = number
        self.epoch = position["epoch"]
        self.taken = position["taken"]  # documents of this epoch that the lane has taken from its feed
        self.pieces: list[tuple] = []
        self._feed = feed
        self._encode = encode  # encode(document number, text) -> tokens
        self._window = row_tokens - 1 if feed.passes > 1 else sys.maxsize  # tokens
        self._bos = bos_id
        self._room = BUFFER_ROWS * row_tokens  # tokens that still fit into the buffer
        self._exhausted = False  # whether all documents of the epoch are taken
        self._empty_epochs = 0  # epochs in a row without a token
        self._serial = 0  # of the newest piece

    def add(self, document: int, first: int, tokens: np.ndarray) -> None:
        """Put the tokens of a document, from token `first` to the end of its window, into the buffer."""
        if len(tokens) > first:
            self._empty_epochs = 0
            self._serial += 1
            tokens = tokens[first : first - first % self._window + self._window]
            insort(self.pieces, (len(tokens) + 1, -self._serial, document, first, tokens))
            self._room -= len(tokens)

    def fill(self, row: np.ndarray) -> None:
        """Write the next row into `row`, (max_seq_len + 1,) int32: pieces that fit, the last one cut."""
        pieces, at, space = self.pieces, 0, len(row)
        while space:
            if not pieces or (not self._exhausted and self._room > 0 and len(pieces) < BUFFER_PIECES):
                self._refill()
            fitting = bisect_right(pieces, (space, 1))  # pieces of at most `space` slots
            if fitting:
                size, _, _, _, tokens = pieces.pop(self._longest(fitting))
                row[at] = self._bos
                row[at + 1 : at + size] = tokens
                self._room += size - 1
            else:
                size = space
                row[at] = self._bos  # with one slot left it is alone there, and only a target
                if size > 1:
                    self._cut(row[at + 1 :])
            at += size
            space -= size

    def _longest(self, fitting: int) -> int:
        """The index of the longest of the first pieces: the oldest, or of windows, of which a document may
        have many, one that is drawn."""
        if self._feed.passes == 1:
            return fitting - 1
        slots = self.pieces[fitting - 1][0]
        first = bisect_left(self.pieces, (slots,))
        return first + drawn_piece([slots] * (fitting - first), self.taken)

    def _cut(self, gap: np.ndarray) -> None:
        """Fill the gap with the first tokens of a piece, drawn in proportion to its length.

        So a batch is a fair sample of the buffered text. A lane that always cut the longest or the oldest
        piece would train for many steps on a few huge files alone (docs/data.md).
        """
        sizes = [piece[0] for piece in self.pieces]
        slots, serial, document, first, tokens = self.pieces.pop(drawn_piece(sizes, self.taken))
        n = len(gap)
        gap[:] = tokens[:n]
        insort(self.pieces, (slots - n, serial, document, first + n, tokens[n:]))
        self._room += n

    def _refill(self) -> None:
        """Take documents until the buffer is full. The next epoch begins only when the buffer is empty."""
        if self._exhausted:
            self._next_epoch()
        while self._room > 0 and len(self.pieces) < BUFFER_PIECES:
            item = self._feed.next(self.number)
            if item is not None:
                self.taken += 1
                number, document, text = item
                tokens, passes = self._encode(document, text), self._feed.passes
                first_window = (number - document) % passes
                for first in range(first_window * self._window, len(tokens), passes * self._window):
                    self.add(document, first, tokens)
            elif self.pieces:
                self._exhausted = True
                return
            else:
                self._next_epoch()

    def _next_epoch(self) -> None:
        self.epoch, self.taken, self._exhausted = self.epoch + 1, 0, False
        self._empty_epochs += 1
        if self._empty_epochs > MAX_EMPTY_EPOCHS:
            raise UserError(
                f"row {self.number} of the batch gets only documents without any text; "
                "use a smaller total_batch_size or data with more text"
            )


def drawn_piece(sizes: list[int], salt: int) -> int:
    """The index of one piece, drawn with a probability proportional to its size.

    The draw is a hash of the salt and the sum of the sizes, so it is the same after a restart.
    """
    ends = list(itertools.accumulate(sizes))
    mixed = (salt << 32 | ends[-1]) * 0x9E3779B97F4A7C15 % 2**64  # Fibonacci hashing
    return bisect_right(ends, (mixed >> 32) * ends[-1] >> 32)


@dataclass
class Feed:
    """Gives lanes their documents. It reads a row group once for all its lanes, and in a later pass only the
    documents whose tokens are not kept."""

    documents: Documents
    seed: int
    passes: int  # over the documents, in an epoch
    kept: Container[int]  # the documents whose tokens are kept for later passes: their text is not read again
    order: Callable[[int], Iterable[int]]  # order(epoch): pass * row groups + row group, of each visit
    stride: int  # document n of an epoch, in that order, goes to the lane whose share is n mod stride
    shares: dict[int, int]  # {lane: share}
    start: dict[int, tuple[int, int]]  # {lane: (epoch, documents of that epoch that the lane has taken)}

    def __post_init__(self):
        self._queues: dict[int, deque] = {lane: deque() for lane in self.shares}
        self._epoch = min(epoch for epoch, _ in self.start.values())
        self._begin_epoch()
        earliest = [(lane, taken) for lane, (epoch, taken) in self.start.items() if epoch == self._epoch]
        self._first = min(taken * self.stride + self.shares[lane] for lane, taken in earliest)

    def next(self, lane: int) -> tuple[int, int, str] | None:
        """The lane's next (pass, document number in the data set, text); None once at the end of an epoch.

        The text is "" if its tokens are kept.
        """
        mine = self._queues[lane]
        while not mine:
            self._read_group()
        return mine.popleft()

    def _begin_epoch(self) -> None:
        self._coming = iter(self.order(self._epoch))  # the row groups that are still to be read
        self._given = 0  # documents of the epoch in the row groups before those
        self._first = 0  # the first document of the epoch that a lane still needs

    def _read_group(self) -> None:
        """Read one row group and give each lane the documents that it has not taken yet, or end the epoch."""
        visit = next(self._coming, None)
        if visit is None:
            for lane, waiting in self._queues.items():
                if self._epoch >= self.start[lane][0]:
                    waiting.append(None)
            self._epoch += 1
            self._begin_epoch()
            return
        number, group = divmod(visit, len(self.documents.sizes))  # of the pass, of the row group
        size, first_document, given = self.documents.sizes[group], self.documents.starts[group], self._given
        self._given += size
        if self._given <= self._first:  # all its documents were taken before the restart: it is not read
            return
        shuffled = permutation(size, self.seed, self._epoch, visit + 1)
        wanted = {}
        for lane, share in self.shares.items():
            epoch, taken = self.start[lane]
            if self._epoch < epoch:
                continue
            skip = (share - given) % self.stride
            if self._epoch == epoch:  # leave out the documents that were taken before the restart
                skip = max(skip, taken * self.stride + share - given)
            wanted[lane] = shuffled[skip :: self.stride]
        mine = np.concatenate([*wanted.values()]).tolist()  # the documents of this process
        rows = sorted(i for i in mine if first_document + i not in self.kept)
        read = self.documents.read(group, rows if len(rows) < size else None) if rows else []
        texts = dict(zip(rows, read, strict=True))
        for lane, mine in wanted.items():
            self._queues[lane].extend((number, first_document + i, texts.get(i, "")) for i in mine.tolist())


def passes_of(documents: Documents, max_seq_len: int) -> int:
    """In how many passes an epoch goes over the documents: about as many as a document has rows, on average.

    One for much text, and where shards may still arrive: the first steps would need all of them.
    """
    if documents.arrival or documents.text_bytes > KEPT_BYTES:
        return 1
    return min(MOST_PASSES, 1 + documents.text_bytes // max(1, len(documents)) // (2 * max_seq_len))


def open_lanes(
    documents: Documents,
    tokenizer: Tokenizer,
    rows_per_step: int,
    seed: int,
    lanes: Sequence[int],
    positions: list[dict],
    passes: int,
    row_tokens: int,
) -> list[Lane]:
    """The lanes with these numbers at these positions, for rows of `row_tokens` = max_seq_len + 1 tokens.

    With many row groups, each lane has a feed of its own and takes whole row groups. Else all lanes share one
    feed; also while shards arrive, because the first steps would need shards from all over the data set.
    """

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> list[int]:
        documents.need()
        groups = permutation(len(documents.sizes), seed, epoch, 0)
        return np.concatenate([groups + number * len(groups) for number in range(passes)]).tolist()

    def arrival_order(epoch: int) -> Iterator[int]:
        """First one shard after the other, shuffled within it, so the first steps need only the first one."""
        if epoch:
            yield from order(epoch)
        else:
            for part in documents.parts():
                yield from (part.start + permutation(len(part), seed, 0, -1 - part.start)).tolist()

    def own_order(lane: int) -> Callable[[int], list[int]]:
        return lambda epoch: order(epoch)[lane::rows_per_step]

    kept: dict[int, np.ndarray] = {}
    smallest = np.min_scalar_type(tokenizer.vocab_size)  # a dtype

    def encode(document: int, text: str) -> np.ndarray:
        """The tokens of a document, kept for its next pass; then its text does not matter."""
        if passes == 1:
            return tokenizer.encode(text)
        if document not in kept:
            kept[document] = tokenizer.encode(text).astype(smallest)
        return kept[document]

    common = documents, seed, passes, kept
    start = {lane: (p["epoch"], p["taken"]) for lane, p in zip(lanes, positions, strict=True)}
    if not documents.arrival and len(documents.sizes) >= GROUPS_PER_LANE * rows_per_step:
        feeds = {n: Feed(*common, own_order(n), 1, {n: 0}, {n: start[n]}) for n in lanes}
    else:
        order_of = arrival_order if documents.arrival else order
        feed = Feed(*common, order_of, rows_per_step, {n: n for n in lanes}, start)
        feeds = dict.fromkeys(lanes, feed)
    opened = [
        Lane(lane, feeds[lane], encode, tokenizer.bos_id, row_tokens, position)
        for lane, position in zip(lanes, positions, strict=True)
    ]
    _restore_pieces(opened, documents, encode, positions)
    return opened


def _restore_pieces(lanes: list[Lane], documents: Documents, encode: Callable, positions: list[dict]) -> None:
    """Tokenize the documents of the lanes' pieces again. Every row group is read once."""
    wanted = sorted({document for position in positions for document, _ in position["pieces"]})
    tokens = {}
    if wanted:
        documents.need(documents=wanted[-1] + 1)
    for group, numbers in itertools.groupby(wanted, lambda n: bisect_right(documents.starts, n) - 1):
        texts = documents.read(group)
        tokens |= {n: encode(n, texts[n - documents.starts[group]]) for n in numbers}
    for lane, position in zip(lanes, positions, strict=True):
        for document, first in position["pieces"]:
            lane.add(document, first, tokens[document])


def permutation(n: int, *seeds: int) -> np.ndarray:
    """A permutation of range(n), (n,) int64, the same for the same seeds with every version of numpy.

    numpy promises that a generator's raw bits never change, but not that its shuffle stays the same.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed % 2**64 for seed in seeds])).random_raw(n)
    return np.argsort(bits, kind="stable")
