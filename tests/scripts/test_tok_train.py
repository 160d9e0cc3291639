"""The script that trains a tokenizer: what it writes is what base_train finds, and its figures are true."""

import hashlib
import json
import random
import signal
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import Process, wait_until

from nanochat.data.parquet import Documents
from nanochat.data.sources import open_dataset
from nanochat.data.tokenizer import Tokenizer, open_tokenizer, train


def tok_train(tmp_path: Path, *arguments: str, status: int = 0) -> Process:
    command = ["scripts.tok_train", f"--base_dir={tmp_path / 'base'}", *arguments]
    done = Process(command, TIKTOKEN_CACHE_DIR=str(tmp_path / "empty"))
    assert done.wait() == status, done.stdout + done.stderr
    return done


def texts(tmp_path: Path, n: int = 300) -> Path:
    path = tmp_path / "texts.jsonl"
    lines = [" ".join(hashlib.sha256(b"%d %d" % (i, j)).hexdigest()[:5] for j in range(50)) for i in range(n)]
    path.write_text("".join(json.dumps({"body": line}) + "\n" for line in lines))
    return path


def test_it_writes_the_tokenizer_that_base_train_then_finds(tmp_path):
    path = texts(tmp_path)
    arguments = [f"--data={path}", "--text_field=body", "--vocab_size=400", "--json"]
    done = tok_train(tmp_path, *arguments)
    record = json.loads(done.stdout.splitlines()[-1])
    data = open_dataset(path, base_dir=tmp_path / "base", text_field="body")
    folder = tmp_path / "base" / "tokenizers" / f"{data.name}-{data.fingerprint[:12]}"
    found = open_tokenizer("auto", 400, folder, lambda: (_ for _ in ()).throw(AssertionError("trained")))
    assert found.fingerprint == record["fingerprint"] and found.vocab_size == 400
    text = "".join(Documents(data.val_shards))
    by_hand = len(text.encode()) / len(found.encode(text))
    assert abs(record["bytes_per_token"]["validation split"]["this one"] - by_hand) < 0.02 * by_hand
    assert "| digits (squares) " in done.stdout
    assert "not compared, because their files are not on this machine: gpt2, cl100k_base" in done.stdout


def test_the_size_follows_the_text_unless_it_is_asked_for(tmp_path):
    path = tmp_path / "small.jsonl"
    path.write_text("".join(f'"word{i} and word{i + 1}"\n' for i in range(200)))
    done = tok_train(tmp_path, f"--data={path}", f"--out={tmp_path / 'mine.json'}")
    assert 265 < Tokenizer.load(tmp_path / "mine.json").vocab_size < 32768
    assert "trained" in done.stdout
    done = tok_train(tmp_path, f"--data={path}", "--vocab_size=32768", status=2)
    assert "error: vocab_size 32768 is more than this text yields; use at most" in done.stderr


def test_only_so_many_characters_are_read(tmp_path):
    path = texts(tmp_path)
    done = tok_train(tmp_path, f"--data={path}", "--text_field=body", "--vocab_size=280", "--max_chars=2000")
    data = open_dataset(path, base_dir=tmp_path / "base", text_field="body")
    few, all_ = (train(data.train_texts(), 280, max_chars=n).fingerprint for n in (2000, -1))
    assert few != all_ and done.stdout.split("fingerprint ")[1].split()[0] == few[:12]


def test_validation_without_text_is_left_out_of_the_comparison(tmp_path):
    for name, values in ("train.parquet", ["some words to read"] * 9), ("val.parquet", [""]):
        pq.write_table(pa.table({"text": values}), tmp_path / name)
    data = [f"--data={tmp_path / 'train.parquet'}", f"--val_data={tmp_path / 'val.parquet'}"]
    done = tok_train(tmp_path, *data, "--vocab_size=270", "--json")
    assert len(json.loads(done.stdout.splitlines()[-1])["bytes_per_token"]) == 4


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--out={tmp_path}/texts.jsonl/t.json", "cannot be written"),
        ("--out={tmp_path}", "cannot be written"),
        ("--out=.", "cannot be written"),
        ("--out=~nouser0815/t.json", "--out=~nouser0815/t.json begins with a user who is unknown"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_sentence_before_the_training(tmp_path, argument, message):
    arguments = [f"--data={texts(tmp_path)}", "--text_field=body", "--vocab_size=1e6"]  # training would fail
    done = tok_train(tmp_path, *arguments, argument.format(tmp_path=tmp_path), status=2)
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 1), ("SIGTERM", -signal.SIGTERM)])
def test_a_signal_ends_the_training(tmp_path, name, status):
    path = tmp_path / "dna.jsonl"
    letters = random.Random(1)
    runs = ["".join(letters.choices("acgt", k=100_000)) for _ in range(80)]
    path.write_text("".join(json.dumps(run) + "\n" for run in runs))
    process = Process(["scripts.tok_train", f"--data={path}", "--vocab_size=60000", f"--base_dir={tmp_path}"])
    wait_until(lambda: "data:" in process.stdout, process)
    time.sleep(2)  # now it merges
    process.send_signal(getattr(signal, name))
    _, errors = process.communicate()
    assert process.returncode == status and "Traceback" not in errors
    assert name != "SIGINT" or errors.endswith("stopped; no tokenizer is written\n")
    assert not list(tmp_path.glob("tokenizers/*/*"))
