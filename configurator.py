"""A script's settings: defaults < environment < config files, in order < command line.

    depth = 20              # Transformer layers; every other size follows from it
    settings = configurator.configure(globals())

A setting is an assignment of one literal (number, arithmetic on numbers, text, True, False, annotated None)
to a name without leading underscore that stands before the call: at module level or, where the call stands
in an `if __name__ == "__main__":` block with assignments of its own, in that block. Its annotation (int,
float, str, bool, Literal["a", "b"], X | None), else its default, gives the type; its trailing comment is its
help. Comment lines of their own above it open a group, named by the first of them that has a word in it.
The script's source and config files are parsed, never executed.
"""

import ast
import contextlib
import difflib
import io
import operator
import os
import re
import shutil
import sys
import textwrap
import tokenize
import warnings
from collections import namedtuple
from dataclasses import dataclass

from nanochat import UserError

ENVIRONMENT = {"base_dir": "NANOCHAT_BASE_DIR"}  # setting -> the variable that may give its default
WORDS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
OPERATORS |= {ast.FloorDiv: operator.floordiv, ast.UAdd: operator.pos, ast.USub: operator.neg}
# A float overflows at once where the exact power of an integer might take minutes.
OPERATORS[ast.Pow] = lambda base, exponent: float(base) ** exponent if exponent > 1024 else base**exponent
LARGEST = 1e308  # of a number: every integer that passes is a finite float too
MAX_FILE_BYTES = 100_000  # of a config file, a page of assignments


# kind: the types and single values that a setting takes, such as (int, None) or ("auto", "on", "off")
Setting = namedtuple("Setting", "kind default group help")


@dataclass
class Settings:
    """Value and source of every setting. A source is default, environment NAME, FILE:LINE or command line."""

    values: dict
    sources: dict

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
    for name, variable in ENVIRONMENT.items():
        if name in declared and os.environ.get(variable):
            values[name], sources[name] = os.environ[variable], f"environment {variable}"
    if "--help" in argv or "-h" in argv:
        _say(_help_page(globals_, declared, values), sys.stdout)
        raise SystemExit(0)
    command_line, files = _read_arguments(argv, declared, errors)
    from_files = [given for path in files for given in _read_file(path, declared, errors)]
    for name, expression, source, label in from_files + command_line:
        try:
            values[name], sources[name] = _fit(_literal(expression), declared[name].kind), source
        except (UserError, RecursionError) as error:
            errors.append(f"{label}: {error}")
    if errors:
        lines = [
            *(f"error: {error}" for error in errors),
            "hint: --help lists every setting with its default",
        ]
        _say("\n".join(lines), sys.stderr)
        raise SystemExit(2)
    globals_.update(values)
    return Settings(values, sources)


def defaults(path):
    """{name: default} of the settings that the script at `path` declares. It is parsed, never executed.

    For a program that needs another script's numbers (its rates, say) and does not want to repeat them.
    """
    return {name: setting.default for name, setting in _declared_settings(path).items()}


# What the script declares.
def _declared_settings(path):
    """{name: Setting} in the order of the script."""
    with tokenize.open(path) as file:
        source = file.read()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {
        token.start[0]: token.string.strip("# ") for token in tokens if token.type == tokenize.COMMENT
    }
    declared, group, end = {}, "", 0
    for statement in _statements_to_call(ast.parse(source).body):
        above = "\n".join(source.split("\n")[end : statement.lineno - 1])
        block = re.search(rf"(^ {{{statement.col_offset}}}#.*\n)+\s*\Z", above + "\n", re.MULTILINE)
        words = [w for line in (block[0] if block else "").split("\n") if (w := line.strip("#-=*~ \t"))]
        heading = words[0] if words else group
        end = statement.end_lineno
        name, node = _assignment(statement)
        declared.pop(name, None)  # a second assignment takes the place of the first
        annotation = getattr(statement, "annotation", None)
        with contextlib.suppress(UserError, RecursionError):  # computed: no setting
            default = _literal(node)
            kind = _kind(annotation) if annotation else (type(default),)
            if not name.startswith("_") and (annotation or default is not None):
                declared[name], group = Setting(kind, default, heading, comments.get(end, "")), heading
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


