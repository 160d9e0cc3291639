"""Reads the documents of .txt .md .py .json .jsonl .jsonl.gz and .parquet files as a stream.

A text file of up to LONG_TEXT characters is one document. A longer one is cut into sections, each of them a
document; together they are the whole file. A section ends at the first blank line after SECTION characters,
else at the first end of a line there, but always after 2 * SECTION; only the last one may be shorter than
SECTION. A .json file is one object, one text, or a list of them; a .jsonl file has one of them a line. The
text of an object is in its field `text_field`.
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
from nanochat.data.parquet import PYARROW_ERRORS, first_line, open_shard
from nanochat.files import special_kind, user_path

LONG_TEXT = 1 << 16  # characters
SECTION = 1 << 13  # characters
CHUNK = 1 << 20  # bytes read at once
LONGEST_ITEM = 1 << 27  # bytes of one JSON value, which must fit into memory

_BLANK = re.compile(r"[ \t\n\r]*")


def find_files(setting: str, value: str | Path) -> tuple[list[Path], int]:
    """The readable files at the paths of a setting, and how many files of other kinds are there.

    `value` is a file, a folder, or several with commas between them. The files of a folder are sorted; hidden
    files and folders are left out. Raises UserError if a path does not exist, if no file can be read, or
    if one of them is a pipe, a device or a broken link.
    """
    parts = [str(value)] if os.path.exists(user_path(setting, value)) else str(value).split(",")
    found: dict[Path, None] = {}
    others = 0
    for part in parts:
        path = user_path(setting, part.strip())
        if not os.path.exists(path):
            raise UserError(
                f"{setting}={path} does not exist or may not be read; give a file or folder of text"
            )
        files = _walk(path) if path.is_dir() else [path]
        known = [file for file in files if _reader(file)]
        for file in known:
            _check_regular(file)
        others += len(files) - len(known)
        found.update(dict.fromkeys(known))
    if not found:
        raise UserError(
            f"{setting}={value} has no file that can be read; "
            f"give {' '.join(READERS)} files or a folder with some"
        )
    return list(found), others


def _check_regular(file: Path) -> None:
    try:
        kind = special_kind(file)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); repair or remove it") from error
    if kind:
        raise UserError(f"{file} is {kind}, not a file; remove it, or write its text to a file")


def _walk(folder: Path) -> list[Path]:
    """All files in a folder and its folders, sorted, without hidden ones."""

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
    """The documents of a file. `advance(n)` is called after n more of its bytes have been read.

    Raises UserError with the file and the line or byte if something in it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            done = 0
            for text in _reader(path)(path, file, text_field):
                if (now := file.tell()) > done:
                    advance(now - done)
                    done = now
                yield text
            advance(max(0, file.seek(0, 2) - done))
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
        while long and len(waiting) - start > 2 * SECTION:
            end = _cut(waiting, start)
            yield waiting[start:end]
            start = end
        waiting = waiting[start:]
    yield waiting


def _cut(text: str, start: int) -> int:
    """The end of the section that begins at `start`; more than 2 * SECTION characters follow it."""
    least, most = start + SECTION, start + 2 * SECTION
    for mark in ("\n\n", "\n"):
        found = text.find(mark, least - len(mark), most)
        if found >= 0:
            return found + len(mark)
    return most


def _decoder(path: Path) -> Callable[[bytes, bool], str]:
    """decode(chunk, whether it is the last) -> text without a byte-order mark; every line ends in \\n."""
    utf8 = codecs.getincrementaldecoder("utf-8-sig")()
    lines = io.IncrementalNewlineDecoder(None, translate=True)
    taken = 0  # bytes of the chunks so far

    def decode(chunk: bytes, final: bool) -> str:
        nonlocal taken
        held = len(utf8.getstate()[0])  # bytes of a character whose end was not in the last chunk
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
    for line, place in jsonl_lines(path, file):
        yield _text_of(parse_line(line, place), text_field, place)


