"""Values of settings: how a text becomes one, which types it may have, and in which range a number must lie.

A range is written `-1, 1..1e9`: numbers, and lowest..highest (both included), with commas between them.
"""

import ast
import operator
import re
import warnings

from nanochat import UserError

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
OPERATORS |= {ast.FloorDiv: operator.floordiv, ast.UAdd: operator.pos, ast.USub: operator.neg}
# An exact power of integers can take minutes. A float power overflows at once.
OPERATORS[ast.Pow] = lambda base, exponent: float(base) ** exponent if exponent > 1024 else base**exponent
LARGEST = 1e308  # the largest number that is accepted, so that every integer fits into a float
# How --help names a type, and how an error describes it
TYPES = {int: ("int", "a whole number"), float: ("float", "a number"), str: ("text", "text")}
TYPES |= {bool: ("bool", "true or false"), None: ("none", "none")}


def parse(text, mode):
    """The body of a source text. Whatever cannot be parsed is a SyntaxError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text, mode=mode).body
    except (ValueError, RecursionError, MemoryError):
        raise SyntaxError("it holds a NUL byte or is nested too deeply") from None


def literal(node):
    """The value of a literal or of arithmetic on numbers."""
    match node:
        case ast.Constant(None | bool() | str() as value):
            return value
        case ast.Constant(int() | float() as value):
            pass
        case ast.UnaryOp(op=op) | ast.BinOp(op=op) if type(op) in OPERATORS:
            numbers = [literal(side) for side in ast.iter_child_nodes(node) if side is not op]
            if any(type(number) not in (int, float) for number in numbers):
                raise UserError("arithmetic works on numbers only")
            try:
                value = OPERATORS[type(op)](*numbers)
            except ArithmeticError:
                value = float("nan")
        case _:
            raise UserError("a value is a number, arithmetic on numbers, text, True, False or None")
    if isinstance(value, complex) or not -LARGEST <= value <= LARGEST:
        raise UserError("the result is too large or not a real number")
    return value


def fit(value, kind):
    """`value` as a value of this kind. A whole number may become a float, and 1e3 an int."""
    if any(type(value) is k or (type(value) is type(k) and value == k) for k in kind):
        return value
    if type(value) is int and float in kind:
        return float(value)
    if type(value) is float and value.is_integer() and int in kind:
        return int(value)
    raise UserError(f"expected {describe(kind)}, got {repr(value)[:200]}")


def describe(kind):
    choices = ", ".join(show(k) for k in kind if k not in TYPES)
    return " or ".join([f"one of {choices}"] * bool(choices) + [TYPES[k][1] for k in kind if k in TYPES])


def show(value):
    """A value as a person writes it on the command line, shortened."""
    text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    return text if re.fullmatch(r"[!-~]{1,200}", text) else repr(text)[:200]


def read_range(text):
    """[(lowest, highest)] of a range, each bound as a pair of text and number; [] for an empty text."""
    alternatives = []
    for part in text.split(",") if text else []:
        low, dots, high = (bound.strip() for bound in part.partition(".."))
        bounds = [(bound, _number(bound)) for bound in (low, high if dots else low)]
        if bounds[0][1] > bounds[1][1]:
            raise UserError(f"its range [{text}] ends before it begins")
        alternatives.append(bounds)
    return alternatives


def _number(text):
    try:
        return fit(literal(parse(text, "eval")), (int, float))
    except (SyntaxError, UserError):
        raise UserError(f"its range holds {text!r}, which is no number; write it as [-1, 1..1e9]") from None


def check_range(value, text, help=""):
    """Raise UserError if `value` is a number outside of the range. Text, True, False and None have no range.

    The error says what single numbers mean, if the help does: "steps (-1 = off)".
    """
    if type(value) not in (int, float):
        return
    alternatives, noun = read_range(text), "a whole number" if type(value) is int else "a number"
    if not alternatives or any(low[1] <= value <= high[1] for low, high in alternatives):
        return
    ways = [f"{noun} from {low} to {high}" for (low, _), (high, _) in alternatives if low != high]
    for single in (low for (low, _), (high, _) in alternatives if low == high):
        meaning = re.search(rf"\({re.escape(single)} = ([^()]*)\)", help)
        ways.append(f"{single} ({meaning[1]})" if meaning else single)
    raise UserError(f"give {', or '.join(ways)}")


def check_text(value, may_be_empty):
    """Raise UserError for a text that no file can be named by: one that is empty or holds a NUL character."""
    if not isinstance(value, str):
        return
    if "\0" in value:
        raise UserError("it holds a NUL character; leave that out")
    if not value.strip() and not may_be_empty:
        raise UserError("it is empty; give a value, or leave it out")
