"""A script's settings: variables at its top that the command line and config files may change.

    depth = 20              # Transformer layers; every other size follows from it
    settings = configurator.configure(globals())

A value comes from the default in the script, the environment, the config files in their order, or the
command line; the last of these that gives one wins.

A setting is a line `name = value` above the call. The value is a number, arithmetic on numbers, text, True
or False; with an annotation it may be None. A name with a leading underscore is no setting. The lines stand
at module level, or in the `if __name__ == "__main__":` block around the call if it has such lines.
The type is the annotation's (int, float, str, bool, Literal["a", "b"], X | None), else the default's.
The comment at the end of the line is the help. A comment above the line starts a group; its first line that
has a word in it is the group's name.

The comment of a number ends with its range: `[0..1]`, or `[-1, 1..1e9]` for -1 and all numbers from 1 to 1e9.
A text must not be empty, unless its default is, or its comment says "may be empty".

The script's source and the config files are parsed, never executed.
"""

import ast
import contextlib
import difflib
import io
import os
import re
import shutil
import sys
import textwrap
import tokenize
from collections import deque, namedtuple
from dataclasses import dataclass

from nanochat import UserError
from nanochat.values import TYPES, check_range, check_text, describe, fit, literal, parse, read_range, show

ENVIRONMENT = {"base_dir": "NANOCHAT_BASE_DIR"}  # setting -> the environment variable that may set it
WORDS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
MAX_FILE_BYTES = 100_000  # of a config file; a longer one is refused before it is read whole
MAX_COLUMN = 28  # where the help texts begin at most; a longer --name=default stands out to the right


# kind: the types and single values that a setting takes, such as (int, None) or ("auto", "on", "off")
# range: of its numbers, as it is written, such as "-1, 1..1e9"; empty if any number will do
Setting = namedtuple("Setting", "kind default group help range")


@dataclass
class Settings:
    """Value and source of every setting: "default", "environment NAME", "FILE:LINE" or "command line"."""

    values: dict
    sources: dict
    arguments: tuple = ()  # the bare ones, if the script takes others than config files

    def record(self):
        """{name: {"value": ..., "source": ...}} for JSON. Checkpoints, wandb and the report store it."""
        return {name: {"value": value, "source": self.sources[name]} for name, value in self.values.items()}


def configure(globals_, argv=None, arguments="CONFIG_FILE"):
    """Give a script's variables the values that the command line asks for. Returns the `Settings`.

    `globals_` is the script's globals(). `argv` is the command line (None: sys.argv[1:]). `arguments` is what
    --help calls a bare argument. With another name than CONFIG_FILE, these are not read as config files:
    they are the script's own, in `Settings.arguments`.
    --help prints every setting and exits with status 0. If anything is wrong, all mistakes are printed on
    stderr, no variable changes, and the script exits with status 2. From this call on, a UserError that
    nothing catches ends the script in the same way: its sentence, status 2, no traceback. A character that
    the terminal cannot show is printed as an escape, such as \\u2192.
    """
    for stream in sys.stdout, sys.stderr:
        if hasattr(stream, "reconfigure"):  # a stream that a program puts in their place may lack it
            stream.reconfigure(errors="backslashreplace")
    if sys.excepthook is not _excepthook:
        _excepthook.previous, sys.excepthook = sys.excepthook, _excepthook
    argv = sys.argv[1:] if argv is None else argv
    declared = _declared_settings(globals_["__file__"])
    values = {name: globals_.get(name, setting.default) for name, setting in declared.items()}
    sources, errors = dict.fromkeys(declared, "default"), []
    environment = {n: v for n, v in ENVIRONMENT.items() if n in declared and os.environ.get(v)}
    if "--help" in argv or "-h" in argv:
        values |= {name: os.environ[variable] for name, variable in environment.items()}
        _say(_help_page(globals_, declared, values, arguments), sys.stdout)
        raise SystemExit(0)
    command_line, bare = _read_arguments(argv, declared, errors)
    files = bare if arguments == "CONFIG_FILE" else []
    from_files = [given for path in files for given in _read_file(path, declared, errors)]
    given = [(n, ast.Constant(os.environ[v]), f"environment {v}", v) for n, v in environment.items()]
    for name, expression, source, label in given + from_files + command_line:
        try:
            values[name], sources[name] = _value(expression, declared[name]), source
        except (UserError, RecursionError) as error:
            errors.append(f"{label}: {error}")
    if errors:
        report = "".join(f"error: {error}\n" for error in errors)
        _say(report + "hint: --help lists every setting with its default", sys.stderr)
        raise SystemExit(2)
    globals_.update(values)
    return Settings(values, sources, tuple(bare))


