"""Shards are parquet files. We read their row groups in any order, and write sorted documents.

A row group is the part of a parquet file that is read at once: some hundred documents. We write documents in
the order of their SHA-256. So neighbours in a batch come from different files, and shards and batches depend
on the documents alone, not on the names or the order of their files.
"""

import functools
import hashlib
import math
import os
import struct
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from nanochat import UserError
from nanochat.data.streaming_shards import Arrival
from nanochat.terminal import first_line

# A document is validation if its hash is a multiple of this number. With Python 3.11 that gives 0.4 M of the
# standard library's 31 M characters: enough for a stable number, and scored in seconds. Never change it, or
# documents move between training and validation.
ONE_IN_VALIDATES = 40
ROW_GROUP_CHARS = 1 << 19  # characters of a row group that we write: it ends after these,
ROW_GROUP_DOCUMENTS = 1024  # or after these documents
SHARD_CHARS = 1 << 28  # characters of a shard that we write
PENDING_BYTES = 1 << 27  # bytes of documents that are sorted in memory; more go through bucket files
BUCKETS = 1024  # bucket files; each of them is sorted in memory
# Of a damaged file, or of a value that Python cannot hold
PYARROW_ERRORS = (OSError, ValueError, LookupError, TypeError, ArithmeticError, NotImplementedError)
OPEN_SHARDS = 32  # shards kept open, with their footers, while row groups are read in any order


class Documents:
    """The documents of all shards: iterate over their texts in stored order, or read one row group; len() is
    their number. Row groups are numbered from 0 in the order of the shards; empty ones are left out.

    sizes: documents in each row group. starts: documents before each row group, then the number of all. With
    an `arrival`, which waits for shards that are on their way, these are of the shards that somebody has
    needed so far. Raises UserError if a shard cannot be opened.
    """

    def __init__(self, shards: Sequence[Path], arrival: Arrival | None = None):
        self.arrival = arrival
        self.sizes: list[int] = []
        self.starts = [0]
        self._shards = [Path(shard) for shard in shards]
        self._parts: list[range] = []  # the row groups of each open shard
        self._shard_of: list[tuple[Path, int]] = []  # shard, and number of the row group within it
        self._column_bytes = 0  # of the column `text` without compression
        self._open = functools.lru_cache(OPEN_SHARDS)(open_shard)
        self.cancelled = threading.Event()  # set: a wait for a shard in another thread ends
        if arrival is None:
            self.need()

    def need(self, documents: float = math.inf, text_bytes: float = 0) -> None:
        """Open shards until these have that many documents and bytes, or all are open."""
        while len(self._parts) < len(self._shards):
            if self.starts[-1] >= documents and self.text_bytes >= text_bytes:
                break
            self._open_next()

    def parts(self) -> Iterator[range]:
        """The numbers of the row groups of one shard after the other. Waits for a shard that is missing."""
        for number in range(len(self._shards)):
            if number == len(self._parts):
                self._open_next()
            yield self._parts[number]

    def _open_next(self) -> None:
        shard, first = self._shards[len(self._parts)], len(self.sizes)
        if self.arrival:
            self.arrival.wait(shard, self.cancelled)
        metadata = self._open(shard).metadata
        paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
        column = paths.index("text")
        for i in range(metadata.num_row_groups):
            group = metadata.row_group(i)
            if group.num_rows:
                self._shard_of.append((shard, i))
                self.sizes.append(group.num_rows)
                self.starts.append(self.starts[-1] + group.num_rows)
                self._column_bytes += group.column(column).total_uncompressed_size
        self._parts.append(range(first, len(self.sizes)))

    @property
    def text_bytes(self) -> int:
        """About how many UTF-8 bytes all texts have: the column's size without lengths and page headers."""
        return max(0, self._column_bytes - 4 * self.starts[-1] - 256 * len(self.sizes))

    @property
    def stream(self) -> dict[str, int]:
        """What a saved position in the data must have in common with this text."""
        return {"shards": len(self._shards)} if self.arrival else {"documents": self.starts[-1]}

    def __len__(self) -> int:
        return self.starts[-1]

    def __iter__(self) -> Iterator[str]:
        for group in range(len(self.sizes)):
            yield from self.read(group)

    def read(self, group: int, rows: Sequence[int] | None = None) -> list[str]:
        """The texts of a row group, or of these rows of it; a null is an empty text.

        Raises UserError if the shard is damaged.
        """
        shard, i = self._shard_of[group]
        file = self._open(shard)
        try:
            column = file.read_row_group(i, columns=["text"], use_threads=False).column(0)
            texts = (column if rows is None else column.take(rows)).to_pylist()
        except PYARROW_ERRORS as error:
            raise UserError(
                f"shard {shard} is damaged in row group {i} ({first_line(error)}); get it again"
            ) from error
        return [text or "" for text in texts]


