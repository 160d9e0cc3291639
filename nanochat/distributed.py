"""Several processes as one run: they join, take turns, and end together, with the first cause named.

What ends when: a process that raises or is killed ends the others within seconds, as their next exchange with
it fails; one that hangs, when the others have waited for `timeout_s`. torchrun, which reports the first
failure, then gives processes that do not answer 30 seconds more.
"""

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
import traceback as traceback_module
from datetime import timedelta

import torch.distributed as dist

from nanochat import UserError

GRACE_S = 3.0  # in which processes that wait for each other find out who does not
FINISH_S = 20.0  # in which what was begun before may end, a save above all; torchrun kills after 30

_to_finish = []  # functions of a time limit in seconds


def before_end(finish):
    """Have finish(seconds) called before an exception ends this process and the others."""
    _to_finish.append(finish)


def join(backend: str, timeout_s: float, **options) -> dist.Store:
    """Join the process group that torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, ...) describe.

    Returns the store through which processes find each other; it knows no time limit of ours. From here on
    an exception ends all processes, see `_end_together`.
    """
    try:
        store, rank, world_size = next(dist.rendezvous("env://"))
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"this process cannot join the others ({error}); start them with torchrun, or set RANK, "
            "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        ) from error
    store = dist.PrefixStore("nanochat", store)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        **options,
    )
    previous = sys.excepthook

    def hook(kind, error, trace):
        _end_together(previous, store, rank, world_size, timeout_s, kind, error, trace)

    sys.excepthook = hook
    return store


def wait_for(store: dist.Store, key: str, given_up=lambda: ""):
    """Wait, for hours if need be, until some process has done store.set(key, ...).

    SystemExit with status 0 where given_up() is not empty: the name of a signal to stop.
    """
    while not store.check([key]):
        if name := given_up():
            print(f"stopped by {name} while another process prepares the data", file=sys.stderr)
            sys.exit(0)
        time.sleep(0.05)


def _end_together(previous, store, rank, world_size, timeout_s, kind, error, trace):
    """What becomes of an exception that nobody caught: say who failed first, then end at once.

    A process whose exchange with the others failed is not the cause. It leaves a mark and looks who has
    left none: that one is dead or hangs. It also leaves time for torchrun to see that one first.
    """
    if isinstance(error, (UserError, KeyboardInterrupt)) or not _is_exchange(error):
        _report_to_torchrun(error)
        if isinstance(error, UserError):
            _say_once(store, rank, error)
        previous(kind, error, trace)  # a UserError exits here
    else:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        traceback_module.print_exception(kind, error, trace, limit=-3, file=sys.stderr)
        missing = _without_mark(store, rank, world_size)
        who = f"process {', '.join(map(str, missing))}" if missing else "the other processes"
        sentence = f"process {rank}: no answer from {who}"
        if "imed out" in str(error) or "imeout" in str(error):
            sentence += f" for {timeout_s:.0f} s: it hangs, or it is far slower than this one"
        else:
            sentence += ": it has ended, and its own message says why"
        print(f"error: {sentence}; all end, and the newest checkpoint is good", file=sys.stderr)
    for finish in _to_finish:
        with contextlib.suppress(Exception):  # the first cause is said, and nothing else shall be
            finish(FINISH_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # threads and destructors of a broken process group may wait for ever


def _say_once(store, rank, error):
    """Print the sentence of a process that is not the first of its machine, whose own is printed in any case,
    unless one of those has the same."""
    key = f"said/{hashlib.sha256(str(error).encode()).hexdigest()}"
    with contextlib.suppress(Exception):  # the process that held the store has ended
        if os.environ.get("LOCAL_RANK", "0") == "0":
            store.set(key, "")
            return
        time.sleep(1)
        if store.check([key]):
            return
    print(f"error: process {rank}: {error}", file=sys.stderr, flush=True)


def _is_exchange(error) -> bool:
    """Whether torch.distributed raised it; gloo's errors are plain RuntimeErrors."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text or "Connection" in text)
    )


def _without_mark(store, rank, world_size) -> list[int]:
    """Ranks that have not come here within GRACE_S; empty where the store is gone too."""
    try:
        store.set(f"waited/{rank}", "")
        time.sleep(GRACE_S)
        return [r for r in range(world_size) if not store.check([f"waited/{r}"])]
    except Exception:  # the process that held it was the one that ended
        time.sleep(GRACE_S)
        return []


def _report_to_torchrun(error):
    """Leave the message where torchrun looks for it: a UserError's sentence alone, else the traceback."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        trace = [str(error)] if isinstance(error, UserError) else traceback_module.format_exception(error)
        extra = {"py_callstack": "".join(trace), "timestamp": str(int(time.time()))}
        message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as f:
            json.dump({"message": message}, f)
