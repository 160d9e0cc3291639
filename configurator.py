"""A script's settings: defaults < environment < config files, in order < command line.

    depth = 20              # Transformer layers; every other size follows from it
    settings = configurator.configure(globals())

A setting is a plain or annotated assignment of one literal (a number, arithmetic on numbers, text, True,
False, an annotated None) that stands before the call: at module level, or, where the call stands in an
`if __name__ == "__main__":` block that has assignments of its own, in that block. A leading underscore
makes a name private. The type is the annotation (int, float, str, bool, Literal["a", "b"], X | None), else
the default's. The trailing comment is the help; comment lines indented deeper continue it. Comment lines of
their own open a group, named by the first of them that has a word in it.

The script's source and config files are parsed, never executed.
"""

import ast
import difflib
import io
import math
import operator
import os
import re
import shutil
import sys
import textwrap
import tokenize
import warnings
from dataclasses import dataclass
from typing import Any

from nanochat import UserError

ENVIRONMENT = {"base_dir": "NANOCHAT_BASE_DIR"}  # setting -> the variable that may give its default
WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
OPERATORS |= {
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
LARGEST = 1e308  # of a number: every integer that passes is a finite float too
MAX_FILE_BYTES = 100_000  # of a config file, a page of assignments
MAX_ERRORS = 40  # printed


@dataclass
class Setting:
    kind: tuple  # what it takes: types and single values, such as (int, None) or ("auto", "on", "off")
    default: Any
    group: str
    help: str


@dataclass
class Settings:
    """Value and source of every setting. A source is default, environment NAME, FILE:LINE or command line."""

    values: dict[str, Any]
    sources: dict[str, str]

    def record(self):
        """{name: {"value": ..., "source": ...}} for JSON: what checkpoints, wandb and the report store."""
        return {name: {"value": value, "source": self.sources[name]} for name, value in self.values.items()}


def configure(globals_, argv=None):
    """Set a script's settings, in place, to what the command line asks for; returns the `Settings`.

    `globals_` is the script's globals(), `argv` its arguments (None: sys.argv[1:]). --help prints every
    setting and exits with 0. Bad input is reported all at once on stderr and exits with 2, nothing changed.
    From here on an uncaught UserError ends the script like that too: one sentence, status 2, no traceback.
    """
    if sys.excepthook is not _excepthook:
        _excepthook.previous, sys.excepthook = sys.excepthook, _excepthook
    argv = sys.argv[1:] if argv is None else argv
    declared = _declared_settings(globals_["__file__"])
    values = {name: globals_.get(name, setting.default) for name, setting in declared.items()}
    sources, errors = dict.fromkeys(declared, "default"), []
    for name in declared.keys() & {
        name for name, variable in ENVIRONMENT.items() if os.environ.get(variable)
    }:
        values[name], sources[name] = os.environ[ENVIRONMENT[name]], f"environment {ENVIRONMENT[name]}"
    if "--help" in argv or "-h" in argv:
        _say(_help_page(globals_, declared, values), sys.stdout)
        raise SystemExit(0)
    command_line, files = _read_arguments(argv, declared, errors)
    from_files = [given for path in files for given in _read_file(path, declared, errors)]
    for name, raw, source, label in from_files + command_line:
        try:
            values[name], sources[name] = _value(raw, declared[name].kind), source
        except (UserError, RecursionError) as error:
            errors.append(f"{label}: {error}")
    if errors:
        more = [f"... and {len(errors) - MAX_ERRORS} more"] * (len(errors) > MAX_ERRORS)
        hint = "hint: --help lists every setting with its default"
        _say("\n".join([*(f"error: {error}" for error in errors[:MAX_ERRORS]), *more, hint]), sys.stderr)
        raise SystemExit(2)
    globals_.update({name: values[name] for name, source in sources.items() if source != "default"})
    return Settings(values, sources)


# What the script declares


def _declared_settings(path):
    """{name: Setting} in the order of the script."""
    with tokenize.open(path) as file:
        source = file.read()
    lines, comments, declared, setting, group, end = source.split("\n"), {}, {}, None, "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:  # line -> its column, -1 behind code, and text
            line, column = token.start
            comments[line] = (-1 if lines[line - 1][:column].strip() else column, token.string.strip("# \t"))
    for statement in _statements_to_call(ast.parse(source).body):
        inside = False  # a block of comment lines whose heading is known
        for line in range(end + 1, statement.lineno):
            column, text = comments.get(line, (-1, ""))
            inside = inside and column == statement.col_offset
            if setting and column > statement.col_offset:
                setting.help += f" {text}"
            elif column == statement.col_offset and not inside and text.strip("-=*~ "):
                group, inside = text.strip("-=*~ "), True
        end = statement.end_lineno
        name, node = _assignment(statement)
        declared.pop(name, None)  # a second assignment takes the place of the first
        kind, default = _declaration(node, getattr(statement, "annotation", None))
        setting = Setting(kind, default, group, comments.get(end, (-1, ""))[1]) if kind else None
        if setting and not name.startswith("_"):
            declared[name] = setting
    return declared


def _statements_to_call(body):
    """The statements up to the call of configure(), in the innermost `if` block that has assignments."""
    for index, statement in enumerate(body):
        called = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
        if any(getattr(f, "attr", getattr(f, "id", "")) == "configure" for f in called):
            inner = _statements_to_call(statement.body) if isinstance(statement, ast.If) else []
            return inner if any(_assignment(s)[0] for s in inner[:-1]) else body[: index + 1]
    return body


def _assignment(statement):
    """(name, value node) of an assignment to one name, else (None, None)."""
    match statement:
        case ast.Assign([ast.Name(name)], node) | ast.AnnAssign(ast.Name(name), _, ast.expr() as node):
            return name, node
    return None, None


def _declaration(node, annotation):
    """(kind, default) of an assignment's value and annotation; no kind where that makes no setting."""
    try:
        default = _literal(node)
    except (UserError, RecursionError):
        return None, None
    return _kind(annotation) if annotation else (type(default),) * (default is not None), default


def _kind(annotation):
    """The alternatives, types and single values, that an annotation stands for."""
    match annotation:
        case ast.Name("int" | "float" | "str" | "bool" as name):
            return ({"int": int, "float": float, "str": str, "bool": bool}[name],)
        case ast.Constant(None):
            return (None,)
        case ast.BinOp(left, ast.BitOr(), right):
            return _kind(left) + _kind(right)
        case ast.Subscript(ast.Name("Optional") | ast.Attribute(attr="Optional"), inner):
            return (*_kind(inner), None)
        case ast.Subscript(ast.Name("Literal") | ast.Attribute(attr="Literal"), inner):
            return tuple(_literal(choice) for choice in getattr(inner, "elts", [inner]))
    raise TypeError(f"a setting is int, float, str, bool, Literal or X | None, not {ast.unparse(annotation)}")


# What a person gives: lists of (name, text or expression, source, label for an error)


def _read_arguments(argv, declared, errors):
    """What the command line gives, and the config files it names."""
    given, files, rest = [], [], list(reversed(argv))
    switches = {name for name, setting in declared.items() if bool in setting.kind}
    while rest:
        argument = rest.pop()
        key, equals, text = argument.partition("=")
        name = key[2:].replace("-", "_") if key.startswith("--") else ""
        if not argument.startswith("-"):
            files.append(argument)
            continue
        if name not in declared and name.removeprefix("no_") in switches and not equals:
            name, text = name.removeprefix("no_"), "false"
        elif name not in declared:
            near = _near(key.strip("-").replace("-", "_"), [*declared, *(f"no_{s}" for s in switches)], "--")
            errors.append(f"unknown setting {_show(key)}{near}")
            if not equals and rest and not rest[-1].startswith("--") and not rest[-1].endswith(".py"):
                rest.pop()  # its value, most likely: one slip, one error
            continue
        elif name in switches and not equals:
            text = rest.pop() if rest and rest[-1].lower() in WORDS else "true"
        elif not equals and (not rest or rest[-1].startswith("--")):
            errors.append(f"{key} needs a value: {_describe(declared[name].kind)}")
            continue
        elif not equals:
            text = rest.pop()
        given.append((name, text, "command line", f"{key}={_show(text)}"))
    return given, files


def _read_file(path, declared, errors):
    """What a config file gives: a docstring, comments and assignments of literals are all it may hold."""
    given, body = [], []
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"over {MAX_FILE_BYTES:,} bytes, too long for a config file")
        body = _parse(data.decode("utf-8-sig"), "exec")
    except UnicodeDecodeError as error:
        errors.append(f"{_show(path)}:{data.count(10, 0, error.start) + 1}: not UTF-8 text")
    except SyntaxError as error:
        errors.append(f"{_show(path)}:{error.lineno or 1}: {error.msg}")
    except (OSError, ValueError) as error:
        near = _near(path.partition("=")[0], declared, "--")
        errors.append(f"config file {_show(path)}: {getattr(error, 'strerror', None) or error}{near}")
    for index, statement in enumerate(body):
        name, node = _assignment(statement)
        place = f"{_show(path)}:{statement.lineno}"
        if name in declared:
            given.append((name, node, f"{path}:{statement.lineno}", f"{place}: {name}"))
        elif name:
            errors.append(f"{place}: unknown setting {_show(name)}{_near(name, declared)}")
        elif index or not isinstance(getattr(getattr(statement, "value", None), "value", None), str):
            errors.append(f"{place}: a config file holds lines of name = value, and nothing else")
    return given


