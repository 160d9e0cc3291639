"""Where text comes from: parquet shards with a `text` column, split into training and validation.

    dataset = open_dataset("embedded", base_dir=base_dir)     # the running Python's standard library
    dataset = open_dataset("my_shards/", "my_shards/val.parquet", base_dir=base_dir)
    for text in iterate_documents(dataset.train_shards): ...

A data set that we build lies in `<base_dir>/data/<name>/` beside an `index.json` that names its files, their
sizes and its fingerprint. It is written into a temporary folder that is renamed when complete: what has the
name is whole, and of two processes that build at once one finds the other's work.
"""

import hashlib
import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanochat import UserError

# Documents whose hash is 0 modulo this number are validation: 0.4 M of the standard library's 31 M characters
# with Python 3.11, enough for a stable number and scored in seconds. Never change it: the split would move.
ONE_IN_VALIDATES = 40
FORMAT = 1  # of what we build; a higher number makes old folders be built anew
ROW_GROUP_CHARS = 1 << 19  # a row group is what is read at once
ROW_GROUP_DOCUMENTS = 1024


@dataclass(frozen=True)
class Dataset:
    """Shards of a split text, `fingerprint` of their content, and a one-line `note` for the log."""

    name: str
    train_shards: list[Path]
    val_shards: list[Path]
    fingerprint: str
    note: str


def open_dataset(
    data: str | Path = "embedded", val_data: str | Path | None = None, *, base_dir: str | Path
) -> Dataset:
    """The data set that the settings `data` and `val_data` mean, built first where it does not exist yet."""
    if str(data) == "embedded":
        if val_data is not None:
            raise UserError(
                "val_data goes with data=PATH only; the embedded data has its own validation split"
            )
        return _open_embedded(Path(base_dir))
    return _open_parquet(data, val_data)


def iterate_documents(shards: Sequence[Path]) -> Iterator[str]:
    """The documents of shards in stored order."""
    groups = RowGroups(shards)
    for group in range(len(groups.sizes)):
        yield from groups.read(group)


class RowGroups:
    """Random access to the row groups of shards, numbered in the order given; empty ones are left out.

    `sizes[g]` is the number of documents of group g and `starts[g]` the number of those before it;
    `starts[-1]` is the number of all. `read(g)` gives a group's texts (a null is an empty text).
    """

    def __init__(self, shards: Sequence[Path]):
        self.sizes: list[int] = []
        self.starts = [0]
        self._places: list[tuple[Path, int]] = []
        for shard in shards:
            metadata = _read_footer(Path(shard)).metadata
            for i in range(metadata.num_row_groups):
                if rows := metadata.row_group(i).num_rows:
                    self._places.append((Path(shard), i))
                    self.sizes.append(rows)
                    self.starts.append(self.starts[-1] + rows)

    def read(self, group: int) -> list[str]:
        shard, i = self._places[group]
        file = _read_footer(shard)
        try:
            column = file.read_row_group(i, columns=["text"], use_threads=False).column(0)
            texts = column.to_pylist()
        except (OSError, ValueError) as error:  # pyarrow's errors are these
            raise UserError(f"shard {shard} is damaged in row group {i} ({error}); get it again") from error
        return [text or "" for text in texts]


def _read_footer(shard: Path):
    """The opened parquet file; UserError where it is not one with a text column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(shard)
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{shard} cannot be read as a parquet file ({error}); remove it or get it again"
        ) from error
    schema = file.schema_arrow
    if "text" not in schema.names or not _is_text(schema.field("text").type):
        raise UserError(
            f"{shard} has no text in a column `text` (it has {', '.join(schema.names)}); rename it"
        )
    return file


def _is_text(kind) -> bool:
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind)


# -- the embedded data set


def _open_embedded(base_dir: Path) -> Dataset:
    root = Path(sysconfig.get_path("stdlib"))
    key = hashlib.sha256(f"{FORMAT} {sys.version} {root}".encode()).hexdigest()[:8]
    folder = base_dir / "data" / f"embedded-py{platform.python_version()}-{key}"
    dataset = _open_built(folder)
    if dataset is None:
        print(f"building the embedded data set from {root} ...", file=sys.stderr, flush=True)
        documents, skipped = _read_sources(root)
        if not documents:
            raise UserError(f"this Python has no source files in {root}; give your own text with --data=PATH")
        what = f"{len(documents):,} files of Python {platform.python_version()}'s standard library"
        note = f"{what}, {skipped} unreadable {'file' if skipped == 1 else 'files'} skipped"
        dataset = _build(folder, documents, note)
    return dataset


def _read_sources(root: Path) -> tuple[list[str], int]:
    """Texts of the non-empty .py files under root but installed packages, and how many are unreadable."""
    documents, skipped = [], 0
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if {"site-packages", "dist-packages"} & set(path.relative_to(root).parts):
            continue
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):  # the library's tests hold files in other encodings on purpose
            skipped += 1
            continue
        if text:
            documents.append(text)
    return documents, skipped


# -- building and opening a folder of ours


def content_key(text: str) -> str:
    """Hash of a document's content: decides its split, so equal documents are never on both sides."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def is_validation(key: str) -> bool:
    return int(key[:16], 16) % ONE_IN_VALIDATES == 0