def open_parquet(path: Path):
    """Open a file as a pyarrow ParquetFile. Raises UserError if it is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        source = pa.OSFile(os.fsencode(path))  # from a str, pyarrow takes UTF-8 names only
        file = pq.ParquetFile(source, page_checksum_verification=True)
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        hidden = [group for group in groups if not group.num_rows and group.column(0).num_values]
        if hidden or sum(group.num_rows for group in groups) != file.metadata.num_rows:
            raise ValueError("its row groups do not have its number of rows")  # a footer has no checksum
        return file
    except PYARROW_ERRORS as error:
        raise UserError(
            f"{path} cannot be read as a parquet file ({first_line(error)}); remove it or get it again"
        ) from error


def values_in(path: Path, file, column: str) -> Iterator:
    """The values of a column of an open parquet file. Raises UserError if it is damaged."""
    try:
        for batch in file.iter_batches(1024, columns=[column], use_threads=False):
            yield from batch.column(0).to_pylist()
    except PYARROW_ERRORS as error:
        raise UserError(f"{path} is damaged ({first_line(error)}); get it again") from error


def open_shard(shard: Path, field: str = "text"):
    """Open a shard as a pyarrow ParquetFile. Raises UserError if it has no text in the column `field`."""
    file = open_parquet(shard)
    schema = file.schema_arrow
    if schema.names.count(field) != 1 or not _is_text(schema.field(field).type):
        columns = ", ".join(f"{column.name}: {column.type}" for column in schema)
        raise UserError(
            f"{shard} has no text in a column `{field}` (it has {columns}); name the column with --text_field"
        )
    return file


def _is_text(kind) -> bool:
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind)


def footer_digest(path: Path) -> tuple[bytes, int]:
    """A hash of a shard's name, size and footer, (32,) bytes, and the number of its documents.

    The footer has sizes and statistics of every row group: it changes with the content, and is quick to read.
    """
    documents = open_shard(path).metadata.num_rows
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(-8, 2)  # a parquet file ends with its footer, the footer's length, and "PAR1"
        length = int.from_bytes(file.read(4), "little")
        file.seek(-8 - length, 2)
        return hashlib.sha256(os.fsencode(f"{path.name} {size} ") + file.read(length)).digest(), documents


# -- writing


def is_validation(key: bytes) -> bool:
    """Whether a document with this SHA-256 is validation. Equal documents are always in the same split."""
    return int.from_bytes(key[:8], "big") % ONE_IN_VALIDATES == 0


def without_surrogates(text: str) -> str:
    """The text with surrogate pairs joined and lone surrogates replaced by U+FFFD, as tiktoken does."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def write_sorted(documents: Iterable[tuple[str, str]], folder: Path) -> dict:
    """Write (split, text) documents into shards in `folder`. With the split "hash", `is_validation` decides.

    Returns {"train": {file name: bytes}, "val": {file name: bytes}, "documents": [training, validation],
    "fingerprint": hexadecimal}. The fingerprint does not depend on the order of the documents. Lone
    surrogates become U+FFFD. Empty documents are left out.
    """
    buckets = _Buckets(folder)
    for split, text in documents:
        if text:
            buckets.add(split, without_surrogates(text).encode())
    writers = {split: _Writer(folder, split) for split in ("train", "val")}
    fingerprint, between = hashlib.sha256(), b""
    for key, split, content in buckets:
        given = b"" if split == "hash" else split.encode()
        fingerprint.update(between + key.hex().encode() + given)
        between = b"\n"
        split = ("val" if is_validation(key) else "train") if split == "hash" else split
        writers[split].add(content.decode())
    for writer in writers.values():
        writer.close()
    return {
        "fingerprint": fingerprint.hexdigest(),
        "documents": [writers[split].documents for split in ("train", "val")],
        **{split: {p.name: p.stat().st_size for p in writer.paths} for split, writer in writers.items()},
    }


