"""Small computations for the embedded conversations: an expression, and what Python says its value is."""

import hashlib
import random
from collections.abc import Callable, Iterator

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


def _list_item(words, rng):
    chosen = rng.sample(words, rng.randint(2, 4))
    at = rng.choice([0, 1, -1])
    return f"{chosen}[{at}]"


def _dictionary(words, rng):
    chosen = rng.sample(words, rng.randint(2, 4))
    return f"{dict(zip(chosen, rng.sample(range(10), len(chosen)), strict=True))}[{rng.choice(chosen)!r}]"


def _length(words, rng):
    return f"len({rng.sample(words, rng.randint(1, 5))})"


def _membership(words, rng):
    chosen = rng.sample(words, rng.randint(3, 5))
    return f"{chosen[0]!r} in {chosen[1:] if rng.random() < 0.5 else rng.sample(chosen, len(chosen))}"


def _variable(words, rng):
    names, values = rng.sample(NAMES, 2), rng.sample(words, 2)
    lines = [f"{name} = {value!r}" for name, value in zip(names, values, strict=True)]
    return "\n".join([*lines, f"print({rng.choice(names)})"])


def _sum(words, rng):
    return f"{rng.randint(0, 12)} + {rng.randint(0, 12)}"


def _larger(words, rng):
    return f"max({rng.randint(10, 99)}, {rng.randint(10, 99)})"


def _sorted(words, rng):
    return f"sorted({rng.sample(range(10), 3)})"


def _word_length(words, rng):
    return f"len({rng.choice(words)!r})"


def _upper(words, rng):
    return f"{rng.choice(words)!r}.upper()"


def _contains(words, rng):
    word = rng.choice(words)
    letter = rng.choice(word if rng.random() < 0.5 else "abcdefghijklmnopqrstuvwxyz")
    return f"{letter!r} in {word!r}"


COMPUTATIONS: dict[str, tuple[float, Callable]] = {  # kind: (share, maker)
    "list item": (3, _list_item),
    "dictionary item": (3, _dictionary),
    "list length": (1.5, _length),
    "membership": (1, _membership),
    "variable": (3, _variable),
    "sum": (1, _sum),
    "larger number": (1, _larger),
    "sorted numbers": (0.5, _sorted),
    "word length": (0.5, _word_length),
    "upper case": (0.5, _upper),
    "letter in word": (0.5, _contains),
}


def computations(
    words: list[str], n: int, validation: bool, held_out: Callable[[str], bool]
) -> Iterator[tuple[str, str, str]]:
    """Yield at most n different (question, answer, kind) of one split, none if there are few words.

    `held_out` tells which words, and which numbers, are validation.
    """
    words = [word for word in words if held_out(word) == validation]
    if len(words) < 5:  # the longest list that is drawn from them
        return
    rng = random.Random(hashlib.sha256(f"computations {validation}".encode()).digest())
    shares = [share for share, _ in COMPUTATIONS.values()]
    seen, tries = set(), 0
    while len(seen) < n and tries < 10 * n:
        tries += 1
        kind = rng.choices(list(COMPUTATIONS), shares)[0]
        made = (COMPUTATIONS[kind][1](words, rng) for _ in range(100))
        mine = (code for code in made if "'" in code or held_out(_numbers(code)) == validation)
        code = next((code for code in mine if code not in seen), None)
        if code is not None:
            seen.add(code)
            yield _question(code, kind, rng)


def _numbers(code: str) -> str:
    """The numbers of an expression in order of size, so that 3 + 4 and 4 + 3 are in one split."""
    digits = "".join(c if c.isdigit() else " " for c in code).split()
    return " ".join(sorted(digits))


def _question(code: str, kind: str, rng: random.Random) -> tuple[str, str, str]:
    if kind == "variable":
        shown = []
        exec(code, {"__builtins__": {}, "print": shown.append})
        return rng.choice(PRINTED).format(code=code), f"It prints {shown[0]}.", kind
    builtins = {"len": len, "max": max, "sorted": sorted}
    value = eval(code, {"__builtins__": builtins})
    return rng.choice(ASKED).format(code=code), f"The value is {value!r}.", kind
