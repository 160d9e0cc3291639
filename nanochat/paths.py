"""Paths that a person gave: an empty one, an unknown ~user and a special file are refused here."""

import stat
from pathlib import Path

from nanochat import UserError


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


def special_kind(path: Path) -> str:
    """What a path is if it is no regular file, else "". Raises OSError if there is nothing or a broken link.

    Such a file is no input: a pipe may wait for ever, and a device may never end.
    """
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        return ""
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
