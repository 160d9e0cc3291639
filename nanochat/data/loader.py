"""Training batches from shards, with an exact position in the data.

A run has L *lanes*, one for each row of a global batch: row n of the run comes from lane n mod L. Document n
of an epoch goes to lane n mod L; where there are many row groups, row group n does. Each lane packs its
documents into rows of max_seq_len + 1 tokens and starts its next epoch on its own. Lane n belongs to rank
n mod world_size. So the rows of a lane depend on the data, the seed, the tokenizer, L and max_seq_len alone,
and any number of processes can continue a run.

A row holds `<|bos|>` and tokens of one document, then `<|bos|>` and tokens of another one, until it is full.
inputs = row[:-1] and targets = row[1:], so every token of a document is a target exactly once.

    loader = TrainLoader(shards, tokenizer, rows_per_step=32, max_seq_len=512, device_batch_size=8)
    inputs, targets = next(loader)      # (B, T) int64; rows_per_step / world_size / B of them make a step
    state = loader.state()              # the position, as JSON; TrainLoader(..., state=state) continues there
"""

import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nanochat import UserError
from nanochat.data.amount import check_amount
from nanochat.data.packing import open_lanes, passes_of
from nanochat.data.parquet import Documents
from nanochat.data.streaming_shards import LOOK_S
from nanochat.data.tokenizer import Tokenizer
from nanochat.machine.transfers import for_new_thread, to_device

PACKING = 2  # version of the packing; a state of another version is refused, because its rows would differ
STEPS_AHEAD = 2  # steps that the background thread prepares ahead
ARRIVING_AHEAD = 2  # further steps while shards arrive: the loop learns early that a shard is missing


class TrainLoader:
    """Endless micro-batches (inputs, targets), each (device_batch_size, max_seq_len) int64 on `device`.

    A step is rows_per_step / world_size / device_batch_size micro-batches: the rows of this process's lanes
    in order. `documents` is what boundaries(inputs, bos_id) returns for the last micro-batch, on `device`
    (None without that function, which gets tensors of the CPU). Raises UserError for numbers that do not
    divide, too little data, or a `state` of other data or settings. A loader belongs to the process that made
    it.
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
        boundaries: Callable | None = None,
    ):
        check_division(rows_per_step, world_size, device_batch_size)
        self._arrival = getattr(shards, "arrival", None)  # if shards may be missing: the Arrival of these
        documents = Documents(shards, self._arrival)
        lanes = range(rank, rows_per_step, world_size)
        if state is not None:
            state = {"passes": 1} | state  # positions of the time when there was one do not say it
        passes = passes_of(documents, max_seq_len) if state is None else state["passes"]
        self._stream = {
            "rows_per_step": rows_per_step,
            "max_seq_len": max_seq_len,
            "seed": seed,
            "tokenizer": tokenizer.fingerprint,
            "packing": PACKING,
            "passes": passes,
            **documents.stream,
        }
        if state is None:
            check_amount(documents, tokenizer, rows_per_step, max_seq_len)
            positions = [{"epoch": 0, "taken": 0, "pieces": []} for _ in lanes]
        else:
            check_stream(self._stream, state)
            positions = [state["lanes"][str(lane)] for lane in lanes]
        self._device = torch.device(device)
        self._device_batch_size = device_batch_size
        self._rows = len(lanes)
        self._next_row = self._rows  # in the current step: at its end, so next() fetches a step
        self._current = None
        self._boundaries, self._bos_id, self.documents = boundaries, tokenizer.bos_id, None
        self._ahead: deque = deque()  # steps after the current one, and perhaps an error as the last
        self._positions = dict(zip(lanes, positions, strict=True))  # after the last complete step
        self.epoch = min(p["epoch"] for p in positions)  # the earliest of this process's lanes, from 0
        self._process = os.getpid()
        self.wait_s = 0.0  # seconds that next() has waited for data, in all
        packer = documents, tokenizer, rows_per_step, seed, lanes, positions, passes, max_seq_len + 1
        self._start_thread(packer)

    def _start_thread(self, packer: tuple) -> None:
        """Make the buffers and start the thread that fills them; `packer` is the arguments of open_lanes."""
        self._ready: queue.SimpleQueue = queue.SimpleQueue()  # (rows, positions, epoch) or an error
        self._free: queue.SimpleQueue = queue.SimpleQueue()  # (buffer, event that ends the copy from it)
        for _ in range(STEPS_AHEAD + 1 + (ARRIVING_AHEAD if self._arrival else 0)):
            shape = (self._rows, packer[-1])
            pin = self._device.type == "cuda"
            self._free.put((torch.empty(shape, dtype=torch.int32, pin_memory=pin), None))
        arguments = packer, for_new_thread(), self._free, self._ready
        thread = threading.Thread(None, _produce, "nanochat-loader", arguments, daemon=True)
        # The thread holds no reference to self. So it stops when the loader is deleted and when Python ends.
        self._stop = weakref.finalize(self, _stop, thread, self._free, self._process, packer[0].cancelled)
        thread.start()

    def __iter__(self) -> "TrainLoader":
        return self

    @torch.profiler.record_function("data")  # its name in a trace
    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._next_row == self._rows:
            self._fetch_step()
        first, self._next_row = self._next_row, self._next_row + self._device_batch_size
        buffer, positions, epoch = self._current
        on_cuda = self._device.type == "cuda"
        rows = buffer[first : self._next_row].to(self._device, non_blocking=on_cuda)
        # The conversion to int64 copies, so the caller's tensors are never overwritten
        inputs, targets = rows[:, :-1].to(torch.int64), rows[:, 1:].to(torch.int64)
        if self._boundaries:
            documents = self._boundaries(buffer[first : self._next_row, :-1], self._bos_id)
            self.documents = to_device(documents, self._device)
        if self._next_row == self._rows:
            copied = None
            if on_cuda:  # the thread refills the buffer only after this copy has finished
                copied = torch.cuda.Event(blocking=True)  # the thread sleeps; by default it keeps a core busy
                copied.record(torch.cuda.current_stream(self._device))
            self._free.put((buffer, copied))
            self._current = None
            self._positions, self.epoch = positions, epoch
        return inputs, targets

    def _fetch_step(self) -> None:
        if not self._stop.alive:
            raise RuntimeError("this loader is closed")
        if os.getpid() != self._process:  # after a fork the child has no thread that fills the queue
            raise RuntimeError("this loader belongs to the process that made it; make one in each process")
        start = time.perf_counter()
        item = self._ahead.popleft() if self._ahead else self._take()
        if self._arrival and not isinstance(item, BaseException):
            self._look_ahead()
        self.wait_s += time.perf_counter() - start
        if isinstance(item, BaseException):
            self.close()
            raise item
        self._current = item
        self._next_row = 0

    def _take(self, until_stop: bool = False):
        """The thread's next step, or an error. until_stop: None when a signal asks the run to stop."""
        while self._arrival:
            self._arrival.print_news()
            try:
                return self._ready.get(timeout=LOOK_S)
            except queue.Empty:
                if until_stop and self._arrival.stopping:
                    return None
        return self._ready.get()

    def _look_ahead(self) -> None:
        """Wait until ARRIVING_AHEAD steps are ready after the current one. If no shard comes, the loop learns
        it that early, and all processes can stop after the same step and save."""
        while len(self._ahead) < ARRIVING_AHEAD:
            if self._ahead and isinstance(self._ahead[-1], BaseException):
                return
            item = self._take(until_stop=True)
            if item is None:
                return
            self._ahead.append(item)
            if isinstance(item, UserError):
                self._arrival.give_up(str(item))

    def state(self) -> dict:
        """The positions of this process's lanes after the last complete step, ready for JSON."""
        return {**self._stream, "lanes": {str(lane): _as_json(p) for lane, p in self._positions.items()}}

    def close(self) -> None:
        """Stop the background thread. A second call does nothing."""
        self._stop()

    def __enter__(self) -> "TrainLoader":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def merge_states(states: Sequence[dict]) -> dict:
    """Join the states of all ranks into one, from which any number of processes can continue."""
    if "lanes" not in states[0]:  # another loader, whose state is the same on all ranks
        return states[0]
    lanes = {lane: position for state in states for lane, position in state["lanes"].items()}
    return {**states[0], "lanes": dict(sorted(lanes.items(), key=lambda item: int(item[0])))}


