"""Texts of another kind than Python, from what lies on a Debian machine: to try the recipe on what it was not
tuned on.

    python -m experiments.other_texts --folder=FOLDER
    python -m scripts.base_train --data=FOLDER/prose-short/train.jsonl --val_data=FOLDER/prose-short/val.jsonl

prose: documentation in Markdown and reStructuredText. manual: sources of manual pages. headers: C and C++.
german, russian, japanese: manual pages in these languages, of Debian's packages manpages-de, -ru and -ja.
Each is there twice, with whole files as documents (long), and cut at empty lines into documents of about 500
characters (short). A file is validation text if its path hashes to 0 mod 20, and the same text counts once.
What the machine lacks is skipped, with a line that says so.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import configurator
from nanochat import UserError

folder: str | None = None  # gets a folder for each text
characters = 2_000_000  # of a text, about [1e4..1e9]
root = "/usr"  # where files are looked for

KINDS = {  # patterns of files below `root`
    "prose": ("**/*.md", "**/*.rst"),
    "manual": tuple(f"share/man/man*/*.{section}.gz" for section in (1, 3, 5, 8)),
    "headers": ("**/*.h", "**/*.hpp"),
    "german": ("share/man/de/**/*.gz",),
    "russian": ("share/man/ru/**/*.gz",),
    "japanese": ("share/man/ja/**/*.gz",),
}
SHORT, LEAST, MOST = 500, 2000, 50_000  # characters: of a short document; of a file, at least and at most


def hashed(text: str) -> int:
    return int(hashlib.sha1(text.encode()).hexdigest(), 16)


def content(path: Path) -> str:
    """The text of a file, also of a compressed one; empty if it is none in UTF-8."""
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        return ""


def texts_of(root: Path, patterns: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(split, text) of each file below `root` that fits a pattern, in an order as good as random."""
    found = {path for pattern in patterns for path in root.glob(pattern)}
    paths = (path for path in found if path.is_file() and not path.is_symlink())
    known = set()
    for path in sorted(paths, key=lambda path: hashed(str(path))):
        text = content(path)
        if LEAST <= len(text) <= MOST and (number := hashed(text)) not in known:
            known.add(number)
            yield "val" if hashed(str(path)) % 20 == 0 else "train", text


def pieces(text: str, at_least: int = SHORT) -> Iterator[str]:
    """The text cut at empty lines into pieces of `at_least` characters or more, the last of fewer."""
    piece = ""
    for paragraph in text.split("\n\n"):
        piece += paragraph + "\n\n"
        if len(piece) >= at_least:
            yield piece
            piece = ""
    if piece.strip():
        yield piece


def write(kind: str, found: list[tuple[str, str]], folder: Path):
    """Both forms of a text, each as train.jsonl and val.jsonl, and a line about each."""
    for form in ("short", "long"):
        place = folder / f"{kind}-{form}"
        place.mkdir(parents=True, exist_ok=True)
        for split in ("train", "val"):
            documents = [
                document
                for one, text in found
                if one == split
                for document in (pieces(text) if form == "short" else [text])
            ]
            lines = (json.dumps({"text": document}) + "\n" for document in documents)
            (place / f"{split}.jsonl").write_text("".join(lines), "utf-8")
            size = sum(map(len, documents))
            print(f"{place / split}.jsonl: {len(documents):,} documents, {size:,} characters")


def main():
    if not folder:
        raise UserError("give --folder=FOLDER, for the texts")
    if not Path(root).is_dir():
        raise UserError(f"--root={root} is no folder; name one with files to read, such as /usr")
    for kind, patterns in KINDS.items():
        found, size = [], 0
        for split, text in texts_of(Path(root), patterns):
            found.append((split, text))
            size += len(text)
            if size >= characters:
                break
        if {split for split, _ in found} == {"train", "val"}:
            write(kind, found, Path(folder))
        else:
            print(f"{kind}: skipped, {root} has too few files {' '.join(patterns)}")


if __name__ == "__main__":
    configurator.configure(globals())
    main()
