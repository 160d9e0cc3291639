"""A run's folder: which process may write in it, which checkpoints it holds, and which are deleted."""

import errno
import json
import os
import platform
import re
import shutil
import sys
import time
import uuid
from fnmatch import fnmatchcase
from pathlib import Path

from nanochat import UserError
from nanochat.checkpoint.files import attempt, reason, remove_folder, to_json
from nanochat.files import open_plain, temporary

LOCK = ".lock"
STEP = re.compile(r"(?:\.old-)?step_(\d{6,})")  # .old-: good until its successor is there
METRICS = "metrics.jsonl"
# What a run writes into its folder, beside checkpoints; base_eval writes there too
FILES = (
    METRICS, "config.json", "report.md", "report.html", "loss.png", "profile_[0-9]*.json.gz",
    "base_eval_[0-9]*.md", "base_eval_[0-9]*.json", "wandb", "tensorboard", ".tmp-*",
)  # fmt: skip


def checkpoints_in(out_dir):
    """{step: folder} of all checkpoints in a run's folder, unverified; empty if the folder does not exist."""
    try:
        names = sorted(os.listdir(out_dir))  # .old-step_N before step_N, which wins
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as e:
        raise UserError(f"cannot read {out_dir} ({reason(e)})") from e
    return {int(match[1]): Path(out_dir) / name for name in names if (match := STEP.fullmatch(name))}


def newest_in_words(out_dir):
    """What a message says of the checkpoints in a run's folder."""
    if steps := checkpoints_in(out_dir):
        return f"the newest checkpoint of step {max(steps)} is in {out_dir}"
    return f"{out_dir} has no checkpoint"


def lock_folder(out_dir, say=print):
    """Make `out_dir` if it does not exist, lock it, and clean up after a run that was killed; returns the
    Lock.

    The lock ends with close() or with the process. Raises UserError if another live process holds it, or if
    the folder cannot be made or written to.
    """
    out_dir, lock = Path(out_dir), None
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        lock = Lock(out_dir / LOCK)
        if lock.exclusive:  # clean up before the next write: the leftovers may be what fills the disk
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
            f"cannot write to {out_dir} ({reason(e)}); make room, or choose a folder that you can "
            "write to with --out_dir, --base_dir or the variable NANOCHAT_BASE_DIR"
        ) from e


def check_shared(out_dir, machine):
    """Check that every process sees what the first one writes to `out_dir`. Every process calls this.

    Returns the run id, a text that all processes of this run share and no other run has. Raises UserError,
    on every process, with the ranks of those that do not see the folder.
    """
    run_id = machine.all_gather(uuid.uuid4().hex)[0]
    if machine.world_size > 1:
        with temporary(Path(out_dir) / f".tmp-{run_id}") as note:
            if machine.is_main:
                note.mkdir()
            machine.all_gather(None)  # wait until it is there
            see = machine.all_gather(note.is_dir())
        if blind := [rank for rank, sees in enumerate(see) if not sees]:
            raise UserError(
                f"process {', '.join(map(str, blind))} does not see what process 0 writes to {out_dir}; "
                "use an --out_dir on a file system that all machines share"
            )
    return run_id


def prune(out_dir, keep, permanent_every=-1, say=print):
    """Delete old checkpoints; returns their steps. The `keep` newest stay (keep <= 0: all), and so does every
    checkpoint whose step is a multiple of `permanent_every` (-1: none).

    A deletion that fails does not end training: it goes to `say`.
    """
    steps = checkpoints_in(out_dir)
    passing = [step for step in sorted(steps) if permanent_every <= 0 or step % permanent_every]
    old = passing[:-keep] if keep > 0 else []
    for step in old:
        if e := attempt(remove_folder, steps[step]):
            say(f"could not delete the old checkpoint of step {step} ({reason(e)}); training goes on")
    return old


