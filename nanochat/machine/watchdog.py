"""A thread in each of several processes that ends its own process when another one no longer answers.

gloo raises an error when a process dies or hangs. nccl does not: a GPU waits for the dead process for ever,
and Python waits for the GPU. So each process writes a sign of life to the store every second, and looks at
those of its two neighbours in the ring of ranks. What it decides:

- A neighbour on the same machine has ended if its process is gone. A process that only pauses is not gone.
- A neighbour on another machine has ended if it gave no sign for SILENT_S seconds.
- A process hangs if another one has waited for it in an exchange longer than the run's time limit. Only waits
  that `expect` or `waiting` announced count. So an evaluation, a save or a compilation may take any time, as
  long as no other process waits for it longer than with gloo.

A process that finds one of these writes a verdict into the store. All read it within a second, and end.

Only seconds in which this thread runs count: a pause of the process or a sleep of the machine counts as one
round. A process makes two requests a second, so 512 processes make about a thousand.
"""

import atexit
import contextlib
import os
import platform
import sys
import threading
import time
import traceback
from pathlib import Path

import torch.distributed as dist

from nanochat.machine.transfers import for_new_thread

ROUND_S = 1.0  # seconds between two signs of life
SILENT_S = 30.0  # seconds without a sign after which a process on another machine counts as ended
LATER_S = 5.0  # seconds by which gloo's own time limit comes first: it knows better where this process waits
CLOSE_S = 8.0  # seconds in which this process tries to say goodbye; the machine of the store may be gone
LINGER_S = 3.0  # seconds that the process with the store waits for the goodbyes of the others
ENDED, HANGS = "ended", "hangs"  # verdicts
GOODBYE, FAILED = "goodbye", "failed"  # the last signs of a process that has done its work, or cannot

_waits: list[list] = []  # this process's waits: [function for a new thread, function: is it over?, seconds]


def expect(is_over):
    """Count how long this process waits for others, until is_over() is true. It is called in a thread."""
    _waits.append([for_new_thread(), is_over, 0.0])


@contextlib.contextmanager
def waiting():
    """A block in which this process waits for others."""
    over = threading.Event()
    expect(over.is_set)
    try:
        yield
    finally:
        over.set()


def sign() -> str:
    """What identifies this process among all: its machine or container, and its number."""
    try:  # Linux: machines may have equal names, and containers do not see each other's processes
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        machine = platform.node()
    return f"{machine} {os.getpid()}"


def register(store: dist.Store, rank: int):
    """Tell the others of this process, before any watchdog looks."""
    store.set(f"sign/{rank}", sign())
    store.set(f"beat/{rank}", "")
    if rank == 0:
        store.set("verdict", "none")


def is_gone(pid: int) -> bool:
    """Whether the process of that number on this machine has ended."""
    try:
        if sys.platform == "linux":  # an ended process stays there until its parent asks for its status
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        os.kill(pid, 0)
    except (ProcessLookupError, FileNotFoundError):
        return True
    except OSError:
        pass
    return False


class Peer:
    """What this process knows of another one."""

    def __init__(self, rank: int, first_sign: str):
        self.rank, self.silent_s, self.last, self._gone_at = rank, 0.0, "", None
        machine, pid = first_sign.split()
        here = machine == sign().split()[0] and os.name == "posix"
        self.pid = int(pid) if here else None  # None: it is on another machine

    def has_ended(self, round_: int) -> bool:
        """Whether it has, without a goodbye. round_: how often this process has looked at the signs."""
        if self.last in (GOODBYE, FAILED):
            return self.last == FAILED
        if self.pid is None:
            return self.silent_s > SILENT_S
        if self._gone_at is None and is_gone(self.pid):
            self._gone_at = round_
        return self._gone_at is not None and round_ >= self._gone_at + 2  # its goodbye would have been heard