def jsonl_lines(path: Path, file: BinaryIO) -> Iterator[tuple[bytes, str]]:
    """(line, file:line) of each line that is not blank."""
    number = 0
    try:
        while line := file.readline(LONGEST_ITEM):
            number += 1
            if len(line) == LONGEST_ITEM:
                raise UserError(f"{path}:{number} is longer than {LONGEST_ITEM:,} bytes; split the line")
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.isspace():
                yield line, f"{path}:{number}"
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(
            f"{path} is damaged or incomplete after line {number} ({first_line(error)}); get it again"
        ) from error


def _read_gzip(path: Path, file: BinaryIO, text_field: str) -> Iterator[str]:
    yield from _read_jsonl(path, unzipped(file), text_field)


def unzipped(file: BinaryIO) -> BinaryIO:
    """The content of a .gz file that is open."""
    return io.BufferedReader(gzip.GzipFile(fileobj=file), CHUNK)


def parse_line(line: bytes, place: str):
    """The JSON value of a line. Raises UserError that names the place."""
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place} is not UTF-8 at byte {error.start} of the line ({error.reason}); convert it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({_reason(error)}); correct the line or remove it") from error


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


def _read_json(path: Path, file: BinaryIO, text_field: str) -> Iterator[str]:
    for value, place in json_values(path, file):
        yield _text_of(value, text_field, place)


def json_values(path: Path, file: BinaryIO) -> Iterator[tuple[object, str]]:
    """(value, file:line) of each item of a list, or of the one value that is no list.

    A list is read item by item, so memory holds one item and at most one more chunk.
    """
    items = _JsonItems(path, file)
    if items.peek() != "[":
        yield items.next_value()
    else:
        items.skip()
        mark = items.peek()
        while mark != "]":
            yield items.next_value()
            mark = items.peek()
            if mark not in (",", "]"):
                raise items.error("a comma or ] is missing")
            if mark == ",":
                items.skip()
                items.peek()
        items.skip()
    if items.peek():
        raise items.error("there is more text after its end")


class _JsonItems:
    """The values of a JSON text, one after another; it reads only as much as the next value needs."""

    def __init__(self, path: Path, file: BinaryIO):
        self._path, self._file = path, file
        self._decode = _decoder(path)
        self._text, self._at, self._line = "", 0, 1
        self._ended = False

    def peek(self) -> str:
        """The next character that is not blank, or "" at the end of the file."""
        while True:
            self._pass(_BLANK.match(self._text, self._at).end())
            if self._at < len(self._text) or not self._more(CHUNK):
                return self._text[self._at : self._at + 1]

    def skip(self) -> None:
        """Pass over the character that peek() gave."""
        self._at += 1

    def next_value(self) -> tuple:
        """(value, file:line where it begins). An incomplete value is parsed again with twice the text."""
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
                        f"{place} does not begin a complete JSON value ({_reason(error)}); correct the file"
                    ) from error
            else:
                self._pass(end)
                return value, place

    def error(self, reason: str) -> UserError:
        """A UserError for the current line."""
        return UserError(f"{self._path}:{self._line} is not JSON ({reason}); correct the file")

    def _pass(self, to: int) -> None:
        """Move to the character `to` and count the lines on the way."""
        self._line += self._text.count("\n", self._at, to)
        self._at = to

    def _more(self, size: int) -> bool:
        """Read `size` more bytes and drop what has been passed. False if the file has ended."""
        if self._ended:
            return False
        chunk = self._file.read(size)
        self._ended = not chunk
        self._text = self._text[self._at :] + self._decode(chunk, self._ended)
        self._at = 0
        return True


def _reason(error: Exception) -> str:
    return getattr(error, "msg", None) or first_line(error)


def _read_parquet(path: Path, file: BinaryIO, text_field: str) -> Iterator[str]:
    shard = open_shard(path, text_field)
    done = 0
    try:
        for batch in shard.iter_batches(1024, columns=[text_field], use_threads=False):
            texts = batch.column(0).to_pylist()
            done += len(texts)
            yield from (text or "" for text in texts)
    except PYARROW_ERRORS as error:
        raise UserError(
            f"{path} is damaged after document {done} ({first_line(error)}); get it again"
        ) from error


READERS: dict[str, Callable[[Path, BinaryIO, str], Iterator[str]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".py": _read_text,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_gzip,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
