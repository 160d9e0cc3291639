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
    _install_excepthook()
    argv = sys.argv[1:] if argv is None else argv
    docstring, declared = _declared_settings(globals_["__file__"])
    values = {name: globals_.get(name, setting.default) for name, setting in declared.items()}
    sources, errors, given = dict.fromkeys(declared, "default"), [], []
    if "--help" in argv or "-h" in argv:
        _say(_help_page(docstring, globals_, declared, values), sys.stdout)
        raise SystemExit(0)
    for name, variable in ENVIRONMENT.items():
        if name in declared and os.environ.get(variable):
            given.append((name, os.environ[variable], f"environment {variable}", variable))
    command_line, files = _read_arguments(argv, declared, errors)
    for path in files:
        given += _read_file(path, declared, errors)
    for name, raw, source, label in given + command_line:
        try:
            values[name], sources[name] = _value(raw, declared[name].kind), source
        except (UserError, RecursionError) as error:
            errors.append(f"{label}: expected {_describe(declared[name].kind)}, got {error}")
    if errors:
        more = [f"... and {len(errors) - MAX_ERRORS} more"] * (len(errors) > MAX_ERRORS)
        hint = "hint: --help lists every setting with its default"
        _say("\n".join([*(f"error: {error}" for error in errors[:MAX_ERRORS]), *more, hint]), sys.stderr)
        raise SystemExit(2)
    globals_.update({name: values[name] for name, source in sources.items() if source != "default"})
    return Settings(values, sources)


# What the script declares


def _declared_settings(path):
    """The script's docstring and {name: Setting} in the order of the script."""
    with tokenize.open(path) as file:
        source = file.read()
    tree, lines, comments = ast.parse(source), source.split("\n"), {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            comments[line] = (-1 if lines[line - 1][:column].strip() else column, token.string.strip("# \t"))
    declared, setting, group, end = {}, None, "", 0
    for statement in _statements_to_call(tree.body):
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
        setting = name and _setting(name, node, getattr(statement, "annotation", None), group)
        if setting:
            declared[name] = setting
            setting.help = comments.get(end, comments.get(statement.lineno, (-1, "")))[1]
    return ast.get_docstring(tree) or "", declared


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


def _setting(name, node, annotation, group):
    """The Setting that an assignment makes, or None where it makes none (private, computed, a bare None)."""
    try:
        default = _literal(node)
    except (UserError, RecursionError):
        return None
    if name.startswith("_") or (default is None and annotation is None):
        return None
    kind = _kind(annotation) if annotation else (type(default),)
    try:
        _fit(default, kind)
    except UserError as error:
        raise TypeError(f"setting {name}: expected {_describe(kind)}, its default is {error}") from None
    return Setting(kind, default, group, "")


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
    given, body, problem = [], [], ""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"over {MAX_FILE_BYTES:,} bytes, too long for a config file")
        body = _parse(data.decode("utf-8-sig"), "exec")
    except UnicodeDecodeError as error:
        problem = f":{data.count(10, 0, error.start) + 1}: not UTF-8 text"
    except SyntaxError as error:
        problem = f":{error.lineno or 1}: {error.msg}"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = f": as a config file: {reason}{_near(path.partition('=')[0], declared, '--')}"
    errors += [f"{_show(path)}{problem}"] if problem else []
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


# Values; the UserErrors here say what was found instead


def _value(raw, kind):
    """The value that a command line's text or a config file's expression gives a setting of this kind."""
    if isinstance(raw, ast.AST):
        return _fit(_literal(raw), kind)
    words = {
        "none" if choice is None else str(choice): choice for choice in kind if not isinstance(choice, type)
    }
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
            value = _calculate(op, [_literal(operand)])
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            value = _calculate(op, [_literal(left), _literal(right)])
        case _:
            raise UserError("something that is neither a literal nor arithmetic on numbers")
    if not -LARGEST <= value <= LARGEST:
        raise UserError("a number that is too large")
    return value


def _calculate(op, numbers):
    if any(type(number) not in (int, float) for number in numbers):
        raise UserError("arithmetic on something other than numbers")
    base, exponent = numbers[0], numbers[-1]
    if isinstance(op, ast.Pow) and type(base) is int and abs(base) > 1 and exponent > 1024:
        return math.inf  # without spending minutes on it
    try:
        value = OPERATORS[type(op)](*numbers)
    except OverflowError:
        return math.inf
    except ZeroDivisionError:
        value = 0j
    if isinstance(value, complex):
        raise UserError("no real number")
    return value


def _fit(value, kind):
    """`value` where the kind takes it: as it is, an integer as a float, an integral float as an integer."""
    for alternative in kind:
        if type(value) is alternative or (type(value) is type(alternative) and value == alternative):
            return value
    if type(value) is int and float in kind:
        return float(value)
    if type(value) is float and value.is_integer() and int in kind:
        return int(value)
    raise UserError(repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}...")


def _describe(kind):
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", None: "none"}
    choices = [_show(choice) for choice in kind if choice not in names]
    return " or ".join(
        ["one of " + ", ".join(choices)] * bool(choices) + [names[k] for k in kind if k in names]
    )


def _show(value):
    """A value as one would write it on a command line, on one line and not too long."""
    text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    text = text if re.fullmatch(r"\S+", text) and text.isprintable() else repr(text)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _near(name, names, dashes=""):
    close = difflib.get_close_matches(name.lower(), names, 1)
    return f"; did you mean {dashes}{close[0]}?" if close else ""


# What a person sees


def _help_page(docstring, globals_, declared, values):
    width = max(40, min(110, shutil.get_terminal_size().columns))
    module = getattr(globals_.get("__spec__"), "name", None)
    command = f"python -m {module}" if module else f"python {os.path.basename(globals_['__file__'])}"
    lines = [docstring, "", f"usage: {command} [CONFIG_FILE ...] [--setting=value ...]"]
    left = {name: f"  --{name}={_show(values[name])}  " for name in declared}
    column, group = min(width // 2, max(map(len, left.values()), default=0)), ""
    for name, setting in declared.items():
        lines += ["", setting.group] if setting.group != group else []
        group = setting.group
        text = textwrap.wrap(f"{setting.help} ({_describe(setting.kind)})".strip(), width - column)
        start = left[name].ljust(column) if len(left[name]) <= column else f"{left[name]}\n{' ' * column}"
        lines.append(start + f"\n{' ' * column}".join(text))
    return "\n".join(lines)


def _say(text, stream):
    """Print whatever the terminal's encoding, on the first process of a machine only."""
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) in ("", "0"):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)


def _install_excepthook():
    previous = sys.excepthook

    def hook(kind, error, traceback):
        if not isinstance(error, UserError):
            return previous(kind, error, traceback)
        _say(f"error: {error}", sys.stderr)
        sys.exit(2)

    hook.for_user_errors = True
    if not hasattr(previous, "for_user_errors"):
        sys.excepthook = hook
