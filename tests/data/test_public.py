"""How many public shards a run reads, and what it says about missing ones. Nothing is downloaded."""

import types
from pathlib import Path

import pytest
import torch
from shards import write_shard

from nanochat import UserError
from nanochat.data import public
from nanochat.data import sources as dataset
from nanochat.data.public import Public
from nanochat.data.sources import open_dataset
from nanochat.machine import runtime

MACHINE = runtime.Machine(torch.device("cpu"))
TOKENIZER = types.SimpleNamespace(vocab_size=1000)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """climbmix with 9 training shards of 10 tokens, of which none is here."""
    monkeypatch.setitem(dataset.PUBLIC, "climbmix", Public("somebody/texts", 10))
    monkeypatch.setattr(public, "TOKENS_PER_SHARD", 10)
    return tmp_path / "data" / "climbmix"


def put(folder: Path, *numbers: int) -> None:
    """Complete shards, as a download leaves them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        write_shard(folder / f"shard_{number:05d}.parquet", [f"text {number}"])


def opened(folder: Path, tokens: int):
    """The data set of a run of so many tokens; with a vocabulary of 1,000 they become twice as many."""
    return open_dataset(
        "climbmix", base_dir=folder.parents[1], tokens=lambda size=0: tokens * (2 if size == 1000 else 1)
    )


def of_run(folder: Path, tokens: int, shards_before: int | None = None):
    loader = {} if shards_before is None else {"shards": shards_before}
    resumed = types.SimpleNamespace(state={"loader": loader}) if shards_before is not None else None
    return opened(folder, tokens).for_run(TOKENIZER, resumed, MACHINE)


def test_without_a_shard_a_sentence_says_how_many_the_horizon_needs_and_how_to_get_them(folder):
    for here, missing in ((), "shard_00009.parquet, the validation split"), (
        (9,), "shard_00000.parquet, the first training shard",
    ):  # fmt: skip
        put(folder, *here)
        command = "scripts.download --name=climbmix --num_shards=4, or give --download=on"
        with pytest.raises(UserError, match=f"lacks {missing} .*needs 4 training shards, 0 are .*{command}"):
            opened(folder, 31)


def test_a_run_reads_as_many_shards_as_its_horizon_needs_and_says_which_it_lacks(folder):
    put(folder, 0, 1, 2, 3, 4, 9)
    found = of_run(folder, 20)
    assert [path.name for path in found.train_shards] == [f"shard_{i:05d}.parquet" for i in range(4)]
    assert found.more_text == "" and found.note == "4 of 9 training shards"
    assert len(of_run(folder, 25).train_shards) == 5 and of_run(folder, 25).more_text == ""
    found = of_run(folder, 26)
    assert len(found.train_shards) == 5
    assert "needs 6 shards of climbmix and 5 are here" in found.more_text
    assert "scripts.download --name=climbmix --num_shards=6, or give --download=on" in found.more_text
    found = of_run(folder, 10**9)
    assert len(found.train_shards) == 5 and "needs 9 shards" in found.more_text


def test_a_plan_without_any_shard_has_their_number_and_uses_no_network(folder, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    where, tokens = folder.parents[1], lambda size=0: 31
    for download in "off", "on":
        found = open_dataset("climbmix", base_dir=where, tokens=tokens, download=download, plan_only=True)
        assert found.for_run(TOKENIZER, None, MACHINE).estimated_tokens(TOKENIZER) == 40
        assert "about 4 of 9 training shards" in found.note and "--num_shards=4" in found.note
    put(folder, 0, 9)
    assert open_dataset("climbmix", base_dir=where, tokens=tokens, plan_only=True).train_shards


def test_a_resumed_run_keeps_its_number_of_shards(folder):
    put(folder, 0, 1, 2, 3, 9)
    found = of_run(folder, 20, shards_before=3)
    assert len(found.train_shards) == 3
    assert "keeps the 3 shards of its first start" in found.more_text and "take 4" in found.more_text
    assert of_run(folder, 15, shards_before=3).more_text == ""
    with pytest.raises(UserError, match=r"reads 6 training shards of climbmix, and 4 of them are in .*=6"):
        of_run(folder, 20, shards_before=6)
