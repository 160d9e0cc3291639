"""Evaluation bundles: what is in them is read as it was written, and what is damaged is named."""

import random
import re
import shutil
import zipfile
from pathlib import Path

import pytest
from bundles import write_bundle, write_tasks
from data.hub_server import hub  # noqa: F401
from helpers import names_in

from nanochat import UserError
from nanochat.evals import bundle
from nanochat.evals.bundle import download_bundle, open_bundle

EXAMPLES = [{"query": f"question {i}", "choices": ["a", "b"], "gold": i % 2} for i in range(30)]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A bundle of two tasks; eval_data/some/two.jsonl has two lines."""
    two = [{"context": "a", "continuation": 10**400}, {"context": "c", "continuation": "d"}]
    tasks = [("one", "multiple_choice", [3], None, 33.3, EXAMPLES)]
    return write_tasks(tmp_path / "bundle", [*tasks, ("two", "language_modeling", [0], "\n", 0, two)])


def zipped(folder: Path, path: Path, root: str = "eval_bundle/") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, root + str(file.relative_to(folder)))
    return path


def test_tasks_are_read_as_they_were_written(folder):
    found = open_bundle(folder, folder)
    one, two = found.tasks
    assert found.path == folder
    assert (one.label, one.task_type, one.num_fewshot, one.delimiter) == ("one", "multiple_choice", 3, " ")
    assert (two.label, two.task_type, two.num_fewshot, two.delimiter) == ("two", "language_modeling", 0, "\n")
    assert (one.baseline, two.baseline) == (33.3, 0)
    assert {example["continuation"] for example in two.examples} == {str(10**400), "d"}
    assert sorted(example["query"] for example in one.examples) == sorted(e["query"] for e in EXAMPLES)


@pytest.mark.parametrize("max_per_task", [-1, 7, 1000])
def test_the_first_examples_are_those_of_the_published_shuffle(folder, max_per_task):
    expected = list(EXAMPLES)
    random.Random(1337).shuffle(expected)
    tasks = open_bundle(folder, folder, max_per_task).tasks
    assert tasks[0].examples == (expected if max_per_task == -1 else expected[:max_per_task])


@pytest.mark.parametrize("root", ["", "eval_bundle/", "mine/"])
def test_a_zip_file_is_read_like_the_folder(folder, tmp_path, root):
    path = zipped(folder, tmp_path / "it.zip", root)
    by_zip, by_folder = open_bundle(path, tmp_path), open_bundle(folder, tmp_path)
    assert by_zip.tasks == by_folder.tasks and by_zip.fingerprint == by_folder.fingerprint


def test_the_fingerprint_changes_with_any_example(folder, tmp_path):
    before = open_bundle(folder, tmp_path).fingerprint
    file = folder / "eval_data/some/two.jsonl"
    file.write_text(file.read_text().replace('"d"', '"e"'))
    assert open_bundle(folder, tmp_path).fingerprint != before


def test_without_a_bundle_the_reason_is_one_line_with_the_command(tmp_path):
    said = []
    assert open_bundle(None, tmp_path, say=said.append) is None
    (reason,) = said
    assert reason.startswith("CORE was left out: ") and "\n" not in reason
    assert reason.endswith("get it with python -m scripts.download --name=core")
    write_bundle(tmp_path / "eval_bundle")
    assert open_bundle(None, tmp_path).path == tmp_path / "eval_bundle"


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("core.yaml", "", None, "core.yaml: the file is missing"),
        ("core.yaml", "icl_tasks:", "tasks:", "core.yaml: it has no list icl_tasks"),
        ("core.yaml", "icl_tasks:", "x: !!python/name:os.system a\nicl_tasks:", "line 1: it is not YAML"),
        ("core.yaml", "label: two", "label: one", "core.yaml: the label one stands twice"),
        ("core.yaml", "label: two", "label: three", "(three): eval_meta_data.csv has no random"),
        ("core.yaml", "[0]", "[many]", "task 2 (two): its num_fewshot"),
        ("core.yaml", "language_modeling", "chat", "task 2 (two): its icl_task_type is none of"),
        ("core.yaml", "some/two.jsonl", "../../x.jsonl", "the path leads out of"),
        ("core.yaml", "some/two.jsonl", "some/three.jsonl", "some/three.jsonl: the file is missing"),
        ("eval_meta_data.csv", "33.3", "much", "eval_meta_data.csv, line 4: could not convert"),
        ("eval_meta_data.csv", "33.3", "100", "eval_meta_data.csv, line 4: the random baseline is 100.0"),
        ("eval_data/some/two.jsonl", '"d"}', "", "two.jsonl, line 2: it is not JSON ("),
        ("eval_data/some/two.jsonl", '"d"', "null", "two.jsonl, line 2: continuation is missing"),
        ("eval_data/some/two.jsonl", '{"context": "c", "continuation": "d"}', "1", "it is not a JSON object"),
        ("eval_data/some/two.jsonl", '"c", "continuation": "d"', '" ", "continuation": ""', "2: a context"),
        ("eval_data/some/one.jsonl", '"question 3", "choices": ["a"', '"", "choices": [""', "4: a context"),
        ("eval_data/some/two.jsonl", '"d"', '"\udcff"', "two.jsonl, line 2: it is not UTF-8"),
        ("eval_data/some/one.jsonl", '"gold": 1', '"gold": 2', "line 2: gold is not an index from 0 to 1"),
    ],
)  # fmt: skip
def test_damage_is_named_with_file_and_line(folder, tmp_path, file, old, new, message):
    path = folder / file
    if new is None:
        path.unlink()
    else:
        text = path.read_text("utf-8")
        assert old in text
        path.write_text(text.replace(old, new, 1), "utf-8", "surrogateescape")
    for place in (folder, zipped(folder, tmp_path / "it.zip")):
        with pytest.raises(UserError, match=re.escape(message)) as error:
            open_bundle(place, tmp_path)
        assert "python -m scripts.download --name=core" in str(error.value)
        assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_a_path_that_is_no_bundle_is_refused(tmp_path):
    (tmp_path / "text").write_text("no zip file")
    for path, message in (("nowhere", "No such file"), ("text", "is not a zip file"), ("", "an empty path")):
        with pytest.raises(UserError, match=message):
            open_bundle(tmp_path / path if path else "", tmp_path)


def test_a_zip_file_without_an_end_is_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "LARGEST", 1_000_000)
    path = zipped(folder, tmp_path / "it.zip")
    assert open_bundle(path, tmp_path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("eval_bundle/eval_data/zeros", bytes(2_000_000))
    with pytest.raises(UserError, match="would take"):
        open_bundle(path, tmp_path)


def test_a_damaged_zip_file_is_a_sentence_wherever_it_is_damaged(folder, tmp_path):
    content = zipped(folder, tmp_path / "good.zip").read_bytes()
    draw, damaged = random.Random(0), tmp_path / "damaged.zip"
    for _ in range(100):
        broken = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            broken[draw.randrange(len(broken))] = draw.randrange(256)
        damaged.write_bytes(broken[: draw.choice([len(broken), draw.randrange(len(broken))])])
        try:
            open_bundle(damaged, tmp_path)
        except UserError as error:
            assert "damaged.zip" in str(error)


# -- Download


@pytest.fixture
def public(hub, folder, tmp_path):  # noqa: F811
    """A server of the bundle."""
    hub.files["eval_bundle.zip"] = zipped(folder, tmp_path / "public.zip").read_bytes()
    return hub


@pytest.mark.parametrize("there", [False, True], ids=["none", "damaged"])
def test_the_bundle_arrives_and_leaves_nothing_else(public, folder, tmp_path, run_script, there):
    base = tmp_path / "base"
    command = "download", "--name=core", f"--base_dir={base}", f"--mirror={public.url}"
    if there:
        shutil.copytree(folder, base / "eval_bundle")
        (base / "eval_bundle" / "core.yaml").write_text("damaged")
    public.faults["eval_bundle.zip"] = ["503"]
    run_script(*command)
    assert names_in(base) == ["eval_bundle"] * there + ["eval_bundle.zip"]
    assert open_bundle(None, base).tasks == open_bundle(folder, base).tasks
    requests = len(public.requests)
    run_script(*command)
    assert len(public.requests) == requests


@pytest.mark.parametrize("fault, why", [
    ("404", "404"), ("drops", "IncompleteRead"), ("cut", "not a zip file"), ("closed", "refused"),
])  # fmt: skip
def test_a_download_that_fails_says_why_and_keeps_the_bundle_that_is_there(
    public, folder, tmp_path, fault, why
):
    base = tmp_path / "base"
    base.mkdir()
    (base / "eval_bundle.zip").write_text("damaged")
    public.faults["eval_bundle.zip"] = [fault]
    with pytest.raises(UserError, match=why) as error:
        download_bundle(base, "http://127.0.0.1:9" if fault == "closed" else public.url)
    assert "\n" not in str(error.value) and names_in(base) == ["eval_bundle.zip"]
    assert (base / "eval_bundle.zip").read_text() == "damaged"


def test_a_byte_that_changed_on_the_way_is_found_by_the_checksums_of_the_zip_file(public, tmp_path):
    content = bytearray(public.files["eval_bundle.zip"])
    content[content.index(b"one.jsonl") + 40] ^= 1
    public.files["eval_bundle.zip"] = bytes(content)
    with pytest.raises(UserError, match="cannot be read"):
        download_bundle(tmp_path / "base", public.url)
    assert names_in(tmp_path / "base") == []
