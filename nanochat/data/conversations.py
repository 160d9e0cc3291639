"""Conversations from files: read, checked, and named by file and line where something is wrong.

A conversation is a list of messages. A message has a role (system, user or assistant) and a content, which is
text. After at most one system message at the start, user and assistant take turns, and the assistant has the
last word. Two formats are in wide use, and both are read as they are:

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}

A .jsonl or .jsonl.gz file has one such object a line, a .json file a list of them, and a .parquet file has a
column `messages` or `conversations`. Other fields are ignored.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet

from nanochat import UserError
from nanochat.data import textfiles
from nanochat.data.parquet import PYARROW_ERRORS, first_line
from nanochat.files import user_path

ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
LONGEST_MESSAGE = 1 << 22  # characters; a longer one is no message of a conversation
SHOWN_ERRORS = 10  # of the bad conversations, so many are named
VALIDATION_SHARE = 40  # by its hash one conversation in so many is validation, as with documents
LARGEST_WEIGHT = 1000.0

Message = tuple[str, str]  # (role, content)


@dataclass(frozen=True)
class Conversations:
    """The conversations of one split, each (messages, weight): how often it comes up in an epoch."""

    messages: list[tuple[Message, ...]]
    weights: list[float]

    def fingerprint(self) -> str:
        """SHA-256 of the content, hexadecimal."""
        digest = hashlib.sha256()
        for messages, weight in zip(self.messages, self.weights, strict=True):
            digest.update(json.dumps([messages, weight]).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class ConversationData:
    """Conversations split into training and validation."""

    name: str
    train: Conversations
    val: Conversations
    note: str  # one line for the log

    @property
    def fingerprint(self) -> str:
        """Of both splits; a checkpoint stores it."""
        return hashlib.sha256((self.train.fingerprint() + self.val.fingerprint()).encode()).hexdigest()


def open_conversations(
    data: str, val_data: str | None, skip_bad: bool, base_dir: Path, say: Callable = print
) -> ConversationData:
    """The conversations of mid_train's settings: "embedded", or files (`open_files`)."""
    if data != "embedded":
        return open_files(data, val_data, skip_bad, say)
    if val_data is not None:
        raise UserError("the embedded questions have their own validation; give --val_data with other --data")
    from nanochat.data.python_questions import open_embedded

    return open_embedded()


def open_files(data: str, val_data: str | None, skip_bad: bool, say: Callable = print) -> ConversationData:
    """The conversations of the settings `data` and `val_data`: files or folders with commas between them.

    `data` may give each a weight: `a.jsonl:3,b.jsonl:0.5`. Without val_data, validation is drawn from the
    files by the hash of a conversation's first user message, so conversations that begin alike stay in one
    split. All bad conversations are found before a UserError names the first of them; with skip_bad they are
    left out, and `say` gets their number.
    """
    bad: list[str] = []
    train = _read_sources("data", data, bad)
    val = _read_sources("val_data", val_data, bad) if val_data is not None else Conversations([], [])
    if bad:
        shown = "\n".join(f"  {error}" for error in bad[:SHOWN_ERRORS])
        more = f"\n  and {len(bad) - SHOWN_ERRORS:,} more" if len(bad) > SHOWN_ERRORS else ""
        if not skip_bad:
            raise UserError(
                f"{len(bad):,} conversations cannot be used; correct them, or leave them out with "
                f"--skip_bad:\n{shown}{more}"
            )
        say(f"{len(bad):,} bad conversations are left out:\n{shown}{more}")
    if val_data is None:
        train, val = _split(train)
    for split, setting, found in (("training", "data", train), ("validation", "val_data", val)):
        if not found.messages:
            raise UserError(f"there is no {split} conversation; give more files with --{setting}=PATH")
    name = re.sub(r"[^\w.-]+", "_", Path(data.split(",")[0].split(":")[0]).name) or "data"
    note = f"{len(train.messages):,} training and {len(val.messages):,} validation conversations"
    return ConversationData(name, train, val, note)


def _split(both: Conversations) -> tuple[Conversations, Conversations]:
    """(training, validation) by the hash of the first user message."""
    splits = Conversations([], []), Conversations([], [])
    for messages, weight in zip(both.messages, both.weights, strict=True):
        first = next(content for role, content in messages if role == "user")
        chosen = int(hashlib.sha256(first.encode("utf-8", "replace")).hexdigest(), 16) % VALIDATION_SHARE == 0
        splits[chosen].messages.append(messages)
        splits[chosen].weights.append(weight)
    return splits


