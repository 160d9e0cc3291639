"""Reads the documents of .txt .md .py .json .jsonl .jsonl.gz and .parquet files as a stream.

A text file of up to LONG_TEXT characters is one document. A longer one is cut into sections, each of them a
document; together they are the whole file. A section ends at the first blank line after SECTION characters,
else at the first end of a line there, but always after 2 * SECTION; only the last one may be shorter than
SECTION. A .json file is one object, one text, or a list of them; a .jsonl file has one of them a line. The
text of an object is in its field `text_field`. A .json file is read as a whole, all others in parts.
"""

import codecs
import contextlib
import gzip
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from nanochat import UserError
from nanochat.data.parquet import open_shard, values_in
from nanochat.files import user_path
from nanochat.terminal import first_line

LONG_TEXT = 1 << 16  # characters
SECTION = 1 << 13  # characters
CHUNK = 1 << 20  # characters read at once
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".jsonl.gz", ".json", ".parquet")


def find_files(setting: str, value: str | Path) -> tuple[list[Path], int]:
    """The readable files at the paths of a setting, and how many files of other kinds are there.

    `value` is a file, a folder, or several with commas between them. The files of a folder are sorted; links
    are followed, hidden files and folders are left out. Raises UserError if a path does not exist, if no file
    can be read, or if one is a pipe, a device or a broken link.
    """
    found: dict[Path, None] = {}
    others = 0
    for path in (user_path(setting, part) for part in paths_of(setting, value)):
        if not os.path.exists(path):
            raise UserError(
                f"{setting}={path} does not exist or may not be read; give a file or folder of text"
            )
        files = _walk(path) if path.is_dir() else [path]
        known = [file for file in files if file.name.lower().endswith(SUFFIXES)]
        if special := next((file for file in known if not file.is_file()), None):
            raise UserError(
                f"{special} is a pipe, a device or a broken link; remove it, or write its text to a file"
            )
        others += len(files) - len(known)
        found.update(dict.fromkeys(known))
    if not found:
        raise UserError(
            f"{setting}={value} has no file that can be read; "
            f"give {' '.join(SUFFIXES)} files or a folder with some"
        )
    return list(found), others


def paths_of(setting: str, value: str | Path) -> list[str]:
    """The paths of a setting: with commas between them, unless the whole is one path."""
    whole = os.path.exists(user_path(setting, value))
    return [str(value)] if whole else [part.strip() for part in str(value).split(",")]


def set_names(paths: list[str]) -> list[str]:
    """A name for each validation set, such as "chats" for data/chats.jsonl; "" for the first one."""
    names = [""]
    for path in paths[1:]:
        name = re.sub(r"[^\w-]+", "_", Path(path.rstrip("/")).name.split(".")[0])[:40] or "set"
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        names.append(next(one for one in itertools.chain([name], numbered) if one not in names))
    return names


