"""Shards -> token rows -> batches, with an exact position that any number of processes can continue from.

A run has L *lanes*, the rows of one global batch, and row n of the run comes from lane n mod L. The documents
of an epoch are dealt to the lanes; each lane packs its own into rows of max_seq_len + 1 tokens and goes on to
its next epoch by itself. A process serves the lanes that are its rank modulo the number of processes, so what
a lane produces depends on the data, the seed, the tokenizer, L and max_seq_len alone.

Inside a row stand pieces, each `<|bos|>` and then tokens of one document. inputs = row[:-1] and
targets = row[1:], and a row starts with `<|bos|>`: every token of a document is a target exactly once.

    loader = TrainLoader(shards, tokenizer, rows_per_step=32, max_seq_len=512, device_batch_size=8)
    inputs, targets = next(loader)      # (B, T) int64; rows_per_step / world_size / B of them make a step
    state = loader.state()              # after the last complete step; JSON-able, give it back as state=...
"""

import queue
import threading
import time
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from nanochat import UserError
from nanochat.dataset import RowGroups, iterate_documents
from nanochat.tokenizer import Tokenizer

BUFFER_PIECES = 32  # pieces that a lane chooses from: best fit wastes little, state and restore stay small
BUFFER_ROWS = 64  # rows' worth of tokens at which a lane waits with more: documents may be very long
MAX_BARREN_EPOCHS = 16  # in a row, of a lane, before it is told that it has no text
GROUPS_PER_LANE = 8  # with at least so many row groups a lane takes whole ones, else every lane-th document
STEPS_AHEAD = 2  # steps that the background thread prepares


class TrainLoader:
    """Endless micro-batches (inputs, targets), each (device_batch_size, max_seq_len) int64 on `device`.

    A step is rows_per_step / world_size / device_batch_size micro-batches: this process's lanes in order.
    Raises UserError for numbers that do not divide, too little data, or a state of another stream.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        tokenizer: Tokenizer,
        rows_per_step: int,
        max_seq_len: int,
        device_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        device: str | torch.device = "cpu",
        state: dict | None = None,
    ):
        _check_division(rows_per_step, world_size, device_batch_size)
        groups = RowGroups(shards)
        lanes = range(rank, rows_per_step, world_size)
        self._stream = {
            "rows_per_step": rows_per_step,
            "max_seq_len": max_seq_len,
            "seed": seed,
            "tokenizer": tokenizer.fingerprint,
            "documents": sum(groups.sizes),
        }
        _check_amount(self._stream["documents"], rows_per_step, max_seq_len)
        positions = _positions(self._stream, lanes, state)
        self._device = torch.device(device)
        self._device_batch_size = device_batch_size
        self._rows = len(lanes)
        self._next_row = self._rows  # of the current step; at its end the next step is due
        self._current = None
        self._snapshot = {lane: position for lane, position in zip(lanes, positions, strict=True)}
        self._handed_out = self._snapshot
        self.wait_s = 0.0  # seconds that callers of next() have waited for data, in all

        self._ready: queue.SimpleQueue = queue.SimpleQueue()
        self._free: queue.SimpleQueue = queue.SimpleQueue()
        for _ in range(STEPS_AHEAD + 1):
            shape = (self._rows, max_seq_len + 1)
            pin = self._device.type == "cuda"
            self._free.put((torch.empty(shape, dtype=torch.int32, pin_memory=pin), None))
        packer = (groups, tokenizer, rows_per_step, seed, lanes, positions, max_seq_len + 1)
        thread = threading.Thread(
            target=_produce, args=(packer, self._free, self._ready), name="nanochat-loader", daemon=True
        )
        # The thread holds no reference to self: a loader dropped, or alive when Python ends, stops it.
        self._stop = weakref.finalize(self, _stop, thread, self._free)
        thread.start()

    def __iter__(self) -> "TrainLoader":
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._next_row == self._rows:
            self._fetch_step()
        first, self._next_row = self._next_row, self._next_row + self._device_batch_size
        buffer, snapshot = self._current
        on_cuda = self._device.type == "cuda"
        rows = buffer[first : self._next_row].to(self._device, non_blocking=on_cuda)
        inputs, targets = (
            rows[:, :-1].to(torch.int64),
            rows[:, 1:].to(torch.int64),
        )  # fresh memory, contiguous
        if self._next_row == self._rows:
            copied = None
            if on_cuda:  # the buffer must not be rewritten before this moment on the stream
                copied = torch.cuda.Event()
                copied.record(torch.cuda.current_stream(self._device))
            self._free.put((buffer, copied))
            self._current = None
            self._handed_out = snapshot
        return inputs, targets

    def _fetch_step(self) -> None:
        if not self._stop.alive:
            raise RuntimeError("this loader is closed")
        start = time.perf_counter()
        item = self._ready.get()
        self.wait_s += time.perf_counter() - start
        if isinstance(item, BaseException):
            self.close()
            raise item
        self._current = item
        self._next_row = 0

    @property
    def epoch(self) -> int:
        """The earliest epoch that a lane of this process is in, from 0."""
        return min(position["epoch"] for position in self.state()["lanes"].values())

    def state(self) -> dict:
        """Position after the last complete step handed out, of this process's lanes; JSON-able."""
        return {**self._stream, "lanes": {str(lane): _as_json(p) for lane, p in self._handed_out.items()}}

    def close(self) -> None:
        """Stop the background thread; harmless when repeated."""
        self._stop()

    def __enter__(self) -> "TrainLoader":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def merge_states(states: Sequence[dict]) -> dict:
    """The states of all ranks as one, from which any number of processes can continue."""
    lanes = {lane: position for state in states for lane, position in state["lanes"].items()}
    return {**states[0], "lanes": dict(sorted(lanes.items(), key=lambda item: int(item[0])))}


