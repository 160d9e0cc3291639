"""The data sets: what becomes a document, which split it is in, and that nothing half-built is ever read."""

import gzip
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat import UserError
from nanochat.data import dataset, imported
from nanochat.data.dataset import open_dataset
from nanochat.data.parquet import RowGroups, iterate_documents


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


def documents(data) -> tuple[list[str], list[str]]:
    return list(iterate_documents(data.train_shards)), list(iterate_documents(data.val_shards))


def test_the_embedded_data_are_the_readable_source_files_each_in_one_split(library, tmp_path):
    data = open_dataset(base_dir=tmp_path / "base")
    train, val = documents(data)
    expected = [path.read_text("utf-8") for path in library.glob("package*/*.py")] + ["same = 1\n"]
    assert sorted(train + val) == sorted(expected)
    assert 0 < len(val) < 0.1 * len(train) and not set(train) & set(val)
    assert "202 files" in data.note and "1 unreadable file skipped" in data.note


def test_the_split_of_a_document_is_decided_by_its_content_alone(library, tmp_path):
    _, val = documents(open_dataset(base_dir=tmp_path / "one"))
    for i in range(300):
        (library / f"new{i}.py").write_text(f"new = {i}\n")
    train, val_after = documents(open_dataset(base_dir=tmp_path / "two"))
    assert set(val) == {text for text in val_after if not text.startswith("new")}
    for text in train + val_after:
        by_hand = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 40 == 0
        assert by_hand == (text in val_after)


def test_the_fingerprint_is_that_of_the_content(library, tmp_path):
    first = open_dataset(base_dir=tmp_path / "one").fingerprint
    (library / "twin.py").rename(library / "renamed.py")
    assert open_dataset(base_dir=tmp_path / "two").fingerprint == first
    (library / "renamed.py").write_text("same = 2\n")
    assert open_dataset(base_dir=tmp_path / "three").fingerprint != first


def test_a_built_data_set_is_opened_without_reading_the_sources_again(library, tmp_path, monkeypatch):
    first = open_dataset(base_dir=tmp_path)
    monkeypatch.setattr(dataset, "_read_sources", lambda root: pytest.fail("read again"))
    assert open_dataset(base_dir=tmp_path) == first


def damage(folder: Path, kind: str) -> None:
    shard, index = folder / "train_00000.parquet", folder / "index.json"
    if kind == "short shard":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif kind == "missing shard":
        shard.unlink()
    elif kind == "missing index":
        index.unlink()
    elif kind == "half an index":
        index.write_text(index.read_text()[:40])
    elif kind == "index of another kind":
        index.write_text("[1, 2]")


@pytest.mark.parametrize(
    "kind", ["short shard", "missing shard", "missing index", "half an index", "index of another kind"]
)
def test_a_damaged_data_set_is_built_again(library, tmp_path, kind):
    first = open_dataset(base_dir=tmp_path / "base")
    before = documents(first)
    damage(first.train_shards[0].parent, kind)
    again = open_dataset(base_dir=tmp_path / "base")
    assert again == first and documents(again) == before
    assert os.listdir(tmp_path / "base" / "data") == [first.name]


@pytest.mark.parametrize("moment", ["writing a shard", "putting it in place"])
def test_a_build_that_breaks_off_leaves_nothing_that_is_taken_for_data(
    library, tmp_path, monkeypatch, moment
):
    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(imported, "write_sorted" if moment == "writing a shard" else "_put_in_place", fail)
        with pytest.raises(KeyboardInterrupt):
            open_dataset(base_dir=tmp_path / "base")
    assert os.listdir(tmp_path / "base" / "data") == []
    assert len(documents(open_dataset(base_dir=tmp_path / "base"))[0]) > 100


def _open_in_process(root: str, base_dir: str, barrier, results) -> None:
    sysconfig.get_path = lambda name: root
    barrier.wait()
    data = open_dataset(base_dir=base_dir)
    results.put((data.fingerprint, len(list(iterate_documents(data.train_shards)))))


