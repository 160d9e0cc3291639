"""A run's folder: who may write in it, which checkpoints stand in it, what goes and what stays."""

import errno
import json
import os
import platform
import re
import shutil
import sys
import time
import uuid
from pathlib import Path

from nanochat import UserError
from nanochat.checkpoint import files as io

LOCK = ".lock"
STEP = re.compile(r"(?:\.old-)?step_(\d{6,})")  # .old-: being replaced, good until its successor is there


def checkpoints_in(out_dir):
    """{step: folder} of what is there, good or not."""
    try:
        names = sorted(os.listdir(out_dir))  # .old-step_N stands before step_N, which wins
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as e:
        raise UserError(f"cannot read {out_dir} ({io.reason(e)})") from e
    return {int(match[1]): Path(out_dir) / name for name in names if (match := STEP.fullmatch(name))}


def changes(found, identity, accept=""):
    """Names of what differs between `identity`, {name: value} of this run, and that of the checkpoint
    `found`.

    UserError that lists them with both values, unless every one is named in `accept` (comma between). Another
    model is never accepted.
    """
    accepted, then = {name.strip() for name in accept.split(",")} - {""}, found.state["identity"]
    possible = identity.keys() - {"model"}
    if unknown := sorted(accepted - possible):
        raise UserError(f"accept cannot name {', '.join(unknown)}; it takes {', '.join(sorted(possible))}")
    changed = [name for name in identity if then.get(name) != identity[name]]
    if refused := [name for name in changed if name not in accepted]:
        listed = "; ".join(f"{name} was {then.get(name)}, is {identity[name]}" for name in refused)
        other = "" if "model" in refused else f", or go on all the same with --accept={','.join(refused)}"
        raise UserError(
            f"{found.path} is from another run: {listed}. Go back to its settings, or start anew with "
            f"--resume=never or another --model_tag{other}"
        )
    return changed


def lock_folder(out_dir, say=print):
    """Make `out_dir` if need be, lock it, and clear away what a killed run left half done; returns the Lock.

    Held until close() or the end of the process. UserError if another live process holds it (a dead one's is
    taken over), or if the folder cannot be made or written to.
    """
    out_dir, lock = Path(out_dir), None
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        lock = Lock(out_dir / LOCK)
        if lock.exclusive:  # clear away first: it may be what fills the disk
            restore_replaced(out_dir)
            remove_temporary(out_dir)
        else:
            say(f"warning: the file system of {out_dir} has no locks; let no other run write there")
        lock.sign()
        return lock
    except BlockingIOError as e:
        raise UserError(
            f"{out_dir} is in use by {e}; wait for it, or choose another --model_tag or --out_dir"
        ) from None
    except OSError as e:
        if lock:
            lock.close()
        raise UserError(
            f"cannot write to {out_dir} ({io.reason(e)}); make room, or choose a folder that you can "
            "write to with --out_dir, --base_dir or the variable NANOCHAT_BASE_DIR"
        ) from e


def check_shared(out_dir, machine):
    """A token that all processes of a run share and no other run has. Every process calls this.

    UserError where some of them do not see what the first one writes to `out_dir`.
    """
    token = machine.all_gather(uuid.uuid4().hex)[0]
    if machine.world_size > 1:
        note = Path(out_dir) / f".tmp-{token}"
        if machine.is_main:
            note.mkdir()
        machine.all_gather(None)  # it is there
        see = machine.all_gather(note.is_dir())
        if machine.is_main:
            note.rmdir()
        if blind := [rank for rank, sees in enumerate(see) if not sees]:
            raise UserError(
                f"process {', '.join(map(str, blind))} does not see what process 0 writes to {out_dir}; "
                "use an --out_dir on a file system that all machines share"
            )
    return token


def prune(out_dir, keep, permanent_every=-1, say=print):
    """Delete old checkpoints: all but the `keep` newest and those of every `permanent_every`-th step (-1:
    none).

    keep <= 0 keeps all. Never raises for a deletion that fails: that is said, and training goes on.
    """
    steps = checkpoints_in(out_dir)
    passing = [step for step in sorted(steps) if permanent_every <= 0 or step % permanent_every]
    for step in passing[:-keep] if keep > 0 else []:
        if e := io.attempt(io.remove, steps[step]):
            say(f"could not delete the old checkpoint of step {step} ({io.reason(e)}); training goes on")


def set_aside(out_dir, after=None):
    """Move what an old run left in `out_dir` to the first free `<out_dir>.old-N`; returns that, or None.

    With `after` only the checkpoints beyond that step go: going on from an earlier one makes another history,
    and a damaged one must not count as the newest. Newest first: a kill in between leaves a shorter run.
    """
    out_dir = Path(out_dir).resolve()
    steps = checkpoints_in(out_dir)
    moving = [steps[s] for s in sorted(steps, reverse=True) if after is None or s > after]
    if after is None and out_dir.is_dir():
        moving += [p for p in sorted(out_dir.iterdir()) if p not in moving and p.name != LOCK]
    if not moving:
        return None
    n = 1
    while (target := out_dir.with_name(f"{out_dir.name}.old-{n}")).exists():
        n += 1
    try:
        target.mkdir()
        for path in moving:
            os.rename(path, target / path.name)
    except OSError as e:
        raise UserError(
            f"cannot set {out_dir} aside as {target} ({io.reason(e)}); move it or choose another --out_dir"
        ) from e
    return target


def remove_temporary(out_dir, keep=None):
    """What a killed or failed save or deletion left. Only for the holder of the lock."""
    for stale in out_dir.glob(".tmp-*"):
        if stale != keep:
            io.attempt(shutil.rmtree, stale)


def restore_replaced(out_dir):
    """After a kill between the two renames of `_publish`: the old one gets its name back, or is removed."""
    for old in out_dir.glob(".old-step_*"):
        final = out_dir / old.name.removeprefix(".old-")
        io.attempt(io.remove, old) if final.exists() else io.attempt(os.rename, old, final)


# The lock

_held = set()  # file descriptors, open and locked until close() or the end of the process


class Lock:
    """A folder held by this process. close() gives it back, and so does the kernel when the process dies.

    Raises BlockingIOError, naming the holder, if another process has it.
    """

    def __init__(self, path):
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self.exclusive = _lock(self.fd)  # False: the file system knows no locks
        except OSError as e:
            holder = _holder(self.fd)
            os.close(self.fd)
            if e.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
                raise BlockingIOError(holder) from e
            raise
        _held.add(self.fd)

    def sign(self):
        """Say in the file who holds it: for the next one's error message, the lock does not depend on it."""
        holder = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.truncate(self.fd, 0)
        os.write(self.fd, io.to_json(holder))

    def close(self):
        if self.fd in _held:
            _held.discard(self.fd)
            os.close(self.fd)


def _let_go():
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):  # a forked worker that outlives us must not hold what we held
    os.register_at_fork(after_in_child=_let_go)


def _lock(fd):
    """Take the lock at once or raise an OSError; False if this file system knows no locks."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(fd, 1 << 30, os.SEEK_SET)  # far behind the text, which others shall be able to read
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
            os.lseek(fd, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            return False
        raise
    return True


def _holder(fd):
    try:
        os.lseek(fd, 0, os.SEEK_SET)
        holder = json.loads(os.read(fd, 4096))
        return f"process {holder['pid']} on host {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