def _read_sources(setting: str, value: str, bad: list[str]) -> Conversations:
    read = Conversations([], [])
    for path, weight in _sources(setting, value):
        files = textfiles.find_files(setting, path)[0]
        known = [file for file in files if _reader(file)]
        if not known:
            raise UserError(f"{setting}={path} has no {' '.join(READERS)} file; give one with conversations")
        for file in known:
            for messages in _read_file(file, bad):
                read.messages.append(messages)
                read.weights.append(weight)
    return read


def _sources(setting: str, value: str) -> list[tuple[Path, float]]:
    """(path, weight) of each part of a setting."""
    whole = user_path(setting, value)
    if whole.exists():
        return [(whole, 1.0)]
    found = []
    for part in value.split(","):
        path, colon, weight = part.strip().rpartition(":")
        if not colon or user_path(setting, part.strip()).exists():
            path, weight = part.strip(), "1"
        try:
            number = float(weight)
        except ValueError:
            number = math.nan
        if not 0 < number <= LARGEST_WEIGHT:
            raise UserError(
                f"--{setting} has the weight {weight!r} for {path or 'no file'}; give a number above 0 "
                f"and up to {LARGEST_WEIGHT:g} after the colon"
            )
        found.append((user_path(setting, path), number))
    return found


# -- one file


def _read_file(path: Path, bad: list[str]) -> Iterator[tuple[Message, ...]]:
    """The good conversations of a file; the reason for each bad one goes to `bad`."""
    try:
        with open(path, "rb") as file:
            for value, place in _reader(path)(path, file, bad):
                messages, reason = _checked(value)
                if reason:
                    bad.append(f"{place}: {reason}")
                else:
                    yield messages
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); repair or remove it") from error


def _jsonl(path, file, bad):
    for line, place in textfiles.jsonl_lines(path, file):
        try:
            value = textfiles.parse_line(line, place)
        except UserError as error:
            bad.append(str(error))
        else:
            yield value, place


def _gzipped(path, file, bad):
    yield from _jsonl(path, textfiles.unzipped(file), bad)


def _json(path, file, bad):
    yield from textfiles.json_values(path, file)


def _parquet(path, file, bad):
    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(file)
        columns = [name for name in ("messages", "conversations") if name in table.schema_arrow.names]
        if not columns:
            raise UserError(f"{path} has no column `messages` or `conversations`; name another file")
        for batch in table.iter_batches(1024, columns=columns[:1], use_threads=False):
            for value in batch.column(0).to_pylist():
                number += 1
                yield {columns[0]: value}, f"{path}, row {number}"
    except PYARROW_ERRORS as error:
        raise UserError(
            f"{path} is damaged after row {number} ({first_line(error)}); get it again"
        ) from error


READERS = {".jsonl": _jsonl, ".jsonl.gz": _gzipped, ".json": _json, ".parquet": _parquet}


def _reader(path: Path):
    return next((reader for suffix, reader in READERS.items() if path.name.lower().endswith(suffix)), None)


# -- one conversation


def _checked(value) -> tuple[tuple[Message, ...], str]:
    """(messages, what is wrong with them or "") of an object."""
    if not isinstance(value, dict):
        return (), f"it is {type(value).__name__}, not an object with `messages`"
    listed = value.get("messages", value.get("conversations"))
    if not isinstance(listed, list):
        return (), "it has no list `messages` or `conversations`"
    messages = []
    for number, message in enumerate(listed, start=1):
        role, content, reason = _message(message)
        if reason:
            return (), f"message {number} {reason}"
        messages.append((role, content))
    return tuple(messages), _wrong_order([role for role, _ in messages])


def _message(message) -> tuple[str, str, str]:
    """(role, content, what is wrong or "")."""
    if not isinstance(message, dict):
        return "", "", f"is {type(message).__name__}, not an object"
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if not isinstance(role, str):
        return "", "", "has no `role`"
    if role not in ROLES:
        return "", "", f"has the unknown role {role[:40]!r}; known are {', '.join(ROLES)}"
    if not isinstance(content, str):
        return "", "", "has no `content` that is text"
    if not content.strip():
        return "", "", "is empty"
    if len(content) > LONGEST_MESSAGE:
        return "", "", f"is too long: {len(content):,} characters, {LONGEST_MESSAGE:,} are allowed"
    return ROLES[role], content, ""


def _wrong_order(roles: list[str]) -> str:
    """What is wrong with the order of turns, or ""."""
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns:
        return "it has no message of the user"
    if "system" in turns:
        return "a system message comes after the start"
    for number, role in enumerate(turns):
        wanted = ("user", "assistant")[number % 2]
        if role != wanted:
            return f"two {role} messages in a row" if number else "it begins with the assistant"
    return "" if len(turns) % 2 == 0 else "it ends with the user, without an answer"