def test_processes_that_build_at_once_get_the_same_whole_data(library, tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    arguments = (str(library), str(tmp_path / "base"), barrier, results)
    processes = [context.Process(target=_open_in_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    found = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(found) == 1
    assert len(os.listdir(tmp_path / "base" / "data")) == 1


def test_a_second_builder_keeps_what_the_first_one_finished(library, tmp_path, monkeypatch):
    write = imported.write_sorted
    stamps = []

    def slow_write(documents, folder):
        if not stamps:  # while the first is at it, a second one begins and finishes
            stamps.append(None)
            stamps[0] = open_dataset(base_dir=tmp_path).train_shards[0].stat().st_mtime_ns
        return write(documents, folder)

    monkeypatch.setattr(imported, "write_sorted", slow_write)
    data = open_dataset(base_dir=tmp_path)
    assert data.train_shards[0].stat().st_mtime_ns == stamps[0]


def test_the_real_standard_library_gives_enough_text_and_row_groups(tmp_path):
    data = open_dataset(base_dir=tmp_path)
    train, val = documents(data)
    assert sum(map(len, train)) > 5_000_000 and sum(map(len, val)) > 50_000
    assert len(RowGroups(data.train_shards).sizes) >= 8


# -- parquet shards in place


def write(path: Path, texts: list, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": texts}), path, **options)
    return path


def test_parquet_shards_are_used_in_place_and_a_validation_file_is_never_training_data(tmp_path):
    for name in ("b", "a", "deep/c"):
        write(tmp_path / "shards" / f"{name}.parquet", [f"{name}{i}" for i in range(5)], row_group_size=2)
    data = open_dataset(tmp_path / "shards", tmp_path / "shards" / "b.parquet", base_dir=tmp_path / "base")
    train, val = documents(data)
    assert train == [f"a{i}" for i in range(5)] + [f"deep/c{i}" for i in range(5)]
    assert val == [f"b{i}" for i in range(5)]
    assert not (tmp_path / "base").exists()
    (tmp_path / "link").symlink_to(tmp_path / "shards" / "deep")
    data = open_dataset(tmp_path / "shards", tmp_path / "link", base_dir=tmp_path / "base")
    assert {path.name for path in data.train_shards} == {"a.parquet", "b.parquet"}


def test_the_fingerprint_of_shards_notices_changes_and_moves_with_the_folder(tmp_path):
    def fingerprint(folder):
        return open_dataset(folder, folder / "v.parquet", base_dir=tmp_path).fingerprint

    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        write(folder / "t.parquet", ["aaa", "bbb"])
        write(folder / "v.parquet", ["ccc"])
    assert fingerprint(one) == fingerprint(two)
    write(two / "t.parquet", ["aaa", "bbc"])
    changed = fingerprint(two)
    write(two / "u.parquet", ["ddd"])
    assert len({fingerprint(one), changed, fingerprint(two)}) == 3


def test_row_groups_are_numbered_through_the_shards_without_the_empty_ones(tmp_path):
    shards = [
        write(tmp_path / "a.parquet", ["a", None, "c"], row_group_size=2),
        write(tmp_path / "b.parquet", pa.array([], pa.string())),
        write(tmp_path / "c.parquet", pa.array(["d", "e", "d"]).dictionary_encode()),
        write(tmp_path / "d.parquet", pa.array(["f"], pa.large_string())),
    ]
    groups = RowGroups(shards)
    assert (groups.sizes, groups.starts) == ([2, 1, 3, 1], [0, 2, 3, 6, 7])
    assert [groups.read(g) for g in (3, 1, 2, 0)] == [["f"], ["c"], ["d", "e", "d"], ["a", ""]]


def test_bad_input_is_refused_in_one_sentence(tmp_path):
    good = write(tmp_path / "good" / "a.parquet", ["a"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "no.parquet").write_text("no parquet")
    pq.write_table(pa.table({"words": ["a"]}), tmp_path / "words.parquet")
    pq.write_table(pa.table({"text": [1]}), tmp_path / "numbers.parquet")
    cases = [
        ("nowhere", good, "does not exist"),
        (tmp_path / "empty", good, "has no file that can be read"),
        (good.parent, None, "none of the 1 documents of good falls .* --val_data="),
        (good.parent, good, "every file"),
        (good, tmp_path / "nowhere", "val_data=.* does not exist"),
        (tmp_path / "no.parquet", good, "cannot be read as a parquet file"),
        (tmp_path / "words.parquet", good, "no text in a column `text` .it has words"),
        (tmp_path / "numbers.parquet", good, "no text in a column `text`"),
        ("embedded", good, "its own validation"),
    ]
    for data, val_data, message in cases:
        with pytest.raises(UserError, match=message) as error:
            open_dataset(data, val_data, base_dir=tmp_path / "base")
        assert "\n" not in str(error.value)


def test_a_shard_damaged_in_its_middle_is_named(tmp_path):
    shard = write(
        tmp_path / "a.parquet", [f"{i} {hashlib.sha256(b'%d' % i).hexdigest()}" for i in range(2000)]
    )
    content = bytearray(shard.read_bytes())
    content[100 : len(content) // 2] = bytes(len(content) // 2 - 100)
    shard.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet is damaged in row group 0"):
        list(iterate_documents([shard]))


def test_the_index_says_what_lies_beside_it(library, tmp_path):
    data = open_dataset(base_dir=tmp_path)
    folder = data.train_shards[0].parent
    index = json.loads((folder / "index.json").read_text())
    for split in ("train", "val"):
        assert index[split] == {p.name: p.stat().st_size for p in folder.glob(f"{split}_*.parquet")}


# -- public shards that someone has already


@pytest.mark.parametrize("pinned", ["shard_06542", "shard_01822"])
def test_a_folder_of_public_shards_is_used_in_place_with_its_last_shard_as_validation(tmp_path, pinned):
    names = ["shard_00000", "shard_01700", pinned]
    for name in names:
        write(tmp_path / "base_data" / f"{name}.parquet", [name])
    data = open_dataset(tmp_path / "base_data", base_dir=tmp_path / "base")
    assert documents(data) == (names[:2], [pinned]) and not (tmp_path / "base").exists()


def test_a_training_shard_never_stands_in_for_missing_validation(tmp_path):
    for i in range(3):
        write(tmp_path / "base_data" / f"shard_{i:05d}.parquet", [str(i)])
    with pytest.raises(UserError, match=r"shard_06542.parquet \(climbmix\) or shard_01822.parquet"):
        open_dataset(tmp_path / "base_data", base_dir=tmp_path)
    given = open_dataset(
        tmp_path / "base_data", tmp_path / "base_data/shard_00001.parquet", base_dir=tmp_path
    )
    assert documents(given) == (["0", "2"], ["1"])


# -- text of the user's


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
    write(folder / "d.parquet", some("parquet"))
    (folder / "e.bin").write_bytes(b"\xff")
    (folder / ".hidden.txt").write_text("hidden")
    return folder, expected


def test_a_folder_of_any_mix_is_imported_and_split_by_hash(texts, tmp_path):
    folder, expected = texts
    data = open_dataset(folder, base_dir=tmp_path / "base")
    train, val = documents(data)
    assert sorted(train + val) == sorted(expected)
    for text in expected:
        by_hand = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 40 == 0
        assert (text in val) == by_hand != (text in train)
    assert data.name == "texts" and "1 files of other kinds left out" in data.note
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
    read = dataset.read_documents
    reads = []
    monkeypatch.setattr(
        dataset, "read_documents", lambda path, *rest: (reads.append(path), read(path, *rest))[1]
    )
    first = open_dataset(folder, base_dir=tmp_path / "base")
    assert len(reads) == 64 and "importing: 100%" in capsys.readouterr().err
    assert open_dataset(str(folder), base_dir=tmp_path / "base") == first and len(reads) == 64
    os.utime(folder / "a.jsonl", (1, 1))
    touched = open_dataset(folder, base_dir=tmp_path / "base")
    assert len(reads) == 128 and touched.fingerprint == first.fingerprint
    assert "older imports of that name" in capsys.readouterr().err
    (folder / "more.txt").write_text("more")
    assert open_dataset(folder, base_dir=tmp_path / "base").fingerprint != first.fingerprint
    assert documents(first)  # a run that uses the older import can go on


def test_val_data_decide_the_split_of_imported_text(texts, tmp_path):
    folder, expected = texts
    data = open_dataset(folder, folder / "a.jsonl", base_dir=tmp_path / "base")
    train, val = documents(data)
    assert sorted(val) == sorted(text for text in expected if text.startswith("jsonl "))
    assert sorted(train + val) == sorted(expected)
    by_hash = open_dataset(folder, base_dir=tmp_path / "base")
    assert by_hash.fingerprint != data.fingerprint


def test_several_paths_may_be_given_with_commas(texts, tmp_path):
    folder, expected = texts
    (tmp_path / "with, comma.txt").write_text("comma")
    data = open_dataset(f"{folder}/a.jsonl, {folder}/d.parquet", base_dir=tmp_path / "base")
    wanted = [text for text in expected if text.startswith(("jsonl ", "parquet "))]
    assert sorted(flat(documents(data))) == sorted(wanted)
    both = open_dataset(folder, f"{folder}/a.jsonl,{folder}/d.parquet", base_dir=tmp_path / "base")
    assert sorted(documents(both)[1]) == sorted(wanted)
    data = open_dataset(folder, tmp_path / "with, comma.txt", base_dir=tmp_path / "base")
    assert documents(data)[1] == ["comma"]


def flat(lists) -> list:
    return [item for items in lists for item in items]


def test_parquet_without_val_data_is_split_by_hash(tmp_path):
    write(tmp_path / "a.parquet", [f"text {i}" for i in range(200)])
    train, val = documents(open_dataset(tmp_path / "a.parquet", base_dir=tmp_path / "base"))
    assert sorted(train + val) == sorted(f"text {i}" for i in range(200)) and 0 < len(val) < 20


def test_another_field_or_column_holds_the_text_when_named(tmp_path):
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"body": [f"a{i}" for i in range(99)]}), tmp_path / "in" / "a.parquet")
    (tmp_path / "in" / "b.json").write_text(json.dumps([{"body": f"b{i}", "text": "no"} for i in range(99)]))
    data = open_dataset(tmp_path / "in", base_dir=tmp_path / "base", text_field="body")
    expected = {f"{letter}{i}" for letter in "ab" for i in range(99)}
    assert set(flat(documents(data))) == expected
    with pytest.raises(UserError, match=r"column `text` .it has body.; name the column with --text_field"):
        open_dataset(tmp_path / "in", base_dir=tmp_path / "base")


def test_the_empty_split_of_few_documents_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "one.txt").write_text("one text")
    with pytest.raises(
        UserError, match=r"none of the 1 documents of one.txt falls into the validation split .*val_data"
    ):
        open_dataset(tmp_path / "one.txt", base_dir=tmp_path / "base")
    assert os.listdir(tmp_path / "base" / "data") == []


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/dev/full").exists(), reason="needs a full device")
def test_a_place_that_cannot_be_written_is_one_sentence(texts, tmp_path, monkeypatch):
    folder, _ = texts
    (tmp_path / "file").write_text("")
    for error in (OSError(28, "No space left on device"), PermissionError(13, "Permission denied")):
        with monkeypatch.context() as patch:
            patch.setattr(imported, "write_sorted", lambda *_, error=error: raising(error))
            with pytest.raises(UserError, match=f"cannot be written .{error.strerror}.*--base_dir"):
                open_dataset(folder, base_dir=tmp_path / "base")
        assert os.listdir(tmp_path / "base" / "data") == []
    with pytest.raises(UserError, match=r"cannot be written .Not a directory"):
        open_dataset(folder, base_dir=tmp_path / "file")


def raising(error: BaseException):
    raise error


def test_a_source_that_vanishes_or_changes_on_the_way_is_one_sentence(texts, tmp_path, monkeypatch):
    folder, _ = texts
    with pytest.raises(UserError, match="nowhere does not exist or may not be read"):
        open_dataset(tmp_path / "nowhere", base_dir=tmp_path / "base")
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


def test_leftovers_of_killed_imports_are_removed_after_a_day_and_no_others(texts, tmp_path):
    folder, _ = texts
    data = tmp_path / "base" / "data"
    for name, age in ((".old.abcdefgh", 90_000), (".new.abcdefgh", 10), ("mine", 90_000)):
        (data / name).mkdir(parents=True)
        (data / name / "bucket_0000").write_text("")
        for path in (data / name / "bucket_0000", data / name):
            os.utime(path, (time.time() - age,) * 2)
    open_dataset(folder, base_dir=tmp_path / "base")
    assert {path.name for path in data.iterdir() if not path.name.startswith("texts")} == {
        ".new.abcdefgh",
        "mine",
    }


LARGE = """
import resource, sys
from nanochat.data.dataset import open_dataset
data = open_dataset(sys.argv[1], base_dir=sys.argv[2])
print(data.note)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "one line again and again"])
def test_two_gigabytes_are_imported_in_less_than_one(tmp_path, kind):
    path = tmp_path / f"large.{kind if ' ' not in kind else 'jsonl'}"
    block = "".join(f"word{i * i} and some more text to fill the lines\n" for i in range(20_000))
    with open(path, "w") as file:
        file.write("[" if kind == "json" else "")
        for i in range(2 * 2**30 // len(block)):
            text = block.replace("word", f"{i:04d}")  # no piece of it comes twice
            if kind == "txt":
                file.write(text)
            elif " " in kind:
                file.write((json.dumps(block[:8000]) + "\n") * (len(block) // 8000))
            else:
                file.write(json.dumps({"text": text}) + (",\n" if kind == "json" else "\n"))
        file.write('"the last one"]' if kind == "json" else "")
    assert path.stat().st_size > 1.95 * 2**30
    command = [sys.executable, "-c", LARGE, str(path), str(tmp_path / "base")]
    done = subprocess.run(command, capture_output=True, text=True)
    if " " in kind and done.returncode:  # which split the line falls into is up to its hash
        assert "falls into the" in done.stderr
        return
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout, done.stderr.split("\r")[-1])
    assert int(done.stdout.split()[-1]) * 1024 < 1e9
