"""A data set, and the folder of shards that an import builds for it.

The folder is `<base_dir>/data/<name>/`. Its `index.json` lists the shards, their sizes and the fingerprint of
their content. We write into a temporary folder and rename it when it is complete. So a folder with its final
name is never half written, and if two processes build the same one, the second finds the work of the first.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nanochat import UserError
from nanochat.data.amount import estimate_tokens, vocabulary_size
from nanochat.data.parquet import Documents, write_sorted
from nanochat.data.tokenizer import Tokenizer, open_tokenizer
from nanochat.files import building
from nanochat.terminal import first_line


@dataclass(frozen=True)
class Dataset:
    """Text in shards (parquet files with a column `text`), split into training and validation."""

    name: str
    train_shards: list[Path]
    val_shards: list[Path]
    fingerprint: str  # of the content, hexadecimal; a checkpoint stores it
    note: str  # one line for the log: how many documents, from where
    more_val: dict[str, list[Path]] = field(default_factory=dict, kw_only=True)  # further validation sets
    more_text: str = field(default="", kw_only=True)  # how to get shards that a run lacks, see for_run

    @property
    def val_sets(self) -> dict[str, list[Path]]:
        """{name of its bits per byte in a record: shards} of every validation set."""
        return {"val_bpb": self.val_shards} | {f"val_bpb_{name}": s for name, s in self.more_val.items()}

    @property
    def sampled_shards(self) -> list[Path]:
        """The training shards that a tokenizer is trained on, and whose text stands for all: here all."""
        return self.train_shards

    def train_texts(self) -> Documents:
        """The documents that a tokenizer is trained on, in stored order."""
        return Documents(self.sampled_shards)

    def estimated_tokens(self, tokenizer: Tokenizer) -> int:
        """About how many training tokens there are, without `<|bos|>`: exact for up to 2 MB of text, else
        estimated from a sample of 2 MB (embedded data of Python 3.11: 0.3 s, and 0.6 % too few). Raises
        UserError if there are none: parquet files in place may hold empty documents alone."""
        if not (tokens := estimate_tokens(Documents(self.sampled_shards), tokenizer)):
            raise UserError(f"{self.name} holds no text; give --data files with documents in them")
        return tokens * len(self.train_shards) // len(self.sampled_shards)

    @property
    def text_bytes(self) -> int:
        """About how many UTF-8 bytes the training text has."""
        sampled = Documents(self.sampled_shards).text_bytes
        return sampled * len(self.train_shards) // len(self.sampled_shards)

    @property
    def suggested_vocab_size(self) -> int:
        """The vocabulary size that suits this much text, in tokens."""
        return vocabulary_size(self.text_bytes)

    def tokenizer_folder(self, base_dir: Path) -> Path:
        """The folder for the tokenizers that are trained on this data set."""
        return Path(base_dir) / "tokenizers" / f"{self.name}-{self.fingerprint[:12]}"

    def open_tokenizer(
        self, setting: str, vocab_size: int, base_dir: Path, network: bool = True
    ) -> Tokenizer:
        """The tokenizer of the settings `tokenizer` and `vocab_size` (-1: to suit the text); trained at the
        first use. Raises what tokenizer.open_tokenizer does."""
        exact, folder = vocab_size != -1, self.tokenizer_folder(base_dir)
        size = vocab_size if exact else self.suggested_vocab_size
        return open_tokenizer(setting, size, folder, self.train_texts, exact=exact, network=network)

    # Public data (public.py) override these: their shards may arrive while the run trains

    def for_run(self, tokenizer: Tokenizer, resumed, machine) -> "Dataset":
        """The data set as a run reads it. resumed: the checkpoint that the run continues, or None.

        `more_text` of the result says how to get shards that the horizon needs and the run lacks.
        """
        return self

    def begin(self, machine, stop, timeout_s: float) -> None:
        """Start to download missing shards in the background. stop: the run's StopSignal."""

    def close(self, machine) -> None:
        """End the download. Raises UserError on every process if the run ended because it ran out of text."""


