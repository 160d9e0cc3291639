"""Where text comes from. A data set is two lists of shards (parquet files): training and validation.

    dataset = open_dataset("embedded", base_dir=base_dir)     # the running Python's standard library
    dataset = open_dataset("my_texts/", base_dir=base_dir)    # your files or folders, imported once
    dataset = open_dataset("hf:OWNER/NAME", base_dir=base_dir)  # a data set of the Hub, imported once
    dataset = open_dataset("climbmix", base_dir=base_dir)     # public shards that scripts/download.py has got
    for text in dataset.train_texts(): ...

docs/data.md says what becomes a document, and which documents are validation.
"""

import filecmp
import glob
import hashlib
import itertools
import json
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from nanochat import UserError
from nanochat.data import hub
from nanochat.data.dataset import Dataset, build, open_built
from nanochat.data.download import fetch
from nanochat.data.parquet import ONE_IN_VALIDATES, footer_digest, is_validation, without_surrogates
from nanochat.data.public import PUBLIC, PublicDataset, UnseenDataset, command
from nanochat.data.streaming_shards import PATIENCE_S, Arrival, ArrivingShards
from nanochat.data.textfiles import SECTION, cut, find_files, paths_of, read_documents, set_names
from nanochat.files import user_path
from nanochat.terminal import bar, counted

FORMAT = 1  # of the folders that we build; a higher number makes all of them new
NAME_CHARS = 50  # of a data set; folders add hashes to it, and a file system takes 255 bytes
FEW = 10 * ONE_IN_VALIDATES  # documents; of more, some are validation by their hash


def open_dataset(
    data: str | Path = "embedded",
    val_data: str | Path | None = None,
    *,
    base_dir: str | Path,
    text_field: str = "text",
    tokens: Callable[..., int] | None = None,
    download: str = "off",
    num_shards: int | None = None,
    plan_only: bool = False,
) -> Dataset:
    """The data set of the settings `data`, `val_data` and `text_field`; it is built at the first use.

    `data` is "embedded", a name in PUBLIC, "hf:OWNER/NAME" (see hub.py), or paths with commas between them.
    `val_data` is the validation split, a file or a folder; after a comma follow further validation sets
    (`more_val`), which decide nothing in a run. None of these files is trained on. `text_field` is the field
    of JSON objects, or the column of parquet files, that holds the text. Raises UserError if files are
    missing, damaged or without text, or if a split is empty.

    For public data and the Hub, `tokens(vocab_size)` are the tokens that the run reads, `tokens()` about.
    With download="on" this function downloads the validation shard and the first training shard of public
    data. num_shards: the files to take of "hf:OWNER/NAME", see hub.py. plan_only: without the network; of
    public data that are not here only the size is told, see UnseenDataset.
    """
    base_dir = user_path("base_dir", base_dir)
    if download == "on" and str(data) not in PUBLIC:
        raise UserError(
            f"--download=on is for public data ({', '.join(PUBLIC)}); leave it out with other data"
        )
    paths = paths_of("val_data", val_data) if val_data is not None else []
    val_sets = [find_files("val_data", path)[0] for path in paths]
    val_files, folder = val_sets[0] if val_sets else [], base_dir / "data"
    if str(data) == "embedded":
        dataset = _open_embedded(base_dir, val_files, text_field)
    elif str(data) in PUBLIC:
        val_shards, _ = _open_validation(folder, val_files, text_field)
        dataset = _open_public(str(data), folder / str(data), val_shards, tokens, download == "on", plan_only)
    else:
        others = 0
        if str(data).startswith(hub.PREFIX):
            data, files = hub.local_files(str(data), base_dir, tokens, num_shards, network=not plan_only)
        else:
            files, others = find_files("data", data)
        dataset = _open_files(folder, data, files, val_sets, text_field, others)
    more = zip(set_names(paths)[1:], val_sets[1:], strict=True)
    more_val = {name: _open_validation(folder, files, text_field)[0] for name, files in more}
    for val_shards in more_val.values():
        _check_twins(dataset.train_shards, val_shards)
    return replace(dataset, more_val=more_val)


