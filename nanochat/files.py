"""Paths that a person gave, and files that a run writes.

A path that is empty or names an unknown ~user is refused. So is a link or a pipe in the place of a run's
file: the folder may come from a stranger, and a run that resumes in it must not write outside of it.
"""

import contextlib
import errno
import os
import shutil
import signal
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from nanochat import UserError

STALE_S = 86_400  # seconds; a temporary folder that has not changed for so long is left from a kill
_unfinished: set[Path] = set()  # the paths of `temporary` now


def user_path(setting: str, value: str | Path) -> Path:
    """The path in the value of a setting, with `~` expanded. Raises UserError if it cannot be a path.

    An empty text would mean the current folder; it often comes from a shell variable that is not set.
    """
    text = str(value)
    if not text.strip() or "\0" in text:
        what = "an empty path" if not text.strip() else f"an impossible path, {text!r}"
        raise UserError(f"--{setting} has {what}; name a file or folder")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(
            f"--{setting}={text} begins with a user who is unknown here; give the path without ~"
        ) from error


def open_plain(path, flags: int, mode: int = 0o666) -> int:
    """os.open for a regular file; OSError for a symbolic link, a pipe or a device."""
    refusal = OSError(errno.EINVAL, "it is a link, a pipe or a device, not a file; remove it", str(path))
    for more in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):  # without O_NONBLOCK, opening a pipe would wait
        flags |= getattr(os, more, 0)
    try:
        fd = os.open(path, flags, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            raise refusal from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise refusal
    return fd


def remove_unfinished(*paths: Path):
    """Remove temporary files and folders; without paths all of this process, which is about to end."""
    for path in paths or tuple(_unfinished):
        with contextlib.suppress(OSError):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


@contextlib.contextmanager
def temporary(path: Path) -> Iterator[Path]:
    """A path that the block may make. Nothing has this name afterwards, also if SIGTERM or SIGHUP ends the
    process; after SIGKILL it stays."""

    def end(number, frame):
        remove_unfinished()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    in_main_thread = threading.current_thread() is threading.main_thread()  # the one that may set handlers
    ours = [n for n in numbers if in_main_thread and signal.getsignal(n) == signal.SIG_DFL]
    _unfinished.add(path)
    try:
        for number in ours:
            signal.signal(number, end)
        yield path
    finally:
        remove_unfinished(path)
        _unfinished.discard(path)
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def temporary_folder(parent: str | Path | None = None) -> Iterator[Path]:
    """A new folder in `parent`, by default among the system's temporary files; it ends as in `temporary`."""
    with temporary(Path(tempfile.mkdtemp(prefix="nanochat-", dir=parent))) as folder:
        yield folder


@contextlib.contextmanager
def replacing(path: str | Path, sync: bool = False):
    """A file, open for bytes, that takes the place of `path` when the block ends, and never if it fails.

    At any moment `path` holds all of its old content or all of the new one. A link there is replaced, not
    followed. sync: the new content is on disk before it gets the name. SIGKILL leaves a file named
    `.tmp-...`. Raises OSError, of a folder, pipe or device in its place before the block begins.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_symlink():  # /dev/null would become a file
        raise OSError(errno.EINVAL, "it is a folder, a pipe or a device, not a file", str(path))
    with temporary(path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")) as new:
        with open(new, "xb") as file:  # x: fails where something has this name, be it a link
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(new, path)


@contextlib.contextmanager
def building(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`: fill it, and rename it to `folder` when it is complete. It goes if
    the block ends without that. What SIGKILL has left beside `folder` goes after a day. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".nanochat-*-{'[0-9a-f]' * 32}"):  # as no person calls a folder
        with contextlib.suppress(OSError):
            newest = max(entry.stat().st_mtime for entry in (left, *left.iterdir()))
            if time.time() - newest > STALE_S:
                shutil.rmtree(left, ignore_errors=True)
    with temporary(folder.with_name(f".nanochat-{folder.name}-{uuid.uuid4().hex}")) as new:
        new.mkdir()
        yield new


def write_whole(path: str | Path, content: bytes):
    """Replace a file of a run by these bytes at once. Raises UserError if it cannot be written."""
    try:
        with replacing(path, sync=True) as file:
            file.write(content)
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}); make room or choose another --out_dir"
        ) from error
