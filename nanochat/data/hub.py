"""Files of a data set on the Hugging Face Hub, to import: --data=hf:OWNER/NAME

An address may name a revision and files: hf:OWNER/NAME@v1.0/data/train-*.parquet. The first use writes the
commit and its list of files to listing.json, beside the files. From then on the address means these files: a
resumed run reads the same text and needs no network.
"""

import bisect
import fnmatch
import itertools
import json
import re
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
BYTES_PER_TOKEN = 4  # of compressed parquet files, at most; the public shards have 2.1
PREFERRED = ((".parquet",), (".jsonl", ".jsonl.gz"), (".json",), (".txt", ".md", ".py"))
NO_TEXT = ("readme", "license", "dataset_info")  # files whose names begin so are no text to train on


def local_files(
    address: str, base_dir: Path, tokens: Callable[..., int] | None = None
) -> tuple[Path, list[Path]]:
    """(folder, files) of an address, downloaded into `<base_dir>/data/hf/` if they are not there yet.

    Without a path in the address these are its training files of one kind: parquet, else JSON lines, else
    JSON, else text. `tokens()` is about how many tokens the run reads, for advice. Raises UserError if there
    is no such data set, if it has no such files, or if they are larger than LARGEST.
    """
    match = ADDRESS.fullmatch(address)
    if not match:
        raise UserError(
            f"data={address} is no data set of the Hub; write hf:OWNER/NAME, and behind it @REVISION or "
            "/PATH/*.parquet if need be"
        )
    repo, revision, pattern = match[1], match[2] or "main", (match[3] or "").rstrip("/")
    folder = base_dir / "data" / "hf" / f"{repo}@{revision.replace('/', '-')}"
    listing = _listing(repo, revision, folder)
    sizes = listing["files"]
    names = _chosen(sizes, pattern)
    if not names:
        there = ", ".join(sorted(sizes)[:8]) + (", ..." if len(sizes) > 8 else "")
        raise UserError(
            f"data={address} has no file that can be read ({' '.join(SUFFIXES)}); it has: "
            f"{there or 'nothing'}"
        )
    if sum(sizes[name] for name in names) > LARGEST:
        raise UserError(_too_large(address, [(name, sizes[name]) for name in names], tokens))
    fetch(repo, names, folder, listing["commit"])
    return folder, [folder / name for name in names]


def _listing(repo: str, revision: str, folder: Path) -> dict:
    """{"commit": hexadecimal, "files": {name: bytes}} of a revision, as it was at the first use."""
    path = folder / "listing.json"
    try:
        listing = json.loads(path.read_text("utf-8"))
        return {"commit": str(listing["commit"]), "files": dict(listing["files"])}
    except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged
        pass
    info = look_up(repo, revision, files=True)
    listing = {"commit": info.sha, "files": {file.rfilename: file.size or 0 for file in info.siblings}}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(listing, indent=1).encode())
    return listing


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


def _too_large(address: str, sizes: list[tuple[str, int]], tokens: Callable[..., int] | None) -> str:
    """The message for files [(name, bytes)] that are too large, with how many of them the horizon needs."""
    total, horizon = sum(size for _, size in sizes), ""
    if tokens:
        held = list(itertools.accumulate(size for _, size in sizes))
        count = min(bisect.bisect_left(held, BYTES_PER_TOKEN * tokens()) + 1, len(sizes))
        horizon = f", for this horizon about {counted(count, 'file', 'files')}, up to {sizes[count - 1][0]}"
    return (
        f"data={address} has {counted(len(sizes), 'file', 'files')} of {gib(total)}, and the limit is "
        f"{gib(LARGEST)}; name those that you need{horizon}, with a pattern behind hf:OWNER/NAME/, or "
        "get them with `hf download` and give their folder"
    )