def _open_files(
    folder: Path, data, files: list[Path], val_sets: list[list[Path]], text_field: str, others: int
) -> Dataset:
    """A data set of the user's files: parquet shards with validation in place, others imported."""
    val_files = val_sets[0] if val_sets else []
    in_place = text_field == "text" and all(path.suffix == ".parquet" for path in files + val_files)
    if in_place and not val_files:
        val_files = _pinned_validation(files)
    validation = {path.resolve() for path in itertools.chain(val_files, *val_sets)}
    files = [path for path in files if path.resolve() not in validation]
    if not files:
        raise UserError(
            f"every file of data={data} is in val_data too; give --data more files than --val_data"
        )
    first = Path(str(data).split(",")[0]).expanduser().resolve()
    name = re.sub(r"[^\w.-]+", "_", first.name)[:NAME_CHARS] or "data"
    if in_place and val_files:
        return _open_shards(name, files, val_files)
    return _open_local(folder, name, files, val_files, text_field, others)


def _open_validation(folder: Path, files: list[Path], text_field: str) -> tuple[list[Path], str]:
    """(shards, fingerprint) of validation files: parquet files in place, others imported into `folder`."""
    if not files or (text_field == "text" and all(path.suffix == ".parquet" for path in files)):
        return files, "".join(footer_digest(path)[0].hex() for path in files)
    name = re.sub(r"[^\w.-]+", "_", files[0].name)[:NAME_CHARS]
    dataset = _open_local(folder, name, [], files, text_field, 0)
    return dataset.val_shards, dataset.fingerprint


# -- the embedded data set


def _open_embedded(base_dir: Path, val_files: list[Path], text_field: str) -> Dataset:
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
        note = f"{what}, {counted(skipped, 'unreadable file', 'unreadable files')} skipped"
        dataset = build(folder, folder.name, (("hash", text) for text in documents), note)
    if not val_files:
        return dataset
    shards, digest = _open_validation(base_dir / "data", val_files, text_field)
    fingerprint = hashlib.sha256(f"{dataset.fingerprint} {digest}".encode()).hexdigest()
    note = f"{dataset.note}; validation on {val_files[0].name}"
    return replace(dataset, val_shards=shards, fingerprint=fingerprint, note=note)


def _read_sources(root: Path) -> tuple[list[str], int]:
    """The texts of the .py files under `root` without installed packages, and how many cannot be read."""
    documents, skipped = [], 0
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if {"site-packages", "dist-packages"} & set(path.relative_to(root).parts):
            continue
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):  # some of the library's own tests are not UTF-8 on purpose
            skipped += 1
            continue
        if text:
            documents.append(text)
    return documents, skipped


# -- the user's own text, imported


def _open_local(
    folder: Path, name: str, files: list[Path], val_files: list[Path], text_field: str, others: int
) -> Dataset:
    stamp = _stamp(files), _stamp(val_files)
    key = hashlib.sha256(json.dumps([FORMAT, stamp, text_field]).encode()).hexdigest()[:12]
    target = folder / f"{name}-{key}"
    dataset = open_built(target)
    if dataset is None:
        if older := sorted(glob.glob(f"{name}-{'[0-9a-f]' * 12}", root_dir=folder)):
            print(f"{folder} has older imports of that name: {', '.join(older)}", file=sys.stderr)
        read = counted(len(files) + len(val_files), "file", "files")
        note = f"{{:,}} training and {{:,}} validation documents of {read}"
        splits = "hash" if not val_files else "given" if files else "val"
        note += f", {counted(others, 'file', 'files')} of other kinds left out" if others else ""
        documents = _import([("train" if val_files else "hash", files), ("val", val_files)], text_field)
        if not val_files:
            documents, few = _with_validation(documents)
            if few:
                note = f"{{:,}} training and {{:,}} validation pieces of {counted(few, 'text', 'texts')}; "
                note += "of so few the last tenth of each is validation"
        dataset = build(target, name, documents, note, splits)
        if (_stamp(files), _stamp(val_files)) != stamp:
            shutil.rmtree(target)
            raise UserError(f"files of {name} changed during the import; start again")
    return dataset


