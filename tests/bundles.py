"""A small evaluation bundle in the format of the public one, with what is awkward in each task type."""

import csv
import json
import random
from pathlib import Path

import yaml

WORDS = ["alpha", "beta", "gamma", "delta", "print", "return", "def", "class", "import", "while"]
WORDS += ["Zürich", "naïve", "漢字", "foo_bar", "12345", "(x)", "==", "+="]


def _words(draw: random.Random, low: int, high: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(low, high)))


def _multiple_choice(draw: random.Random, n: int, low: int, high: int) -> list[dict]:
    examples = []
    for _ in range(n):
        choices = [_words(draw, 1, 6) for _ in range(draw.randint(2, 5))]
        examples.append(
            {"query": _words(draw, low, high), "choices": choices, "gold": draw.randrange(len(choices))}
        )
    return examples


def _schema(draw: random.Random, n: int, low: int, high: int) -> list[dict]:
    examples = []
    for _ in range(n):
        start = _words(draw, low, high)
        options = [f"{start} {_words(draw, 1, 3)}" for _ in range(2)]
        examples.append(
            {"context_options": options, "continuation": _words(draw, 2, 6), "gold": draw.randrange(2)}
        )
    return examples


def _language_modeling(draw: random.Random, n: int, low: int, high: int) -> list[dict]:
    blanks = ("", " ", "\n", "  \t")
    return [
        {"context": _words(draw, low, high) + draw.choice(blanks), "continuation": _words(draw, 1, 2)}
        for _ in range(n)
    ]


def _awkward(draw: random.Random) -> dict[str, list[dict]]:
    """Ties, choices that begin or end alike, and choices whose first tokens depend on what follows."""
    mc = [
        {"query": "the same", "choices": ["one", "one", "two"], "gold": 1},
        {"query": "the same", "choices": ["one", "two", "one"], "gold": 0},
        {"query": "alike", "choices": ["a long beginning, then x", "a long beginning, then y"], "gold": 1},
        {"query": "numbers", "choices": ["1", "12", "123456", "1234567"], "gold": 2},
        {"query": "blanks ", "choices": ["  two", " one", "none"], "gold": 1},
        {"query": "", "choices": ["x", "y", "z"], "gold": 2},
        {"query": "<|bos|> is text here", "choices": ["<|bos|>", "bos"], "gold": 0},
        {"query": "an index", "choices": [1, 2.5, "x"], "gold": 0, "category": "more than is needed"},
    ]
    schema = [
        {"context_options": ["left", "right"], "continuation": "hand side of the street", "gold": 0},
        {"context_options": ["both end the same", "all end the same"], "continuation": "way.", "gold": 1},
        {"context_options": ["same", "same"], "continuation": "tie", "gold": 0},
        {"context_options": ["a", "b", "c"], "continuation": "!", "gold": 2},
    ]
    return {
        "multiple_choice": mc + _multiple_choice(draw, 6, 1, 9),
        "schema": schema + _schema(draw, 5, 1, 9),
    }


def write_bundle(folder: Path, n: int = 20, low: int = 1, high: int = 40, seed: int = 0) -> Path:
    """Write a bundle of nine tasks; `n` questions in most, with contexts of `low` to `high` words."""
    draw = random.Random(seed)
    awkward = _awkward(draw)
    size = (n, low, high)
    tasks = [  # label, type, num_fewshot, delimiter, random baseline, examples
        ("choice_0", "multiple_choice", [0], None, 25, _multiple_choice(draw, *size)),
        ("choice_3", "multiple_choice", [3], "\nAnswer: ", 33.3, _multiple_choice(draw, *size)),
        ("choice_awkward", "multiple_choice", [2], None, 25, awkward["multiple_choice"]),
        ("schema_0", "schema", [0], None, 50, _schema(draw, *size)),
        ("schema_2", "schema", [2], "", 50, _schema(draw, *size)),
        ("schema_awkward", "schema", [1], None, 50, awkward["schema"]),
        ("words_0", "language_modeling", [0], None, 0, _language_modeling(draw, *size)),
        ("words_4", "language_modeling", [4], "\nAnswer: ", 0, _language_modeling(draw, *size)),
        ("words_cut", "language_modeling", [10], "\n", 9.1, _language_modeling(draw, *size)),
    ]
    return write_tasks(folder, tasks)


def write_tasks(folder: Path, tasks: list[tuple]) -> Path:
    """Write a bundle of (label, type, num_fewshot, delimiter or None, random baseline, examples)."""
    (folder / "eval_data" / "some").mkdir(parents=True)
    entries = []
    with open(folder / "eval_meta_data.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["Eval Task", "Task Category", "Random baseline", "Description"])
        table.writerow(["in no list", "none", "12.5", 'a "quoted", and\nbroken line'])
        for label, task_type, shots, delimiter, baseline, examples in tasks:
            uri = f"some/{label}.jsonl"
            entry = {"label": label, "dataset_uri": uri, "num_fewshot": shots, "icl_task_type": task_type}
            entries.append(entry if delimiter is None else entry | {"continuation_delimiter": delimiter})
            table.writerow([label, "some", baseline, "made up"])
            text = "".join(json.dumps(example) + "\n" for example in examples)
            (folder / "eval_data" / uri).write_text(text, encoding="utf-8")
    (folder / "core.yaml").write_text(
        yaml.safe_dump({"icl_tasks": entries}, default_flow_style=None), "utf-8"
    )
    return folder
