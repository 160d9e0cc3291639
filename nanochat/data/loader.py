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

import os
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from nanochat import UserError
from nanochat.data.amount import check_amount
from nanochat.data.packing import open_lanes
from nanochat.data.parquet import RowGroups, iterate_documents
from nanochat.data.tokenizer import Tokenizer

PACKING = 2  # raised when lanes place the same documents otherwise: positions of before are refused
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
            "packing": PACKING,
            "documents": sum(groups.sizes),
        }
        if state is None:
            check_amount(groups, tokenizer, rows_per_step, max_seq_len)
        positions = _positions(self._stream, lanes, state)
        self._device = torch.device(device)
        self._device_batch_size = device_batch_size
        self._rows = len(lanes)
        self._next_row = self._rows  # of the current step; at its end the next step is due
        self._current = None
        self._handed_out = dict(zip(lanes, positions, strict=True))
        self._process = os.getpid()
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
        self._stop = weakref.finalize(self, _stop, thread, self._free, self._process)
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
        # int64 is fresh memory: what the caller has is never rewritten
        inputs, targets = rows[:, :-1].to(torch.int64), rows[:, 1:].to(torch.int64)
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
        if os.getpid() != self._process:  # a fork has no thread that would fill the queue
            raise RuntimeError("this loader belongs to the process that made it; make one in each process")
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
        return min(_as_json(position)["epoch"] for position in self._handed_out.values())

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


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def _positions(stream: dict, lanes: Sequence[int], state: dict | None) -> list[dict]:
    """Each lane's position in `state` (the start if that is None); UserError if it is of another stream."""
    if state is None:
        return [{"epoch": 0, "taken": 0, "pieces": []} for _ in lanes]
    for name, value in stream.items():
        if state.get(name) != value:
            raise UserError(
                f"the saved position in the data is for {name} {state.get(name)}, this run has {value}; "
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
        lanes = open_lanes(groups, tokenizer.copy(), *rest)
        while (item := free.get()) is not None:
            buffer, copied = item
            if copied is not None:
                copied.synchronize()
            for lane, row in zip(lanes, buffer.numpy(), strict=True):
                lane.fill(row)
            ready.put((buffer, {lane.number: (lane.epoch, lane.taken, lane.pieces.copy()) for lane in lanes}))
    except BaseException as error:
        ready.put(error)


def _stop(thread: threading.Thread, free: queue.SimpleQueue, process: int) -> None:
    """End the thread and wait for it: Python must not exit while it is inside of tiktoken or pyarrow."""
    if os.getpid() != process:  # after a fork: the thread is not here, and its queue may be locked for ever
        return
    try:
        while True:
            free.get_nowait()
    except queue.Empty:
        free.put(None)
    if thread is not threading.current_thread():
        thread.join()


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
    if eval_tokens != -1 and eval_tokens < 1:
        raise UserError(f"eval_tokens {eval_tokens} scores nothing; use -1 (all) or a positive number")
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
