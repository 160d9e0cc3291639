"""Conversations from files. What is wrong in a file is named with its line.

A conversation is a list of messages. A message has a role (system, user or assistant) and a content, which is
text. After at most one system message at the start, user and assistant take turns, and the assistant has the
last word. Two formats are in wide use, and both are read as they are:

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}

A .jsonl or .jsonl.gz file has one such object a line, a .json file a list of them, and a .parquet file has a
column `messages` or `conversations`. Other fields are ignored.
"""

import hashlib
import os
import re
from collections.abc import Callable, Container, Iterator
from functools import partial
from pathlib import Path

from nanochat import UserError
from nanochat.data import textfiles
from nanochat.data.chat_format import ConversationData, Conversations, Message
from nanochat.data.hub import PREFIX, local_files
from nanochat.data.parquet import open_parquet, values_in
from nanochat.data.python_questions import open_embedded
from nanochat.files import user_path
from nanochat.terminal import counted

ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
NAMES = ("messages", "conversations")  # of the field or column that holds a conversation
SHOWN_ERRORS = 10  # bad conversations that a message shows
VALIDATION_SHARE = 40  # one conversation in 40 is validation, chosen by hash, as with documents
LARGEST_WEIGHT = 1000.0


def open_conversations(
    data: str,
    val_data: str | None,
    skip_bad: bool,
    base_dir: Path,
    say: Callable = print,
    network: bool = True,
) -> ConversationData:
    """The conversations of mid_train's settings: "embedded", or files, folders and data sets of the Hub
    (hf:OWNER/NAME, see hub.py) with commas between them.

    `data` may give each a weight: `a.jsonl:3,hf:OWNER/NAME:0.5`. The first part of val_data is the validation
    split; the others are further sets, see more_val. A folder of `data` is read without these files. Without
    val_data, validation is drawn by the hash of a conversation's first user message, so conversations that
    begin alike stay in one split. All bad conversations are found before a UserError names the first of them;
    with skip_bad they are left out, and `say` gets their number. network=False: nothing is downloaded.
    """
    if data == "embedded":
        if val_data is not None:
            raise UserError(
                "the embedded questions have their own validation; give --val_data with other --data"
            )
        return open_embedded()
    bad: list[str] = []
    fetched = partial(local_files, base_dir=base_dir, network=network)
    paths = textfiles.paths_of("val_data", val_data) if val_data is not None else []
    val_files = [_files("val_data", path, fetched) for path in paths]
    held_out = {file.resolve() for found in val_files for file, _ in found}
    files = _files("data", data, fetched, held_out)
    train, *val_sets = (_read(found, bad) for found in (files, *val_files))
    if bad:
        shown = "\n".join(f"  {error}" for error in bad[:SHOWN_ERRORS])
        shown += f"\n  and {len(bad) - SHOWN_ERRORS:,} more" if len(bad) > SHOWN_ERRORS else ""
        number = counted(len(bad), "bad conversation", "bad conversations")
        if not skip_bad:
            raise UserError(
                f"the files have {number}; correct them, or leave out what is bad with --skip_bad:\n{shown}"
            )
        say(f"{number} left out:\n{shown}")
    if not val_sets:
        train, *val_sets = _split(train)
    named = [("training", "data", train), *(("validation", "val_data", val) for val in val_sets)]
    for split, setting, found in named:
        if not found.messages:
            raise UserError(f"there is no {split} conversation; give more files with --{setting}=PATH")
    first, _ = next(_sources("data", data))
    name = re.sub(r"[^\w.-]+", "_", Path(first).name) or "data"
    val, *more = val_sets
    note = f"{len(train.messages):,} training and {len(val.messages):,} validation conversations"
    more_val = dict(zip(textfiles.set_names(paths)[1:], more, strict=True))
    asked = [content for messages in train.messages[:3] for role, content in messages if role == "user"]
    questions = (" ".join(content.split()) for content in asked[:3])
    shown = ", ".join(repr(q if len(q) <= 60 else f"{q[:57]}...") for q in questions)
    teaches = f"It was taught to answer questions like {shown}. Of others it knows what its base model knows."
    return ConversationData(name, train, val, note, teaches, more_val=more_val)


def _split(both: Conversations) -> tuple[Conversations, Conversations]:
    """(training, validation) by the hash of the first user message."""
    splits = Conversations([], []), Conversations([], [])
    for messages, weight in zip(both.messages, both.weights, strict=True):
        first = next(content for role, content in messages if role == "user")
        chosen = int(hashlib.sha256(first.encode("utf-8", "replace")).hexdigest(), 16) % VALIDATION_SHARE == 0
        splits[chosen].messages.append(messages)
        splits[chosen].weights.append(weight)
    return splits