# Values


def _value(raw, kind):
    """The value that a command line's text or a config file's expression gives a setting of this kind."""
    if isinstance(raw, ast.AST):
        return _fit(_literal(raw), kind)
    words = {"none" if k is None else str(k): k for k in kind if not isinstance(k, type)}
    words |= WORDS if bool in kind else {}
    for word in (raw, raw.lower()):
        if word in words:
            return words[word]
    if str in kind or not re.fullmatch(r"[-+.(0-9][-+*/.()0-9a-fA-FxX_ ]{,99}", raw):
        return _fit(raw, kind)
    try:
        return _fit(_literal(_parse(raw, "eval")), kind)
    except SyntaxError:
        return _fit(raw, kind)


def _parse(text, mode):
    """The body of a source; SyntaxError for all that cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text, mode=mode).body
    except (ValueError, RecursionError, MemoryError):
        raise SyntaxError("a NUL byte, or brackets or operators nested too deeply") from None


def _literal(node):
    """The value of a literal, or of arithmetic on numbers."""
    match node:
        case ast.Constant(None | bool() | str() as value):
            return value
        case ast.Constant(int() | float() as value):
            pass
        case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
            value = _calculate(op, _literal(operand))
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            value = _calculate(op, _literal(left), _literal(right))
        case _:
            raise UserError("neither a literal nor arithmetic on numbers")
    if isinstance(value, complex) or not -LARGEST <= value <= LARGEST:
        raise UserError("the result is too large, or no real number")
    return value


def _calculate(op, *numbers):
    if any(type(number) not in (int, float) for number in numbers):
        raise UserError("arithmetic is for numbers")
    if isinstance(op, ast.Pow) and numbers[1] > 1024:
        numbers = (float(numbers[0]), numbers[1])  # overflows at once; the exact power might take minutes
    try:
        return OPERATORS[type(op)](*numbers)
    except ArithmeticError:
        return math.nan


def _fit(value, kind):
    """`value` where the kind takes it: as it is, an integer as a float, an integral float as an integer."""
    if any(type(value) is k or (type(value) is type(k) and value == k) for k in kind):
        return value
    if type(value) is int and float in kind:
        return float(value)
    if type(value) is float and value.is_integer() and int in kind:
        return int(value)
    raise UserError(f"expected {_describe(kind)}, got {repr(value)[:200]}")


def _describe(kind):
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", None: "none"}
    choices = ", ".join(_show(k) for k in kind if k not in names)
    return " or ".join([f"one of {choices}"] * bool(choices) + [names[k] for k in kind if k in names])


def _show(value):
    """A value as one would write it on a command line, on one line and not too long."""
    text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    return text if re.fullmatch(r"[!-~]{1,200}", text) else repr(text)[:200]


def _near(name, names, dashes=""):
    close = difflib.get_close_matches(name.lower(), names, 1)
    return f"; did you mean {dashes}{close[0]}?" if close else ""


# What a person sees


def _help_page(globals_, declared, values):
    width = max(40, min(110, shutil.get_terminal_size().columns))
    module = getattr(globals_.get("__spec__"), "name", None)
    command = f"python -m {module}" if module else f"python {os.path.basename(globals_['__file__'])}"
    lines = [globals_.get("__doc__") or "", f"usage: {command} [CONFIG_FILE ...] [--setting=value ...]"]
    left = {name: f"  --{name}={_show(values[name])}  " for name in declared}
    column, group = min(width // 2, max(map(len, left.values()), default=0)), ""
    for name, setting in declared.items():
        lines += ["", setting.group] if setting.group != group else []
        group = setting.group
        text = textwrap.wrap(f"{setting.help} ({_describe(setting.kind)})".strip(), width - column)
        start = left[name].ljust(column) if len(left[name]) <= column else f"{left[name]}\n{' ' * column}"
        lines.append(start + f"\n{' ' * column}".join(text))
    return "\n".join(lines).strip()


def _say(text, stream):
    """Print whatever the terminal's encoding, on the first process of a machine only."""
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) in ("", "0"):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)


def _excepthook(kind, error, traceback):
    if not isinstance(error, UserError):
        return _excepthook.previous(kind, error, traceback)
    _say(f"error: {error}", sys.stderr)
    sys.exit(2)
