"""A script's settings: variables at its top that the command line and config files may change.

    depth = 20              # Transformer layers; every other size follows from it
    settings = configurator.configure(globals())

A value comes from the default in the script, the environment, the config files in their order, or the
command line; the last of these that gives one wins.

A setting is a line `name = value` above the call. The value is a number, arithmetic on numbers, text, True
or False; with an annotation it may be None. A name that begins with an underscore is not a setting. The
type is the annotation's (int, float, str, bool, Literal["a", "b"], X | None), else the default's.
A comment above the line starts a group; its first line that has a word in it is the group's name.
The comment at the end of the line is the help. If it begins with a *, --help shows the setting. --help=all
shows all, and so does --help if no setting has a *.

The comment of a number ends with its range: `[0..1]`, or `[-1, 1..1e9]` for -1 and all numbers from 1 to 1e9.
A text must not be empty, unless its default is, or its comment says "may be empty".

The script's source and the config files are parsed, never executed.
"""

import ast
import contextlib
import difflib
import io
import operator
import os
import re
import select
import shutil
import signal
import stat
import sys
import textwrap
import tokenize
import warnings
from collections import deque, namedtuple
from dataclasses import dataclass

from nanochat import UserError, explained, streams
from nanochat.terminal import printable

ENVIRONMENT = {"base_dir": "NANOCHAT_BASE_DIR"}  # setting -> the environment variable that may set it
WORDS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
OPERATORS |= {ast.FloorDiv: operator.floordiv, ast.UAdd: operator.pos, ast.USub: operator.neg}
# An exact power of integers can take minutes. A float power overflows at once.
OPERATORS[ast.Pow] = lambda base, exponent: float(base) ** exponent if exponent > 1024 else base**exponent
LARGEST = 1e308  # the largest number that is accepted, so that every integer fits into a float
MAX_FILE_BYTES = 100_000  # the largest config file
PIPE_S = 10  # seconds to wait for a config file that another program writes into a pipe
MAX_COLUMN = 28  # the rightmost column where help texts begin; a longer --name=default sticks out
# How --help names a type, and how an error describes it
TYPES = {int: ("int", "a whole number"), float: ("float", "a number"), str: ("text", "text")}
TYPES |= {bool: ("bool", "true or false"), None: ("none", "none")}
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # taken for the values on the right
# Names that other programs use -> the settings to give here, of those that the script has, or a sentence
ELSEWHERE = {short: [f"dtype={value}"] for short, value in SHORT.items()} | {
    "lr, learning_rate": ["matrix_lr", "embedding_lr", "unembedding_lr", "scalar_lr", "rate_fraction"],
    "batch_size": ["device_batch_size", "total_batch_size"],
    "epochs, max_epochs": ["num_epochs", "num_iterations", "target_param_data_ratio"],
    "steps, max_steps, iters, max_iters": ["num_iterations"],
    "layers, n_layer, num_layers": ["depth"],
    "wandb, wandb_log, use_wandb": ["logger=wandb"],
    "config, config_file": "a config file is given by its path alone",
    "gpus, num_gpus": "start a process for each GPU, with torchrun --standalone --nproc_per_node=8 -m ...",
}

# variable: its name in the script. kind: the types and single values that the setting takes, such as
# (int, None) or ("auto", "on", "off"). range: of numbers, as text; empty: any number. shown: by --help
Setting = namedtuple("Setting", "variable kind default group shown help range")


@dataclass
class Settings:
    """Value and source of every setting: "default", "environment NAME", "FILE:LINE" or "command line"."""

    values: dict
    sources: dict
    arguments: tuple = ()  # bare arguments, if the script takes other ones than config files

    def record(self):
        """{name: {"value": ..., "source": ...}} for JSON. Checkpoints, wandb and the report store it."""
        return {name: {"value": value, "source": self.sources[name]} for name, value in self.values.items()}


