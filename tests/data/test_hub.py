"""Data sets of the Hub by --data=hf:OWNER/NAME: which files they are, and that they stay the same."""

import gzip
import json
import types
from pathlib import Path

import pytest
from helpers import TINY, command, losses, run
from hub_server import parquet
from shards import documents, flat, is_validation

from nanochat import UserError
from nanochat.data import hub as addresses
from nanochat.data.conversations import open_conversations
from nanochat.data.sources import open_dataset

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
    (val := tmp_path / "val.txt").write_text("validation")
    expected = {
        "hf:somebody/texts": TEXTS[:120],
        "hf://datasets/somebody/texts": TEXTS[:120],
        "hf:somebody/texts/data": TEXTS[:180],
        "hf:somebody/texts/data/t*-0.parquet": TEXTS[:60] + TEXTS[120:180],
        "hf:somebody/texts@v1/data/train-1.parquet": TEXTS[60:120],
    }
    for address, found in expected.items():
        texts.requests.clear()
        assert opened(tmp_path, address, val_data=val) == sorted([*found, "validation"])
    assert {name for method, name, _ in texts.requests if method == "GET"} >= {"data/train-1.parquet"}
    assert texts.got("more/lines.jsonl") == []


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


@pytest.mark.parametrize("address, message", [
    ("hf:texts", "write hf:OWNER/NAME"), ("hf:", "write hf:OWNER/NAME"), ("hf:a/b c", "write hf:OWNER/NAME"),
    ("hf:nobody/texts", "nobody/texts .*no such data set.*HF_TOKEN"), ("hf:somebody/texts@v9", "revision"),
    ("hf:somebody/texts", "no file that can be read .*it has: .*README.md"),
    ("hf:somebody/texts/nowhere/*", "nowhere.* no file that can be read"),
])  # fmt: skip
def test_an_address_without_files_is_a_sentence(texts, tmp_path, address, message):
    with pytest.raises(UserError, match=message):
        open_dataset(address, base_dir=tmp_path)


def test_a_mirror_that_lists_no_files_and_a_damaged_listing_cause_no_traceback(texts, tmp_path, monkeypatch):
    def mirror(siblings):
        info = types.SimpleNamespace(sha="v1", siblings=siblings)
        patch.setattr(addresses, "look_up", lambda *_, **__: info)

    texts.files["train.jsonl"] = lines(TEXTS)
    with monkeypatch.context() as patch:
        mirror(None)
        with pytest.raises(UserError, match="it has: nothing"):
            open_dataset("hf:somebody/texts", base_dir=tmp_path)
        mirror([types.SimpleNamespace(rfilename="train.jsonl", size="2 MB")])
        assert opened(tmp_path / "other") == sorted(TEXTS)
    first = open_dataset("hf:somebody/texts", base_dir=tmp_path)
    (listing,) = tmp_path.glob("data/hf/*/*/listing.json")
    good = listing.read_text()
    for damaged in good.replace(str(len(lines(TEXTS))), "null"), good.replace("{", "[{").replace("}", "}]"):
        listing.write_text(damaged)
        assert open_dataset("hf:somebody/texts", base_dir=tmp_path) == first and listing.read_text() == good


@pytest.fixture
def six(texts, monkeypatch):
    """A data set of 6 files of about 100 tokens each, and no smallest amount."""
    texts.files |= {f"data/train-{i}.parquet": parquet(TEXTS[30 * i : 30 * (i + 1)]) for i in range(6)}
    monkeypatch.setattr(addresses, "SMALLEST", 0)
    monkeypatch.setattr(addresses, "BYTES_PER_TOKEN", {True: len(texts.files["data/train-0.parquet"]) / 100})
    return texts


def files_taken(base: Path, **options) -> int:
    _, files = addresses.local_files("hf:somebody/texts", base, **options)
    assert [file.name for file in files] == [f"train-{i}.parquet" for i in range(len(files))]
    return len(files)


@pytest.mark.parametrize("tokens, smallest, count", [(1, 0, 1), (250, 0, 3), (10**9, 0, 6), (1, 10**9, 6)])
def test_the_first_use_takes_as_many_files_as_the_horizon_needs(
    six, tmp_path, monkeypatch, tokens, smallest, count
):
    monkeypatch.setattr(addresses, "SMALLEST", smallest)
    assert files_taken(tmp_path, tokens=lambda: tokens) == count
    assert six.got("data/train-5.parquet") == [] or count == 6