def _stamp(files: list[Path]) -> list:
    """Paths, sizes and times of files. An import stays valid as long as they are the same."""
    try:
        return [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    except OSError as error:
        raise UserError(
            f"{error.filename} is gone or cannot be read; check the file and start again"
        ) from error


def _import(splits: list[tuple[str, list[Path]]], text_field: str) -> Iterator[tuple[str, str]]:
    """(split, text) of all documents, with a progress bar over the bytes of the files."""
    total = sum(size for _, files in splits for _, size, _ in _stamp(files))
    with bar("importing", "B", total) as progress:
        for split, files in splits:
            for path in files:
                for text in read_documents(path, text_field, progress.update):
                    yield split, text


def _with_validation(documents: Iterator[tuple[str, str]]) -> tuple[Iterable[tuple[str, str]], int]:
    """(split, text) of documents, and how many there are if by their hash all are in one split, else 0.

    Of those few the last tenth of each is validation. They are cut into pieces, because a batch needs as many
    documents as it has rows.
    """
    first, splits = [], set()
    for document in documents:
        first.append(document)
        content = without_surrogates(document[1]).encode()
        splits |= {is_validation(hashlib.sha256(content).digest())} if content else set()
        if len(splits) == 2 or len(first) == FEW:
            return itertools.chain(first, documents), 0
    found = []
    for _, text in first:
        pieces = cut(text, min(SECTION, max(1, len(text) // 20)))  # 10 to 20 of them, or more
        last = max(1, round(len(pieces) / 10))
        found += [("train", piece) for piece in pieces[:-last]] + [("val", piece) for piece in pieces[-last:]]
    return found, len(first)


# -- parquet shards used in place: the user's own or downloaded ones


def _open_shards(name: str, train_shards: list[Path], val_shards: list[Path]) -> Dataset:
    fingerprint, documents = hashlib.sha256(), {"train": 0, "val": 0}
    for split, paths in (("train", train_shards), ("val", val_shards)):
        fingerprint.update(split.encode())
        for path in paths:
            footer, count = footer_digest(path)
            fingerprint.update(footer)
            documents[split] += count
    _check_twins(train_shards, val_shards)
    note = f"{documents['train']:,} training documents in {counted(len(train_shards), 'shard', 'shards')}"
    note += f", {documents['val']:,} validation documents"
    return Dataset(name, train_shards, val_shards, fingerprint.hexdigest(), note)


def _check_twins(train_shards: list[Path], val_shards: list[Path]) -> None:
    """Raise UserError if a validation shard is a copy of a training shard."""
    for train, val in itertools.product(train_shards, val_shards):
        if filecmp.cmp(train, val, shallow=False):  # it reads files of the same size only
            raise UserError(
                f"the training shard {train} and the validation shard {val} have the same content; "
                "remove one (if they were downloaded: both, then download again)"
            )


def _pinned_validation(files: list[Path]) -> list[Path]:
    """The validation shard in a folder of public shards; [] if the files are not public shards.

    Raises UserError if public shards come without their validation shard.
    """
    names = {path.name: path for path in files}
    if not all(re.fullmatch(r"shard_\d{5}\.parquet", name) for name in names):
        return []
    for public in sorted(PUBLIC.values(), key=lambda public: -public.shards):
        if public.validation in names:
            return [names[public.validation]]
    wanted = " or ".join(f"{public.validation} ({name})" for name, public in PUBLIC.items())
    raise UserError(
        f"{files[0].parent} has public shards, but not the validation shard; put {wanted} there, or name the "
        "validation files with --val_data=PATH"
    )


def _open_public(
    name: str, folder: Path, val_shards: list[Path], tokens: Callable | None, download: bool, plan_only: bool
) -> PublicDataset | UnseenDataset:
    """The shards of a folder, up to the first one that is missing."""
    public = PUBLIC[name]
    at_start = {} if val_shards else {public.validation: "validation split"}
    at_start |= {public.file(0): "first training shard"}
    missing = [file for file in at_start if not (folder / file).exists()]
    needed = public.shards_for(tokens()) if tokens else None
    if missing and plan_only and needed:
        note = f"about {needed:,} of {public.shards - 1:,} training shards"
        note += f", not here yet (get them: {command(name, needed)})"
        return UnseenDataset(name, [], [], "unknown", note, public, tokens)
    if missing and download:
        fetch(public.repo, [*at_start], folder)
    how = command(name, needed or 8) + (", or give --download=on" if needed and not download else "")
    arrival = Arrival(folder, how, PATIENCE_S if download else 0)
    here = 0
    while here < public.shards - 1 and (folder / public.file(here)).exists():
        here += 1
    for file, what in at_start.items():
        if not (folder / file).exists():
            horizon = f" (the horizon needs {needed} training shards, {here} are there)" if needed else ""
            raise UserError(f"{folder} lacks {file}, the {what}{horizon}; get it: {how}")
    train = [folder / public.file(number) for number in range(here)]
    opened = _open_shards(name, train[:1], val_shards or [folder / public.validation])
    _check_twins(train, opened.val_shards)
    note = f"{here:,} of {public.shards - 1:,} training shards"
    shards = ArrivingShards(train, arrival)
    common = name, shards, opened.val_shards, opened.fingerprint, note
    return PublicDataset(*common, public, arrival, here, download, tokens)