def _build(folder: Path, documents: list[str], note: str) -> Dataset:
    """Split the documents, write both splits as shards into `folder`, and open it."""
    # Stored in the order of their hashes: neighbours in a batch should not come from one package.
    keyed = sorted((content_key(text), text) for text in documents)
    fingerprint = hashlib.sha256("\n".join(key for key, _ in keyed).encode()).hexdigest()
    splits = {
        "train": [text for key, text in keyed if not is_validation(key)],
        "val": [text for key, text in keyed if is_validation(key)],
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        index = {"fingerprint": fingerprint, "note": note, "train": {}, "val": {}}
        for split, texts in splits.items():
            path = temporary / f"{split}_00000.parquet"
            _write_shard(path, texts)
            index[split][path.name] = path.stat().st_size
        (temporary / "index.json").write_text(json.dumps(index, indent=1), "utf-8")
        os.chmod(temporary, 0o755)  # mkdtemp's 0700 would hide it from other users
        _put_in_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    dataset = _open_built(folder)
    if dataset is None:
        raise OSError(f"{folder} was written but cannot be read back")
    return dataset


def _write_shard(path: Path, texts: list[str]) -> None:
    """Texts as row groups of about ROW_GROUP_CHARS characters."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
        group, chars = [], 0
        for text in texts:
            group.append(text)
            chars += len(text)
            if chars >= ROW_GROUP_CHARS or len(group) >= ROW_GROUP_DOCUMENTS:
                writer.write_table(pa.table({"text": group}, schema=schema))
                group, chars = [], 0
        if group:
            writer.write_table(pa.table({"text": group}, schema=schema))


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Give a complete folder its name; where another process was first with a good one, keep that."""
    if folder.exists() and _open_built(folder) is None:  # damaged: set it aside within the temporary folder
        aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        os.replace(folder, aside / "damaged")
        shutil.rmtree(aside, ignore_errors=True)
    try:
        os.rename(temporary, folder)
    except OSError:
        if _open_built(folder) is None:
            raise


def _open_built(folder: Path) -> Dataset | None:
    """The data set in a folder of ours; None where it is missing or its files are not those in its index."""
    try:
        index = json.loads((folder / "index.json").read_text("utf-8"))
        splits = {split: [folder / name for name in index[split]] for split in ("train", "val")}
        sizes = {path: index[split][path.name] for split, paths in splits.items() for path in paths}
        if any(path.stat().st_size != size for path, size in sizes.items()):
            return None
        return Dataset(folder.name, splits["train"], splits["val"], index["fingerprint"], index["note"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# -- parquet shards of the user's, used in place


def _open_parquet(data: str | Path, val_data: str | Path | None) -> Dataset:
    shards = _parquet_files("data", data)
    if val_data is None:
        raise UserError(f"say which files of {data} are validation with --val_data=FILE_OR_FOLDER")
    val_shards = _parquet_files("val_data", val_data)
    resolved = {path.resolve() for path in val_shards}
    train_shards = [path for path in shards if path.resolve() not in resolved]
    if not train_shards:
        raise UserError(f"every file of data={data} is validation; give --data more files than --val_data")
    fingerprint = hashlib.sha256()
    documents = []
    for split, paths in (("train", train_shards), ("val", val_shards)):
        fingerprint.update(split.encode())
        for path in paths:
            footer, rows = _footer_digest(path)
            fingerprint.update(footer)
            documents.append((split, rows))
    train, val = (sum(rows for name, rows in documents if name == split) for split in ("train", "val"))
    note = f"{train:,} training documents in {len(train_shards)} shards, {val:,} validation documents"
    return Dataset(Path(data).resolve().name, train_shards, val_shards, fingerprint.hexdigest(), note)


def _parquet_files(setting: str, path: str | Path) -> list[Path]:
    """The .parquet files that a path means, sorted by name."""
    path = Path(path).expanduser()
    if not path.exists():
        raise UserError(f"{setting}={path} does not exist; give a folder of .parquet files, or data=embedded")
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path] if path.suffix == ".parquet" else []
    if not files:
        raise UserError(f"{setting}={path} is no .parquet file or folder with some; give one of these")
    return files


def _footer_digest(path: Path) -> tuple[bytes, int]:
    """Hash of a shard's name, size and footer (its statistics stand for the content), and its rows."""
    rows = _read_footer(path).metadata.num_rows
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(-8, os.SEEK_END)  # a parquet file ends with its footer, the footer's length, and "PAR1"
        length = int.from_bytes(file.read(4), "little")
        file.seek(-8 - length, os.SEEK_END)
        return hashlib.sha256(f"{path.name} {size} ".encode() + file.read(length)).digest(), rows
