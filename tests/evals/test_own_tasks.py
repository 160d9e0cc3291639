"""The tasks made from a data set's own validation text: what they ask, that they are fair, where they are."""

import functools
import json
import os
import random
import re
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
from shards import write_shard

from nanochat.data.dataset import Dataset
from nanochat.evals import cloze_questions as own_items
from nanochat.evals.bundle import open_bundle
from nanochat.evals.cloze_questions import TASKS, make_items
from nanochat.evals.own_tasks import open_own_tasks

LIBRARY = Path(json.__file__).parent.parent
NAMES = "ast bdb calendar cmd configparser copy csv dis"
SOURCES = [(LIBRARY / f"{name}.py").read_text("utf-8") for name in NAMES.split()]
ANY_TEXT = ["continuation", "beginning", "repeated_word", "next_word"]
PYTHON = ["keyword", "bracket", "indentation", "argument"]


def dataset(folder: Path, texts: list[str]) -> Dataset:
    shard = write_shard(folder / "val.parquet", texts, row_group_size=16)
    return Dataset("texts", [shard], [shard], "0" * 64, "")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(data set, folder, tasks by label), from a part of the standard library."""
    folder = tmp_path_factory.mktemp("own")
    data = dataset(folder, SOURCES)
    return data, folder, {task.label: task for task in open_own_tasks(data, folder)}


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def choices(example: dict) -> list[str]:
    return example.get("choices") or example["context_options"]


# ------------------------------------------------------------------------------------------------------
# What is asked


def test_python_text_gets_every_task_with_a_few_hundred_questions_in_all(built):
    tasks = built[2]
    assert list(tasks) == ANY_TEXT + PYTHON
    counts = [len(task.examples) for task in tasks.values()]
    assert min(counts) >= own_items.FEWEST_QUESTIONS and max(counts) == own_items.QUESTIONS
    assert sum(counts) >= 300
    kinds = {kind.label: kind for kind in TASKS}
    for label, task in tasks.items():
        assert (task.num_fewshot, task.delimiter) == (0, "")
        assert task.baseline == pytest.approx(kinds[label].random_baseline, abs=1e-4)
    assert {task.task_type for task in tasks.values()} == {"multiple_choice", "schema", "language_modeling"}


def test_the_right_choice_is_what_the_text_has_and_the_others_are_not(built):
    text = "\0".join(SOURCES)
    for label, task in built[2].items():
        for example in task.examples:
            if task.task_type == "language_modeling":
                assert example["context"] + example["continuation"] in text
                continue
            if task.task_type == "schema":
                texts = [option + example["continuation"] for option in example["context_options"]]
            else:
                texts = [example["query"] + choice for choice in example["choices"]]
            there = [whole in text for whole in texts]
            if label == "indentation":  # four blanks are a part of eight
                there = [bool(re.search(re.escape(whole) + r" \S", text)) for whole in texts]
            assert there == [i == example["gold"] for i in range(len(texts))], (label, example)


def test_a_query_is_short_and_begins_with_a_line_if_one_is_in_reach(built):
    for task in built[2].values():
        for example in task.examples:
            queries = example.get("context_options") or [example.get("query") or example["context"]]
            assert all(60 <= len(query) <= own_items.QUERY_CHARS for query in queries)
    text = "word " * 100 + "\n" + "line " * 40
    assert text[own_items.query_start(text, len(text)) :] == "line " * 40
    assert text[own_items.query_start(text, 300) : 300] == "word " * 48
    assert own_items.query_start("x" * 1000, 700) == 460


def test_a_repeated_word_or_an_argument_stands_in_its_own_query_and_in_no_other_of_the_group(built):
    for label in ("repeated_word", "argument"):
        for example in built[2][label].examples:
            words = [choice.strip() for choice in example["choices"]]
            assert [word in example["query"] for word in words] == [
                i == example["gold"] for i in range(len(words))
            ]
    for example in built[2]["next_word"].examples:
        assert re.search(rf"\b{example['continuation'].strip()}\b", example["context"])


def test_brackets_of_a_question_have_the_opening_one_in_the_query(built):
    for example in built[2]["bracket"].examples:
        assert sorted(example["choices"]) == [")", "]", "}"]
        assert own_items.OPENING[example["choices"][example["gold"]]] in example["query"]


# ------------------------------------------------------------------------------------------------------
# Fair: the choices alone say nothing


def rules(text: str):
    """Rules that look at the choices alone; ties go to the choice that comes first in the alphabet."""
    words, count = Counter(re.findall(r"\w+", text)), functools.cache(text.count)
    yield "shortest", lambda choice: (len(choice), choice)
    yield "longest", lambda choice: (-len(choice), choice)
    yield "most frequent in the text", lambda choice: (-count(choice), choice)
    yield "rarest in the text", lambda choice: (count(choice), choice)
    yield "most frequent words", lambda c: (-sum(words[w] for w in re.findall(r"\w+", c)), c)


def test_rules_that_do_not_read_the_query_are_right_exactly_as_often_as_chance(built):
    for name, rule in rules("\0".join(SOURCES)):
        for label, task in built[2].items():
            if task.task_type == "language_modeling":
                continue
            right = [min(choices(e), key=rule) == choices(e)[e["gold"]] for e in task.examples]
            assert sum(right) * len(choices(task.examples[0])) == len(right), (name, label)


def test_every_place_of_the_right_choice_is_equally_frequent(built):
    for task in built[2].values():
        if task.task_type != "language_modeling":
            counts = Counter(example["gold"] for example in task.examples)
            assert len(set(counts.values())) == 1 and len(counts) == len(choices(task.examples[0]))


def test_open_answers_come_once_so_one_word_written_everywhere_is_right_once_at_most(built):
    for label in ("continuation", "beginning", "repeated_word", "next_word", "argument"):
        examples = built[2][label].examples
        answers = [e["continuation"] if "continuation" in e else e["choices"][e["gold"]] for e in examples]
        assert len(set(answers)) == len(answers)


# ------------------------------------------------------------------------------------------------------
# Other texts


def sentences(draw: random.Random, n: int, blank: str = " ") -> str:
    letters = "abcdefghijklmnopqrstuvwxyz" if blank else "".join(map(chr, range(0x4E00, 0x5000)))
    words = ["".join(draw.choices(letters, k=draw.randint(3, 9))) for _ in range(400)]
    return ". ".join(blank.join(draw.choices(words, k=draw.randint(5, 15))) for _ in range(n))


def test_prose_gets_the_tasks_for_any_text_and_none_about_python():
    draw = random.Random(0)
    made = make_items([sentences(draw, 20) for _ in range(40)])
    assert [task.label for task in made] == ANY_TEXT


def test_a_script_without_blanks_between_words_gets_continuations():
    draw = random.Random(0)
    made = make_items([sentences(draw, 30, "") for _ in range(20)])
    assert [task.label for task in made] == ["continuation", "beginning"]
    assert all(40 <= len(choice) <= 100 for e in made[TASKS[0]] for choice in e["choices"])


def test_documents_that_no_parser_takes_are_text_like_any_other(recwarn):
    hostile = ["(" * 50_000, "-" * 50_000 + "1", "a\0b", "x = '\\d'\n", "def f(:\n", "\f\r\n\v", "", "é" * 9]
    hostile += ["a." * 10_000, "\n" * 5000, "if a:\n" * 50, '"""', "f(" + "1, " * 10_000 + ")", "x" * 600_000]
    began = time.process_time()
    made = make_items(SOURCES[:3] + hostile)
    assert time.process_time() - began < 20, "a hostile document must not cost minutes"
    assert "continuation" in {task.label for task in made} and not recwarn.list