def configure(globals_, argv=None, arguments="CONFIG_FILE", aliases=None):
    """Give a script's variables the values that the command line asks for. Returns the `Settings`.

    `globals_` is the script's globals(). `argv` is the command line (None: sys.argv[1:]). `arguments` is the
    name of bare arguments in --help. With another name than CONFIG_FILE they are not read as config files;
    the script finds them in `Settings.arguments`.
    `aliases`, {"plan": "plan_only"}: the setting of the variable plan_only is called plan, in the record too.
    People may type either name. It is read from the source of the call, so it must be written out there.
    --help prints the settings and exits with status 0. If anything is wrong, all mistakes are printed on
    stderr, no variable changes, and the script exits with status 2. Later errors end it as `handle_errors`
    says. stdout and stderr are as nanochat/streams.py says.
    """
    streams.secure()
    handle_errors()
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # of scripts/__init__.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    argv = sys.argv[1:] if argv is None else argv
    declared = _declared_settings(globals_["__file__"])
    values = {name: globals_.get(setting.variable, setting.default) for name, setting in declared.items()}
    sources, errors = dict.fromkeys(declared, "default"), []
    environment = {n: v for n, v in ENVIRONMENT.items() if n in declared and os.environ.get(v)}
    if asked := {"--help", "-h", "--help=all"} & {*argv}:
        values |= {name: os.environ[variable] for name, variable in environment.items()}
        _say(_help_page(globals_, declared, values, arguments, "--help=all" in asked), sys.stdout)
        raise SystemExit(0)
    names = {setting.variable: name for name, setting in declared.items()} | {name: name for name in declared}
    command_line, bare = _read_arguments(argv, declared, names, errors)
    files = bare if arguments == "CONFIG_FILE" else []
    from_files = [given for path in files for given in _read_file(path, names, errors)]
    given = [(n, ast.Constant(os.environ[v]), f"environment {v}", v) for n, v in environment.items()]
    for name, expression, source, label in given + from_files + command_line:
        try:
            values[name], sources[name] = _value(expression, declared[name]), source
        except (UserError, RecursionError) as error:
            errors.append(f"{label}: {error}")
    if errors:
        report = "".join(f"error: {error}\n" for error in errors)
        _say(report + "hint: --help=all lists every setting with its default", sys.stderr)
        raise SystemExit(2)
    globals_.update({declared[name].variable: value for name, value in values.items()})
    return Settings(values, sources, tuple(bare))


def handle_errors():
    """From now on a UserError that nothing catches ends the process with its sentence and status 2, without a
    traceback, and Ctrl-C prints nothing."""
    if sys.excepthook is not _excepthook:
        _excepthook.previous, sys.excepthook = sys.excepthook, _excepthook


def defaults(path):
    """{name: default} of the settings that the script at `path` declares. The script does not run. Raises
    OSError, SyntaxError or UserError if it cannot be read."""
    return {name: setting.default for name, setting in _declared_settings(path).items()}


# What the script declares
def _declared_settings(path):
    """{name: Setting} in the order of the script."""
    with tokenize.open(path) as file:
        source = file.read()
    tree = ast.parse(source)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    keywords = {k.arg: k.value for k in getattr(_call(tree), "keywords", [])}
    aliases = ast.literal_eval(keywords["aliases"]) if "aliases" in keywords else {}
    names = {variable: name for name, variable in aliases.items()}
    declared, group, end = {}, "", 0
    for statement in tree.body:
        if _call(statement):
            break
        heading = _heading(source.split("\n")[end : statement.lineno - 1]) or group
        end = statement.end_lineno
        variable, node = _assignment(statement)
        name = names.get(variable, variable)
        declared.pop(name, None)  # a second assignment to a name replaces the first
        annotation = getattr(statement, "annotation", None)
        try:
            default = literal(node)
        except (UserError, RecursionError):
            continue  # a computed value is not a setting
        if variable.startswith("_") or (default is None and annotation is None):
            continue
        try:
            kind = _kind(annotation) if annotation else (type(default),)
            comment = comments.get(end, "").strip("# ")
            shown, about = comment[:1] == "*", _help_and_range(comment.lstrip("* "), kind)
            declared[name] = Setting(variable, kind, default, heading, shown, *about)
            _value(node, declared[name])
        except UserError as error:
            raise UserError(f"{path}:{statement.lineno}: {variable}: {error}") from None
        group = heading
    return declared


