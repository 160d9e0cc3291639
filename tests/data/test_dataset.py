"""Imported text: which documents come out of it, in which split, when it is imported again, and errors."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shards import documents, flat, is_validation, write_shard

from nanochat import UserError
from nanochat.data import sources as dataset
from nanochat.data.parquet import Documents
from nanochat.data.sources import open_dataset


@pytest.fixture
def texts(tmp_path) -> tuple[Path, list[str]]:
    """A folder with all kinds of files, 20 documents of each, and the documents."""
    folder, expected = tmp_path / "texts", []

    def some(kind: str) -> list[str]:
        expected.extend(more := [f"{kind} {i} é 漢字\n" for i in range(20)])
        return more

    (folder / "deep" / "er").mkdir(parents=True)
    for suffix in ("txt", "md", "py"):
        for i, text in enumerate(some(suffix)):
            (folder / "deep" / f"{i}.{suffix}").write_text(text, "utf-8")
    lines = [json.dumps({"id": 3, "text": text}) for text in some("jsonl")]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n\n", "utf-8")
    lines = [json.dumps(text, ensure_ascii=False) for text in some("gz")]
    (folder / "deep" / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (folder / "deep" / "er" / "c.json").write_text(json.dumps([{"text": text} for text in some("json")]))
    write_shard(folder / "d.parquet", some("parquet"))
    (folder / "e.bin").write_bytes(b"\xff")
    (folder / ".hidden.txt").write_text("hidden")
    return folder, expected


def test_a_folder_of_any_mix_is_imported_and_split_by_hash(texts, tmp_path):
    folder, expected = texts
    data = open_dataset(folder, base_dir=tmp_path / "base")
    train, val = documents(data)
    assert sorted(train + val) == sorted(expected)
    for text in expected:
        assert (text in val) == is_validation(text) != (text in train)
    assert data.name == "texts" and "1 file of other kinds left out" in data.note
    assert f"{len(train)} training and {len(val)} validation documents of 64 files" in data.note


def test_what_is_imported_depends_on_the_documents_alone(texts, tmp_path):
    folder, _ = texts
    first = open_dataset(folder, base_dir=tmp_path / "one")
    (folder / "deep" / "3.txt").rename(folder / "zzz.md")
    moved = folder.rename(tmp_path / "moved")
    second = open_dataset(moved, base_dir=tmp_path / "two")
    assert first.fingerprint == second.fingerprint and documents(first) == documents(second)
    for one, two in zip(first.train_shards, second.train_shards, strict=True):
        assert one.read_bytes() == two.read_bytes()


def test_it_is_imported_once_and_again_when_the_source_changed(texts, tmp_path, monkeypatch, capsys):
    folder, _ = texts
    reads, read = [], dataset.read_documents
    monkeypatch.setattr(dataset, "read_documents", lambda *args: (reads.append(args), read(*args))[1])
    first = open_dataset(folder, base_dir=tmp_path / "base")
    assert len(reads) == 64
    assert open_dataset(str(folder), base_dir=tmp_path / "base") == first and len(reads) == 64
    os.utime(folder / "a.jsonl", (1, 1))
    touched = open_dataset(folder, base_dir=tmp_path / "base")
    assert len(reads) == 128 and touched.fingerprint == first.fingerprint
    assert "older imports of that name" in capsys.readouterr().err
    (folder / "more.txt").write_text("more")
    assert open_dataset(folder, base_dir=tmp_path / "base").fingerprint != first.fingerprint
    assert documents(first)  # a run that uses the older import can go on


def test_val_data_decide_the_split_and_several_paths_may_be_given_with_commas(texts, tmp_path):
    folder, expected = texts
    (tmp_path / "with, comma.txt").write_text("comma")
    data = open_dataset(f"{folder}/a.jsonl, {folder}/d.parquet", base_dir=tmp_path / "base")
    wanted = [text for text in expected if text.startswith(("jsonl ", "parquet "))]
    assert sorted(flat(documents(data))) == sorted(wanted)
    data = open_dataset(folder, tmp_path / "with, comma.txt", base_dir=tmp_path / "base")
    assert documents(data)[1] == ["comma"] and list(data.val_sets) == ["val_bpb"]


def test_further_validation_sets_are_not_trained_on_and_decide_nothing_else(texts, tmp_path):
    folder, expected = texts
    (tmp_path / "d.txt").write_text("other")
    more = f"{folder}/a.jsonl, {folder}/d.parquet,{tmp_path}/d.txt"
    data = open_dataset(folder, more, base_dir=tmp_path / "base")
    sets = {name: list(Documents(shards)) for name, shards in data.val_sets.items()}
    assert list(sets) == ["val_bpb", "val_bpb_d", "val_bpb_d_2"] and sets["val_bpb_d_2"] == ["other"]
    for name, kind in ("val_bpb", "jsonl "), ("val_bpb_d", "parquet "):
        assert sorted(sets[name]) == sorted(text for text in expected if text.startswith(kind))
    assert sorted(documents(data)[0] + sets["val_bpb"] + sets["val_bpb_d"]) == sorted(expected)
    elsewhere = open_dataset(folder, f"{folder}/a.jsonl,{tmp_path}/d.txt", base_dir=tmp_path / "base")
    alone = open_dataset(folder, f"{folder}/a.jsonl", base_dir=tmp_path / "base")
    assert elsewhere.fingerprint == alone.fingerprint != data.fingerprint


def test_the_embedded_text_is_validated_on_what_val_data_names(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    plain = open_dataset("embedded", base_dir=tmp_path)
    given = open_dataset("embedded", tmp_path / "mine.txt", base_dir=tmp_path)
    assert documents(given)[1] == ["mine"] and given.train_shards == plain.train_shards
    assert given.fingerprint != plain.fingerprint


def test_another_field_or_column_holds_the_text_when_named(tmp_path):
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"body": [f"a{i}" for i in range(99)]}), tmp_path / "in" / "a.parquet")
    (tmp_path / "in" / "b.json").write_text(json.dumps([{"body": f"b{i}", "text": "no"} for i in range(99)]))
    data = open_dataset(tmp_path / "in", base_dir=tmp_path / "base", text_field="body")
    expected = {f"{letter}{i}" for letter in "ab" for i in range(99)}
    assert set(flat(documents(data))) == expected
    with pytest.raises(UserError, match=r"column `text` .it has body: string.; name the column"):
        open_dataset(tmp_path / "in", base_dir=tmp_path / "base")


def test_of_few_texts_the_last_tenth_of_each_is_validation(tmp_path):
    for name, number in (("one", 1), ("several", 5)):
        (tmp_path / name).mkdir()
        texts = ["".join(f"{name} {i}, line {n}\n" for n in range(300)) for i in range(number)]
        for i, text in enumerate(texts):
            (tmp_path / name / f"{i}.txt").write_text(text)
        data = open_dataset(tmp_path / name, base_dir=tmp_path / "base")
        train, val = documents(data)
        assert len(train) >= 9 * number and not set(train) & set(val)
        for text in texts:
            held = sorted((piece for piece in val if piece in text), key=text.index)
            assert text.endswith("".join(held)) and 0.05 < len("".join(held)) / len(text) < 0.2
            kept = sorted((piece for piece in train if piece in text), key=text.index)
            assert "".join(kept + held) == text
        assert open_dataset(tmp_path / name, base_dir=tmp_path / "again").fingerprint == data.fingerprint
        assert "the last tenth" in data.note
    (tmp_path / "a.txt").write_text("a")  # no tenth
    with pytest.raises(UserError, match=r"of a.txt falls .*val_data"):
        open_dataset(tmp_path / "a.txt", base_dir=tmp_path / "base")


def test_a_source_that_vanishes_or_changes_on_the_way_is_one_sentence(texts, tmp_path, monkeypatch):
    folder, _ = texts
    read = dataset.read_documents

    def change(path, *rest):
        (folder / "a.jsonl").write_text('"changed"')
        return read(path, *rest)

    monkeypatch.setattr(dataset, "read_documents", change)
    with pytest.raises(UserError, match="changed during the import"):
        open_dataset(folder, base_dir=tmp_path / "base")

    def vanish(path, *rest):
        path.unlink(missing_ok=True)
        return read(path, *rest)

    monkeypatch.setattr(dataset, "read_documents", vanish)
    with pytest.raises(UserError, match=r"cannot be read .No such file"):
        open_dataset(folder, base_dir=tmp_path / "base")
    assert os.listdir(tmp_path / "base" / "data") == []


LARGE = """
import resource, sys
from nanochat.data.sources import open_dataset
open_dataset(sys.argv[1], base_dir=sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_more_than_a_gigabyte_is_imported_in_less(tmp_path, kind):
    path = tmp_path / f"large.{kind}"
    block = "".join(f"word{i * i} and some more text to fill the lines\n" for i in range(20_000))
    with open(path, "w") as file:
        for i in range(5 * 2**28 // len(block)):
            text = block.replace("word", f"{i:04d}")  # no piece of it comes twice
            file.write(text if kind == "txt" else json.dumps({"text": text}) + "\n")
    assert path.stat().st_size > 1.2 * 2**30
    kib = subprocess.check_output([sys.executable, "-c", LARGE, str(path), str(tmp_path / "base")])
    assert int(kib) * 1024 < 1e9
