"""Where text comes from: parquet shards with a `text` column, split into training and validation.

    dataset = open_dataset("embedded", base_dir=base_dir)     # the running Python's standard library
    dataset = open_dataset("my_texts/", base_dir=base_dir)    # files or folders of text, imported once
    dataset = open_dataset("climbmix", base_dir=base_dir)     # public shards, downloaded by
    python -m scripts.download --name=climbmix --num_shards=8
    for text in dataset.train_texts(): ...

docs/data.md says what becomes a document, and which documents are validation.
"""

import hashlib
import json
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nanochat import UserError
from nanochat.data.imported import Dataset, build, open_built
from nanochat.data.parquet import footer_digest
from nanochat.data.textfiles import find_files, read_documents

# What one public shard holds. Its author counts with 240 shards for 11.2 billion tokens (karpathy/nanochat,
# speedrun.sh of 2025-10-13, fineweb-edu) and 150 shards for 7 billion (dev/LOG.md, 2026-03-04, climbmix). By
# characters it is 10 % more: 250 million a shard (dev/repackage_data_reference.py) at 4.8 a token of a
# vocabulary of this size (speedrun.sh).
TOKENS_PER_SHARD = 46_700_000

FORMAT = 1  # of what we build; a higher number makes old folders be built anew


@dataclass(frozen=True)
class Public:
    """Shards shard_00000.parquet ... of a Hugging Face data set; the last one is the validation split."""

    repo: str
    shards: int

    def file(self, number: int) -> str:
        return f"shard_{number:05d}.parquet"

    @property
    def validation(self) -> str:
        return self.file(self.shards - 1)

    def shards_for(self, tokens: int) -> int:
        """How many training shards hold about `tokens` tokens of a vocabulary of 32,768 ids: at least one,
        at most all there are."""
        return min(max(1, -(-tokens // TOKENS_PER_SHARD)), self.shards - 1)


PUBLIC = {
    "climbmix": Public("karpathy/climbmix-400b-shuffle", 6543),
    "fineweb-edu": Public("karpathy/fineweb-edu-100b-shuffle", 1823),
}


def open_dataset(
    data: str | Path = "embedded",
    val_data: str | Path | None = None,
    *,
    base_dir: str | Path,
    text_field: str = "text",
) -> Dataset:
    """The data set that the settings `data`, `val_data` and `text_field` mean, built where it is not yet.

    `text_field` is the field of JSON objects, or the column of parquet files, that holds the text.
    """
    base_dir = Path(base_dir).expanduser()
    if str(data) == "embedded":
        if val_data is not None:
            raise UserError("val_data goes with other data only; the embedded data has its own validation")
        return _open_embedded(base_dir)
    val_files = find_files("val_data", val_data)[0] if val_data is not None else []
    if str(data) in PUBLIC:
        return _open_public(str(data), base_dir / "data" / str(data), val_files)
    files, others = find_files("data", data)
    in_place = text_field == "text" and all(path.suffix == ".parquet" for path in files + val_files)
    if in_place and not val_files:
        val_files = _pinned_validation(files)
    validation = {path.resolve() for path in val_files}
    files = [path for path in files if path.resolve() not in validation]
    if not files:
        raise UserError(f"every file of data={data} is validation; give --data more files than --val_data")
    name = re.sub(r"[^\w.-]+", "_", Path(str(data).split(",")[0]).expanduser().resolve().name) or "data"
    if in_place and val_files:
        return _open_shards(name, files, val_files)
    return _open_local(base_dir / "data", name, files, val_files, text_field, others)


# -- the embedded data set


def _open_embedded(base_dir: Path) -> Dataset:
    root = Path(sysconfig.get_path("stdlib"))
    key = hashlib.sha256(f"{FORMAT} {sys.version} {root}".encode()).hexdigest()[:8]
    folder = base_dir / "data" / f"embedded-py{platform.python_version()}-{key}"
    dataset = open_built(folder)
    if dataset is None:
        print(f"building the embedded data set from {root} ...", file=sys.stderr, flush=True)
        documents, skipped = _read_sources(root)
        if not documents:
            raise UserError(f"this Python has no source files in {root}; give your own text with --data=PATH")
        what = f"{len(documents):,} files of Python {platform.python_version()}'s standard library"
        note = f"{what}, {skipped} unreadable {'file' if skipped == 1 else 'files'} skipped"
        dataset = build(folder, folder.name, (("hash", text) for text in documents), note)
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


# -- text of the user's, imported


def _open_local(
    folder: Path, name: str, files: list[Path], val_files: list[Path], text_field: str, others: int
) -> Dataset:
    stamp = _stamp(files), _stamp(val_files)
    key = hashlib.sha256(json.dumps([FORMAT, stamp, text_field]).encode()).hexdigest()[:12]
    target = folder / f"{name}-{key}"
    dataset = open_built(target)
    if dataset is None:
        if older := sorted(path.name for path in folder.glob(f"{name}-{'[0-9a-f]' * 12}")):
            print(f"{folder} has other imports of that name: {', '.join(older)}", file=sys.stderr)
        note = f"{{:,}} training and {{:,}} validation documents of {len(files) + len(val_files):,} files"
        note += f", {others:,} files of other kinds left out" if others else ""
        documents = _import([("train" if val_files else "hash", files), ("val", val_files)], text_field)
        dataset = build(target, name, documents, note)
        if (_stamp(files), _stamp(val_files)) != stamp:
            shutil.rmtree(target)
            raise UserError(f"files of {name} changed while they were imported; start again")
    return dataset


def _stamp(files: list[Path]) -> list:
    """Names, sizes and times of files: while these are the same they are not read again."""
    try:
        return [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    except OSError as error:
        raise UserError(f"{error.filename} has vanished or may not be read; start again") from error


def _import(splits: list[tuple[str, list[Path]]], text_field: str) -> Iterator[tuple[str, str]]:
    """(split, text) of all documents, with a progress bar over the bytes of the files."""
    from tqdm import tqdm

    sizes = sum(path.stat().st_size for _, files in splits for path in files)
    interval = 0.2 if sys.stderr.isatty() else 10  # seconds: a log gets few lines
    with tqdm(total=sizes, unit="B", unit_scale=True, desc="importing", mininterval=interval) as bar:
        for split, files in splits:
            for path in files:
                for text in read_documents(path, text_field, bar.update):
                    yield split, text


# -- parquet shards used in place: the user's, or downloaded


def _open_shards(name: str, train_shards: list[Path], val_shards: list[Path]) -> Dataset:
    fingerprint, documents = hashlib.sha256(), {"train": 0, "val": 0}
    for split, paths in (("train", train_shards), ("val", val_shards)):
        fingerprint.update(split.encode())
        for path in paths:
            footer, rows = footer_digest(path)
            fingerprint.update(footer)
            documents[split] += rows
    note = f"{documents['train']:,} training documents in {len(train_shards)} shards"
    note += f", {documents['val']:,} validation documents"
    return Dataset(name, train_shards, val_shards, fingerprint.hexdigest(), note)


def _pinned_validation(files: list[Path]) -> list[Path]:
    """The validation shard among public shards that someone has already; [] where there are other files."""
    names = {path.name: path for path in files}
    if not all(re.fullmatch(r"shard_\d{5}\.parquet", name) for name in names):
        return []
    for public in sorted(PUBLIC.values(), key=lambda public: -public.shards):
        if public.validation in names:
            return [names[public.validation]]
    wanted = " or ".join(f"{public.validation} ({name})" for name, public in PUBLIC.items())
    raise UserError(
        f"{files[0].parent} has public shards without the one that is validation: put {wanted} there, or "
        "say which files are validation with --val_data=PATH"
    )


def _open_public(name: str, folder: Path, val_files: list[Path]) -> Dataset:
    """Downloaded shards, as far as they are recorded and have the recorded size."""
    from nanochat.data.download import read_record

    public, command = PUBLIC[name], f"python -m scripts.download --name={name} --num_shards=8"
    record = read_record(folder)
    there = {file: folder / file for file in sorted(record) if (folder / file).exists()}
    for file, path in there.items():
        if path.stat().st_size != record[file]["bytes"]:
            raise UserError(f"{path} is not as it was downloaded; get it again: {command}")
    if public.validation not in there and not val_files:
        raise UserError(f"{folder} lacks {public.validation}, the validation split; get it: {command}")
    pinned = there.pop(public.validation, None)
    if not there:
        raise UserError(f"{folder} holds no training shards; get some: {command}")
    if any(path.suffix != ".parquet" for path in val_files):
        raise UserError(f"val_data for {name} has to be parquet files with a column `text`")
    return _open_shards(name, list(there.values()), val_files or [pinned])