def _call(node):
    """The call of configure() in a part of the script, else None."""
    calls = (part for part in ast.walk(node) if isinstance(part, ast.Call))
    return next((c for c in calls if getattr(c.func, "attr", getattr(c.func, "id", "")) == "configure"), None)


def _assignment(statement):
    """(name, value node) of an assignment to one name, else (None, None)."""
    match statement:
        case ast.Assign([ast.Name(name)], node) | ast.AnnAssign(ast.Name(name), _, ast.expr() as node):
            return name, node
    return None, None


def _heading(lines):
    """The name of the group that begins after `lines`: the first words of the comment there, else ""."""
    comment = re.search(r"(^#.*\n)+\s*\Z", "\n".join([*lines, ""]), re.MULTILINE)
    words = [line.strip("#-=*~ \t") for line in comment[0].split("\n")] if comment else []
    return next(filter(None, words), "")


def _help_and_range(comment, kind):
    """The help and the range that the comment of a setting of this kind holds."""
    bracket = re.fullmatch(r"(.*?)\s*\[([^][]+)\]", comment) if {int, float} & {*kind} else None
    read_range(bracket[2] if bracket else "")
    return bracket.groups() if bracket else (comment, "")


def _kind(annotation):
    """The types and single values that an annotation allows."""
    match annotation:
        case ast.Name("int" | "float" | "str" | "bool" as name):
            return ({"int": int, "float": float, "str": str, "bool": bool}[name],)
        case ast.Constant(None):
            return (None,)
        case ast.BinOp(left, ast.BitOr(), right):
            return _kind(left) + _kind(right)
        case ast.Subscript(ast.Name("Literal"), choices):
            return tuple(literal(choice) for choice in getattr(choices, "elts", [choices]))
    raise UserError(f"use int, float, str, bool, Literal or X | None, not {ast.unparse(annotation)}")


# What a person gives, as lists of (name, expression, source, label for an error)
def _read_arguments(argv, declared, names, errors):
    """What the command line gives to settings, and its bare arguments. names: {what a person may type: name
    of the setting}."""
    given, bare, rest = [], [], deque(argv)
    negated = {f"no_{typed}": name for typed, name in names.items() if bool in declared[name].kind}
    while rest:
        argument = rest.popleft()
        key, equals, text = argument.partition("=")
        typed = key[2:].replace("-", "_") if key.startswith("--") else ""
        following = rest[0] if rest else "--"
        if not argument.startswith("-"):
            bare.append(argument)
        elif typed in names:
            name, kind = names[typed], declared[names[typed]].kind
            if not equals and bool not in kind and following.startswith("--"):
                errors.append(f"{key} needs a value: {_describe(kind)}")
                continue
            if not equals:
                text = "true" if bool in kind and following.lower() not in WORDS else rest.popleft()
            given.append((name, _expression(text, kind), "command line", f"{key}={show(text)}"))
        elif typed in negated:
            given.append((negated[typed], ast.Constant(False), "command line", key))
            errors += [f"{key} takes no value"] if equals else []
        else:
            near = _near(key.strip("-").replace("-", "_"), [*names, *negated], "--")
            errors.append(f"unknown setting {show(key)}{near}")
            if not equals and not following.startswith("--") and not following.endswith(".py"):
                rest.popleft()  # most likely its value, which is not a second mistake
    return given, bare


