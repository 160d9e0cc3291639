"""Data sets of the Hub by --data=hf:OWNER/NAME: which files they are, and that they stay the same."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import TINY, losses, run
from hub_server import parquet
from shards import documents, flat, is_validation

from nanochat import UserError
from nanochat.data import hub as addresses
from nanochat.data.sources import open_dataset

ROOT = Path(__file__).parents[2]
TEXTS = [f"text number {i}" for i in range(200)]


def lines(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({field: text}) + "\n" for text in texts).encode()


@pytest.fixture
def texts(hub):
    """A data set with the usual files beside its text."""
    hub.files = {".gitattributes": b"", "README.md": b"# Texts", "dataset_infos.json": b"{}"}
    return hub


def opened(base: Path, address: str = "hf:somebody/texts", **more) -> list[str]:
    """The documents of both splits, sorted."""
    return sorted(flat(documents(open_dataset(address, base_dir=base, **more))))


@pytest.mark.parametrize("files", [
    {"data/all.parquet": parquet(TEXTS)}, {"all.jsonl.gz": gzip.compress(lines(TEXTS))},
    {"all.json": json.dumps(TEXTS).encode()}, {f"{i}.txt": text.encode() for i, text in enumerate(TEXTS)},
], ids=["parquet", "jsonl.gz", "json", "txt"])  # fmt: skip
def test_files_of_each_kind_are_imported_with_validation_by_hash(texts, tmp_path, files):
    texts.files |= files
    train, val = documents(open_dataset("hf:somebody/texts", base_dir=tmp_path))
    assert sorted(train + val) == sorted(TEXTS)
    assert sorted(val) == sorted(filter(is_validation, TEXTS))


def test_training_files_are_taken_and_a_path_takes_others(texts, tmp_path):
    for i, name in enumerate(("data/train-0.parquet", "data/train-1.parquet", "data/test-0.parquet")):
        texts.files[name] = parquet(TEXTS[60 * i : 60 * (i + 1)])
    texts.files["more/lines.jsonl"] = lines(TEXTS[180:])
    expected = {
        "hf:somebody/texts": TEXTS[:120],
        "hf://datasets/somebody/texts": TEXTS[:120],
        "hf:somebody/texts/data": TEXTS[:180],
        "hf:somebody/texts/data/t*-0.parquet": TEXTS[:60] + TEXTS[120:180],
        "hf:somebody/texts@v1/data/train-1.parquet": TEXTS[60:120],
    }
    for address, found in expected.items():
        texts.requests.clear()
        assert opened(tmp_path, address, val_data=_one(tmp_path)) == sorted([*found, "validation"])
    assert {name for method, name, _ in texts.requests if method == "GET"} >= {"data/train-1.parquet"}
    assert texts.got("more/lines.jsonl") == []


def _one(folder: Path) -> Path:
    (folder / "val.txt").write_text("validation")
    return folder / "val.txt"


def test_the_text_stays_that_of_the_first_use_and_needs_no_network(texts, tmp_path, monkeypatch):
    texts.files |= {"train-0.jsonl": lines(TEXTS[:100]), "train-1.jsonl": lines(TEXTS[100:])}
    first = open_dataset("hf:somebody/texts", base_dir=tmp_path)
    (tmp_path / "own.jsonl").write_bytes(lines(TEXTS, "body"))  # the same text in a file of one's own
    own = open_dataset(tmp_path / "own.jsonl", base_dir=tmp_path, text_field="body")
    assert own.fingerprint == first.fingerprint
    texts.commit = "f" * 40
    texts.files["train-2.jsonl"] = lines(["new"])
    texts.requests.clear()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert open_dataset("hf:somebody/texts", base_dir=tmp_path) == first and texts.requests == []


def test_offline_what_is_not_here_is_a_sentence(texts, tmp_path):
    texts.files["all.jsonl"] = lines(TEXTS)
    command = [sys.executable, "-m", "scripts.download", "--data=hf:somebody/texts", f"--base_dir={tmp_path}"]
    for offline, status, said in (("1", 2, "HF_HUB_OFFLINE"), ("", 0, "documents"), ("1", 0, "documents")):
        environment = os.environ | {"HF_HUB_OFFLINE": offline}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == status and said in done.stdout + done.stderr, done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("address, message", [
    ("hf:texts", "write hf:OWNER/NAME"), ("hf:", "write hf:OWNER/NAME"), ("hf:a/b c", "write hf:OWNER/NAME"),
    ("hf:nobody/texts", "nobody/texts .*no such data set.*HF_TOKEN"), ("hf:somebody/texts@v9", "revision"),
    ("hf:somebody/texts", "no file that can be read .*it has: .*README.md"),
    ("hf:somebody/texts/nowhere/*", "nowhere.* no file that can be read"),
])  # fmt: skip
def test_an_address_without_files_is_a_sentence(texts, tmp_path, address, message):
    with pytest.raises(UserError, match=message):
        open_dataset(address, base_dir=tmp_path)


def test_too_much_is_refused_with_how_much_the_horizon_needs(texts, tmp_path, monkeypatch):
    texts.files |= {f"data/train-{i}.parquet": parquet(TEXTS) for i in range(4)}
    size = len(parquet(TEXTS))
    monkeypatch.setattr(addresses, "LARGEST", 3 * size)
    tokens = lambda: size // addresses.BYTES_PER_TOKEN + 1  # noqa: E731
    with pytest.raises(UserError, match=r"4 files .*about 2 files, up to data/train-1\.parquet"):
        open_dataset("hf:somebody/texts", base_dir=tmp_path, tokens=tokens)
    assert texts.got("data/train-0.parquet") == []
    assert opened(tmp_path, "hf:somebody/texts/data/train-[01].parquet") == sorted(TEXTS * 2)


def test_names_that_lead_out_of_the_folder_are_left_out(texts, tmp_path):
    texts.files |= dict.fromkeys(["../outside.jsonl", "/outside.jsonl", "in.jsonl"], lines(TEXTS))
    assert opened(tmp_path / "base") == sorted(TEXTS)
    assert not (tmp_path / "outside.jsonl").exists()


def test_a_run_trains_on_it_and_goes_on_without_the_hub(texts, tmp_path, monkeypatch):
    texts.files["train.jsonl"] = lines([f"{text} " * 20 for text in TEXTS])
    command = ["scripts.base_train", *TINY, "--data=hf:somebody/texts", f"--base_dir={tmp_path}"]
    run([*command, "--num_iterations=6"])
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "going on from" in run(command) and losses(run_of(tmp_path)).keys() == set(range(8))


def run_of(base: Path) -> Path:
    return base / "base_checkpoints" / "d2"