# What a person gives, as lists of (name, expression, source, label for an error).
def _read_arguments(argv, declared, errors):
    """What the command line gives, and the config files it names."""
    given, files, rest = [], [], list(reversed(argv))
    switches = {name for name, setting in declared.items() if bool in setting.kind}
    while rest:
        argument = rest.pop()
        key, equals, text = argument.partition("=")
        name = key[2:].replace("-", "_") if key.startswith("--") else ""
        following = rest[-1] if rest else "--"
        if not argument.startswith("-"):
            files.append(argument)
        elif name not in declared and name.removeprefix("no_") in switches:
            given.append((name.removeprefix("no_"), ast.Constant(False), "command line", key))
            errors += [f"{key} takes no value"] if equals else []
        elif name not in declared:
            near = _near(key.strip("-").replace("-", "_"), [*declared, *(f"no_{s}" for s in switches)], "--")
            errors.append(f"unknown setting {_show(key)}{near}")
            if not equals and not following.startswith("--") and not following.endswith(".py"):
                rest.pop()  # its value, most likely: one slip, one error
        elif not equals and name not in switches and following.startswith("--"):
            errors.append(f"{key} needs a value: {_describe(declared[name].kind)}")
        else:
            if not equals:
                text = "true" if name in switches and following.lower() not in WORDS else rest.pop()
            label = f"{key}={_show(text)}"
            given.append((name, _expression(text, declared[name].kind), "command line", label))
    return given, files


def _read_file(path, declared, errors):
    """What a config file gives: a docstring, comments and assignments of literals are all it may hold."""
    given, body = [], []
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"over {MAX_FILE_BYTES:,} bytes, too long for a config file")
        body = _parse(data, "exec")
    except SyntaxError as error:
        errors.append(f"{_show(path)}:{error.lineno or 1}: {error.msg}")
    except (OSError, ValueError) as error:
        near = _near(path.partition("=")[0], declared, "--")
        errors.append(f"config file {_show(path)}: {getattr(error, 'strerror', None) or error}{near}")
    for statement in body:
        name, node = _assignment(statement)
        place = f"{_show(path)}:{statement.lineno}"
        if name in declared:
            given.append((name, node, f"{path}:{statement.lineno}", f"{place}: {name}"))
        elif name:
            errors.append(f"{place}: unknown setting {_show(name)}{_near(name, declared)}")
        elif statement is not body[0] or ast.get_docstring(ast.Module(body, [])) is None:
            errors.append(f"{place}: a config file holds lines of name = value, and nothing else")
    return given


def _expression(text, kind):
    """The expression that a command-line text stands for, given the kind of its setting."""
    words = {"none" if k is None else str(k): k for k in kind if not isinstance(k, type)}
    words |= WORDS if bool in kind else {}
    for word in (text, text.lower()):
        if word in words:
            return ast.Constant(words[word])
    if str not in kind and re.fullmatch(r"[-+.(0-9][-+*/.()0-9a-fA-FxX_ ]{,999}", text):
        with contextlib.suppress(SyntaxError):
            return _parse(text, "eval")
    return ast.Constant(text)


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
        case ast.UnaryOp(op=op) | ast.BinOp(op=op) if type(op) in OPERATORS:
            numbers = [_literal(side) for side in ast.iter_child_nodes(node) if side is not op]
            if any(type(number) not in (int, float) for number in numbers):
                raise UserError("arithmetic is for numbers")
            try:
                value = OPERATORS[type(op)](*numbers)
            except ArithmeticError:
                value = float("nan")
        case _:
            raise UserError("neither a literal nor arithmetic on numbers")
    if isinstance(value, complex) or not -LARGEST <= value <= LARGEST:
        raise UserError("the result is too large, or no real number")
    return value


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
    close = difflib.get_close_matches(name.lower(), names, 1, 0.7)
    return f"; did you mean {dashes}{close[0]}?" if close else ""


def _help_page(globals_, declared, values):
    width = max(40, min(110, shutil.get_terminal_size().columns))
    module = getattr(globals_.get("__spec__"), "name", None)
    command = f"python -m {module}" if module else f"python {os.path.basename(globals_['__file__'])}"
    lines = [globals_.get("__doc__") or "", f"usage: {command} [CONFIG_FILE ...] [--setting=value ...]"]
    left = {name: f"  --{name}={_show(values[name])}" for name in declared}
    column, group = min(width // 2, 2 + max(map(len, left.values()), default=0)), ""
    for name, setting in declared.items():
        lines += ["", setting.group] if setting.group != group else []
        group, indent = setting.group, "\n" + " " * column
        text = textwrap.wrap(f"{setting.help} ({_describe(setting.kind)})".strip(), width - column)
        first = left[name].ljust(column) if len(left[name]) < column else left[name] + indent
        lines.append(first + indent.join(text))
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