def _read_file(path, names, errors):
    """What a config file gives. It may hold a docstring, comments and lines of name = value."""
    given, body, where = [], [], path
    if path.startswith("runs/") and not os.path.exists(path):  # an installed copy has its recipes beside it
        where = os.path.join(os.path.dirname(__file__), path)
    try:
        more = getattr(os, "O_NONBLOCK", 0)  # to open a pipe would wait for the program that writes to it
        with open(where, "rb", opener=lambda path, flags: os.open(path, flags | more)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                if not select.select([file], [], [], PIPE_S)[0]:
                    raise ValueError("it is a pipe or a terminal to which nobody writes")
                os.set_blocking(file.fileno(), True)
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"over {MAX_FILE_BYTES:,} bytes, which is too long")
        body = _parse(data, "exec")
    except SyntaxError as error:
        errors.append(f"{show(path)}:{error.lineno or 1}: {error.msg}")
    except (OSError, ValueError) as error:
        near = _near(path.partition("=")[0], names, "--")
        errors.append(f"config file {show(path)}: {getattr(error, 'strerror', None) or error}{near}")
    for statement in body:
        name, node = _assignment(statement)
        place = f"{show(path)}:{statement.lineno}"
        if name in names:
            given.append((names[name], node, f"{path}:{statement.lineno}", f"{place}: {name}"))
        elif name:
            errors.append(f"{place}: unknown setting {show(name)}{_near(name, names)}")
        elif statement is not body[0] or ast.get_docstring(ast.Module(body, [])) is None:
            errors.append(f"{place}: a config file holds lines of name = value, and nothing else")
    return given


def _expression(text, kind):
    """The expression that a text on the command line means to a setting of this kind."""
    words = {show(k): k for k in kind if not isinstance(k, type)} | (WORDS if bool in kind else {})
    for word in (text, text.lower()):
        if word in words:
            return ast.Constant(words[word])
    if str not in kind and re.fullmatch(r"[-+.(0-9][-+*/.()0-9a-fA-FxX_ ]{,999}", text):
        with contextlib.suppress(SyntaxError):
            return _parse(text, "eval")
    return ast.Constant(text)


