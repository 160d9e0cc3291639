"""Evaluation bundles: tasks with their examples, in the format of the public bundle of CORE.

A bundle is a folder, or a zip file of one, with

    core.yaml            icl_tasks: a list of label, dataset_uri, num_fewshot: [n], icl_task_type and, if it
                         is not one space, continuation_delimiter
    eval_meta_data.csv   columns "Eval Task" (a label) and "Random baseline" (percent right by guessing)
    eval_data/           the dataset_uri of each task: a JSON object a line

The examples of the three task types have these fields:

    multiple_choice      query, choices, gold: one context, several continuations, the index of the right one
    schema               context_options, continuation, gold: several contexts, one continuation
    language_modeling    context, continuation: the model has to write exactly this continuation

The file may come from a stranger, so all that is read has a limit and is checked before it is used.
"""

import csv
import hashlib
import io
import json
import math
import random
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nanochat import UserError
from nanochat.files import special_kind, user_path

NAME = "eval_bundle"  # the folder in base_dir
GET = "python -m scripts.download --name=core"
TASK_TYPES = {  # fields of an example: str, a list of str, or an index into that list
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("continuation", "context_options", "gold"),
    "language_modeling": ("context", "continuation"),
}
SHUFFLE_SEED = 1337  # karpathy/nanochat's: of the order in which the first max_per_task examples are taken
LARGEST_FILE = 1 << 29  # bytes; the largest of the public bundle's files has some tens of MB
LARGEST_SETTINGS = 1 << 17  # bytes of core.yaml and of eval_meta_data.csv; the public ones have some KB
DEEPEST = 10  # lists and mappings in each other in core.yaml; a bundle has three
MOST_FEWSHOT = 1000  # worked examples before a question; CORE has at most 10
UNREADABLE = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError)


@dataclass(frozen=True)
class Task:
    """One task of a bundle, with the examples that are evaluated."""

    label: str
    task_type: str  # a key of TASK_TYPES
    num_fewshot: int  # worked examples before each question
    delimiter: str  # stands between a context and its continuation
    baseline: float  # percent right by guessing, 0 <= baseline < 100
    examples: list[dict]  # with the fields of TASK_TYPES


@dataclass(frozen=True)
class Bundle:
    """The tasks of a bundle in the order of its core.yaml."""

    path: Path
    tasks: list[Task]
    fingerprint: str  # of all that was read, hexadecimal: equal ones give equal scores


def open_bundle(
    path: str | Path | None, base_path: Path, max_per_task: int = -1
) -> tuple[Bundle | None, str]:
    """(the bundle at a folder or zip file, ""), or (None, the reason in one line) if none is there.

    path: None is `<base_path>/eval_bundle`, which may be missing. max_per_task: examples to read of each task
    (-1 = all), in an order that is shuffled, always in the same way. Raises UserError if `path`
    does not exist or the bundle is damaged, with the file and the line.
    """
    found = Path(base_path) / NAME if path is None else user_path("bundle", path)
    if path is None and not found.exists():
        return None, f"CORE was left out: there is no evaluation bundle in {found}; get it with {GET}"
    with _Source(found) as source:
        entries, baselines = _entries(source), _baselines(source)
        tasks = [
            _read_task(source, f"{source.place('core.yaml')}, task {number}", entry, baselines, max_per_task)
            for number, entry in enumerate(entries, start=1)
        ]
        labels = [task.label for task in tasks]
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise _damaged(source.place("core.yaml"), f"the label {twice} stands twice")
        return Bundle(found, tasks, source.digest.hexdigest()), ""


def _damaged(place: str, reason: object) -> UserError:
    return UserError(f"{place}: {reason}; repair the bundle or get it again ({GET})")


class _Source:
    """Reads the files of a bundle, out of a folder or a zip file."""

    def __init__(self, path: Path):
        self.path, self.digest, self._zip = path, hashlib.sha256(), None

    def __enter__(self) -> "_Source":
        advice = f"name its folder or zip file, or get the public one with {GET}"
        try:
            kind = special_kind(self.path)
            self._zip = None if kind else zipfile.ZipFile(self.path)
        except OSError as error:
            reason = f"no evaluation bundle can be read at {self.path} ({error.strerror})"
            raise UserError(f"{reason}; {advice}") from error
        except UNREADABLE as error:
            raise UserError(f"{self.path} is no zip file of an evaluation bundle; {advice}") from error
        if kind not in ("", "a folder"):
            raise UserError(f"{self.path} is {kind} and no evaluation bundle; {advice}")
        self.root = root_of(self._zip.namelist()) if self._zip else ""
        return self

    def __exit__(self, *exception) -> None:
        if self._zip:
            self._zip.close()

    def place(self, name: str) -> str:
        """A file's name for messages."""
        return str(self.path / self.root / name)

    def read(self, name: str, limit: int) -> str:
        """The UTF-8 text of a file; `name` is relative to the bundle."""
        place = self.place(name)
        if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute() or "\0" in name:
            raise _damaged(place, "the path leads out of the bundle")
        try:
            if self._zip:
                with self._zip.open(self.root + name) as file:
                    content = file.read(limit + 1)
            else:
                if kind := special_kind(self.path / name):
                    raise _damaged(place, f"it is {kind} and no file")
                with open(self.path / name, "rb") as file:
                    content = file.read(limit + 1)
            if len(content) > limit:
                raise _damaged(place, f"it has more than {limit:,} bytes")
            self.digest.update(len(content).to_bytes(8, "big") + content)
            return content.decode()
        except UserError:
            raise
        except UnicodeDecodeError as error:
            line = content[: error.start].count(b"\n") + 1
            raise _damaged(f"{place}, line {line}", "it is no UTF-8 text") from error
        except (KeyError, FileNotFoundError) as error:
            raise _damaged(place, "the file is missing") from error
        except (OSError, *UNREADABLE) as error:
            raise _damaged(place, f"it cannot be read ({type(error).__name__})") from error


