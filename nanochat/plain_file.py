"""Writing files. A link or a pipe with the name of a run's file is refused: the folder may come from a
stranger, and a run that goes on in it must not write outside of it."""

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path


def open_plain(path, flags: int, mode: int = 0o666) -> int:
    """os.open for a regular file; OSError for a symbolic link, a pipe or a device."""
    for more in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):  # without O_NONBLOCK, opening a pipe would wait
        flags |= getattr(os, more, 0)
    try:
        fd = os.open(path, flags, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            raise _refusal(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _refusal(path)
    return fd


@contextlib.contextmanager
def replacing(path: Path):
    """A file, open for bytes, that takes the place of `path` when the block ends, and never if it fails.
    Raises OSError if the folder cannot be written."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide it from other users
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _refusal(path) -> OSError:
    return OSError(errno.EINVAL, "it is a link, a pipe or a device and no file; remove it", str(path))