def build(
    folder: Path, name: str, documents: Iterable[tuple[str, str]], note: str, splits: str = "hash"
) -> Dataset:
    """Write (split, text) documents as shards into `folder`, and open it.

    Two `{}` in `note` become the numbers of training and validation documents. splits: "hash", "given" if
    --val_data names the validation split, or "val" for that split alone. Raises UserError if a split is empty
    or the folder cannot be written.
    """
    with writing(folder), building(folder) as temporary:
        index = write_sorted(documents, temporary)
        train, val = index.pop("documents")
        if not train and (splits == "given" or not val) and splits != "val":
            raise UserError(f"{name} holds no text; give --data files with documents in them")
        if splits != "hash" and not val:
            raise UserError("--val_data holds no text; give it files with documents in them")
        if splits == "hash" and not (val and train):
            missing = "validation" if train else "training"
            raise UserError(
                f"none of the {train + val:,} documents of {name} falls into the {missing} split (by its "
                "hash one in 40 is validation); name the validation files with --val_data=PATH"
            )
        index |= {"name": name, "note": note.format(train, val)}
        (temporary / "index.json").write_text(json.dumps(index, indent=1), "utf-8")
        _put_in_place(temporary, folder)
    return open_built(folder)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an OSError into a UserError that names `folder`: errors in reading are UserErrors already."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror or first_line(error)}); make room or get "
            "permission there, or name another folder with --base_dir=PATH"
        ) from error


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Give a complete folder its final name. If another process was faster, keep its folder."""
    try:
        os.rename(temporary, folder)
    except OSError:
        if open_built(folder) is None:  # it is damaged, not the folder of another process
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(temporary, folder)


def open_built(folder: Path) -> Dataset | None:
    """The data set in a folder that we built; None if it is missing or a file differs from the index."""
    try:
        index = json.loads((folder / "index.json").read_text("utf-8"))
        splits = {split: [folder / name for name in index[split]] for split in ("train", "val")}
        sizes = {path: index[split][path.name] for split, paths in splits.items() for path in paths}
        if any(path.stat().st_size != size for path, size in sizes.items()):
            return None
        return Dataset(index["name"], splits["train"], splits["val"], index["fingerprint"], index["note"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


# -- the prompts that a model continues during its training, to show what it has learned

CODE = ["def", "class", "import"]  # prompts for the embedded text, which is Python code
WORDS, CHARACTERS = 4, 24  # the most that a prompt takes of a document's beginning
UNSPACED = 8  # characters of a prompt if the first word is longer than CHARACTERS, as in Chinese
PROMPTS, DOCUMENTS = 3, 200  # prompts to make, and documents to look at


def sample_prompts(setting: str, dataset: Dataset | None) -> list[str]:
    """The prompts of the setting `sample_prompts`: `auto`, or texts separated by |.

    auto: Python's keywords for the embedded text, else the first words of the first validation documents that
    have words, all different. If no document has words, the only prompt is empty. Texts need no data set.
    """
    if setting != "auto":
        return setting.split("|")
    if re.match(r"embedded-py\d", dataset.name):
        return CODE
    documents = itertools.islice(Documents(dataset.val_shards), DOCUMENTS)
    found = dict.fromkeys(beginning(text) for text in documents)
    return [text for text in found if text][:PROMPTS] or [""]


def beginning(text: str) -> str:
    """The first words of the first line of a text that has a letter or a digit; empty if no line has one.

    Without a space at its end: tokens of most words begin with the space before them.
    """
    text = "".join(c for c in text[:10_000] if c.isspace() or unicodedata.category(c) != "Cc")  # no controls
    lines = (" ".join(line.split()) for line in text.splitlines())
    line = next((line for line in lines if any(map(str.isalnum, line))), "")
    words = " ".join(line.split(" ")[:WORDS])
    if len(words) > CHARACTERS:
        words = words[: CHARACTERS + 1].rpartition(" ")[0]
    end = UNSPACED
    while end < len(line) and unicodedata.category(line[end]).startswith("M"):  # accents and the like
        end += 1
    return words or line[:end]