class _Writer:
    """Writes the shards of one split, with row groups of ROW_GROUP_CHARS and shards of SHARD_CHARS."""

    def __init__(self, folder: Path, split: str):
        self._folder, self._split = folder, split
        self.paths: list[Path] = []
        self.documents = 0
        self._texts, self._chars, self._shard_chars = [], 0, 0
        self._file = None

    def add(self, text: str) -> None:
        self._texts.append(text)
        self._chars += len(text)
        self.documents += 1
        if self._chars >= ROW_GROUP_CHARS or len(self._texts) >= ROW_GROUP_DOCUMENTS:
            self._write_group()
            if self._shard_chars >= SHARD_CHARS:
                self._close_file()

    def close(self) -> None:
        if self._texts or not self.paths:
            self._write_group()
        self._close_file()

    def _write_group(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.schema([("text", pa.string())])
        if self._file is None:
            self.paths.append(self._folder / f"{self._split}_{len(self.paths):05d}.parquet")
            self._sink = pa.OSFile(os.fsencode(self.paths[-1]), "wb")
            self._file = pq.ParquetWriter(
                self._sink, schema, compression="zstd", use_dictionary=False, write_page_checksum=True
            )
        if self._texts:
            self._file.write_table(pa.table({"text": self._texts}, schema=schema))
        self._shard_chars += self._chars
        self._texts, self._chars = [], 0

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._sink.close()
        self._file, self._shard_chars = None, 0


class _Buckets:
    """Sorts documents by SHA-256 in bounded memory. Iterate over it for (hash, split, content) in that order.

    Documents are kept in memory. When they have more than PENDING_BYTES, each goes to the bucket file that
    the first bits of its hash name; in the end one bucket after another is sorted.
    """

    HEADER = struct.Struct("<32s5sQ")  # hash, split, bytes of the content after the header

    def __init__(self, folder: Path):
        self._folder = folder
        self._pending: list[tuple[bytes, str, bytes]] = []
        self._bytes = 0
        self._spilled: set[Path] = set()

    def add(self, split: str, content: bytes) -> None:
        self._pending.append((hashlib.sha256(content).digest(), split, content))
        self._bytes += len(content) + 300  # bytes of the Python objects around it
        if self._bytes > PENDING_BYTES:
            self._spill()

    def __iter__(self) -> Iterator[tuple[bytes, str, bytes]]:
        if self._spilled:
            self._spill()
        yield from sorted(self._pending)
        for path in sorted(self._spilled):
            with open(path, "rb") as file:
                yield from sorted(self._entries(file))
            path.unlink()

    def _entries(self, file: BinaryIO) -> Iterator[tuple[bytes, str, bytes]]:
        while header := file.read(self.HEADER.size):
            key, split, size = self.HEADER.unpack(header)
            yield key, split.rstrip(b"\0").decode(), file.read(size)

    def _spill(self) -> None:
        """Move the documents in memory to the bucket files."""
        buckets: dict[Path, list] = defaultdict(list)
        for key, split, content in self._pending:
            path = self._folder / f"bucket_{int.from_bytes(key[:8], 'big') * BUCKETS >> 64:04d}"
            buckets[path] += [self.HEADER.pack(key, split.encode(), len(content)), content]
        for path, entries in buckets.items():
            with open(path, "ab") as file:
                file.writelines(entries)
        self._spilled |= buckets.keys()
        self._pending, self._bytes = [], 0
