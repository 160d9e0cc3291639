"""Strange paths and files as data or as a tokenizer: each is refused in one sentence, and nothing hangs."""

import base64
import hashlib
import json
import os
import resource
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shards import write_shard

from nanochat import UserError
from nanochat.data import dataset as imported
from nanochat.data import parquet
from nanochat.data.sources import open_dataset
from nanochat.data.tokenizer import Tokenizer, open_tokenizer


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


def make(kind: str, path: Path) -> None:
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        here = os.getcwd()
        os.chdir(path.parent)  # the path of a socket may have some 100 bytes only
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
        os.chdir(here)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "symbolic links":
        path.symlink_to(path.name)
    else:
        path.symlink_to("nowhere")


@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a device", "symbolic links", "No such file"])
@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.jsonl.gz", "x.json", "x.parquet"])
def test_a_file_without_an_end_is_refused_in_a_folder_and_by_its_name(folder, kind, name):
    path = folder / "texts" / name
    make(kind, path)
    sentence = refusal(open_dataset, "texts", base_dir=folder / "base")
    assert f"texts/{name} " in sentence and kind in sentence
    for arguments in ((str(path),), ("texts/good.jsonl", str(path))):
        assert str(path) in refusal(open_dataset, *arguments, base_dir=folder / "base")


@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a device", "symbolic links", "No such file"])
def test_a_tokenizer_is_a_regular_file(folder, kind):
    make(kind, folder / "t.json")
    assert "tokenizer" in refusal(open_tokenizer, str(folder / "t.json"), 300, folder, lambda: [])
    assert "tokenizer" in refusal(open_tokenizer, "texts", 300, folder, lambda: [])


def test_a_file_whose_name_is_not_utf8_is_read(folder):
    (folder / "texts" / "good.jsonl").rename(folder / "texts" / os.fsdecode(b"\xff.jsonl"))
    assert len(list(open_dataset("texts", base_dir=folder / "base").train_texts())) > 100
    write_shard(folder / "a.parquet", ["a"]).rename(folder / os.fsdecode(b"\xff.parquet"))
    data = open_dataset(os.fsdecode(b"\xff.parquet"), "texts", base_dir=folder / "base")
    assert list(data.train_texts()) == ["a"]


# -- parquet files and the folders we build


def test_a_column_that_comes_twice_is_refused(folder):
    columns = [pa.array(["a", "b"]), pa.array(["c", "d"])]
    pq.write_table(pa.table(columns, names=["text", "text"]), folder / "twice.parquet")
    sentence = "has 2 columns `text`"
    assert sentence in refusal(open_dataset, "twice.parquet", base_dir=folder / "base")
    assert sentence in refusal(open_dataset, "twice.parquet", "texts", base_dir=folder / "base")


@pytest.mark.parametrize("pending", [1 << 27, 1 << 14])
@pytest.mark.parametrize("room", [0, 4000, 30_000])
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


def test_a_folder_that_cannot_be_read_back_is_one_sentence(folder, monkeypatch):
    monkeypatch.setattr(imported, "open_built", lambda folder: None)
    assert "cannot be read back" in refusal(open_dataset, "texts", base_dir=folder / "base")


@pytest.mark.parametrize("content", ["[" * 100_000, "{}", '{"train": {"../x": 1}, "val": {}}', "[]"])
def test_a_damaged_index_is_built_again(folder, content):
    data = open_dataset("texts", base_dir=folder / "base")
    index = data.train_shards[0].parent / "index.json"
    index.write_text(content)
    again = open_dataset("texts", base_dir=folder / "base")
    assert again.fingerprint == data.fingerprint and index.read_text() != content


# -- tokenizer files


def tokenizer_file(**changes) -> bytes:
    """A tokenizer's file with other content, and with the fingerprint of that content."""
    good = json.loads(Tokenizer("t", [bytes([b]) for b in range(256)]).to_bytes())
    data = {**good, **changes}
    tokens = [bytes.fromhex(token) for token in data.pop("tokens", [])] or [bytes([b]) for b in range(256)]
    data["tokens_base64"] = [base64.b64encode(token).decode() for token in tokens]
    content = json.dumps([data["pattern"], list(data["special_tokens"]), [token.hex() for token in tokens]])
    data["fingerprint"] = hashlib.sha256(content.encode()).hexdigest()
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "x?",
        "(?=.)",
        r"\b",
        "a",
        r"\w+",
        r"\w+|\s+",
        "(" * 5000,
        r"(?:\w{1000}){1000}",
        r"(?:(a+)+(?=b))|\S+",
    ],
)
def test_a_pattern_that_would_lose_text_is_refused(pattern):
    assert "train it again" in refusal(Tokenizer.from_bytes, tokenizer_file(pattern=pattern))


def test_a_pattern_that_only_fails_on_some_text_fails_with_a_sentence():
    tokenizer = Tokenizer.from_bytes(tokenizer_file(pattern=r"(?:(?:q|q(?=q))+!!)|[\s\S]"))
    assert "pattern" in refusal(tokenizer.encode, "q" * 100 + "!")


def test_other_strange_content_of_a_tokenizer_is_refused():
    specials = Tokenizer("t", [bytes([b]) for b in range(256)]).special_tokens
    every_byte = [bytes([b]).hex() for b in range(256)]
    for content in (
        b"[" * 100_000,
        b'{"format": ' + b"[" * 100_000,
        tokenizer_file(
            tokens=[*every_byte, ""], special_tokens={name: i + 1 for name, i in specials.items()}
        ),
        tokenizer_file(special_tokens={**specials, "": 256 + len(specials)}),
    ):
        assert "train it again" in refusal(Tokenizer.from_bytes, content)


def test_a_tokenizer_file_of_any_size_is_not_read_into_memory(folder):
    with open(folder / "t.json", "wb") as file:
        file.truncate(1 << 33)
    assert "t.json" in refusal(Tokenizer.load, folder / "t.json")