def check_division(rows_per_step: int, world_size: int, device_batch_size: int) -> None:
    """Raise UserError if processes or micro-batches cannot share the rows of a step equally."""
    if rows_per_step % world_size:
        raise UserError(
            f"{world_size} processes cannot share the {rows_per_step} rows of a batch equally; "
            f"use one of {_divisors(rows_per_step)} processes or another total_batch_size"
        )
    rows = rows_per_step // world_size
    if rows % device_batch_size:
        raise UserError(
            f"device_batch_size {device_batch_size} does not divide a process's {rows} rows of a batch; "
            f"use one of {_divisors(rows)} or another total_batch_size"
        )


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def check_stream(stream: dict, state: dict) -> None:
    """Raise UserError if a saved position comes from other data or settings than those of `stream`."""
    for name, value in stream.items():
        if state.get(name) != value:
            raise UserError(
                f"the saved position in the data is for {name} {state.get(name)}, this run has {value}; "
                "resume with the run's first settings and data, or start a new run with --resume=never"
            )


def _as_json(position) -> dict:
    """A position: {"epoch", "taken": its documents, "pieces": [document, first token], the oldest first}.

    The thread gives (epoch, taken, pieces), because few positions are saved and so converted.
    """
    if isinstance(position, dict):
        return position
    epoch, taken, pieces = position
    pieces = sorted(pieces, key=lambda piece: -piece[1])
    return {"epoch": epoch, "taken": taken, "pieces": [[piece[2], piece[3]] for piece in pieces]}


# -- the background thread


def _produce(packer: tuple, begin, free: queue.SimpleQueue, ready: queue.SimpleQueue) -> None:
    """Fill free buffers with steps until None comes. An exception goes to the queue in place of a step."""
    try:
        begin()
        documents, tokenizer, *rest = packer
        lanes = open_lanes(documents, tokenizer.copy(), *rest)
        while (item := free.get()) is not None:
            buffer, copied = item
            if copied is not None:
                copied.synchronize()
            for lane, row in zip(lanes, buffer.numpy(), strict=True):
                lane.fill(row)
            positions = {lane.number: (lane.epoch, lane.taken, lane.pieces.copy()) for lane in lanes}
            ready.put((buffer, positions, min(lane.epoch for lane in lanes)))
    except BaseException as error:
        ready.put(error)


def _stop(thread: threading.Thread, free: queue.SimpleQueue, process: int, cancelled: threading.Event):
    """Stop the thread and wait for it: Python must not exit while it runs code of tiktoken or pyarrow."""
    if os.getpid() != process:  # a forked child has no thread, and its queue may stay locked for ever
        return
    try:
        while True:
            free.get_nowait()
    except queue.Empty:
        free.put(None)
        cancelled.set()
    if thread is not threading.current_thread():
        thread.join()
