"""Several processes as one run: they join, wait for each other, and end together. The log names the cause.

When does the run end? If a process raises an exception or is killed, the next exchange of the others with it
fails, and they end within seconds. If a process hangs, the others end after waiting `timeout_s` seconds. With
nccl, whose exchanges do not fail, watchdog.py detects both.
torchrun reports the first failure. It waits another 30 seconds for processes that do not answer.
"""

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback as traceback_module
from concurrent import futures
from datetime import timedelta

import torch
import torch.distributed as dist

from nanochat import UserError, explained, streams
from nanochat.machine import watchdog
from nanochat.terminal import first_line, printable

GRACE_S = 3.0  # seconds in which the waiting processes find out which one does not wait
FINISH_S = 20.0  # seconds for work in progress, such as a save, to end; torchrun kills after 30

_to_finish = []  # functions that take a time limit in seconds


def before_end(finish):
    """Register finish(seconds): it is called before an exception ends this process and the others."""
    _to_finish.append(finish)


# Joining


def place() -> tuple[int, int, int]:
    """(rank, local rank, world size) of this process, from the variables that torchrun sets; without them
    (0, 0, 1). Impossible values end the process with a sentence and status 2."""
    try:
        rank, local_rank, world_size = _number("RANK", 0), _number("LOCAL_RANK", 0), _number("WORLD_SIZE", 1)
        if rank >= world_size:
            raise UserError(
                f"the variable RANK is {rank}, but WORLD_SIZE is {world_size}; WORLD_SIZE is the number of "
                "processes, and each of them has its own RANK, from 0 to WORLD_SIZE - 1"
            )
    except UserError as error:  # not raised: sys.excepthook prints in the first process only
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    return rank, local_rank, world_size


def processes_here(default: int) -> int:
    """How many of the processes run on this machine; `default` without torchrun's variable."""
    return _number("LOCAL_WORLD_SIZE", default) or default


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "").strip()
    if text and not re.fullmatch("[0-9]{1,9}", text):
        raise UserError(
            f"the variable {variable} is {text[:40]!r}; it is a whole number, which torchrun or srun sets "
            "(runs/slurm.sh); to run one process, unset it"
        )
    return int(text or default)


def meet(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Wait until all processes are there; returns the store in which they leave notes for each other.

    MASTER_ADDR and MASTER_PORT say where the store is. Waiting for a key in it has no time limit. From here
    on, an exception in one process ends all of them, see `_Ending`. Raises UserError, with the ranks that are
    missing, if some do not come within `timeout_s` seconds.
    """
    sys.excepthook = ending = _Ending(rank, world_size, timeout_s)
    host, port = os.environ.get("MASTER_ADDR"), _number("MASTER_PORT", 0)
    if not host or not 0 < port < 2**16:
        raise UserError(
            "this process cannot join the others without MASTER_ADDR and MASTER_PORT, the host of process 0 "
            f"and a free port on it, from 1 to 65535 (they are {host or 'not set'} and {port or 'not set'}); "
            "start with torchrun, or set them"
        )
    deadline = time.monotonic() + timeout_s
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not of_torchrun
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives a restart

    def open_store(serves=False):
        store = dist.TCPStore(
            host, port, world_size, serves, timedelta(seconds=timeout_s), wait_for_workers=False,
            multi_tenant=serves, use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )  # fmt: skip
        return dist.PrefixStore(f"nanochat/{attempt}", store)

    try:
        if not serves:
            _wait_for_port(host, port, deadline)
        # In a thread: for a program that listens there and says nothing, torch waits without a limit
        opening = futures.ThreadPoolExecutor(1).submit(open_store, serves)
        try:
            store = opening.result(max(0.1, deadline - time.monotonic()))
        except futures.TimeoutError:
            raise TimeoutError("what listens there does not answer") from None
        watchdog.register(store, rank)
        missing = _call_the_roll(store, rank, world_size, deadline)
    except (OSError, ValueError, RuntimeError) as error:
        what = "give another MASTER_PORT if this one is in use" if serves else "process 0 has to run there"
        raise UserError(
            f"cannot join the other processes at {host}:{port} within {timeout_s:.0f} s "
            f"({first_line(error)}); {what}"  # further lines are C++ frames
        ) from error
    ending.store, ending.serves = store, serves
    if missing:
        raise UserError(
            f"process {_few(missing)} of {world_size} did not come within {timeout_s:.0f} s; look at its own "
            "messages, or give it longer with --process_timeout"
        )
    ending.watchdog = watchdog.Watchdog(
        rank, world_size, timeout_s, open_store, not of_torchrun, ending.by_watchdog
    )
    return store


def join(device: torch.device, store: dist.Store, rank: int, world_size: int, timeout_s: float):
    """Make the process group of the processes that have met."""
    ending = sys.excepthook
    how = {"backend": "gloo", "timeout": timedelta(seconds=timeout_s)}
    if device.type == "cuda":  # nccl would end the process without our sentence: the watchdog comes first
        how = {"backend": "nccl", "timeout": timedelta(seconds=timeout_s + 30), "device_id": device}
    dist.init_process_group(store=store, rank=rank, world_size=world_size, **how)
    sys.excepthook = ending  # torch has wrapped it in a hook that loses what it prints


def _wait_for_port(host: str, port: int, deadline: float):
    """Return when somebody listens there. torch's own wait for that would print pages of C++ frames."""
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            return socket.create_connection((host, port), timeout=left).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def _call_the_roll(store: dist.Store, rank: int, world_size: int, deadline: float) -> list[int]:
    """Wait for all processes; returns the ranks that are missing at the deadline."""
    store.set(f"here/{rank}", "")
    absent = list(range(world_size))
    while absent := [r for r in absent if not store.check([f"here/{r}"])]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return absent


def _few(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:8])) + more