def test_a_text_with_too_few_places_has_no_tasks(tmp_path):
    data = dataset(tmp_path, ["too short", "to ask about"])
    assert open_own_tasks(data, tmp_path) == []
    data.val_shards[0].unlink()
    assert open_own_tasks(data, tmp_path) == [], "the answer is kept like a set of tasks"


# ------------------------------------------------------------------------------------------------------
# The folder


def test_the_same_documents_give_the_same_bytes_in_any_order(built, tmp_path):
    folder = built[1]
    assert sum(map(len, SOURCES)) < own_items.TEXT_CHARS
    open_own_tasks(dataset(tmp_path, SOURCES[5:] + SOURCES[:5]), tmp_path)
    assert content(tmp_path / "own_tasks-1") == content(folder / "own_tasks-1")


def test_a_set_that_is_there_is_read_and_not_made_again(built, tmp_path):
    _, folder, tasks = built
    shutil.copytree(folder / "own_tasks-1", tmp_path / "own_tasks-1")
    gone = Dataset("gone", [], [tmp_path / "gone.parquet"], "", "")
    assert open_own_tasks(gone, tmp_path) == list(tasks.values())
    assert open_bundle(tmp_path / "own_tasks-1", tmp_path)[0].tasks == list(tasks.values())


def damage(place: Path, how: str):
    file = place / "eval_data" / "own" / "keyword.jsonl"
    if how == "cut":
        os.truncate(file, 1000)
    elif how == "one byte":
        file.write_bytes(file.read_bytes().replace(b'"gold": 1', b'"gold": 2', 1))
    elif how == "removed":
        file.unlink()
    elif how == "no fingerprint":
        (place / "fingerprint.txt").unlink()
    elif how == "not text":
        (place / "fingerprint.txt").write_bytes(b"\xff\xfe")
    else:
        shutil.rmtree(place)
        if how == "a file":
            place.write_text("not a folder")
        elif how == "a link":
            place.symlink_to(place.parent / "nowhere")


HOWS = ["cut", "one byte", "removed", "no fingerprint", "not text", "gone", "a file", "a link"]


def test_a_damaged_set_is_made_again(built, tmp_path, monkeypatch):
    data, folder, tasks = built
    made = make_items(SOURCES)
    monkeypatch.setattr("nanochat.evals.own_tasks.make_items", lambda documents: made)
    place = tmp_path / "own_tasks-1"
    shutil.copytree(folder / "own_tasks-1", place)
    for how in HOWS:
        damage(place, how)
        assert open_own_tasks(data, tmp_path) == list(tasks.values()), how
        assert content(place) == content(folder / "own_tasks-1"), how
        assert [path.name for path in tmp_path.iterdir()] == ["own_tasks-1"], how


def test_a_folder_that_cannot_be_written_leaves_the_tasks_out_with_one_line(built, tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    assert open_own_tasks(built[0], tmp_path / "file", said.append) == []
    assert len(said) == 1 and "left out" in said[0] and str(tmp_path / "file") in said[0]