def _check_division(rows_per_step: int, world_size: int, device_batch_size: int) -> None:
    if rows_per_step % world_size:
        raise UserError(
            f"{world_size} processes cannot share the {rows_per_step} rows of a batch equally; "
            f"use a number of processes among {_divisors(rows_per_step)} or another total_batch_size"
        )
    rows = rows_per_step // world_size
    if rows % device_batch_size:
        raise UserError(
            f"device_batch_size {device_batch_size} does not divide the {rows} rows that each process has of "
            f"a batch; use one of {_divisors(rows)} or another total_batch_size"
        )


def _check_amount(documents: int, rows_per_step: int, max_seq_len: int) -> None:
    if documents < rows_per_step:
        raise UserError(
            f"the training data has {documents} documents, fewer than the {rows_per_step} rows of a batch; "
            f"use a total_batch_size of at most {documents * max_seq_len} tokens, or more data"
        )


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def _positions(stream: dict, lanes: Sequence[int], state: dict | None) -> list[dict]:
    """Each lane's position in `state` (the start if that is None); UserError if it is of another stream."""
    if state is None:
        return [{"epoch": 0, "taken": 0, "pieces": []} for _ in lanes]
    for name, value in stream.items():
        if state[name] != value:
            raise UserError(
                f"the saved position in the data is for {name} {state[name]}, this run has {value}; "
                "resume with the settings and data that the run began with, or start anew with --resume=never"
            )
    missing = [lane for lane in lanes if str(lane) not in state["lanes"]]
    if missing:
        raise ValueError(f"the state lacks lanes {missing}; merge_states those of all ranks")
    return [state["lanes"][str(lane)] for lane in lanes]


def _as_json(position) -> dict:
    """Documents `taken` of the lane's `epoch`, and its pieces [document, first token], oldest first."""
    if isinstance(position, dict):
        return position
    epoch, taken, pieces = position
    pieces = sorted(pieces, key=lambda piece: -piece[1])
    return {"epoch": epoch, "taken": taken, "pieces": [[piece[2], piece[3]] for piece in pieces]}


# -- the background thread


def _produce(packer: tuple, free: queue.SimpleQueue, ready: queue.SimpleQueue) -> None:
    """Fill free buffers with steps until a None comes; an exception is handed over in place of a step."""
    try:
        groups, tokenizer, *rest = packer
        lanes = _open_lanes(groups, tokenizer.copy(), *rest)
        while (item := free.get()) is not None:
            buffer, copied = item
            if copied is not None:
                copied.synchronize()
            for lane, row in zip(lanes, buffer.numpy(), strict=True):
                lane.fill(row)
            ready.put((buffer, {lane.number: (lane.epoch, lane.taken, lane.pieces.copy()) for lane in lanes}))
    except BaseException as error:
        ready.put(error)


