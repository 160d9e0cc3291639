"""How many tokens a data set has, and how many public shards a horizon needs."""

import random
from pathlib import Path

import numpy as np
import pytest
from shards import write_shard

from nanochat import UserError
from nanochat.data.amount import vocabulary_size
from nanochat.data.dataset import Dataset
from nanochat.data.public import PUBLIC, TOKENS_PER_SHARD
from nanochat.data.sources import open_dataset


class Words:
    """A tokenizer whose tokens are the words of a text; it counts the characters it has seen."""

    def __init__(self):
        self.seen = 0

    def encode(self, text: str) -> np.ndarray:
        self.seen += len(text)
        return np.zeros(len(text.split()), dtype=np.uint32)


def documents(chars: int) -> list[str]:
    """About `chars` characters: some documents are long, and words are 1 to 8 characters long."""
    draw, texts = random.Random(0), []
    while chars > 0:
        word = "x" * draw.randint(1, 8)
        size = draw.choice([50, 500, 5_000, 50_000])
        texts.append(f"{len(texts)} " + f"{word} " * (size // (len(word) + 1)))
        chars -= len(texts[-1])
    return texts


def imported(folder: Path, texts: list[str]) -> Dataset:
    """As our import writes them: sorted, in row groups of about 500,000 characters."""
    write_shard(folder / "all.parquet", texts)
    return open_dataset(folder, base_dir=folder / "base")


def in_place(folder: Path, texts: list[str], **options) -> Dataset:
    """Two shards that are used as they are."""
    for i in range(2):
        write_shard(folder / f"{i}.parquet", texts[i::2], **options)
    write_shard(folder / "val.parquet", texts[:1])
    return open_dataset(folder, folder / "val.parquet", base_dir=folder / "base")


def true_tokens(dataset: Dataset) -> int:
    return sum(len(text.split()) for text in dataset.train_texts())


def test_the_tokens_of_a_small_data_set_are_counted_exactly(tmp_path):
    dataset = in_place(tmp_path / "in", ["", *documents(500_000)], row_group_size=7)
    assert dataset.estimated_tokens(Words()) == true_tokens(dataset)
    with pytest.raises(UserError, match="holds no text"):
        in_place(tmp_path / "empty", [""] * 4).estimated_tokens(Words())


@pytest.mark.parametrize(
    ("write", "options"),
    [(imported, {}), (in_place, {"row_group_size": 100, "use_dictionary": False}), (in_place, {}),
     (in_place, {"row_group_size": 1})],
    ids=["imported", "many row groups", "one row group a shard", "one document a row group"],
)  # fmt: skip
def test_the_tokens_of_a_large_data_set_are_estimated_from_two_megabytes(tmp_path, write, options):
    dataset = write(tmp_path / "in", documents(16_000_000), **options)
    tokenizer = Words()
    estimate = dataset.estimated_tokens(tokenizer)
    assert estimate == pytest.approx(true_tokens(dataset), rel=0.1)
    assert tokenizer.seen <= 2_000_000
    assert dataset.estimated_tokens(Words()) == estimate


def test_bytes_are_counted_not_characters(tmp_path):
    dataset = in_place(tmp_path / "in", [f"{i} " + "漢字 " * 2_000 for i in range(400)], row_group_size=50)
    assert dataset.estimated_tokens(Words()) == pytest.approx(true_tokens(dataset), rel=0.02)


def test_the_vocabulary_doubles_as_the_text_grows_fourfold(tmp_path):
    sizes = [vocabulary_size(30_000_000 * 4**i) for i in range(-3, 6)]
    assert sizes == [4096] * 4 + [8192, 16384, 32768, 32768, 32768]
    assert vocabulary_size(0) == 4096 and vocabulary_size(10**15) == 32768
    small = imported(tmp_path / "small", documents(500_000))
    assert small.suggested_vocab_size == 4096
    texts = [f"{i} " + "word " * 200_000 for i in range(80)]  # 80 MB, which parquet keeps small
    large = in_place(tmp_path / "large", texts, row_group_size=8, use_dictionary=False)
    assert large.suggested_vocab_size == vocabulary_size(80_000_000) == 8192


def test_a_horizon_needs_as_many_shards_as_hold_its_tokens():
    climbmix = PUBLIC["climbmix"]
    assert climbmix.shards_for(1) == climbmix.shards_for(TOKENS_PER_SHARD) == 1
    assert climbmix.shards_for(TOKENS_PER_SHARD + 1) == 2
    assert climbmix.shards_for(7_000_000_000) == 150  # the figures of its author
    assert PUBLIC["fineweb-edu"].shards_for(11_200_000_000) == 240
    assert PUBLIC["fineweb-edu"].shards_for(10**15) == 1822  # all, without validation
