"""Conversations about the running Python's standard library, made here: nothing is downloaded.

    data = open_embedded()                           # ConversationData, the same for one version of Python

Most questions contain the text that answers them, a signature or a line of code. So a small model can answer
about a function that it has never seen: it must read, not remember. The answers come from inspect.signature
of the text in the question, or from evaluating it. A few questions ask what a function does. The answer is
the first sentence of its docstring, which a model knows only from training.

Validation holds out functions, not wordings: all functions with the same name are in the same split, by the
hash of the name, and so are all computations with the same word or the same numbers. What a model can only
learn by heart is in training alone, all of it: the 100 sums of two one-digit numbers, what common functions
do, and greetings.
"""

import hashlib
import itertools
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from nanochat.data.chat_format import ConversationData, Conversations
from nanochat.data.python_functions import KINDS, Facts, Function, read_functions, texts

HELD_OUT_SHARE = 10  # one name in ten is validation
QUESTIONS_PER_FUNCTION = 3  # at most, each a conversation of its own
FOLLOWED_UP = 0.3  # share of the functions that also get a conversation of several questions
WITH_SYSTEM = 0.1  # share of the conversations that begin with a system message
TRAIN_COMPUTATIONS, VAL_COMPUTATIONS = 3000, 300
BY_HEART_TIMES = 24  # times that a sum or a common function comes up in an epoch
GREETING_WEIGHT = 5.0  # times that a greeting comes up in an epoch
Turn = tuple[str, str]  # (question, answer)

SYSTEM = (
    "You answer questions about Python.",
    "You are a helpful assistant. Answer in one sentence.",
    "Read the code and answer briefly.",
    "You know Python's standard library.",
)

GREETINGS = {  # {answer: questions}
    "Hello! Ask me about a Python function.": ("Hello", "Hi", "Hi there!"),
    "Good morning! Ask me about a Python function.": ("Good morning",),
    "I am a small language model that reads Python signatures.": ("Who are you?", "What are you?"),
    "I can read the signature of a Python function and answer questions about it.": (
        "What can you do?",
        "How can you help me?",
    ),
    "You are welcome.": ("Thank you", "Thanks!"),
    "Goodbye!": ("Goodbye", "Bye"),
}

SUMS = (
    "What is {a} + {b}?", "What is {a}+{b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?",
    "How much is {a} + {b}?", "What is {a} plus {b}?", "What is the sum of {a} and {b}?",
)  # fmt: skip

FUNCTIONS = ("What does {name} do?", "What does {name}() do?", "What is {name} for?", "Explain {name}.")
COMMON = """\
abs gives a number without its sign.
all says whether every item is true.
any says whether at least one item is true.
append adds an item to the end of a list.
dict makes a dictionary.
enumerate pairs each item with its number.
float turns a value into a floating-point number.
input reads a line that the user types.
int turns a value into an integer.
isinstance says whether an object belongs to a class.
join puts strings together with a separator between them.
len counts the items of a container.
list makes a list of items.
lower gives a string in lower case.
max gives the largest item.
min gives the smallest item.
open opens a file.
pop removes an item and returns it.
print writes values to the screen.
range counts from a start up to a stop.
replace puts another text in the place of a text.
reversed goes through the items from the last to the first.
round rounds a number.
set makes a set of items without duplicates.
sorted gives the items as a list in order.
split cuts a string into a list of strings.
str turns a value into a string.
strip removes blanks from both ends of a string.
sum adds up the items.
tuple makes a tuple of items.
type gives the class of an object.
upper gives a string in upper case.
zip pairs the items of several sequences.
"""


# -- the data set


def open_embedded(root: Path | None = None) -> ConversationData:
    """Training and validation conversations about the functions under `root` (the standard library), made in
    about 3 seconds. Raises UserError if there are no source files.
    """
    functions = read_functions(root or Path(sysconfig.get_path("stdlib")))
    parameters = {text.split("=")[0] for function in functions for text in function.parameters}
    parameters = sorted(name for name in parameters if name[0].isalpha())
    words = {word for function in functions for word in function.name.split("_")}
    words = sorted(word for word in words if word.isalpha() and word.islower() and 3 <= len(word) <= 8)
    splits = {False: Conversations([], []), True: Conversations([], [])}
    for function in functions:
        for turns in _conversations(function, parameters):
            _add(splits[held_out(function.name)], turns)
    for validation, number in ((False, TRAIN_COMPUTATIONS), (True, VAL_COMPUTATIONS)):
        for turn in computations(words, number, validation):
            _add(splits[validation], [turn])
    for wordings, answer, weight in _by_heart():
        for question in wordings:
            _add(splits[False], [(question, answer)], weight)
    train, val = splits[False], splits[True]
    note = (
        f"{len(train.messages):,} training and {len(val.messages):,} validation conversations about "
        f"{len(functions):,} functions of Python's library"
    )
    teaches = (
        "It answers questions about the Python code that they show (parameters, defaults, imports, classes) "
        "and small computations like len(['red', 'blue']). It knows by heart the sums of two one-digit "
        f"numbers and what {len(COMMON.splitlines())} common functions do. It was taught no other arithmetic "
        "and nothing about the world."
    )
    return ConversationData("python-questions", train, val, note, teaches)