def test_their_number_stays_until_a_person_names_another(six, tmp_path, capsys, run_script):
    assert files_taken(tmp_path, tokens=lambda: 150) == 2 and capsys.readouterr().err == ""
    assert files_taken(tmp_path, tokens=lambda: 50) == files_taken(tmp_path) == 2
    assert files_taken(tmp_path, tokens=lambda: 450) == 2
    assert "scripts.download --data=hf:somebody/texts --num_shards=5" in capsys.readouterr().err
    run_script("download", "--data=hf:somebody/texts", f"--base_dir={tmp_path}", "--num_shards=5")
    assert files_taken(tmp_path, tokens=lambda: 150) == 5


def test_more_than_the_limit_is_refused_before_any_file_comes(six, tmp_path, monkeypatch):
    monkeypatch.setattr(addresses, "LARGEST", 3 * len(six.files["data/train-0.parquet"]))
    with pytest.raises(UserError, match=r"6 files .*to data/train-5\.parquet.*--num_shards=N"):
        open_dataset("hf:somebody/texts", base_dir=tmp_path)
    assert six.got("data/train-0.parquet") == []
    assert opened(tmp_path, "hf:somebody/texts/data/train-[01].parquet") == sorted(TEXTS[:60])
    assert files_taken(tmp_path, count=2) == 2


def test_a_plan_uses_no_network(texts, tmp_path):
    texts.files["all.jsonl"] = lines(TEXTS)
    with pytest.raises(UserError, match=r"no network; get it: .*--data=hf:somebody/texts"):
        open_dataset("hf:somebody/texts", base_dir=tmp_path, plan_only=True)
    assert texts.requests == []
    here = open_dataset("hf:somebody/texts", base_dir=tmp_path)
    texts.requests.clear()
    assert open_dataset("hf:somebody/texts", base_dir=tmp_path, plan_only=True) == here
    assert texts.requests == []


def test_conversations_of_both_formats_come_with_weights(texts, tmp_path, run_script):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    old = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    texts.files |= {
        "new/train.parquet": parquet([talk] * 2, "messages"),
        "old/train.jsonl": json.dumps({"conversations": old}).encode() + b"\n",
    }
    (tmp_path / "val.jsonl").write_text(json.dumps({"messages": talk}) + "\n")

    def read(data):
        return open_conversations(data, str(tmp_path / "val.jsonl"), False, tmp_path).train

    for files in "new", "old":  # ahead of a run; they are no text to import
        said, _ = run_script("download", f"--data=hf:somebody/texts/{files}", f"--base_dir={tmp_path}")
        assert said.startswith("1 file of conversations, for mid_train, in ")
    both = read("hf:somebody/texts/new:3, hf:somebody/texts/old/*.jsonl")
    assert both.messages == [(("user", "Hi"), ("assistant", "Hello"))] * 3 and both.weights == [3, 3, 1]
    assert len(read("hf:somebody/texts").messages) == 2  # parquet is preferred


def test_names_that_lead_out_of_the_folder_are_left_out(texts, tmp_path):
    texts.files |= dict.fromkeys(["../outside.jsonl", "/outside.jsonl", "in.jsonl"], lines(TEXTS))
    assert opened(tmp_path / "base") == sorted(TEXTS)
    assert not (tmp_path / "outside.jsonl").exists()


@pytest.mark.slow
def test_mid_train_takes_conversations_of_the_hub(texts, corpus, tmp_path):
    pairs = [("human", f"What is {i}?", "gpt", f"It is {i}.") for i in range(200)]
    rows = [{"conversations": [{"from": a, "value": b}, {"from": c, "value": d}]} for a, b, c, d in pairs]
    texts.files["train.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows).encode()
    run([*command(corpus, tmp_path / "base_checkpoints" / "d2"), "--num_iterations=2"])
    line = ["scripts.mid_train", "--source=d2", "--data=hf:somebody/texts", f"--base_dir={tmp_path}"]
    said = run([*line, "--plan"], status=2)
    assert "--plan uses no network" in said and texts.requests == []
    run([*line, "--num_iterations=2", "--eval_questions=0", "--sample_every=-1", "--compile=off"])
    assert len(losses(tmp_path / "mid_checkpoints" / "d2")) == 2


def test_a_run_trains_on_it_and_goes_on_without_the_hub(texts, tmp_path, monkeypatch):
    texts.files["train.jsonl"] = lines([f"{text} " * 20 for text in TEXTS])
    line = ["scripts.base_train", *TINY, "--data=hf:somebody/texts", f"--base_dir={tmp_path}"]
    run([*line, "--num_iterations=6"])
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "going on from" in run(line)
    assert losses(tmp_path / "base_checkpoints" / "d2").keys() == set(range(8))