# Ending together


class _Ending:
    """sys.excepthook of one of several processes: it names the cause of an exception that nothing caught, and
    ends this process at once.

    If an exchange failed, the cause is in another process. This one leaves a mark in the store and looks
    which processes leave none: those are dead or hang. The pause also lets torchrun see their failure first.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float):
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.store, self.serves = None, False  # serves: the store is in this process, and ends with it
        self.previous = sys.excepthook
        self.watchdog: watchdog.Watchdog | None = None
        self._begun = threading.Lock()  # the main thread or the watchdog's ends this process, never both

    def __call__(self, kind, error, trace):
        self._begun.acquire()
        error = explained(error)
        if isinstance(error, UserError):
            self._say_once(error)
        elif isinstance(error, KeyboardInterrupt) or not _is_exchange(error):
            _report_to_torchrun(error)
            self.previous(kind, error, trace)
        else:
            self._no_answer(error, trace)
        self._end(2 if isinstance(error, UserError) else 1)

    def by_watchdog(self, ended: list[int], hangs: bool, waits: bool, store: dist.Store | None):
        """End this process, from the watchdog's thread, unless the main thread finds an error meanwhile."""
        missing = _without_mark(store, self.rank, self.world_size, mark=waits or not hangs)
        if not self._begun.acquire(blocking=False):
            return
        if not hangs:
            self._say_no_answer(ended, hangs=False)
        elif waits:
            self._say_no_answer(missing, hangs=True)
        else:
            print(watchdog.place_of_main_thread(), end="", file=sys.stderr)
            said = f"process {self.rank}: the others have waited {self.timeout_s:.0f} s for this one"
            print(f"error: {said}, which hangs there, or is far slower", file=sys.stderr)
        self._end(1)

    def _end(self, status: int):
        """Finish what is in progress, and end this process at once."""
        for finish in _to_finish:
            with contextlib.suppress(Exception):  # the cause is printed; a later error would hide it
                finish(FINISH_S)
        streams.drain(streams.END_S)
        if self.watchdog:
            self.watchdog.close(watchdog.FAILED)
        os._exit(status)  # threads and destructors of a broken process group may wait for ever

    def _say_once(self, error):
        """Print a UserError's sentence, unless another process has printed the same one."""
        key = f"said/{hashlib.sha256(str(error).encode(errors='replace')).hexdigest()}"
        said, store = 1, self._live_store()
        with contextlib.suppress(Exception):  # the process that held the store has ended
            if store and self.rank > 0:
                time.sleep(1)  # so that the first process speaks, if it has the same error
            said = store.add(key, 1) if store else 1
        if said == 1:
            who = f"process {self.rank}: " if self.rank > 0 else ""
            _report_to_torchrun(error)
            print(printable(f"error: {who}{error}"), file=sys.stderr, flush=True)
        if self.serves and self.store:  # the others look into the store before they speak
            deadline = time.monotonic() + GRACE_S
            while self.store.add(key, 0) < self.world_size and time.monotonic() < deadline:
                time.sleep(0.05)

    def _live_store(self) -> dist.Store | None:
        """The store, unless it has not answered the watchdog: then a request might take for ever."""
        return self.store if not self.watchdog or self.watchdog.hears() else None

    def _no_answer(self, error, trace):
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        missing = _without_mark(self._live_store(), self.rank, self.world_size)
        hangs = "imed out" in str(error) or "imeout" in str(error)
        if hangs:  # where this one waited helps to find out why
            print(*traceback_module.format_tb(trace)[-3:], first_line(error), sep="", file=sys.stderr)
        self._say_no_answer(missing, hangs)

    def _say_no_answer(self, missing: list[int], hangs: bool):
        who = f"process {_few(missing)}" if missing else "the other processes"
        why = ": it has ended, and its own message says why"
        if hangs:
            why = f" for {self.timeout_s:.0f} s: it hangs, or it is far slower than this one"
        sentence = f"process {self.rank}: no answer from {who}{why}"
        print(f"error: {sentence}; all end, and finished checkpoints are good", file=sys.stderr)


def _is_exchange(error) -> bool:
    """Whether torch.distributed raised this error; gloo raises plain RuntimeErrors."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text or "Connection" in text)
    )


def _without_mark(store, rank, world_size, mark=True) -> list[int]:
    """Ranks without a mark after GRACE_S; empty if the store is gone too. mark: leave this one's."""
    try:
        if mark:
            store.set(f"waited/{rank}", "")
        time.sleep(GRACE_S)
        return [r for r in range(world_size) if not store.check([f"waited/{r}"])]
    except Exception:  # the process that held the store was the one that ended
        time.sleep(GRACE_S)
        return []


def _report_to_torchrun(error):
    """Write the error where torchrun looks for it: the sentence of a UserError, else the traceback."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        trace = [str(error)] if isinstance(error, UserError) else traceback_module.format_exception(error)
        extra = {"py_callstack": "".join(trace), "timestamp": str(int(time.time()))}
        message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as f:
            json.dump({"message": message}, f)