def _by_heart() -> Iterator[tuple[Sequence[str], str, float]]:
    """(questions, their answer, weight of each) of what a model cannot work out from the question."""
    for answer, questions in GREETINGS.items():
        yield questions, answer, GREETING_WEIGHT
    for a, b in itertools.product(range(10), repeat=2):
        answer = f"{a} + {b} = {a + b}."
        yield [wording.format(a=a, b=b) for wording in SUMS], answer, BY_HEART_TIMES / len(SUMS)
    for answer in COMMON.splitlines():
        name = answer.split()[0]
        yield [wording.format(name=name) for wording in FUNCTIONS], answer, BY_HEART_TIMES / len(FUNCTIONS)


def held_out(name: str) -> bool:
    """Whether functions with this name, or computations with this word or these numbers, are validation."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0


def _rng(text: str) -> random.Random:
    return random.Random(hashlib.sha256(text.encode()).digest())


def _add(split: Conversations, turns: list[Turn], weight: float = 1.0):
    messages = [message for q, a in turns for message in (("user", q), ("assistant", a))]
    rng = _rng(messages[0][1])
    if rng.random() < WITH_SYSTEM:
        messages.insert(0, ("system", rng.choice(SYSTEM)))
    split.messages.append(tuple(messages))
    split.weights.append(weight)


def _conversations(function: Function, others: list[str]) -> list[list[Turn]]:
    """The conversations about a function: single questions, and perhaps one with several."""
    rng = _rng(function.qualified_name)
    facts = Facts(function, function.signature, others, rng)
    order = sorted(KINDS, key=lambda kind: rng.random() ** (1 / kind.share), reverse=True)
    asked = [(kind, *found) for kind in order if (found := kind.answer(facts))]
    conversations = [
        [(rng.choice(kind.first).format(**texts(facts), **values), answer)]
        for kind, values, answer in asked[:QUESTIONS_PER_FUNCTION]
    ]
    if rng.random() < FOLLOWED_UP:
        shown = texts(facts)["code"]
        turns = []
        for kind, values, answer in [found for found in asked if found[0].later][:3]:
            wording = rng.choice(kind.later).format(**values)
            turns.append((wording if turns else f"{shown}\n\n{wording}", answer))
        conversations.append(turns)
    return conversations


# -- small computations: an expression, and what Python says its value is

NAMES = ("a", "b", "c", "x", "y", "n", "item", "result")

ASKED = (
    "What is the value of {code}?",
    "What does Python say to {code}?",
    "{code}\n\nWhat is the value of this expression?",
    "Evaluate this expression: {code}",
)
PRINTED = (
    "What does this print?\n\n{code}",
    "{code}\n\nWhat is printed?",
    "I run these lines:\n\n{code}\n\nWhat do they print?",
)


def _dictionary(words, rng):
    chosen = rng.sample(words, rng.randint(2, 4))
    return f"{dict(zip(chosen, rng.sample(range(10), len(chosen)), strict=True))}[{rng.choice(chosen)!r}]"


def _variable(words, rng):
    names = rng.sample(NAMES, 2)
    values = rng.sample(words if rng.random() < 0.5 else range(100), 2)
    lines = [f"{name} = {value!r}" for name, value in zip(names, values, strict=True)]
    return "\n".join([*lines, f"print({rng.choice(names)})"])


# Kinds that a model of minutes learns. It does not learn the letters of a word: len('word'), 'word'.upper()
# and 'w' in 'word' were at chance after three epochs, and so was `in` for lists
COMPUTATIONS = {  # {maker of an expression: its share}
    lambda words, rng: f"{rng.sample(words, rng.randint(2, 4))}[{rng.choice([0, 1, -1])}]": 3,
    _dictionary: 3,
    lambda words, rng: f"len({rng.sample(words, rng.randint(1, 5))})": 3,
    _variable: 4,
    lambda words, rng: f"max({rng.randint(10, 99)}, {rng.randint(10, 99)})": 2.5,
    lambda words, rng: f"sorted({rng.sample(range(10), 3)})": 1.5,
}


def computations(words: list[str], n: int, validation: bool) -> Iterator[Turn]:
    """At most n different questions of one split with their answers; none if there are too few words."""
    words = [word for word in words if held_out(word) == validation]
    if len(words) < 5:  # the longest list that is drawn from them
        return
    rng = _rng(f"computations {validation}")
    seen, tries = set(), 0
    while len(seen) < n and tries < 10 * n:
        tries += 1
        make = rng.choices(list(COMPUTATIONS), list(COMPUTATIONS.values()))[0]
        made = (make(words, rng) for _ in range(100))
        # By its numbers in one order, so that max(3, 4) and max(4, 3) are in one split
        numbers = ((code, " ".join(sorted(re.findall(r"\d+", code)))) for code in made)
        mine = (code for code, found in numbers if "'" in code or held_out(found) == validation)
        code = next((code for code in mine if code not in seen), None)
        if code is not None:
            seen.add(code)
            yield _asked(code, rng)


def _asked(code: str, rng: random.Random) -> Turn:
    if "print(" in code:
        shown = []
        exec(code, {"__builtins__": {}, "print": shown.append})
        return rng.choice(PRINTED).format(code=code), f"It prints {shown[0]}."
    builtins = {"len": len, "max": max, "sorted": sorted}
    value = eval(code, {"__builtins__": builtins})
    return rng.choice(ASKED).format(code=code), f"The value is {value!r}."
