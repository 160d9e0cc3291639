"""Cloze questions from a data set's own validation text: what they ask, that they are fair, their file."""

import functools
import gzip
import json
import random
import re
import time
from collections import Counter
from pathlib import Path

import pytest
from data.shards import write_shard

from nanochat.data.dataset import Dataset
from nanochat.evals import cloze_questions, tasks
from nanochat.evals.bundle import TASK_TYPES
from nanochat.evals.cloze_questions import make_tasks
from nanochat.evals.tasks import cloze_tasks

LIBRARY = Path(json.__file__).parent.parent
NAMES = "ast bdb calendar cmd configparser copy csv dis"
SOURCES = [(LIBRARY / f"{name}.py").read_text("utf-8") for name in NAMES.split()]
ANY_TEXT = ["continuation", "beginning", "repeated_word", "next_word"]
PYTHON = ["keyword", "bracket", "indentation", "argument"]


def dataset(folder: Path, texts: list[str]) -> Dataset:
    shard = write_shard(folder / "val.parquet", texts, row_group_size=16)
    return Dataset("texts", [shard], [shard], "0" * 64, "")


@pytest.fixture(scope="module")
def built():
    """{label: task} from a part of the standard library."""
    return {task.label: task for task in make_tasks(SOURCES)}


def choices(example: dict) -> list[str]:
    return example.get("choices") or example["context_options"]


# -- What is asked


def test_python_text_gets_every_task_with_a_few_hundred_questions_in_all(built):
    assert list(built) == ANY_TEXT + PYTHON
    counts = [len(task.examples) for task in built.values()]
    assert min(counts) >= cloze_questions.FEWEST_QUESTIONS and max(counts) == cloze_questions.QUESTIONS
    assert sum(counts) >= 300
    for task in built.values():
        assert (task.num_fewshot, task.delimiter) == (0, "")
        guessing = 0 if task.task_type == "language_modeling" else 100 / len(choices(task.examples[0]))
        assert task.baseline == pytest.approx(guessing, abs=1e-4)
    assert {task.task_type for task in built.values()} == set(TASK_TYPES)


def test_the_right_choice_is_what_the_text_has_and_the_others_are_not(built):
    text = "\0".join(SOURCES)
    for label, task in built.items():
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
    for task in built.values():
        for example in task.examples:
            queries = example.get("context_options") or [example.get("query") or example["context"]]
            assert all(60 <= len(query) <= cloze_questions.QUERY_CHARS for query in queries)
    text = "word " * 100 + "\n" + "line " * 40
    assert text[cloze_questions.query_start(text, len(text)) :] == "line " * 40
    assert text[cloze_questions.query_start(text, 300) : 300] == "word " * 48
    assert cloze_questions.query_start("x" * 1000, 700) == 460


def test_the_query_tells_the_answer_and_none_of_the_others(built):
    for label in ("repeated_word", "argument"):
        for example in built[label].examples:
            in_query = [choice.strip() in example["query"] for choice in example["choices"]]
            assert in_query == [i == example["gold"] for i in range(len(in_query))]
    for example in built["bracket"].examples:
        assert sorted(example["choices"]) == [")", "]", "}"]
        assert cloze_questions.OPENING[example["choices"][example["gold"]]] in example["query"]
    for example in built["next_word"].examples:
        assert re.search(rf"\b{example['continuation'].strip()}\b", example["context"])


# -- Fair: the choices alone say nothing


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
        for label, task in built.items():
            if task.task_type == "language_modeling":
                continue
            right = [min(choices(e), key=rule) == choices(e)[e["gold"]] for e in task.examples]
            assert sum(right) * len(choices(task.examples[0])) == len(right), (name, label)


def test_every_place_of_the_right_choice_is_equally_frequent_and_no_open_answer_comes_twice(built):
    for task in built.values():
        if task.label not in ("keyword", "bracket", "indentation"):
            answers = [e.get("continuation") or e["choices"][e["gold"]] for e in task.examples]
            assert len(set(answers)) == len(answers)
        if task.task_type != "language_modeling":
            counts = Counter(example["gold"] for example in task.examples)
            assert len(set(counts.values())) == 1 and len(counts) == len(choices(task.examples[0]))


# -- Other texts


def sentences(draw: random.Random, n: int, blank: str = " ") -> str:
    letters = "abcdefghijklmnopqrstuvwxyz" if blank else "".join(map(chr, range(0x4E00, 0x5000)))
    words = ["".join(draw.choices(letters, k=draw.randint(3, 9))) for _ in range(400)]
    return ". ".join(blank.join(draw.choices(words, k=draw.randint(5, 15))) for _ in range(n))


def test_prose_gets_the_tasks_for_any_text_and_one_without_blanks_gets_continuations():
    draw = random.Random(0)
    made = make_tasks([sentences(draw, 20) for _ in range(40)])
    assert [task.label for task in made] == ANY_TEXT
    made = make_tasks([sentences(draw, 30, "") for _ in range(20)])
    assert [task.label for task in made] == ["continuation", "beginning"]
    assert all(40 <= len(choice) <= 100 for e in made[0].examples for choice in e["choices"])


def test_documents_that_no_parser_takes_are_text_like_any_other(recwarn):
    hostile = ["(" * 50_000, "-" * 50_000 + "1", "a\0b", "x = '\\d'\n", "def f(:\n", "\f\r\n\v", "", "é" * 9]
    hostile += ["a." * 10_000, "\n" * 5000, "if a:\n" * 50, '"""', "f(" + "1, " * 10_000 + ")", "x" * 600_000]
    began = time.process_time()
    made = make_tasks(SOURCES[:3] + hostile)
    assert time.process_time() - began < 20, "a hostile document must not cost minutes"
    assert "continuation" in {task.label for task in made} and not recwarn.list


# -- The file that keeps them


def test_they_are_made_once_also_where_there_are_none(built, tmp_path, monkeypatch):
    texts = {"many": SOURCES, "none": ["too short", "to ask about"]}
    many, none = (dataset(tmp_path / name, texts[name]) for name in texts)
    assert cloze_tasks(many, tmp_path / "many") == list(built.values())
    assert cloze_tasks(none, tmp_path / "none") == []
    monkeypatch.setattr(tasks, "make_tasks", lambda documents: pytest.fail("made again"))
    assert cloze_tasks(many, tmp_path / "many") == list(built.values())
    assert cloze_tasks(none, tmp_path / "none") == []


def test_the_same_documents_give_the_same_tasks_in_any_order(built):
    assert sum(map(len, SOURCES)) < cloze_questions.TEXT_CHARS
    assert make_tasks(SOURCES[5:] + SOURCES[:5]) == list(built.values())


def test_a_damaged_file_is_made_again_and_a_folder_that_cannot_be_written_costs_the_time(tmp_path):
    data = dataset(tmp_path, SOURCES[:3])
    made = cloze_tasks(data, tmp_path / "kept")
    (file,) = (tmp_path / "kept").iterdir()
    content = file.read_bytes()
    flipped = content[:1000] + bytes([content[1000] ^ 1]) + content[1001:]
    for damaged in (b"", content[:1000], flipped, b"\xff\n[]", gzip.compress(b"[1]")):
        file.write_bytes(damaged)
        assert cloze_tasks(data, tmp_path / "kept") == made and file.read_bytes() == content
    assert made and cloze_tasks(data, file / "folder") == made