class Watchdog:
    """The signs of life of this process, and the watch over its neighbours.

    All processes have called `register`. open_store: makes the watchdog's own client of the store, since a
    request of another thread may block its client for ever. served_by_first: process 0 holds the store (else
    torchrun does). end(ranks, hangs, waits, store): ends this process because those ranks have ended,
    or because a rank hangs; `waits`: whether this process waits for others. It returns only if the main
    thread ends the process.
    """

    def __init__(self, rank, world_size, timeout_s, open_store, served_by_first, end):
        self.rank, self.timeout_s, self._end = rank, timeout_s, end
        self._store, self._served_by_first = open_store(), served_by_first
        self._world_size, self._serves = world_size, served_by_first and rank == 0
        ring = {(rank + 1) % world_size, (rank - 1) % world_size} - {rank}
        signs = self._store.multi_get([f"sign/{r}" for r in (0, *ring)])
        self._first, *peers = (Peer(r, text.decode()) for r, text in zip((0, *ring), signs, strict=True))
        self._peers = {peer.rank: peer for peer in peers}
        self._verdict, self._silent_s, self._rounds, self._closed = "", 0.0, 0, threading.Event()
        self._last_words = GOODBYE
        self._talker, judge = (
            threading.Thread(target=work, name=f"watchdog{work.__name__}", daemon=True)
            for work in (self._talk, self._judge)
        )
        self._talker.start()
        judge.start()
        atexit.register(self.close)

    def close(self, last_words: str = GOODBYE):
        """Say goodbye, so that nobody waits for this process, and watch no longer."""
        if not self._closed.is_set():
            self._last_words = last_words
            self._closed.set()
            self._talker.join(CLOSE_S)

    def _say_goodbye(self):
        self._store.set(f"beat/{self.rank}", self._last_words)
        if self._last_words == GOODBYE:
            self._store.add("left", 1)
            deadline = time.monotonic() + LINGER_S
            while self._serves and time.monotonic() < deadline:
                if self._store.add("left", 0) == self._world_size:
                    break
                time.sleep(0.02)

    def _talk(self):
        """Every second: write a sign of life, read the neighbours' and the verdict; at the end, say goodbye.
        It may block for ever, if the machine of the store is gone, so it decides nothing."""
        keys = ["verdict", *(f"beat/{rank}" for rank in self._peers)]
        with contextlib.suppress(Exception):  # the store is gone; _judge sees that nothing is heard
            while not self._closed.wait(ROUND_S):
                self._store.set(f"beat/{self.rank}", str(self._rounds))
                verdict, *texts = self._store.multi_get(keys)
                for peer, text in zip(self._peers.values(), texts, strict=True):
                    if (heard := text.decode()) != peer.last:
                        peer.last, peer.silent_s = heard, 0.0
                self._verdict, self._silent_s = verdict.decode().replace("none", ""), 0.0
                self._rounds += 1
            self._say_goodbye()

    def _judge(self):
        """Every second: count seconds, and end the process if it is time."""
        before = time.monotonic()
        while not self._closed.wait(ROUND_S):
            now = time.monotonic()
            before, seconds = now, min(now - before, 2 * ROUND_S)  # a pause of this process does not count
            if found := self._found(seconds):
                store = self._store if self.hears() else None
                if store and not self._verdict:
                    with contextlib.suppress(Exception):
                        store.compare_set("verdict", "none", found)
                verdict, *ranks = found.split()
                return self._end([int(r) for r in ranks], verdict == HANGS, len(_waits) > 0, store)

    def hears(self) -> bool:
        """Whether the store answers."""
        return self._silent_s < 3 * ROUND_S

    def _found(self, seconds: float) -> str:
        """What is wrong: ENDED and the ranks that have ended, HANGS, or ""."""
        self._silent_s += seconds
        longest = _longest_wait(seconds)
        if self._verdict:
            return self._verdict
        if self.hears():
            for peer in self._peers.values():
                peer.silent_s += seconds
            if gone := [peer.rank for peer in self._peers.values() if peer.has_ended(self._rounds)]:
                return f"{ENDED} {' '.join(map(str, gone))}"
        elif self._served_by_first and self.rank > 0:  # process 0 has ended; perhaps all is done
            patience = SILENT_S if self._first.pid is None else 3 * ROUND_S
            if longest > patience and (self._first.pid is None or is_gone(self._first.pid)):
                return f"{ENDED} 0"
        return HANGS if longest > self.timeout_s + LATER_S else ""


def _longest_wait(seconds: float) -> float:
    """Add the seconds to all waits that are not over, forget the others; returns the longest wait."""
    for wait in list(_waits):
        use_device, is_over, _ = wait
        with contextlib.suppress(Exception):  # a broken device: the main thread gets the error too
            use_device()
            if not is_over():
                wait[2] += seconds
                continue
        _waits.remove(wait)
    return max((wait[2] for wait in _waits), default=0.0)


def place_of_main_thread() -> str:
    """Where in the code the main thread is: its last three calls, ready to print."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    return "".join(traceback.format_stack(frame)[-3:]) if frame else ""
