"""Files of a data set on the Hugging Face Hub: --data=hf:OWNER/NAME

An address may name a revision and files: hf:OWNER/NAME@v1.0/data/train-*.parquet. Its first use chooses the
files, as many as the run's horizon needs, and writes the commit and their number to listing.json, beside the
files. From then on the address means these files: every script reads the same text, and needs no network.
"""

import bisect
import fnmatch
import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from nanochat import UserError
from nanochat.data.dataset import writing
from nanochat.data.download import fetch, look_up
from nanochat.data.textfiles import SUFFIXES
from nanochat.files import replacing
from nanochat.terminal import counted, gib

PREFIX = "hf:"
ADDRESS = re.compile(
    r"hf:(?://datasets/)?([\w.-]+/[\w.-]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?", re.ASCII
)
LARGEST = 10 << 30  # bytes of all files; the import writes about as much again
SMALLEST = 64 << 20  # bytes that the shortest run takes too, so that validation has text
COMPRESSED = (".parquet", ".gz")
BYTES_PER_TOKEN = {True: 4, False: 6}  # of compressed files (the public shards have 2.1) and others, at most
PREFERRED = ((".parquet",), (".jsonl", ".jsonl.gz"), (".json",), (".txt", ".md", ".py"))
NO_TEXT = ("readme", "license", "dataset_info")  # files whose names begin so are no text to train on


def local_files(
    address: str,
    base_dir: Path,
    tokens: Callable[..., int] | None = None,
    count: int | None = None,
    network: bool = True,
) -> tuple[Path, list[Path]]:
    """(folder, files) of an address, downloaded into `<base_dir>/data/hf/` if they are not there yet.

    Without a path in the address these are training files of one kind: parquet, else JSON lines, else JSON,
    else text. They are taken in the order of their names: `count`, else as many as the first use took, else
    what `tokens()` tokens need, else all. Raises UserError if there is no such data set, if it has no such
    files, if they are larger than LARGEST, or if they are not here and network=False.
    """
    match = ADDRESS.fullmatch(address)
    if not match:
        raise UserError(
            f"data={address} is no data set of the Hub; write hf:OWNER/NAME, and behind it @REVISION or "
            "/PATH/*.parquet if need be"
        )
    repo, revision, pattern = match[1], match[2] or "main", (match[3] or "").rstrip("/")
    folder = base_dir / "data" / "hf" / f"{repo}@{revision.replace('/', '-')}"
    listing = _read(folder)
    if listing is None and network:
        info = look_up(repo, revision, files=True)
        listed = info.siblings or ()  # by a mirror perhaps without sizes that are numbers
        sizes = {file.rfilename: file.size if isinstance(file.size, int) else 0 for file in listed}
        listing = {"commit": info.sha, "files": sizes, "taken": {}}
    names = _taken(address, listing, pattern, tokens, count) if listing else []
    if not network and not (names and all((folder / name).exists() for name in names)):
        raise UserError(f"data={address} is not here, and --plan uses no network; get it: {_get(address)}")
    listing["taken"][pattern] = len(names)
    if listing != _read(folder):
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(folder / "listing.json") as file:
                file.write(json.dumps(listing, indent=1).encode())
    fetch(repo, names, folder, listing["commit"])
    return folder, [folder / name for name in names]


def _get(address: str) -> str:
    return f"python -m scripts.download --data={address}"


def _read(folder: Path) -> dict | None:
    """{"commit": hexadecimal, "files": {name: bytes}, "taken": {pattern: number of files}} of a folder."""
    try:
        listing = json.loads((folder / "listing.json").read_text("utf-8"))
        numbers = {name: {k: int(n) for k, n in listing[name].items()} for name in ("files", "taken")}
        return {"commit": str(listing["commit"])} | numbers
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not there, or damaged
        return None


def _taken(
    address: str, listing: dict, pattern: str, tokens: Callable | None, count: int | None
) -> list[str]:
    """The names of the files that an address means. If the horizon needs more of them, a line says so."""
    sizes = listing["files"]
    names = _chosen(sizes, pattern)
    if not names:
        there = ", ".join(sorted(sizes)[:8]) + (", ..." if len(sizes) > 8 else "")
        raise UserError(
            f"data={address} has no file that can be read ({' '.join(SUFFIXES)}); it has: "
            f"{there or 'nothing'}"
        )
    needed = _needed([(name, sizes[name]) for name in names], tokens) if tokens else len(names)
    taken = names[: count or listing["taken"].get(pattern, needed)]
    if tokens and len(taken) < needed:
        print(
            f"{address} means {len(taken)} of its {len(names)} files since its first use, and the horizon "
            f"needs about {needed}; for all runs to come: {_get(address)} --num_shards={needed}",
            file=sys.stderr,
        )
    if (total := sum(sizes[name] for name in taken)) > LARGEST:
        raise UserError(
            f"{counted(len(taken), 'file', 'files')} of data={address}, to {taken[-1]}, have {gib(total)}, "
            f"and the limit is {gib(LARGEST)}; take fewer with {_get(address)} --num_shards=N or a pattern "
            "behind hf:OWNER/NAME/, or get them with `hf download` and give their folder"
        )
    return taken


def _needed(sizes: list[tuple[str, int]], tokens: Callable[..., int]) -> int:
    """How many of the first files [(name, bytes)] hold `tokens()` tokens and have SMALLEST bytes, or all."""
    held = [size / BYTES_PER_TOKEN[name.lower().endswith(COMPRESSED)] for name, size in sizes]
    of_tokens = bisect.bisect_left(list(itertools.accumulate(held)), tokens())
    of_bytes = bisect.bisect_left(list(itertools.accumulate(size for _, size in sizes)), SMALLEST)
    return min(max(of_tokens, of_bytes) + 1, len(sizes))


def _chosen(files: dict[str, int], pattern: str) -> list[str]:
    """The names, sorted, that match a pattern or are in a folder; without a pattern, see `local_files`."""
    paths = [PurePosixPath(name) for name in sorted(files)]
    inside = [p for p in paths if not p.is_absolute() and not any(part.startswith(".") for part in p.parts)]
    names = [str(path) for path in inside if path.name.lower().endswith(SUFFIXES)]
    if pattern:
        return [n for n in names if fnmatch.fnmatchcase(n, pattern) or n.startswith(f"{pattern}/")]
    names = [name for name in names if not PurePosixPath(name).name.lower().startswith(NO_TEXT)]
    of_kinds = ([name for name in names if name.lower().endswith(kind)] for kind in PREFERRED)
    found = next(filter(None, of_kinds), [])
    return [name for name in found if "train" in name] or found
