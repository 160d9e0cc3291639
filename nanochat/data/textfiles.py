"""Documents out of files that people have: .txt .md .py .json .jsonl .jsonl.gz .parquet, read as a stream.

A text file of up to LONG_TEXT characters is one document. A longer one is cut into several: each has at least
PIECE characters and ends at the next blank line, or where there is none within another PIECE at the next end
of a line, or else after 2 * PIECE; put together again they are the file. A .json file is one object or text,
or a list of these; a .jsonl file has one a line. An object's text is in its field `text_field`.
"""

import codecs
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from nanochat import UserError
from nanochat.data.parquet import first_line, open_shard

LONG_TEXT = 1 << 16
PIECE = 1 << 13
CHUNK = 1 << 20  # bytes read at once
LONGEST_ITEM = 1 << 27  # bytes of one JSON value: all of it must be in memory

_BLANK = re.compile(r"[ \t\n\r]*")


def find_files(setting: str, value: str | Path) -> tuple[list[Path], int]:
    """The files that a path, or several with commas between, means, sorted; and how many others lie there.

    Hidden files and folders are passed over. UserError where a path does not exist or has nothing for us.
    """
    parts = [str(value)] if os.path.exists(Path(value).expanduser()) else str(value).split(",")
    found: dict[Path, None] = {}
    others = 0
    for part in parts:
        path = Path(part.strip()).expanduser()
        if not os.path.exists(path):
            raise UserError(
                f"{setting}={path} does not exist or may not be read; give a file or folder of text"
            )
        files = _walk(path) if path.is_dir() else [path]
        known = [file for file in files if _reader(file)]
        others += len(files) - len(known)
        found.update(dict.fromkeys(known))
    if not found:
        raise UserError(
            f"{setting}={value} has none of the files that can be read; "
            f"give {' '.join(READERS)} files or a folder with some"
        )
    return list(found), others


def _walk(folder: Path) -> list[Path]:
    """All files under a folder but hidden ones, sorted."""

    def fail(error: OSError):
        raise UserError(
            f"the folder {error.filename} cannot be read ({error.strerror}); change its permissions"
        )

    files = []
    for root, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(root, name) for name in names if not name.startswith(".")]
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def _reader(path: Path) -> Callable | None:
    return next((reader for suffix, reader in READERS.items() if path.name.lower().endswith(suffix)), None)


def read_documents(path: Path, text_field: str, advance: Callable[[int], None]) -> Iterator[str]:
    """The documents of a file; `advance(n)` is called as n more of its bytes are read.

    Any error in it is a UserError with the file and the line or byte.
    """
    try:
        with open(path, "rb") as file:
            at = 0
            for text in _reader(path)(path, file, text_field):
                if (now := file.tell()) > at:
                    advance(now - at)
                    at = now
                yield text
            advance(max(0, file.seek(0, 2) - at))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or first_line(error)}); repair or remove it"
        ) from error


def _read_text(path: Path, file: BinaryIO, text_field: str) -> Iterator[str]:
    decode = _decoder(path)
    waiting, long, chunk = "", False, b"..."
    while chunk:
        chunk = file.read(CHUNK)
        waiting += decode(chunk, not chunk)
        long = long or len(waiting) > LONG_TEXT
        start = 0
        while long and len(waiting) - start > 2 * PIECE:
            end = _cut(waiting, start)
            yield waiting[start:end]
            start = end
        waiting = waiting[start:]
    yield waiting


def _cut(text: str, start: int) -> int:
    """Where the piece that begins at `start` ends; there are more than 2 * PIECE characters."""
    least, most = start + PIECE, start + 2 * PIECE
    for mark in ("\n\n", "\n"):
        at = text.find(mark, least - len(mark), most)
        if at >= 0:
            return at + len(mark)
    return most


def _decoder(path: Path) -> Callable[[bytes, bool], str]:
    """Decodes a file chunk by chunk, without a byte-order mark, all ends of lines as \\n."""
    utf8 = codecs.getincrementaldecoder("utf-8-sig")()
    lines = io.IncrementalNewlineDecoder(None, translate=True)
    taken = 0

    def decode(chunk: bytes, final: bool) -> str:
        nonlocal taken
        held = len(utf8.getstate()[0])
        try:
            text = utf8.decode(chunk, final)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} is not UTF-8 at byte {taken - held + error.start} ({error.reason}); "
                "convert it or remove it"
            ) from error
        taken += len(chunk)
        return lines.decode(text, final)

    return decode


# -- JSON