def _parse(text, mode):
    """The body of a source text. Whatever cannot be parsed is a SyntaxError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text, mode=mode).body
    except (ValueError, RecursionError, MemoryError):
        raise SyntaxError("it holds a NUL byte or is nested too deeply") from None


def _near(name, names, dashes=""):
    """A suggestion: what other programs call so, else names with this one in them, else one spelled alike."""
    name = name.lower()
    meant = next((meant for typed, meant in ELSEWHERE.items() if name in typed.split(", ")), [])
    if isinstance(meant, str):
        return f"; {meant}"
    close = [other for other in meant if other.partition("=")[0] in names]
    close = close or [other for other in names if f"_{name}_" in f"_{other}_"]
    close = close or difflib.get_close_matches(name, names, 1, 0.7)
    return f"; did you mean {' or '.join(dashes + other for other in close[:4])}?" if close else ""


# Values
def literal(node):
    """The value of a literal or of arithmetic on numbers."""
    match node:
        case ast.Constant(None | bool() | str() | int() | float() as value):
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
    if isinstance(value, complex) or (type(value) in (int, float) and not -LARGEST <= value <= LARGEST):
        raise UserError("the result is too large or not a real number")
    return value


def _value(expression, setting):
    """The value of an expression, if the setting takes it; else UserError."""
    value = _fit(literal(expression), setting.kind)
    if type(value) in (int, float):
        _check_range(value, setting)
    may_be_empty = setting.default == "" or "may be empty" in setting.help
    if isinstance(value, str) and not value.strip() and not may_be_empty:
        raise UserError("it is empty; give a value, or leave it out")
    return value


def _fit(value, kind):
    """`value` as a value of this kind. A whole number may become a float, 1e3 an int, and bf16 bfloat16."""
    value = SHORT[value] if value in SHORT and SHORT[value] in kind else value
    if any(type(value) is k or (type(value) is type(k) and value == k) for k in kind):
        return value
    if type(value) is int and float in kind:
        return float(value)
    if type(value) is float and value.is_integer() and int in kind:
        return int(value)
    raise UserError(f"expected {_describe(kind)}, got {repr(value)[:200]}")


def _describe(kind):
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
        try:
            texts = low, high if dots else low
            bounds = [(bound, _fit(literal(_parse(bound, "eval")), (int, float))) for bound in texts]
        except (SyntaxError, UserError):
            bounds = [(low, 1), (high, 0)]
        if bounds[0][1] > bounds[1][1]:
            raise UserError(f"its range [{text}] is not one; write it as [-1, 1..1e9]")
        alternatives.append(bounds)
    return alternatives


def _check_range(number, setting):
    """Raise UserError for a number outside of the range. The error says what single numbers mean, if the help
    does: "steps (-1 = off)"."""
    alternatives = read_range(setting.range)
    if not alternatives or any(low[1] <= number <= high[1] for low, high in alternatives):
        return
    noun = TYPES[type(number)][1]
    ways = [f"{noun} from {low} to {high}" for (low, _), (high, _) in alternatives if low != high]
    for single in (low for (low, _), (high, _) in alternatives if low == high):
        meaning = re.search(rf"\({re.escape(single)} = ([^()]*)\)", setting.help)
        ways.append(f"{single} ({meaning[1]})" if meaning else single)
    raise UserError(f"give {', or '.join(ways)}")


# What a person sees
def _help_page(globals_, declared, values, arguments, whole):
    """The docstring, the usage, and settings with their defaults, help and types, in groups; whole: all."""
    listed = {name: setting for name, setting in declared.items() if setting.shown and not whole} or declared
    width = max(40, min(110, shutil.get_terminal_size().columns))
    module = getattr(globals_.get("__spec__"), "name", None)
    command = f"python -m {module}" if module else f"python {os.path.basename(globals_['__file__'])}"
    doc = (globals_.get("__doc__") or "").strip()
    doc = re.sub(r"^\S.*(\n\S.*)*", lambda prose: textwrap.fill(prose[0], width), doc, flags=re.MULTILINE)
    lines = [doc, "", f"usage: {command} [{arguments} ...] [--setting=value ...]"]
    left = {name: f"  --{name}={show(values[name])}  " for name in listed}
    column, group = min(MAX_COLUMN, width // 2, max(map(len, left.values()), default=0)), ""
    for name, setting in listed.items():
        lines += ["", setting.group] if setting.group != group else []
        group = setting.group
        lines.append(_help_lines(left[name].ljust(column), setting, column, width))
    lines += ["", f"--help=all shows all {len(declared)} settings"] * (len(listed) < len(declared))
    return "\n".join(lines).strip()


def _help_lines(left, setting, column, width):
    """`left`, then help and type; further lines begin at `column`."""
    types = [TYPES[k][0] if k in TYPES else show(k) for k in setting.kind]
    kind = "|".join(setting.range if name in ("int", "float") and setting.range else name for name in types)
    # A line breaks between choices if it must, and never within a range
    kind = kind.replace("|", " | ") if len(kind) > width - column - 2 else kind.replace(" ", "\0")
    indents = {"initial_indent": left, "subsequent_indent": " " * column}
    text = f"{setting.help} [{kind}]".strip()
    return textwrap.fill(text, width, break_long_words=False, **indents).replace("\0", " ")


def _say(text, stream):
    """Print on the first process of each machine."""
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) in ("", "0"):
        print(printable(text), file=stream, flush=True)


def _excepthook(kind, error, traceback):
    if kind is KeyboardInterrupt:  # no error: Python ends as one who stops by Ctrl-C does
        return None
    error = explained(error)
    if not isinstance(error, UserError):
        return _excepthook.previous(kind, error, traceback)
    _say(f"error: {error}", sys.stderr)
    sys.exit(2)