def _stop(thread: threading.Thread, free: queue.SimpleQueue) -> None:
    """End the thread and wait for it: Python must not exit while it is inside of tiktoken or pyarrow."""
    try:
        while True:
            free.get_nowait()
    except queue.Empty:
        free.put(None)
    if thread is not threading.current_thread():
        thread.join()


# -- lanes


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
        """Fill the gap from the longest piece: long documents take turns, which mixes the batches."""
        slots, age, document, first, tokens = self.pieces.pop()
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


class Feed:
    """The documents of an epoch in its order, dealt to the lanes served here; every row group is read once.

    `lanes` maps the lane numbers served to their share: the running document numbers r of an epoch with
    r mod `stride` == share. `start` maps them to (epoch, documents of it already taken).
    """

    def __init__(self, groups: RowGroups, seed: int, order, stride: int, shares: dict, start: dict):
        self._groups = groups
        self._seed = seed
        self._order = order  # epoch -> its row groups
        self._stride = stride
        self._shares = shares
        self._start = start
        self._first_document = np.concatenate([[0], np.cumsum(groups.sizes)])
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
        first_document = int(self._first_document[group])
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


def _open_lanes(
    groups: RowGroups,
    tokenizer: Tokenizer,
    rows_per_step: int,
    seed: int,
    lanes: Sequence[int],
    positions: list[dict],
    row_tokens: int,
) -> list[Lane]:
    """The lanes at their positions. One feed serves them all, or each has its own where groups are many."""

    def order(epoch: int) -> list[int]:
        return _permutation(len(groups.sizes), seed, epoch, 0).tolist()

    start = {lane: (p["epoch"], p["taken"]) for lane, p in zip(lanes, positions, strict=True)}
    if len(groups.sizes) >= GROUPS_PER_LANE * rows_per_step:
        feeds = {
            lane: Feed(
                groups,
                seed,
                lambda epoch, lane=lane: order(epoch)[lane::rows_per_step],
                1,
                {lane: 0},
                {lane: start[lane]},
            )
            for lane in lanes
        }
    else:
        feed = Feed(groups, seed, order, rows_per_step, {lane: lane for lane in lanes}, start)
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
    first_document = np.concatenate([[0], np.cumsum(groups.sizes)])
    tokens, group, texts = {}, -1, []
    for document in wanted:
        at = int(np.searchsorted(first_document, document, side="right")) - 1
        if at != group:
            group, texts = at, groups.read(at)
        tokens[document] = tokenizer.encode(texts[document - int(first_document[at])])
    for lane, position in zip(lanes, positions, strict=True):
        for document, first in position["pieces"]:
            lane.add(document, first, tokens[document])


def _permutation(n: int, *seeds: int) -> np.ndarray:
    """A permutation fixed by the seeds. numpy promises its raw bits for ever, but not its shuffles."""
    bits = np.random.PCG64(np.random.SeedSequence([seed % 2**64 for seed in seeds])).random_raw(n)
    return np.argsort(bits, kind="stable")


# -- validation


class ValidationBatches:
    """Batches (inputs, targets), both (B, T) int64, that score every token of the documents exactly once.

    One document a row, in windows of T tokens that begin with `<|bos|>`; padding has the target -1. Window n
    goes to rank n mod world_size and every rank has equally many batches. Iterate as often as you like.
    """

    def __init__(self, targets, starts, bos_id, max_seq_len, batch_size, rank, world_size, device):
        self._tokens = targets  # all documents one after another, (n,) int32
        self._windows = starts  # (windows, 2): first token and length of each
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
        """Targets that all ranks together score."""
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
    """Tokenize the validation documents, the first `eval_tokens` tokens of them (-1: all)."""
    tokens, windows, total = [], [], 0
    for text in iterate_documents(shards):
        document = tokenizer.encode(text)
        if eval_tokens >= 0:
            document = document[: eval_tokens - total]
        tokens.append(document.astype(np.int32))
        for first in range(0, len(document), max_seq_len):
            windows.append((total + first, min(max_seq_len, len(document) - first)))
        total += len(document)
        if total == eval_tokens:
            break
    if not total:
        raise UserError("the validation data holds no text; give other files with --val_data=PATH")
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