def _read_jsonl(path: Path, file: BinaryIO, text_field: str) -> Iterator[str]:
    number = 0
    try:
        while line := file.readline(LONGEST_ITEM):
            number += 1
            if len(line) == LONGEST_ITEM:
                raise UserError(f"{path}:{number} is longer than {LONGEST_ITEM:,} bytes; split it up")
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.isspace():
                yield _text_of(_parse(line, f"{path}:{number}"), text_field, f"{path}:{number}")
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(
            f"{path} is damaged or incomplete after line {number} ({first_line(error)}); get it again"
        ) from error


def _read_gzip(path: Path, file: BinaryIO, text_field: str) -> Iterator[str]:
    with gzip.GzipFile(fileobj=file) as lines:
        yield from _read_jsonl(path, io.BufferedReader(lines, CHUNK), text_field)


def _parse(line: bytes, place: str):
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place} is not UTF-8 at byte {error.start} of the line ({error.reason}); convert it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is no JSON ({_reason(error)}); correct the line or remove it") from error


def _text_of(value, text_field: str, place: str) -> str:
    """The text of a JSON value: itself, or what its field holds (null is empty)."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise UserError(f"{place} holds {type(value).__name__}, not text or an object; correct it")
    if text_field not in value:
        there = ", ".join(map(str, value))[:200]
        raise UserError(
            f"{place} has no field `{text_field}` (it has {there}); name the field with --text_field"
        )
    text = value[text_field]
    if text is not None and not isinstance(text, str):
        raise UserError(
            f"{place} has {type(text).__name__}, not text, in the field `{text_field}`; correct it, or name "
            "another field with --text_field"
        )
    return text or ""


def _read_json(path: Path, file: BinaryIO, text_field: str) -> Iterator[str]:
    """A list is read item by item: the buffer holds the one that is being read and little more."""
    items = _JsonItems(path, file)
    if items.peek() != "[":
        value, place = items.next_value()
        yield _text_of(value, text_field, place)
    else:
        items.skip()
        mark = items.peek()
        while mark != "]":
            value, place = items.next_value()
            yield _text_of(value, text_field, place)
            mark = items.peek()
            if mark not in (",", "]"):
                raise items.error("a comma or ] is missing")
            if mark == ",":
                items.skip()
                items.peek()
        items.skip()
    if items.peek():
        raise items.error("more follows after its end")


class _JsonItems:
    """A text of which as much is in memory as is needed for the next value."""

    def __init__(self, path: Path, file: BinaryIO):
        self._path, self._file = path, file
        self._decode = _decoder(path)
        self._text, self._at, self._line = "", 0, 1
        self._ended = False

    def peek(self) -> str:
        """The next character that is not blank; "" at the end."""
        while True:
            self._pass(_BLANK.match(self._text, self._at).end())
            if self._at < len(self._text) or not self._more(CHUNK):
                return self._text[self._at : self._at + 1]

    def skip(self) -> None:
        self._at += 1

    def next_value(self) -> tuple:
        """The value that begins here and its place; until it is complete, each time twice as much is read."""
        place = f"{self._path}:{self._line}"
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                size = len(self._text) - self._at
                if (
                    size > LONGEST_ITEM
                    or isinstance(error, RecursionError)
                    or not self._more(max(CHUNK, size))
                ):
                    raise UserError(
                        f"{place} begins no whole JSON value ({_reason(error)}); correct the file"
                    ) from error
            else:
                self._pass(end)
                return value, place

    def error(self, reason: str) -> UserError:
        return UserError(f"{self._path}:{self._line} is no JSON ({reason}); correct the file")

    def _pass(self, to: int) -> None:
        self._line += self._text.count("\n", self._at, to)
        self._at = to

    def _more(self, size: int) -> bool:
        chunk = b"" if self._ended else self._file.read(size)
        if self._ended:
            return False
        self._ended = not chunk
        self._text = self._text[self._at :] + self._decode(chunk, self._ended)
        self._at = 0
        return True


def _reason(error: Exception) -> str:
    return getattr(error, "msg", None) or first_line(error)


def _read_parquet(path: Path, file: BinaryIO, text_field: str) -> Iterator[str]:
    parquet = open_shard(path, text_field)
    rows = 0
    try:
        for batch in parquet.iter_batches(1024, columns=[text_field], use_threads=False):
            texts = batch.column(0).to_pylist()
            rows += len(texts)
            yield from (text or "" for text in texts)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged after row {rows} ({first_line(error)}); get it again") from error


READERS: dict[str, Callable[[Path, BinaryIO, str], Iterator[str]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".py": _read_text,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_gzip,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