def root_of(names: list[str]) -> str:
    """The folder of a zip file's names that holds core.yaml: "" or "eval_bundle/"."""
    return f"{NAME}/" if f"{NAME}/core.yaml" in names else ""


def _entries(source: _Source) -> list[dict]:
    """The entries of core.yaml. An alias could make a small file endless, and deep nesting takes for ever."""
    import yaml

    place, text = source.place("core.yaml"), source.read("core.yaml", LARGEST_SETTINGS)
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > DEEPEST:
                what = "lists in lists" if depth > DEEPEST else "an alias (*name)"
                place = f"{place}, line {event.start_mark.line + 1}"
                raise _damaged(place, f"{what}, which no bundle needs")
        content = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise _damaged(f"{place}, line {line}", f"it is no YAML ({error.problem})") from error
    except UserError:
        raise
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(place, f"it is no YAML ({type(error).__name__})") from error
    entries = content.get("icl_tasks") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) for e in entries):
        raise _damaged(place, "it has no list icl_tasks of tasks")
    return entries


def _baselines(source: _Source) -> dict[str, float]:
    """{label: percent right by guessing}"""
    name = "eval_meta_data.csv"
    place = source.place(name)
    rows = csv.DictReader(io.StringIO(source.read(name, LARGEST_SETTINGS), newline=""))
    baselines = {}
    try:
        for row in rows:
            if row.get("Eval Task") is None or row.get("Random baseline") is None:
                raise ValueError("a row lacks the column Eval Task or Random baseline")
            baselines[row["Eval Task"]] = percent = float(row["Random baseline"])
            if not 0 <= percent < 100:  # also false for nan
                raise ValueError(f"the random baseline is {percent}; it is a number from 0 to below 100")
    except (csv.Error, ValueError) as error:
        raise _damaged(f"{place}, line {rows.line_num}", error) from error
    return baselines


def _read_task(source: _Source, place: str, entry: dict, baselines: dict, max_per_task: int) -> Task:
    """The task of an entry of core.yaml, which stands at `place`."""
    label, uri = entry.get("label"), entry.get("dataset_uri")
    for field, value in (("label", label), ("dataset_uri", uri)):
        if not isinstance(value, str) or not value.strip():
            raise _damaged(place, f"its {field} is no text")
    place = f"{place} ({label[:80]})"
    task_type, delimiter = entry.get("icl_task_type"), entry.get("continuation_delimiter", " ")
    if not isinstance(task_type, str) or task_type not in TASK_TYPES:
        raise _damaged(place, f"its icl_task_type is none of {', '.join(TASK_TYPES)}")
    if not isinstance(delimiter, str):
        raise _damaged(place, "its continuation_delimiter is no text")
    shots = entry.get("num_fewshot")
    shots = shots[0] if isinstance(shots, list) and shots else shots
    if type(shots) is not int or not 0 <= shots <= MOST_FEWSHOT:
        raise _damaged(place, f"its num_fewshot is no list of a number from 0 to {MOST_FEWSHOT}")
    if label not in baselines:
        raise _damaged(place, "eval_meta_data.csv has no random baseline for it")
    examples = _read_examples(source, f"eval_data/{uri}", task_type, max_per_task)
    return Task(label, task_type, shots, delimiter, baselines[label], examples)


def _read_examples(source: _Source, name: str, task_type: str, max_per_task: int) -> list[dict]:
    """The first `max_per_task` examples of a file in the order of SHUFFLE_SEED (-1 = all of them)."""
    lines = [
        (number, line)
        for number, line in enumerate(source.read(name, LARGEST_FILE).split("\n"), start=1)
        if line.strip()
    ]
    if not lines:
        raise _damaged(source.place(name), "it has no examples")
    random.Random(SHUFFLE_SEED).shuffle(lines)
    examples = []
    for number, line in lines[:max_per_task] if max_per_task > 0 else lines:
        try:
            examples.append(_example(json.loads(line), TASK_TYPES[task_type]))
        except json.JSONDecodeError as error:
            reason = f"it is no JSON ({error.msg})"
        except (ValueError, RecursionError) as error:
            reason = error if isinstance(error, UserError) else f"it is no JSON ({type(error).__name__})"
        else:
            continue
        raise _damaged(f"{source.place(name)}, line {number}", reason)
    return examples


def _example(content: object, fields: tuple[str, ...]) -> dict:
    """The checked fields of an example; UserError with the reason if one is missing or of another type."""
    if not isinstance(content, dict):
        raise UserError("it is no JSON object")
    example = {field: content.get(field) for field in fields}
    for field, value in example.items():
        if field in ("choices", "context_options"):
            if not isinstance(value, list) or not value:
                raise UserError(f"{field} is no list of texts")
            example[field] = [_text(field, one) for one in value]
            size = len(value)
        elif field == "gold":
            if type(value) is not int or not 0 <= value < size:
                raise UserError(f"gold is no index from 0 to {size - 1}")
        else:
            example[field] = _text(field, value)
    return example


def _text(field: str, value: object) -> str:
    """A text; a number is written out, as other readers of this format do."""
    if isinstance(value, str):
        return value
    if type(value) in (int, float) and math.isfinite(value):
        return str(value)
    raise UserError(f"{field} is {'missing' if value is None else 'no text'}")