def make_room(out_dir, keep, permanent_every=-1, say=print, failed=False):
    """Before a save: if the disk has less room than the newest checkpoint takes, or if a save has `failed`,
    delete the checkpoints that `prune` would delete after the next save, but for the newest one."""
    steps = checkpoints_in(out_dir)
    if not steps or keep <= 0:
        return
    needed = sum(file.stat().st_size for file in steps[max(steps)].iterdir())
    full = failed or shutil.disk_usage(out_dir).free < needed
    if full and (gone := prune(out_dir, max(1, keep - 1), permanent_every, say)):
        say(f"the disk is full: deleted the checkpoint of step {', '.join(map(str, gone))} for the next one")


def set_aside(out_dir, after=None):
    """Move what an old run wrote into `out_dir` to the first free `<out_dir>.old-N`; returns that folder, or
    None if there was nothing to move. Other files stay.

    after: move only the checkpoints of later steps than this one. The newest moves first, so a kill leaves a
    shorter run without gaps. Raises UserError if a folder cannot be moved, or if files have names of a run's
    and there is no run.
    """
    out_dir = Path(out_dir).resolve()
    steps = checkpoints_in(out_dir)
    moving = [steps[s] for s in sorted(steps, reverse=True) if after is None or s > after]
    if after is None and out_dir.is_dir():
        names = [name for name in sorted(os.listdir(out_dir)) if any(fnmatchcase(name, f) for f in FILES)]
        if names and not steps and METRICS not in names:
            raise UserError(
                f"{out_dir} has {names[0]} but no {METRICS} and no checkpoint, so it is not a run's folder; "
                "choose another --out_dir, or move the file"
            )
        names.sort(key=METRICS.__eq__)  # the last to go: a kill leaves a folder that is still a run's
        moving += [out_dir / name for name in names]
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
        attempt(target.rmdir)  # if nothing is in it
        raise UserError(
            f"cannot set {out_dir} aside as {target} ({reason(e)}); move it or choose another --out_dir"
        ) from e
    return target


def remove_temporary(out_dir, which="*", keep=None):
    """Remove what killed or failed saves and deletions left. Only the holder of the lock may.

    which: a pattern; during a run the name of a file that is being written, such as a report, must not match.
    """
    for stale in out_dir.glob(f".tmp-{which}"):
        if stale != keep:
            attempt(shutil.rmtree if stale.is_dir() and not stale.is_symlink() else os.unlink, stale)


def restore_replaced(out_dir):
    """Undo or finish a replacement (`save_and_load._publish`) that was killed between its two renames."""
    for old in out_dir.glob(".old-step_*"):
        final = out_dir / old.name.removeprefix(".old-")
        attempt(remove_folder, old) if final.exists() else attempt(os.rename, old, final)


# The lock

_held = set()  # file descriptors; each stays open and locked until close() or the end of the process


class Lock:
    """A folder that this process holds. close() releases it; when the process dies, the kernel does.

    restarted: a torchrun started the holder before, and after a failure this process in its place. Raises
    BlockingIOError, with the holder as its message, if another process holds the folder.
    """

    def __init__(self, path):
        self.fd = open_plain(path, os.O_RDWR | os.O_CREAT)
        try:
            self.exclusive = _lock(self.fd)  # False: the file system has no locks
        except OSError as e:
            holder = _holder(self.fd)
            os.close(self.fd)
            if e.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
                raise BlockingIOError(holder) from e
            raise
        _held.add(self.fd)
        same_parent = f'"parent": "{_parent()}"'.encode() in os.read(self.fd, 4096)
        self.restarted = same_parent and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"

    def sign(self):
        """Write into the file who holds it: for another process's error message, and for `restarted`."""
        holder = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        holder["parent"] = _parent()
        os.truncate(self.fd, 0)
        os.lseek(self.fd, 0, os.SEEK_SET)
        os.write(self.fd, to_json(holder))

    def close(self):
        """Release the folder. A second call does nothing."""
        if self.fd in _held:
            _held.discard(self.fd)
            os.close(self.fd)


def _parent():
    return f"{os.getppid()} on {platform.node()}"


def _let_go():
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):  # a forked worker may outlive this process; it must not keep the lock
    os.register_at_fork(after_in_child=_let_go)


def _lock(fd):
    """Take the lock or raise an OSError, without waiting. False if this file system has no locks."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(fd, 1 << 30, os.SEEK_SET)  # far behind the text: other processes have to read that
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