def defaults(path):
    """{name: default} of the settings that the script at `path` declares. The script does not run.

    A program that needs the numbers of another script, such as its rates, reads them here.
    """
    return {name: setting.default for name, setting in _declared_settings(path).items()}


# What the script declares.
def _declared_settings(path):
    """{name: Setting} in the order of the script."""
    with tokenize.open(path) as file:
        source = file.read()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    declared, group, end = {}, "", 0
    for statement in _statements_to_call(ast.parse(source).body):
        heading = _heading(source.split("\n")[end : statement.lineno - 1], statement.col_offset) or group
        end = statement.end_lineno
        name, node = _assignment(statement)
        declared.pop(name, None)  # a second assignment to a name replaces the first
        annotation = getattr(statement, "annotation", None)
        try:
            default = literal(node)
        except (UserError, RecursionError):
            continue  # a computed value is not a setting
        if name.startswith("_") or (default is None and annotation is None):
            continue
        try:
            kind = _kind(annotation) if annotation else (type(default),)
            setting = Setting(
                kind, default, heading, *_help_and_range(comments.get(end, "").strip("# "), kind)
            )
            _value(node, setting)
        except UserError as error:
            raise UserError(f"{path}:{statement.lineno}: {name}: {error}") from None
        declared[name], group = setting, heading
    return declared


def _help_and_range(comment, kind):
    """The help and the range that the comment of a setting of this kind holds."""
    bracket = re.fullmatch(r"(.*?)\s*\[([^][]+)\]", comment) if {int, float} & {*kind} else None
    read_range(bracket[2] if bracket else "")
    return bracket.groups() if bracket else (comment, "")


def _value(expression, setting):
    """The value of an expression, if the setting takes it; else UserError."""
    value = fit(literal(expression), setting.kind)
    check_range(value, setting.range, setting.help)
    check_text(value, may_be_empty=setting.default == "" or "may be empty" in setting.help)
    return value


def _heading(lines, indent):
    """The first line with a word of the comment that ends `lines` at this indentation, else ""."""
    comment = re.search(rf"(^ {{{indent}}}#.*\n)+\s*\Z", "\n".join([*lines, ""]), re.MULTILINE)
    words = [line.strip("#-=*~ \t") for line in comment[0].split("\n")] if comment else []
    return next(filter(None, words), "")


def _statements_to_call(body):
    """The statements up to the call of configure(): those of its `if` block if that has assignments."""
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
    """The types and single values that an annotation allows."""
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
            return tuple(literal(choice) for choice in getattr(inner, "elts", [inner]))
    raise UserError(f"use int, float, str, bool, Literal or X | None, not {ast.unparse(annotation)}")


# What a person gives, as lists of (name, expression, source, label for an error).
def _read_arguments(argv, declared, errors):
    """What the command line gives to settings, and its bare arguments."""
    given, bare, rest = [], [], deque(argv)
    switches = {name for name, setting in declared.items() if bool in setting.kind}
    negated = {f"no_{name}": name for name in switches if f"no_{name}" not in declared}
    while rest:
        argument = rest.popleft()
        key, equals, text = argument.partition("=")
        name = key[2:].replace("-", "_") if key.startswith("--") else ""
        following = rest[0] if rest else "--"
        if not argument.startswith("-"):
            bare.append(argument)
        elif name in negated:
            given.append((negated[name], ast.Constant(False), "command line", key))
            errors += [f"{key} takes no value"] if equals else []
        elif name not in declared:
            near = _near(key.strip("-").replace("-", "_"), [*declared, *negated], "--")
            errors.append(f"unknown setting {show(key)}{near}")
            if not equals and not following.startswith("--") and not following.endswith(".py"):
                rest.popleft()  # most likely its value, which is not a second mistake
        elif not equals and name not in switches and following.startswith("--"):
            errors.append(f"{key} needs a value: {describe(declared[name].kind)}")
        else:
            if not equals:
                text = "true" if name in switches and following.lower() not in WORDS else rest.popleft()
            label = f"{key}={show(text)}"
            given.append((name, _expression(text, declared[name].kind), "command line", label))
    return given, bare


