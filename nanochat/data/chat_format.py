"""Conversations, and how one becomes tokens: special tokens around each turn, and which tokens are targets.

    <|bos|> <|user_start|> question <|user_end|> <|assistant_start|> answer <|assistant_end|> ...

A system message has no tokens of its own: it stands before the first question, with a blank line between. The
content of a message is encoded as plain text, so text that looks like a special token stays text.
"""

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nanochat import UserError
from nanochat.data.tokenizer import Tokenizer
from nanochat.terminal import printable

Message = tuple[str, str]  # (role, content); the roles are system, user and assistant


@dataclass(frozen=True)
class Conversations:
    """The conversations of one split. A conversation comes up `weight` times in an epoch, on average."""

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
    teaches: str = ""  # a sentence or two: which questions a model answers after it, and which not
    more_val: dict[str, Conversations] = field(default_factory=dict, kw_only=True)  # further validation sets

    @property
    def val_sets(self) -> dict[str, Conversations]:
        """{name of its bits per byte in a record: conversations} of every validation set."""
        return {"val_bpb": self.val} | {f"val_bpb_{name}": some for name, some in self.more_val.items()}

    @property
    def fingerprint(self) -> str:
        """SHA-256 of both splits, hexadecimal; a checkpoint stores it. Further sets decide nothing."""
        return hashlib.sha256((self.train.fingerprint() + self.val.fingerprint()).encode()).hexdigest()


def check(tokenizer: Tokenizer):
    """Raise UserError if this tokenizer cannot render conversations."""
    wanted = [f"<|{role}_{place}|>" for role in ("user", "assistant") for place in ("start", "end")]
    missing = [name for name in wanted if name not in tokenizer.special_tokens]
    if missing:
        raise UserError(
            f"the tokenizer of the model has no {missing[0]}; copy the tokenizer.json of its training into "
            "the checkpoint, or train another base model"
        )


def turns(messages: Sequence[Message]) -> list[Message]:
    """The messages of user and assistant, with a system message put into the first question."""
    if messages and messages[0][0] == "system":
        (_, system), (role, question), *rest = messages
        return [(role, f"{system}\n\n{question}"), *rest]
    return list(messages)


def render(tokenizer: Tokenizer, messages: Sequence[Message], loss_on: str) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32, is_target bool), both (n,): the tokens, and which of them the model learns to predict.

    loss_on "assistant": the answers and the <|assistant_end|> after each, so that the model learns when to
    stop. "all": every token but the first one, <|bos|>.
    """
    special = tokenizer.special_tokens
    ids, is_target = [np.array([tokenizer.bos_id], np.int32)], [np.array([False])]
    for role, content in turns(messages):
        start, end = special[f"<|{role}_start|>"], special[f"<|{role}_end|>"]
        text = tokenizer.encode(content).astype(np.int32)
        ids += [np.array([start], np.int32), text, np.array([end], np.int32)]
        scored = loss_on == "all" or role == "assistant"
        is_target += [np.array([loss_on == "all"]), np.full(len(text) + 1, scored)]
    return np.concatenate(ids), np.concatenate(is_target)


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """The tokens after which the model answers: the conversation so far, then <|assistant_start|>."""
    ids, _ = render(tokenizer, messages, "all")
    return [*ids.tolist(), tokenizer.special_tokens["<|assistant_start|>"]]


def next_turn_ids(tokenizer: Tokenizer, question: str, system: str, begun: bool) -> list[int]:
    """The tokens of the user's next turn, up to <|assistant_start|>. The first one is <|bos|>, or, if the
    conversation has `begun`, the <|assistant_end|> of the answer before, which generation leaves out. The
    system message ("" for none) stands in the first turn."""
    first = [("system", system)] if system and not begun else []
    ids = prompt_ids(tokenizer, [*first, ("user", question)])
    return [tokenizer.special_tokens["<|assistant_end|>"], *ids[1:]] if begun else ids


def coloured(tokenizer: Tokenizer, messages: Sequence[Message], loss_on: str) -> str:
    """A conversation as the model sees it, special tokens included; targets are green."""
    ids, is_target = render(tokenizer, messages, loss_on)
    edges = [0, *(np.flatnonzero(np.diff(is_target)) + 1).tolist(), len(ids)]
    parts = []
    for first, last in itertools.pairwise(edges):
        text = printable(tokenizer.decode(ids[first:last]))
        parts.append(f"\x1b[32m{text}\x1b[0m" if is_target[first] else text)
    return "".join(parts)
