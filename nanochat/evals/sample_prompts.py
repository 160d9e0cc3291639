"""Texts that a model continues during its training, to show what it has learned. They suit the data."""

import itertools
import re
import unicodedata

from nanochat.data.dataset import Dataset
from nanochat.data.parquet import iterate_documents

CODE = ["def", "class", "import"]  # for the embedded text, which is Python code
WORDS, CHARACTERS = 4, 24  # of a document's beginning, at most
UNSPACED = 8  # characters of it if the first space comes late, as in Chinese
PROMPTS, DOCUMENTS = 3, 200  # prompts to make, and documents to look at


def sample_prompts(setting: str, dataset: Dataset) -> list[str]:
    """The prompts that the setting `sample_prompts` means: `auto`, or texts separated by |.

    auto: code for the embedded text, else the first words of the first validation documents that have words,
    each beginning once. If none has, the one prompt is empty: the model then begins a text by itself.
    """
    if setting != "auto":
        return setting.split("|")
    if re.match(r"embedded-py\d", dataset.name):
        return CODE
    documents = itertools.islice(iterate_documents(dataset.val_shards), DOCUMENTS)
    found = dict.fromkeys(beginning(text) for text in documents)
    return [text for text in found if text][:PROMPTS] or [""]


def beginning(text: str) -> str:
    """The first words of the first line of a text that has a letter or a digit; empty if no line has one.

    Without a space at its end: tokens of most words begin with the space before them.
    """
    text = "".join(c for c in text[:10_000] if c.isspace() or unicodedata.category(c) != "Cc")  # no controls
    lines = (" ".join(line.split()) for line in text.splitlines())
    line = next((line for line in lines if any(map(str.isalnum, line))), "")
    words = line.split(" ")
    if len(words[0]) > CHARACTERS:
        return whole_characters(line, UNSPACED)
    while len(" ".join(words)) > CHARACTERS or len(words) > WORDS:
        words.pop()
    return " ".join(words)


def whole_characters(text: str, n: int) -> str:
    """The first n characters, and what belongs to the last of them: marks such as accents, joined emoji."""
    while n < len(text) and (_joins(text[n]) or text[n - 1] == "\u200d"):
        n += 1
    return text[:n].rstrip()


def _joins(character: str) -> bool:
    """Whether a character is drawn on the one before it, or joins it to the next (zero-width joiner)."""
    return unicodedata.category(character) in ("Mn", "Mc", "Me") or character == "\u200d"