def _read_file(path, declared, errors):
    """What a config file gives. It may hold a docstring, comments and lines of name = value."""
    given, body = [], []
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"over {MAX_FILE_BYTES:,} bytes, which is too long")
        body = parse(data, "exec")
    except SyntaxError as error:
        errors.append(f"{show(path)}:{error.lineno or 1}: {error.msg}")
    except (OSError, ValueError) as error:
        near = _near(path.partition("=")[0], declared, "--")
        errors.append(f"config file {show(path)}: {getattr(error, 'strerror', None) or error}{near}")
    for statement in body:
        name, node = _assignment(statement)
        place = f"{show(path)}:{statement.lineno}"
        if name in declared:
            given.append((name, node, f"{path}:{statement.lineno}", f"{place}: {name}"))
        elif name:
            errors.append(f"{place}: unknown setting {show(name)}{_near(name, declared)}")
        elif statement is not body[0] or ast.get_docstring(ast.Module(body, [])) is None:
            errors.append(f"{place}: a config file holds lines of name = value, and nothing else")
    return given


def _expression(text, kind):
    """The expression that a text on the command line means to a setting of this kind."""
    words = {"none" if k is None else str(k): k for k in kind if not isinstance(k, type)}
    words |= WORDS if bool in kind else {}
    for word in (text, text.lower()):
        if word in words:
            return ast.Constant(words[word])
    if str not in kind and re.fullmatch(r"[-+.(0-9][-+*/.()0-9a-fA-FxX_ ]{,999}", text):
        with contextlib.suppress(SyntaxError):
            return parse(text, "eval")
    return ast.Constant(text)


def _near(name, names, dashes=""):
    close = difflib.get_close_matches(name.lower(), names, 1, 0.7)
    return f"; did you mean {dashes}{close[0]}?" if close else ""


def _help_page(globals_, declared, values, arguments):
    """The docstring, the usage, and every setting with its default, help and type, in its group."""
    width = max(40, min(110, shutil.get_terminal_size().columns))
    module = getattr(globals_.get("__spec__"), "name", None)
    command = f"python -m {module}" if module else f"python {os.path.basename(globals_['__file__'])}"
    doc = (globals_.get("__doc__") or "").strip()
    doc = re.sub(r"^\S.*(\n\S.*)*", lambda prose: textwrap.fill(prose[0], width), doc, flags=re.MULTILINE)
    lines = [doc, "", f"usage: {command} [{arguments} ...] [--setting=value ...]"]
    left = {name: f"  --{name}={show(values[name])}  " for name in declared}
    column, group = min(MAX_COLUMN, width // 2, max(map(len, left.values()), default=0)), ""
    for name, setting in declared.items():
        lines += ["", setting.group] if setting.group != group else []
        group = setting.group
        lines.append(_help_lines(left[name].ljust(column), setting, column, width))
    return "\n".join(lines).strip()


def _help_lines(left, setting, column, width):
    """`left`, then help and type: on one line if they fit, else wrapped from `column` on."""
    types = [TYPES[k][0] if k in TYPES else show(k) for k in setting.kind]
    kind = "|".join(setting.range if name in ("int", "float") and setting.range else name for name in types)
    # A line breaks between choices if it must, and never within a range
    kind = kind.replace("|", " | ") if len(kind) > width - column - 2 else kind.replace(" ", "\0")
    text, indent = f"{setting.help} [{kind}]".strip(), "\n" + " " * column
    if len(left + text) <= width:
        return (left + text).replace("\0", " ")
    first = left if len(left) == column else left.rstrip() + indent
    return (first + indent.join(textwrap.wrap(text, width - column))).replace("\0", " ")


def _say(text, stream):
    """Print on the first process of each machine."""
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) in ("", "0"):
        try:
            print(text, file=stream, flush=True)
        except BrokenPipeError:  # the reader of the output, such as `head`, has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _excepthook(kind, error, traceback):
    if not isinstance(error, UserError):
        return _excepthook.previous(kind, error, traceback)
    _say(f"error: {error}", sys.stderr)
    sys.exit(2)