def _files(
    setting: str, value: str, fetched: Callable, held_out: Container[Path] = ()
) -> list[tuple[Path, float]]:
    """The files of a setting, each with its weight, without those of `held_out` that it does not name itself.
    fetched(address): (folder, files) of a data set of the Hub."""
    found = []
    for path, weight in _sources(setting, value):
        on_hub = path.startswith(PREFIX)
        files, _ = reversed(fetched(path)) if on_hub else textfiles.find_files(setting, path)
        files = [file for file in files if file.suffix.lower() not in (".txt", ".md", ".py")]
        if not files:
            raise UserError(f"{setting}={path} has no .jsonl .jsonl.gz .json .parquet file; give one")
        named = None if on_hub else user_path(setting, path)
        found += [(file, weight) for file in files if file == named or file.resolve() not in held_out]
    return found


def _read(files: list[tuple[Path, float]], bad: list[str]) -> Conversations:
    """The good conversations of files; the reason for each bad one goes to `bad`."""
    read = Conversations([], [])
    for file, weight in files:
        for value, place in _values(file, bad):
            try:
                read.messages.append(_messages(value))
                read.weights.append(weight)
            except ValueError as reason:
                bad.append(f"{place}: {reason}")
    return read


def _sources(setting: str, value: str) -> Iterator[tuple[str, float]]:
    """(path or address, weight) of each part of a setting."""
    for part in textfiles.paths_of(setting, value):
        path, colon, weight = part.rpartition(":")
        if not colon or path == PREFIX[:-1] or os.path.exists(user_path(setting, part)):
            path, weight = part, "1"
        try:
            number = float(weight)
        except ValueError:
            number = 0.0
        if not 0 < number <= LARGEST_WEIGHT:
            raise UserError(
                f"--{setting} has the weight {weight!r} for {path or 'no file'}; give a number above 0 "
                f"and up to {LARGEST_WEIGHT:g} after the colon"
            )
        yield path, number


def are_conversations(path: Path, text_field: str) -> bool:
    """Whether a file holds conversations, and no text in the field or column `text_field`, by its first item.
    Raises UserError if it cannot be read."""
    fields = ()
    if path.suffix.lower() == ".parquet":
        fields = open_parquet(path).schema_arrow.names
    elif path.suffix.lower() in (".json", ".jsonl", ".gz"):
        with textfiles.opened(path) as file:
            value, _ = next(textfiles.json_values(path, file), (None, ""))
        fields = value if isinstance(value, dict) else ()
    return text_field not in fields and any(name in fields for name in NAMES)


def _values(path: Path, bad: list[str]) -> Iterator[tuple[object, str]]:
    """(value, its place) of each conversation of a file. What is wrong with a line that is no JSON goes to
    `bad`."""
    if path.suffix.lower() != ".parquet":
        with textfiles.opened(path) as file:
            yield from textfiles.json_values(path, file, bad)
        return
    file = open_parquet(path)
    columns = [name for name in NAMES if name in file.schema_arrow.names]
    if not columns:
        raise UserError(f"{path} has no column `messages` or `conversations`; name another file")
    for number, value in enumerate(values_in(path, file, columns[0]), start=1):
        yield {columns[0]: value}, f"{path}, row {number}"


# -- one conversation


def _messages(value) -> tuple[Message, ...]:
    """The messages of an object. Raises ValueError with the reason if it is no conversation."""
    if not isinstance(value, dict):
        raise ValueError(f"it is {type(value).__name__}, not an object with `messages`")
    listed = value.get("messages", value.get("conversations"))
    if not isinstance(listed, list):
        raise ValueError("it has no list `messages` or `conversations`")
    messages = tuple(_message(f"message {number}", message) for number, message in enumerate(listed, start=1))
    _check_order([role for role, _ in messages])
    return messages


def _message(name: str, message) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"{name} is {type(message).__name__}, not an object")
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if not isinstance(role, str):
        raise ValueError(f"{name} has no `role`")
    if role not in ROLES:
        raise ValueError(f"{name} has the unknown role {role[:40]!r}; known are {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"{name} has no `content` that is text")
    if not content.strip():
        raise ValueError(f"{name} is empty")
    return ROLES[role], content


def _check_order(roles: list[str]) -> None:
    """Raise ValueError if the turns are in a wrong order."""
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns:
        raise ValueError("it has no message of the user")
    if "system" in turns:
        raise ValueError("a system message comes after the start")
    for number, role in enumerate(turns):
        if role != ("user", "assistant")[number % 2]:
            raise ValueError(f"two {role} messages in a row" if number else "it begins with the assistant")
    if len(turns) % 2:
        raise ValueError("it ends with the user, without an answer")