def _walk(folder: Path) -> list[Path]:
    """All files in a folder and its folders, sorted, without hidden ones."""

    def fail(error: OSError):
        raise UserError(
            f"the folder {error.filename} cannot be read ({error.strerror}); change its permissions"
        )

    files, entered = [], set()
    for root, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        if (place := os.path.realpath(root)) in entered:  # a link may lead to a folder that contains it
            folders.clear()
            continue
        entered.add(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [Path(root, name) for name in names if not name.startswith(".")]
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file, open for bytes. An error in reading it becomes a UserError that names it."""
    try:
        with open(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:  # a damaged .gz raises any of these
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"{path} cannot be read ({reason}); repair it or get it again") from error


def read_documents(path: Path, text_field: str, advance: Callable[[int], None]) -> Iterator[str]:
    """The documents of a file. `advance(n)` is called after n more of its bytes have been read.

    Raises UserError with the file, and the line if it has lines, if something in it cannot be read.
    """
    suffix, done = path.suffix.lower(), 0
    with opened(path) as file:
        if suffix == ".parquet":
            shard = open_shard(path, text_field)
            texts = (text or "" for text in values_in(path, shard, text_field))
        elif suffix in (".json", ".jsonl", ".gz"):
            texts = (_text_of(value, text_field, place) for value, place in json_values(path, file))
        else:
            texts = _sections(path, file)
        for text in texts:
            if (now := file.tell()) > done:
                advance(now - done)
                done = now
            yield text
        advance(max(0, file.seek(0, 2) - done))


def _sections(path: Path, file: BinaryIO) -> Iterator[str]:
    """The sections of a text file, without a byte-order mark; every line ends in \\n."""
    reader = io.TextIOWrapper(file, "utf-8-sig")
    waiting, long, chunk = "", False, "..."
    while chunk:
        try:
            chunk = reader.read(CHUNK)
        except UnicodeDecodeError as error:
            raise _not_utf8(path, error) from error
        waiting += chunk
        long = long or len(waiting) > LONG_TEXT
        if long:
            *whole, waiting = cut(waiting, SECTION)
            yield from whole
    reader.detach()  # else its end would close the file
    yield waiting


def cut(text: str, size: int) -> list[str]:
    """The pieces of a text, which together are the text: each has `size` to 2 * size characters, and the last
    one at most 2 * size."""
    pieces, start = [], 0
    while len(text) - start > 2 * size:
        end = start + 2 * size
        for mark in ("\n\n", "\n"):
            if (found := text.find(mark, start + size - len(mark), end)) >= 0:
                end = found + len(mark)
                break
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _not_utf8(path: Path, error: UnicodeDecodeError) -> UserError:
    """The error of a text file, with the line. The decoder's own error counts from the start of a chunk."""
    number = 1
    with open(path, "rb") as file, contextlib.suppress(UnicodeDecodeError):
        for line in file:
            line.decode()
            number += 1
    return UserError(f"{path}:{number} is not UTF-8 ({error.reason}); convert it or remove it")


def json_values(path: Path, file: BinaryIO, bad: list[str] | None = None) -> Iterator[tuple[object, str]]:
    """(value, its place) of each line of a .jsonl file that is not blank, or of each item of a .json file.

    A line that is no JSON adds a sentence to `bad`; without that list it raises UserError.
    """
    if path.suffix.lower() == ".json":
        values = _parsed(file.read(), str(path))
        for number, value in enumerate(values if isinstance(values, list) else [values], start=1):
            yield value, f"{path}, item {number}"
        return
    lines = file
    if path.suffix.lower() == ".gz":  # GzipFile's own lines take twice the time
        lines = io.BufferedReader(gzip.GzipFile(fileobj=file), CHUNK)
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        place = f"{path}:{number}"
        try:
            value = _parsed(line, place)
        except UserError as error:
            if bad is None:
                raise
            bad.append(str(error))
        else:
            yield value, place


def _parsed(content: bytes, place: str):
    try:
        return json.loads(content.removeprefix(codecs.BOM_UTF8).decode())
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{place} is not UTF-8 in line {line} ({error.reason}); convert it") from error
    except json.JSONDecodeError as error:
        at = f"{error.msg}: line {error.lineno}, column {error.colno}"
        lines = error.msg == "Extra data" and error.lineno > 1
        more = ", or name it .jsonl if each line is JSON" if lines else ""
        raise UserError(f"{place} is not JSON ({at}); correct or remove it{more}") from error
    except (ValueError, RecursionError) as error:  # a number with too many digits, too many brackets
        raise UserError(f"{place} is not JSON ({first_line(error)}); correct or remove it") from error


def _text_of(value, text_field: str, place: str) -> str:
    """The text of a JSON value: the value itself, or its field `text_field` (null is an empty text)."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise UserError(f"{place} holds {type(value).__name__}, not text or an object; correct it")
    if text_field not in value:
        fields = ", ".join(map(str, value))[:200]
        raise UserError(
            f"{place} has no field `{text_field}` (it has {fields}); name the field with --text_field"
        )
    text = value[text_field]
    if text is not None and not isinstance(text, str):
        raise UserError(
            f"{place} has {type(text).__name__}, not text, in the field `{text_field}`; correct it, or name "
            "another field with --text_field"
        )
    return text or ""
