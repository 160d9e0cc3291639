"""Strange paths and files as data: each is refused in one sentence, and nothing hangs."""

import hashlib
import json
import os
import resource
from pathlib import Path

import pytest
from shards import write_shard

from nanochat import UserError
from nanochat.data import parquet
from nanochat.data.sources import open_dataset
from nanochat.data.tokenizer import open_tokenizer


def refusal(function, *arguments, **options) -> str:
    """The sentence of the UserError that a call must end in."""
    with pytest.raises(UserError) as error:
        function(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, with a good text in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "good.jsonl").write_text("".join(f'"text {i}"\n' for i in range(200)))
    return tmp_path


# -- paths


@pytest.mark.parametrize("value", ["", " ", ",", "texts,", "texts,,texts", "~nouser0815/x", "a\0b"])
def test_an_empty_or_impossible_path_never_means_the_current_folder(folder, value):
    assert "--data" in refusal(open_dataset, value, base_dir=folder / "base")
    assert "--val_data" in refusal(open_dataset, "texts", value, base_dir=folder / "base")
    if "," not in value:
        assert "--base_dir" in refusal(open_dataset, "texts", base_dir=value)
        assert "--tokenizer" in refusal(open_tokenizer, value, 300, folder, lambda: [])


# -- special files


@pytest.mark.parametrize("target", ["/dev/zero", "x.txt", "nowhere", None])  # a link to it, or a pipe
def test_a_file_without_an_end_is_refused_in_a_folder_and_by_its_name(folder, target):
    path = folder / "texts" / "x.txt"
    path.symlink_to(target) if target else os.mkfifo(path)
    sentence = refusal(open_dataset, "texts", base_dir=folder / "base")
    assert "texts/x.txt is a pipe, a device or a broken link" in sentence
    for arguments in ((str(path),), ("texts/good.jsonl", str(path))):
        assert str(path) in refusal(open_dataset, *arguments, base_dir=folder / "base")


def test_a_file_whose_name_is_not_utf8_is_read(folder):
    (folder / "texts" / "good.jsonl").rename(folder / "texts" / os.fsdecode(b"\xff.jsonl"))
    assert len(list(open_dataset("texts", base_dir=folder / "base").train_texts())) > 100
    write_shard(folder / "a.parquet", ["a"]).rename(folder / os.fsdecode(b"\xff.parquet"))
    data = open_dataset(os.fsdecode(b"\xff.parquet"), "texts", base_dir=folder / "base")
    assert list(data.train_texts()) == ["a"]


def test_a_file_with_a_long_name_is_read(folder):
    (folder / "texts" / "good.jsonl").rename(name := "漢" * 80 + ".jsonl")  # 246 bytes of at most 255
    write_shard(folder / (name[:-6] + ".parquet"), ["a"] * 9)
    for data, val_data in (name, None), (name[:-6] + ".parquet", name):
        dataset = open_dataset(data, val_data, base_dir=folder / "base")
        assert dataset.open_tokenizer("auto", 265, folder / "base").vocab_size == 265


# -- parquet files and the folders we build


@pytest.mark.parametrize("pending, room", [(1 << 27, 0), (1 << 27, 30_000), (1 << 14, 4000)])
def test_a_full_disk_while_data_are_built_is_one_sentence_and_leaves_nothing(
    folder, monkeypatch, pending, room
):
    texts = [hashlib.sha512(b"%d" % i).hexdigest() * 10 for i in range(500)]
    (folder / "t.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    monkeypatch.setattr(parquet, "PENDING_BYTES", pending)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # a file of more bytes fails like one on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        sentence = refusal(open_dataset, "t.jsonl", base_dir=folder / "base")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be written" in sentence and "--base_dir" in sentence
    assert os.listdir(folder / "base" / "data") == []
    assert "Not a directory" in refusal(open_dataset, "t.jsonl", base_dir=folder / "t.jsonl")
    assert "name too long" in refusal(open_dataset, "t.jsonl", base_dir=folder / ("x" * 300))
