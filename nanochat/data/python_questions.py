"""Conversations about the running Python's own library, made on the spot: nothing is downloaded.

    data = open_embedded()                           # ConversationData, the same for one version of Python
    questions = exact_match_questions(data, 300)     # held-out questions (exact_match.py)

Most questions bring the text that answers them, a signature or a line of code, so a small model can answer
for a function that it never met: it has to read, not to know. The answers come from inspect.signature of the
very text in the question, or from evaluating it. A minority asks for what a function does, and the answer is
the first sentence of its docstring. Only a model that has seen it can know that one.

Validation holds out functions, not wordings: all functions of one name are in one split, by the hash of
that name, and so are all computations with one word or the same numbers.
"""

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

from nanochat.data.conversations import ConversationData, Conversations
from nanochat.data.python_computations import computations
from nanochat.data.python_functions import Function, read_functions
from nanochat.data.python_question_kinds import KINDS, Facts, texts

HELD_OUT_SHARE = 10  # one name in so many is validation
QUESTIONS_PER_FUNCTION = 3  # at most, each a conversation of its own
FOLLOWED_UP = 0.3  # share of the functions that also get a conversation of several questions
WITH_SYSTEM = 0.1  # share of the conversations that begin with a system message
TRAIN_COMPUTATIONS, VAL_COMPUTATIONS = 3000, 300
GREETING_WEIGHT = 5.0  # a greeting comes up so often in an epoch


@dataclass(frozen=True)
class PythonQuestions(ConversationData):
    """ConversationData that knows the kind of each question: {(question, answer): kind}."""

    kinds: dict[tuple[str, str], str]


SYSTEM = (
    "You answer questions about Python.",
    "You are a helpful assistant. Answer in one sentence.",
    "Read the code and answer briefly.",
    "You know Python's standard library.",
)

GREETINGS = (
    ("Hello", "Hello! Ask me about a Python function."),
    ("Hi", "Hello! Ask me about a Python function."),
    ("Hi there!", "Hello! Ask me about a Python function."),
    ("Good morning", "Good morning! Ask me about a Python function."),
    ("Who are you?", "I am a small language model that reads Python signatures."),
    ("What are you?", "I am a small language model that reads Python signatures."),
    ("What can you do?", "I can read the signature of a Python function and answer questions about it."),
    ("How can you help me?", "I can read the signature of a Python function and answer questions about it."),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Goodbye", "Goodbye!"),
    ("Bye", "Goodbye!"),
)


# -- the data set


def open_embedded(root: Path | None = None) -> PythonQuestions:
    """Training and validation conversations about the functions under `root` (the standard library).

    They are built in about 3 seconds. Raises UserError if there are no source files.
    """
    functions = read_functions(root)
    parameters = {text.split("=")[0] for function in functions for text in function.parameters}
    parameters = sorted(name for name in parameters if name[0].isalpha())
    words = {word for function in functions for word in function.name.split("_")}
    words = sorted(word for word in words if word.isalpha() and word.islower() and 3 <= len(word) <= 8)
    splits = {False: Conversations([], []), True: Conversations([], [])}
    kinds: dict[tuple[str, str], str] = {}
    for function in functions:
        for turns in _conversations(function, parameters):
            _add(splits[held_out(function.name)], turns, kinds)
    for validation, number in ((False, TRAIN_COMPUTATIONS), (True, VAL_COMPUTATIONS)):
        for turn in computations(words, number, validation, held_out):
            _add(splits[validation], [turn], kinds)
    for question, answer in GREETINGS:
        _add(splits[False], [(question, answer, "greeting")], kinds, GREETING_WEIGHT)
    train, val = splits[False], splits[True]
    note = (
        f"{len(train.messages):,} training and {len(val.messages):,} validation conversations about "
        f"{len(functions):,} functions of Python's library"
    )
    return PythonQuestions("python-questions", train, val, note, kinds)


def held_out(name: str) -> bool:
    """Whether the functions of a name, or computations with a word or with numbers, are validation."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0


def _rng(text: str) -> random.Random:
    return random.Random(hashlib.sha256(text.encode()).digest())


def _add(split: Conversations, turns: list[tuple[str, str, str]], kinds: dict, weight: float = 1.0):
    """Add a conversation of turns (question, answer, kind) to a split."""
    messages = [message for q, a, _ in turns for message in (("user", q), ("assistant", a))]
    rng = _rng(messages[0][1])
    if rng.random() < WITH_SYSTEM:
        messages.insert(0, ("system", rng.choice(SYSTEM)))
    split.messages.append(tuple(messages))
    split.weights.append(weight)
    kinds.update(((question, answer), kind) for question, answer, kind in turns)


def _conversations(function: Function, others: list[str]) -> list[list[tuple[str, str, str]]]:
    """The conversations about a function: single questions, and perhaps one with several."""
    rng = _rng(function.qualified_name)
    facts = Facts(function, list(function.signature().parameters.values()), others, rng)
    order = sorted(KINDS, key=lambda kind: rng.random() ** (1 / KINDS[kind].share), reverse=True)
    asked = [(kind, found) for kind in order if (found := KINDS[kind].answer(facts))]
    conversations = [
        [(rng.choice(KINDS[kind].first).format(**texts(facts), **values), answer, kind)]
        for kind, (values, answer) in asked[:QUESTIONS_PER_FUNCTION]
    ]
    if rng.random() < FOLLOWED_UP:
        shown = texts(facts)["code"]
        later = [(kind, found) for kind, found in asked if KINDS[kind].later][:3]
        turns = []
        for kind, (values, answer) in later:
            wording = rng.choice(KINDS[kind].later).format(**values)
            turns.append((wording if turns else f"{shown}\n\n{wording}", answer, kind))
        conversations.append(turns)
    return conversations
