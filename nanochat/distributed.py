"""Several processes as one run: they join, wait for each other, and end together. The log names the cause.

When does the run end? If a process raises an exception or is killed, the next exchange of the others with it
fails, and they end within seconds. If a process hangs, the others end after waiting `timeout_s` seconds.
torchrun reports the first failure. It waits another 30 seconds for processes that do not answer.
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

GRACE_S = 3.0  # seconds in which the processes that wait find out which one does not
FINISH_S = 20.0  # seconds for work in progress, such as a save, to end; torchrun kills after 30

_to_finish = []  # functions that take a time limit in seconds


def before_end(finish):
    """Register finish(seconds): it is called before an exception ends this process and the others."""
    _to_finish.append(finish)


def join(backend: str, timeout_s: float, **options) -> dist.Store:
    """Join the process group that torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, ...) describe.

    Returns the store through which the processes find each other; waiting for a key in it has no time limit.
    From here on, an exception in one process ends all of them, see `_end_together`. Raises UserError if this
    process cannot join.
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
    """Wait until some process has called store.set(key, ...); there is no time limit.

    given_up: returns the name of a signal to stop, or "". With a name, this raises SystemExit with status 0.
    """
    while not store.check([key]):
        if name := given_up():
            print(f"stopped by {name} while another process prepares the data", file=sys.stderr)
            sys.exit(0)
        time.sleep(0.05)


def _end_together(previous, store, rank, world_size, timeout_s, kind, error, trace):
    """The last stop of an exception that nothing caught: name the cause, then end this process at once.

    If an exchange with the other processes failed, the cause is in another process. This one leaves a mark
    in the store and looks which processes leave none: those are dead or hang. The pause also lets torchrun
    see their failure first.
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
        with contextlib.suppress(Exception):  # the cause is printed; a later error would hide it
            finish(FINISH_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # threads and destructors of a broken process group may wait for ever


def _say_once(store, rank, error):
    """Print a UserError's sentence, unless the first process of a machine has the same one: that process
    prints its own in any case."""
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
    """Whether torch.distributed raised this error; gloo raises plain RuntimeErrors."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text or "Connection" in text)
    )


def _without_mark(store, rank, world_size) -> list[int]:
    """Ranks that have left no mark within GRACE_S; an empty list if the store is gone too."""
    try:
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
