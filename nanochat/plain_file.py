"""Opening a file of a run's folder to write: a link or a pipe with its name is refused. A folder may come
from a stranger, and a run that goes on in it must not write outside of it."""

import errno
import os
import stat


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


def _refusal(path) -> OSError:
    return OSError(errno.EINVAL, "it is a link, a pipe or a device and no file; remove it", str(path))
