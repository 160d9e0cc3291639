"""The data sets: which documents they have, in which split, and that nothing half-built is ever read."""

import multiprocessing
import os
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shards import documents, is_validation, write_shard

from nanochat import UserError
from nanochat.data import dataset as built
from nanochat.data import sources as dataset
from nanochat.data.parquet import Documents
from nanochat.data.sources import open_dataset


@pytest.fixture
def library(tmp_path, monkeypatch) -> Path:
    """A small standard library in place of the running Python's."""
    root = tmp_path / "lib"
    for i in range(200):
        path = root / f"package{i % 7}" / f"module{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def f{i}():\n    return {i!r}  # é\n", "utf-8")
    (root / "empty.py").write_text("")
    (root / "twin.py").write_text("same = 1\n")
    (root / "package0" / "twin.py").write_text("same = 1\n")
    (root / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    (root / "notes.txt").write_text("no Python")
    for name in ("site-packages", "dist-packages"):
        (root / name).mkdir()
        (root / name / "foreign.py").write_text("foreign = 1\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))
    return root


def test_the_embedded_data_are_the_readable_source_files_each_in_one_split(library, tmp_path):
    data = open_dataset(base_dir=tmp_path / "base")
    train, val = documents(data)
    expected = [path.read_text("utf-8") for path in library.glob("package*/*.py")] + ["same = 1\n"]
    assert sorted(train + val) == sorted(expected)
    assert 0 < len(val) < 0.1 * len(train) and not set(train) & set(val)
    assert all(map(is_validation, val)) and not any(map(is_validation, train))
    assert "202 files" in data.note and "1 unreadable file skipped" in data.note


def test_a_built_data_set_is_opened_by_its_index_without_reading_the_sources(library, tmp_path, monkeypatch):
    first = open_dataset(base_dir=tmp_path)
    monkeypatch.setattr(dataset, "_read_sources", lambda root: pytest.fail("read again"))
    assert open_dataset(base_dir=tmp_path) == first


def test_a_damaged_data_set_is_built_again(library, tmp_path):
    first = open_dataset(base_dir=tmp_path / "base")
    before, shard = documents(first), first.train_shards[0]
    index = shard.parent / "index.json"
    for damage in (
        lambda: shard.write_bytes(shard.read_bytes()[:-1]),
        lambda: shard.unlink(),
        lambda: index.write_text(index.read_text()[:40]),
    ):
        damage()
        again = open_dataset(base_dir=tmp_path / "base")
        assert again == first and documents(again) == before
        assert os.listdir(tmp_path / "base" / "data") == [first.name]


def _open_in_process(root: str, base_dir: str, barrier, results) -> None:
    sysconfig.get_path = lambda name: root
    barrier.wait()
    data = open_dataset(base_dir=base_dir)
    results.put((data.fingerprint, len(list(Documents(data.train_shards)))))


def test_processes_that_build_at_once_get_the_same_whole_data(library, tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    arguments = (str(library), str(tmp_path / "base"), barrier, results)
    processes = [context.Process(target=_open_in_process, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    found = {results.get(timeout=300) for _ in processes}
    for process in processes:
        process.join()
    assert len(found) == 1
    assert len(os.listdir(tmp_path / "base" / "data")) == 1


def test_a_whole_folder_that_another_process_puts_in_place_meanwhile_stays(tmp_path, monkeypatch):
    texts = [("hash", f"text {i}") for i in range(500)]
    built.build(tmp_path / "theirs", "name", texts, "")
    (tmp_path / "theirs" / "mark").touch()
    open_built, rename = built.open_built, os.rename

    def they_are_faster():
        if (tmp_path / "theirs").exists():
            rename(tmp_path / "theirs", tmp_path / "ours")

    monkeypatch.setattr(built, "open_built", lambda folder: (open_built(folder), they_are_faster())[0])
    monkeypatch.setattr(os, "rename", lambda *paths: (they_are_faster(), rename(*paths)))
    assert len(built.build(tmp_path / "ours", "name", texts, "").train_texts()) > 400
    assert (tmp_path / "ours" / "mark").exists()


# -- parquet shards in place


def test_parquet_shards_are_used_in_place_and_a_validation_file_is_never_training_data(tmp_path):
    folder = tmp_path / "shards"
    for name in ("b", "a", "deep/c"):
        write_shard(folder / f"{name}.parquet", [f"{name}{i}" for i in range(5)], row_group_size=2)
    data = open_dataset(folder, folder / "b.parquet", base_dir=tmp_path / "base")
    train, val = documents(data)
    assert train == [f"a{i}" for i in range(5)] + [f"deep/c{i}" for i in range(5)]
    assert val == [f"b{i}" for i in range(5)]
    assert not (tmp_path / "base").exists()
    (tmp_path / "link").symlink_to(folder / "deep")
    data = open_dataset(folder, tmp_path / "link", base_dir=tmp_path / "base")
    assert {path.name for path in data.train_shards} == {"a.parquet", "b.parquet"}


def test_the_fingerprint_of_shards_notices_changes_and_moves_with_the_folder(tmp_path):
    def fingerprint(folder):
        return open_dataset(folder, folder / "v.parquet", base_dir=tmp_path).fingerprint

    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        write_shard(folder / "t.parquet", ["aaa", "bbb"])
        write_shard(folder / "v.parquet", ["ccc"])
    assert fingerprint(one) == fingerprint(two)
    write_shard(two / "t.parquet", ["aaa", "bbc"])
    changed = fingerprint(two)
    write_shard(two / "u.parquet", ["ddd"])
    assert len({fingerprint(one), changed, fingerprint(two)}) == 3


def test_row_groups_are_numbered_through_the_shards_without_the_empty_ones(tmp_path):
    shards = [
        write_shard(tmp_path / "a.parquet", ["a", None, "c"], row_group_size=2),
        write_shard(tmp_path / "b.parquet", []),
        write_shard(tmp_path / "c.parquet", pa.array(["d", "e", "d"]).dictionary_encode()),
        write_shard(tmp_path / "d.parquet", pa.array(["f"], pa.large_string())),
    ]
    groups = Documents(shards)
    assert (groups.sizes, groups.starts) == ([2, 1, 3, 1], [0, 2, 3, 6, 7])
    assert [groups.read(g) for g in (3, 1, 2, 0)] == [["f"], ["c"], ["d", "e", "d"], ["a", ""]]


@pytest.mark.parametrize(
    ("data", "val_data", "message"),
    [
        ("nowhere", "good/a.parquet", "does not exist"),
        ("empty", "good/a.parquet", "has no file that can be read"),
        ("good", "good/a.parquet", "every file"),
        ("no.parquet", "good/a.parquet", "cannot be read as a parquet file"),
        ("numbers.parquet", "good/a.parquet", "no text in a column `text` .it has text: int64"),
        ("nothing.txt", "text.txt", "nothing.txt holds no text; give --data"),
        ("text.txt", "nothing.txt", "--val_data holds no text"),
        ("good", "text.txt,nothing.txt", "--val_data holds no text"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(tmp_path, monkeypatch, data, val_data, message):
    monkeypatch.chdir(tmp_path)
    write_shard(tmp_path / "good" / "a.parquet", ["a"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "no.parquet").write_text("no parquet")
    pq.write_table(pa.table({"text": [1]}), tmp_path / "numbers.parquet")
    (tmp_path / "nothing.txt").touch()
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(UserError, match=message) as error:
        open_dataset(data, val_data, base_dir=tmp_path / "base")
    assert "\n" not in str(error.value)


# -- public shards that someone has already


@pytest.mark.parametrize("pinned", ["shard_06542", "shard_01822"])
def test_a_folder_of_public_shards_is_used_in_place_with_its_last_shard_as_validation(tmp_path, pinned):
    names = ["shard_00000", "shard_01700", pinned]
    for name in names:
        write_shard(tmp_path / "base_data" / f"{name}.parquet", [name])
    data = open_dataset(tmp_path / "base_data", base_dir=tmp_path / "base")
    assert documents(data) == (names[:2], [pinned]) and not (tmp_path / "base").exists()


def test_a_training_shard_never_stands_in_for_missing_validation(tmp_path):
    folder = tmp_path / "base_data"
    for i in range(3):
        write_shard(folder / f"shard_{i:05d}.parquet", [str(i)])
    with pytest.raises(UserError, match=r"shard_06542.parquet \(climbmix\) or shard_01822.parquet"):
        open_dataset(folder, base_dir=tmp_path)
    given = open_dataset(folder, folder / "shard_00001.parquet", base_dir=tmp_path)
    assert documents(given) == (["0", "2"], ["1"])
