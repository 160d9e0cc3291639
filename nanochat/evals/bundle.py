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

Everything is checked before it is used: a bundle may be a person's own, or a stranger's.
"""

import contextlib
import csv
import hashlib
import io
import itertools
import json
import math
import random
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from nanochat import UserError
from nanochat.data.download import route
from nanochat.files import replacing, user_path
from nanochat.terminal import bar, first_line, gib

NAME = "eval_bundle"  # in base_dir: NAME.zip, which `download_bundle` gets, or a folder
HOST = "https://karpathy-public.s3.us-west-2.amazonaws.com"  # where karpathy/nanochat has it
TIMEOUT_S = 15.0  # seconds for the connection, and between two pieces of an answer
GET = "python -m scripts.download --name=core"
TASK_TYPES = {  # fields of an example: str, a list of str, or an index into that list
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("continuation", "context_options", "gold"),
    "language_modeling": ("context", "continuation"),
}
LARGEST = 1 << 31  # bytes of all files of a zip file, unpacked
SHUFFLE_SEED = 1337  # karpathy/nanochat's: gives the order in which max_per_task takes examples
# The errors of zipfile for a damaged file
UNREADABLE = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError)


@dataclass(frozen=True)
class Task:
    """One task of a bundle, with the examples that are evaluated."""

    label: str
    task_type: str  # a key of TASK_TYPES
    num_fewshot: int  # worked examples before each question
    delimiter: str  # between a context and its continuation
    baseline: float  # percent right by guessing, 0 <= baseline < 100
    examples: list[dict]  # with the fields of TASK_TYPES

    def centred(self, accuracy: float) -> float:
        """An accuracy on a scale where guessing is 0 and no mistake is 1."""
        guessing = self.baseline / 100
        return (accuracy - guessing) / (1 - guessing)


@dataclass(frozen=True)
class Bundle:
    """The tasks of a bundle in the order of its core.yaml."""

    path: Path
    tasks: list[Task]
    fingerprint: str  # SHA-256 of all files that were read, hexadecimal


def open_bundle(path: str | Path | None, base_path: Path, max_per_task: int = -1, say=print) -> Bundle | None:
    """The bundle at a folder or zip file.

    path: None is the one in `base_path`; if that is missing, `say` gets a line about it, and the result is
    None. max_per_task: examples to read of each task (-1 = all), in a shuffled order that is always the same.
    Raises UserError if `path` does not exist or the bundle is damaged, with the file and the line.
    """
    found = user_path("bundle", path) if path is not None else Path(base_path) / f"{NAME}.zip"
    if path is None and not found.exists():
        found = found.with_suffix("")
    if path is None and not found.exists():
        say(f"CORE was left out: there is no evaluation bundle in {found}; get it with {GET}")
        return None
    with _root(found) as root:
        source = _Source(root, hashlib.sha256())
        entries, baselines = _entries(source), _baselines(source)
        tasks = [
            _read_task(source, f"{root / 'core.yaml'}, task {number}", entry, baselines, max_per_task)
            for number, entry in enumerate(entries, start=1)
        ]
        labels = [task.label for task in tasks]
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise _damaged(root / "core.yaml", f"the label {twice} stands twice")
        return Bundle(found, tasks, source.digest.hexdigest())


def _damaged(place: object, reason: object) -> UserError:
    return UserError(f"{place}: {reason}; repair the bundle or get it again ({GET})")


@contextlib.contextmanager
def _root(path: Path) -> Iterator[Path | zipfile.Path]:
    """The folder that holds core.yaml, which may be inside of a zip file."""
    if path.is_dir():
        yield path
        return
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, *UNREADABLE) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(
            f"no evaluation bundle can be read at {path} ({reason}); name its folder or zip file, or get the "
            f"public one with {GET}"
        ) from error
    with archive:
        if (size := sum(member.file_size for member in archive.infolist())) > LARGEST:
            raise UserError(f"{path} would take {gib(size)}, which is no evaluation bundle")
        folders = (re.fullmatch(r"([^/]+/)?core\.yaml", name) for name in archive.namelist())
        yield zipfile.Path(archive, next((found[1] or "" for found in folders if found), ""))


@dataclass
class _Source:
    """Reads the files of a bundle and hashes them."""

    root: Path | zipfile.Path
    digest: "hashlib._Hash"

    def read(self, name: str) -> str:
        """The UTF-8 text of a file; `name` is relative to the bundle."""
        place = self.root / name
        if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
            raise _damaged(place, "the path leads out of the bundle")
        try:
            content = place.read_bytes()
            self.digest.update(len(content).to_bytes(8, "big") + content)
            return content.decode()
        except UnicodeDecodeError as error:
            line = content[: error.start].count(b"\n") + 1
            raise _damaged(f"{place}, line {line}", "it is not UTF-8 text") from error
        except (KeyError, FileNotFoundError) as error:
            raise _damaged(place, "the file is missing") from error
        except (OSError, *UNREADABLE) as error:
            raise _damaged(place, f"it cannot be read ({type(error).__name__})") from error


def _entries(source: _Source) -> list[dict]:
    """The entries of core.yaml."""
    import yaml

    place, text = source.root / "core.yaml", source.read("core.yaml")
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{place}, line {mark.line + 1}" if mark else place
        raise _damaged(
            where, f"it is not YAML ({getattr(error, 'problem', type(error).__name__)})"
        ) from error
    entries = content.get("icl_tasks") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) for e in entries):
        raise _damaged(place, "it has no list icl_tasks of tasks")
    return entries


def _baselines(source: _Source) -> dict[str, float]:
    """{label: percent right by guessing}"""
    name = "eval_meta_data.csv"
    rows = csv.DictReader(io.StringIO(source.read(name), newline=""))
    baselines = {}
    try:
        for row in rows:
            if row.get("Eval Task") is None or row.get("Random baseline") is None:
                raise ValueError("a row lacks the column Eval Task or Random baseline")
            baselines[row["Eval Task"]] = percent = float(row["Random baseline"])
            if not 0 <= percent < 100:  # also false for nan
                raise ValueError(f"the random baseline is {percent}; it is a number from 0 to below 100")
    except (csv.Error, ValueError) as error:
        raise _damaged(f"{source.root / name}, line {rows.line_num}", error) from error
    return baselines


def _read_task(source: _Source, place: str, entry: dict, baselines: dict, max_per_task: int) -> Task:
    """The task of an entry of core.yaml. place: of the entry, for messages."""
    label, uri = entry.get("label"), entry.get("dataset_uri")
    task_type, delimiter = entry.get("icl_task_type"), entry.get("continuation_delimiter", " ")
    shots = entry.get("num_fewshot")
    shots = shots[0] if isinstance(shots, list) and shots else shots
    checks = {
        "its label is not text": isinstance(label, str) and label.strip(),
        "its dataset_uri is not text": isinstance(uri, str) and uri.strip(),
        f"its icl_task_type is none of {', '.join(TASK_TYPES)}": task_type in list(TASK_TYPES),
        "its continuation_delimiter is not text": isinstance(delimiter, str),
        "its num_fewshot is not a list of a number from 0": type(shots) is int and shots >= 0,
        "eval_meta_data.csv has no random baseline for it": label in list(baselines),
    }
    for reason, good in checks.items():
        if not good:
            raise _damaged(f"{place} ({str(label)[:80]})", reason)
    examples = _read_examples(source, f"eval_data/{uri}", task_type, max_per_task)
    return Task(label, task_type, shots, delimiter, baselines[label], examples)


def _read_examples(source: _Source, name: str, task_type: str, max_per_task: int) -> list[dict]:
    """The first `max_per_task` examples of a file in the order of SHUFFLE_SEED (-1 = all of them)."""
    lines = [pair for pair in enumerate(source.read(name).split("\n"), start=1) if pair[1].strip()]
    if not lines:
        raise _damaged(source.root / name, "it has no examples")
    random.Random(SHUFFLE_SEED).shuffle(lines)
    examples = []
    for number, line in lines[:max_per_task] if max_per_task > 0 else lines:
        try:
            examples.append(_example(json.loads(line), TASK_TYPES[task_type]))
        except (ValueError, RecursionError) as error:
            reason = error if isinstance(error, UserError) else f"it is not JSON ({first_line(error)})"
            raise _damaged(f"{source.root / name}, line {number}", reason) from error
    return examples


def _example(content: object, fields: tuple[str, ...]) -> dict:
    """The checked fields of an example; UserError with the reason if one is missing or of another type."""
    if not isinstance(content, dict):
        raise UserError("it is not a JSON object")
    example = {field: content.get(field) for field in fields}
    for field, value in example.items():
        if field in ("choices", "context_options"):
            if not isinstance(value, list) or not value:
                raise UserError(f"{field} is not a list of texts")
            example[field] = [_text(field, one) for one in value]
            size = len(value)
        elif field == "gold":
            if type(value) is not int or not 0 <= value < size:
                raise UserError(f"gold is not an index from 0 to {size - 1}")
        else:
            example[field] = _text(field, value)
    parts = [v if isinstance(v, list) else [v] for field, v in example.items() if field != "gold"]
    if not all("".join(text).strip() for text in itertools.product(*parts)):
        raise UserError("a context and its continuation are empty, so there is nothing to score")
    return example


def _text(field: str, value: object) -> str:
    """A text; a number becomes its text, as in other readers of this format."""
    if isinstance(value, str):
        return value
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return str(value)
    raise UserError(f"{field} is {'missing' if value is None else 'not text'}")


# -- the public bundle


def download_bundle(base_path: Path, host: str | None = None) -> None:
    """Get the public bundle unless a good one is there, as a zip file from HOST or a mirror of it.

    Raises UserError if the download fails or is no bundle, OSError if `base_path` cannot be written. In both
    cases a bundle that was there stays.
    """
    with contextlib.suppress(UserError):
        if there := open_bundle(None, base_path, say=lambda missing: None):
            print(f"the evaluation bundle is in {there.path}")
            return
    base_path.mkdir(parents=True, exist_ok=True)
    path = base_path / f"{NAME}.zip"
    with replacing(path) as file:
        _get((host or HOST).rstrip("/"), file)
        file.flush()
        bundle = open_bundle(file.name, base_path)
    print(f"the evaluation bundle is in {path}: {len(bundle.tasks)} tasks")


def _get(host: str, file: BinaryIO) -> None:
    """Download the bundle into a file. If the server is busy, try again."""
    import requests
    from urllib3.util import Retry

    again = Retry(3, connect=0, read=0, backoff_factor=1, status_forcelist=[429, 500, 502, 503, 504])
    try:
        with requests.Session() as session:
            session.mount(host, requests.adapters.HTTPAdapter(max_retries=again))
            with session.get(f"{host}/{NAME}.zip", stream=True, timeout=TIMEOUT_S) as answer:
                answer.raise_for_status()
                size = int(answer.headers.get("Content-Length", 0)) or None
                with bar("downloading", "B", size) as progress:
                    for chunk in answer.iter_content(1 << 20):
                        file.write(chunk)
                        progress.update(len(chunk))
    except requests.RequestException as error:
        raise UserError(
            f"{NAME}.zip cannot be had from {route(host)}: {first_line(error)[:300]}; check the network, or "
            "name another server with --mirror"
        ) from error
