"""The configurator: generated command lines and config files, one example for every rule, real processes."""

import contextlib
import io
import json
import math
import os
import runpy
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import configurator

ROOT = Path(configurator.__file__).parent

SCRIPT = '''\
"""Train a small thing.

Run it: python train.py
"""

# Not a heading: an import stands below
from typing import Literal, Optional

import configurator

_private = 5
computed = len("abc")
listed = [1, 2]
unknown_type = None

# ---- Model ----
# everything follows from depth
depth = 20  # Transformer layers; every other size
width: int | None = None  # columns (none = derived)

# Training

rate = 3e-4  # step size
decay: float = 0  # 0 = off
batch = 2**4 * 1024
steps = -1  # -1 = as long as it takes
dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of the products
plan = False  # print the plan and exit
compiled: bool = True
run = "dummy"  # name
tag: Optional[str] = None
base_dir = "~/.cache/nanochat"
settings = configurator.configure(globals())
after = 7
'''
KINDS = {  # setting -> its default and the values it may take
    "depth": (20, st.integers(-(2**70), 2**70)),
    "width": (None, st.none() | st.integers(-(2**70), 2**70)),
    "rate": (3e-4, st.floats(-1e300, 1e300)),
    "decay": (0, st.floats(-1e300, 1e300)),
    "batch": (16384, st.integers(-(10**6), 10**6)),
    "steps": (-1, st.integers(-10, 10)),
    "dtype": ("auto", st.sampled_from(["auto", "bfloat16", "float32"])),
    "plan": (False, st.booleans()),
    "compiled": (True, st.booleans()),
    "run": ("dummy", st.text()),
    "tag": (None, st.none() | st.text().filter(lambda text: text.lower() != "none")),
    "base_dir": ("~/.cache/nanochat", st.text()),
}
DEFAULTS = {name: default for name, (default, _) in KINDS.items()}
OTHERS = {"_private": 5, "computed": 3, "listed": [1, 2], "unknown_type": None, "after": "not yet"}
many = settings(max_examples=1000, deadline=None)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for name in ("NANOCHAT_BASE_DIR", "LOCAL_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A script in a folder of its own; the generated config files go there too."""
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


def configure(script, argv):
    """(exit status or None, the script's globals, Settings or None, stdout, stderr) of one call."""
    variables = {"__file__": str(script), "__doc__": "Train a small thing.", **DEFAULTS, **OTHERS}
    out, err = io.StringIO(), io.StringIO()
    status = record = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            record = configurator.configure(variables, argv)
        except SystemExit as stop:
            status = stop.code
    assert all(variables[name] == value for name, value in OTHERS.items())  # never a changed non-setting
    assert variables.keys() == {"__file__", "__doc__", *DEFAULTS, *OTHERS}
    if status is not None:
        assert {name: variables[name] for name in DEFAULTS} == DEFAULTS
    return status, variables, record, out.getvalue(), err.getvalue()


def values_of(script, *argv):
    """The settings after a command line that has to be accepted, in silence."""
    status, variables, record, out, err = configure(script, list(argv))
    assert (status, out, err) == (None, "", ""), err
    assert record.values == {name: variables[name] for name in DEFAULTS}
    return record.values


def errors_of(script, *argv):
    """The error lines, without their marks, of a command line that has to be refused."""
    status, _, _, out, err = configure(script, list(argv))
    *lines, hint = err.splitlines() or [""]
    assert status == 2 and out == "" and hint.startswith("hint: --help"), (status, out, err)
    assert lines and all(line.startswith("error: ") for line in lines)
    return [line.removeprefix("error: ") for line in lines]


def same(left, right):
    return type(left) is type(right) and left == right


@contextlib.contextmanager
def inside(folder):
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# Properties


@st.composite
def spelled(draw, name, in_file):
    """(text, value): one of the ways to write a value of the setting `name`."""
    value = draw(KINDS[name][1])
    if in_file:
        ways = [repr(value)]
    elif isinstance(value, bool):
        ways = (
            ["true", "1", "yes", "on", "True", "ON"] if value else ["false", "0", "no", "off", "False", "No"]
        )
    else:
        ways = ["none", "None"] if value is None else [str(value)]
    if type(value) is int:
        ways += [
            f"{value:_}",
            f"({value})",
            f"{value} + 0",
            f"-(-({value}))",
            f"{value * 2}//2",
            f"{value}*1",
        ]
        ways += [f"{value}.0", f"{value}e0", f"{value * 4} / 2**2"] if abs(value) < 2**50 else []
    if type(value) is float:
        ways += [f"+{value!r}", f"1*{value!r}"] + ([str(int(value))] if value.is_integer() else [])
    return draw(st.sampled_from(ways)), value


@st.composite
def config_files(draw, number):
    """(text, {setting: value}, {setting: source}) of a valid config file."""
    lines, values, sources = ['"""Settings."""'] if draw(st.booleans()) else [], {}, {}
    for name in draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=4)):
        lines += draw(st.sampled_from([[], [""], ["# a comment"], ["", "# two", "# lines"]]))
        text, values[name] = draw(spelled(name, in_file=True))
        mark = draw(st.sampled_from(["=", " = ", ": int = ", "   =\t"]))
        lines.append(name + mark + text + draw(st.sampled_from(["", "  # why", ";"])))
        sources[name] = f"file{number}.py:{len(lines)}"
    end = draw(st.sampled_from(["\n", "\r\n"]))
    return draw(st.sampled_from(["", "\ufeff"])) + end.join([*lines, ""]), values, sources


@st.composite
def command_lines(draw):
    """(argv, texts of file0.py..., expected values, expected sources), all of it valid."""
    files = [draw(config_files(number)) for number in range(draw(st.integers(0, 2)))]
    values, sources, arguments = {}, {}, []
    for _, file_values, file_sources in files:
        values, sources = values | file_values, sources | file_sources
    for name in draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=5)):
        text, value = draw(spelled(name, in_file=False))
        key = "--" + name.replace("_", draw(st.sampled_from("-_")))
        ways = [[f"{key}={text}"]] + ([] if text.startswith("--") or text == "-h" else [[key, text]])
        if isinstance(value, bool):
            ways.append([key if value else key.replace("--", draw(st.sampled_from(["--no-", "--no_"])))])
        arguments.append(draw(st.sampled_from(ways)))
        values[name], sources[name] = value, "command line"
    for number in range(len(files)):  # files keep their order, and stand anywhere
        first = arguments.index([f"file{number - 1}.py"]) + 1 if number else 0
        arguments.insert(draw(st.integers(first, len(arguments))), [f"file{number}.py"])
    return [word for words in arguments for word in words], [text for text, _, _ in files], values, sources


@many
@given(command_lines())
def test_every_valid_command_line_gives_the_values_and_sources_that_were_written(script, line):
    argv, files, values, sources = line
    with inside(script.parent):
        for number, text in enumerate(files):
            Path(f"file{number}.py").write_bytes(text.encode())
        status, variables, record, out, err = configure(script, argv)
    assert (status, out, err) == (None, "", ""), err
    for name, default in DEFAULTS.items():
        assert same(variables[name], values.get(name, default)), name
        assert same(record.values[name], variables[name])
        assert record.sources[name] == sources.get(name, "default")
    entries = json.loads(json.dumps(record.record()))
    assert entries == {n: {"value": variables[n], "source": record.sources[n]} for n in DEFAULTS}


letters = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12)
wrong_values = [
    *["depth=abc", "depth=1.5", "depth=", "depth=2**10**10", "depth=1/0", "depth=none", "depth=1e999"],
    *["depth=\u0663", "rate=nan", "rate=inf", "rate=-inf", "rate=1j", "rate=(1", "rate=1,2", "rate=9e307*9"],
    *["rate=true", "plan=maybe", "plan=2", "plan=", "dtype=fp8", "dtype=", "width=wide", "batch=len('a')"],
]
mistakes = st.one_of(  # (argument, what its error has to say)
    letters.filter(lambda word: word.removeprefix("no_") not in KINDS).map(lambda w: (f"--{w}=1", f"--{w}")),
    st.sampled_from(wrong_values).map(lambda text: (f"--{text}", f"--{text.partition('=')[0]}=")),
    letters.map(lambda word: (f"no/such/{word}.py", f"no/such/{word}.py: No such file")),
    letters.filter(lambda word: word != "h").map(lambda word: (f"-{word}", f"unknown setting -{word}")),
    st.sampled_from([("--", "setting --"), ("--=5", "setting --"), ("-", "setting -"), ("-1", "setting -1")]),
    st.sampled_from(
        [("--depth", "--depth needs"), ("", "file ''"), (".", "file ."), ("--no-depth", "--no-depth")]
    ),
    st.just(("--no-plan=1", "--no-plan takes no value")),
)


@many
@given(st.lists(mistakes, min_size=1, max_size=8), st.data())
def test_every_mistake_of_a_command_line_is_reported_once_and_by_name(script, bad, data):
    fine = st.sampled_from(["--depth=5", "--plan", "--no-plan", "--run=x"])
    errors = errors_of(script, *[word for argument, _ in bad for word in (argument, data.draw(fine))])
    assert len(errors) == len(bad)
    for argument, named in bad:
        assert any(named in error for error in errors), (argument, errors)


words = [
    *KINDS,
    *OTHERS,
    "--",
    "-",
    "=",
    "--depth",
    "--plan",
    "no-",
    "1e3",
    "2**19",
    "none",
    "true",
    "'",
    "((((",
]
words += ["9**9**9", "-1", "file0.py", "\0", "\ufeff", "\ud800", " ", "__import__('os')"]
pieces = st.text(max_size=20) | st.sampled_from(words)
chaotic_arguments = st.lists(st.lists(pieces, max_size=4).map("".join), max_size=6)
hostile = r"""
open('executed', 'w')
depth = open('executed', 'w')
depth: open('executed', 'w') = 5
@open('executed', 'w')
def f(x=open('executed', 'w')): pass
class A: open('executed', 'w')
import executed
depth = 5
plan = True
'x'
depth += 1
depth, rate = 1, 2
depth: int
a.depth = 'x'
settings = 5
_private = 6
listed = [3]
run = f'{open("executed", "w")}'
run = 'a' 'b'
run = 'a' * 10**9
run = '\d\ud800'
depth = 10**10**10
depth = 1if 1else 2
rate = 1e999
# coding: rot13
\
""".splitlines()
sizes = [
    "depth = " + "(" * 300,
    "depth = " + "-" * 9000 + "1",
    "depth = 1" + "+1" * 5000,
    "depth = " + "9" * 5000,
]
hostile += [
    *sizes,
    "depth = 0x" + "f" * 9000,
    "\uff44epth = 3",
    "depth = \u0663",
    "\t",
    "\f",
    "\0",
    "#" * 10**5,
]
chaotic_files = st.one_of(
    st.lists(st.sampled_from(hostile) | st.text(max_size=30), max_size=5).map(
        lambda x: "\n".join(x).encode()
    ),
    st.binary(max_size=60),
    command_lines().map(lambda line: "\n".join(line[1]).encode()[:-2]),
)


@many
@given(chaotic_arguments, chaotic_files)
def test_whatever_is_given_ends_in_fitting_values_or_one_report_and_is_never_executed(script, argv, data):
    with inside(script.parent):
        Path("file0.py").write_bytes(data)
        status, variables, _, out, err = configure(script, [*argv, "file0.py"])
        assert not os.path.exists("executed")
    if "-h" in argv or "--help" in argv:
        assert status == 0 and out and not err
    elif status is None:
        assert out == err == ""
        kinds = {
            "depth": int,
            "batch": int,
            "steps": int,
            "rate": float,
            "plan": bool,
            "compiled": bool,
            "run": str,
        }
        assert all(type(variables[name]) is kind for name, kind in kinds.items())
        assert variables["width"] is None or type(variables["width"]) is int
        assert variables["dtype"] in ("auto", "bfloat16", "float32")
        assert math.isfinite(variables["rate"]) and math.isfinite(variables["depth"])
    else:
        *lines, hint = err.splitlines()
        assert status == 2 and out == "" and lines and hint.startswith("hint: ")
        assert all(line.startswith("error: ") for line in lines) and "Traceback" not in err


def calculated(parts):
    (left, a), sign, (right, b) = parts
    if None in (a, b) or (b == 0 and sign in ("/", "//")):
        return f"({left} {sign} {right})", None
    if sign == "/":
        value = a / b
    elif sign == "//":
        value = a // b
    else:
        value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    return f"({left} {sign} {right})", value if abs(value) < 1e308 else None


arithmetic = st.recursive(  # (text, its value, or None where there is no finite one)
    st.integers(0, 99).map(lambda n: (str(n), n)) | st.floats(0, 99).map(lambda x: (repr(x), x)),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//"]), inner).map(calculated),
    max_leaves=6,
)


@settings(max_examples=500, deadline=None)
@given(arithmetic)
def test_arithmetic_gives_what_python_gives_on_the_command_line_and_in_files(script, expression):
    text, value = expression
    path = script.parent / "sum.py"
    path.write_text(f"rate = {text}")
    for argument in f"--rate={text}", str(path):
        if value is None:
            assert "rate" in errors_of(script, argument)[0]
        else:
            assert same(values_of(script, argument)["rate"], float(value))


# One example for every rule


RIGHT = [
    *[
        ("--depth=6", 6),
        ("--depth=-6", -6),
        ("--depth=1e3", 1000),
        ("--depth=524_288", 524288),
        ("--depth=+5", 5),
    ],
    *[
        ("--depth=2**19", 2**19),
        ("--depth=512*1024", 512 * 1024),
        ("--depth=(2+3)*4 - 1", 19),
        ("--depth=7//2", 3),
    ],
    *[
        ("--depth=8/2", 4),
        ("--depth=0x10", 16),
        ("--depth=2**-1*4", 2),
        ("--depth=1**2000", 1),
        ("--depth=- 6", -6),
    ],
    *[("--rate=1", 1.0), ("--rate=1e-3", 1e-3), ("--rate=-.5", -0.5), ("--rate=3.", 3.0), ("--decay=1", 1.0)],
    *[
        ("--width=none", None),
        ("--width=None", None),
        ("--width=64", 64),
        ("--tag=none", None),
        ("--tag=5", "5"),
    ],
    *[("--tag=", ""), ("--run=--x", "--x"), ("--run=-h", "-h"), ("--run=a=b", "a=b"), ("--run=true", "true")],
    *[
        ("--run=none", "none"),
        ("--run= kept ", " kept "),
        ("--run=2**3", "2**3"),
        ("--dtype=bfloat16", "bfloat16"),
    ],
    *[("--plan", True), ("--no-plan", False), ("--no_compiled", False), ("--base-dir=~/x", "~/x")],
    *[(f"--plan={word}", True) for word in ("true", "1", "yes", "on", "True", "YES")],
    *[(f"--compiled={word}", False) for word in ("false", "0", "no", "off", "False")],
]


@pytest.mark.parametrize(("argument", "value"), RIGHT)
def test_one_argument_gives_one_value(script, argument, value):
    name = argument.lstrip("-").partition("=")[0].replace("-", "_").removeprefix("no_")
    assert same(values_of(script, argument)[name], value)


def test_a_value_may_stand_in_the_next_argument(script):
    line = "--steps -5 --rate 1e-3 --plan --run -x --compiled off --depth 6"
    values = values_of(script, *line.split())
    assert (values["steps"], values["rate"], values["plan"], values["run"]) == (-5, 1e-3, True, "-x")
    assert (values["compiled"], values["depth"]) == (False, 6)


def test_the_last_of_two_arguments_counts_but_both_have_to_be_right(script):
    assert values_of(script, "--depth=3", "--depth=4", "--plan", "--no-plan")["depth"] == 4
    assert errors_of(script, "--depth=x", "--depth=4") == ["--depth=x: expected a whole number, got 'x'"]


WRONG = {
    "--dept=6": "unknown setting --dept; did you mean --depth?",
    "--Depth=6": "unknown setting --Depth; did you mean --depth?",
    "-depth=6": "unknown setting -depth; did you mean --depth?",
    "---depth=6": "unknown setting ---depth; did you mean --depth?",
    "--no-plam": "unknown setting --no-plam; did you mean --no_plan?",
    "--zzz": "unknown setting --zzz",
    "--_private=6": "unknown setting --_private",
    "--after=6": "unknown setting --after",
    "--listed=6": "unknown setting --listed",
    "--a\nb\x1b[31m": r"unknown setting '--a\nb\x1b[31m'",
    "depth=6": "config file depth=6: No such file or directory; did you mean --depth?",
    "": "config file '': No such file or directory",
    "/": "config file /: Is a directory",
    "a\0b": r"config file 'a\x00b': embedded null byte",
    "/dev/zero": "config file /dev/zero: over 100,000 bytes, too long for a config file",
    "--depth": "--depth needs a value: a whole number",
    "--no-plan=true": "--no-plan takes no value",
    "--depth=1.5": "--depth=1.5: expected a whole number, got 1.5",
    "--depth=": "--depth='': expected a whole number, got ''",
    "--width=x": "--width=x: expected a whole number or none, got 'x'",
    "--dtype=bf16": "--dtype=bf16: expected one of auto, bfloat16, float32, got 'bf16'",
    "--plan=2": "--plan=2: expected true or false, got 2",
    "--rate=nan": "--rate=nan: expected a number, got 'nan'",
    "--rate=-inf": "--rate=-inf: expected a number, got '-inf'",
    "--rate=1e999": "--rate=1e999: the result is too large, or no real number",
    "--rate=(-8)**.5": "--rate=(-8)**.5: the result is too large, or no real number",
    "--rate=1/0": "--rate=1/0: the result is too large, or no real number",
    "--rate=1+": "--rate=1+: expected a number, got '1+'",
}


@pytest.mark.parametrize("argument", WRONG)
def test_one_mistake_gives_one_sentence_that_names_it(script, argument):
    assert errors_of(script, argument) == [WRONG[argument]]


ABSURD = ["2**10**10", "9**9**9**9", "(2**1024)**1024", "-(3**99999999999)", "10**308*100", "2.5**99999999"]
ABSURD += ["9" * 5000, "9" * 900, "-" * 900 + "x", "(" * 400 + "1" + ")" * 400, "1" + "+.5" * 333]


@pytest.mark.parametrize("text", ABSURD)
def test_absurd_numbers_are_refused_at_once(script, text):
    start = time.perf_counter()
    assert len(errors_of(script, f"--depth={text}")) == 1
    assert time.perf_counter() - start < 2


def test_an_unknown_setting_takes_its_value_along_so_that_one_slip_is_one_error(script):
    assert errors_of(script, "--dept", "6", "--plan") == ["unknown setting --dept; did you mean --depth?"]
    assert len(errors_of(script, "--dept", "missing.py")) == 2


def test_files_count_in_their_order_and_the_command_line_counts_wherever_it_stands(script, tmp_path):
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("depth = 1\nwidth = 1\nrate = 1\n")
    two.write_text("# the second\n\nwidth = 2; rate = 2\nrate = 3\n")
    _, _, record, _, _ = configure(script, ["--depth=9", str(one), str(two)])
    assert (record.values["depth"], record.values["width"], record.values["rate"]) == (9, 2, 3.0)
    assert record.sources["depth"] == "command line"
    assert (record.sources["width"], record.sources["rate"]) == (f"{two}:3", f"{two}:4")
    assert configure(script, [str(two), str(one)])[2].sources["width"] == f"{one}:2"


NOTHING_ELSE = "a config file holds lines of name = value, and nothing else"
WRONG_FILES = {
    "\n\ndepht = 3": ":3: unknown setting depht; did you mean depth?",
    "depth = '5'": ":1: depth: expected a whole number, got '5'",
    "plan = 1": ":1: plan: expected true or false, got 1",
    "rate = None": ":1: rate: expected a number, got None",
    "run = 5": ":1: run: expected text, got 5",
    "depth = open('x', 'w')": ":1: depth: neither a literal nor arithmetic on numbers",
    "depth = 'a' * 3": ":1: depth: arithmetic is for numbers",
    "depth = 10**10**10": ":1: depth: the result is too large, or no real number",
    "'doc'\nimport os": f":2: {NOTHING_ELSE}",
    "depth = 1\n'no docstring'": f":2: {NOTHING_ELSE}",
    "a.depth = 'x'": f":1: {NOTHING_ELSE}",
    "depth: int": f":1: {NOTHING_ELSE}",
    "_private = 5": ":1: unknown setting _private",
    "depth = 5\ndepth = = 6": ":2: invalid syntax",
    "depth = 5\n  rate = 6": ":2: unexpected indent",
}


@pytest.mark.parametrize("text", WRONG_FILES)
def test_a_mistake_in_a_file_is_reported_with_its_line(script, tmp_path, text):
    path = tmp_path / "config.py"
    path.write_text(text)
    assert errors_of(script, str(path)) == [f"{path}{WRONG_FILES[text]}"]


def test_a_file_that_is_not_text_is_reported_with_its_line(script, tmp_path):
    path = tmp_path / "config.py"
    path.write_bytes(b"depth = 5\nrun = '\xff'\n")
    assert errors_of(script, str(path))[0].startswith(f"{path}:2: ")
    path.write_bytes(b"depth = 5\0\n")
    assert errors_of(script, str(path))[0].startswith(f"{path}:1: ")


def test_a_file_that_python_would_warn_about_is_read_in_silence(script, tmp_path):
    path = tmp_path / "config.py"
    path.write_text(r"run = 'C:\data'")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert values_of(script, str(path))["run"] == r"C:\data"
    assert not seen


def test_the_script_itself_is_no_config_file(script):
    assert f"{script}:7: {NOTHING_ELSE}" in errors_of(script, str(script))


def test_all_mistakes_of_command_line_and_files_are_reported_together(script, tmp_path):
    path = tmp_path / "config.py"
    path.write_text("depht = 1\nrate = 'fast'\nprint()\n")
    errors = errors_of(script, "--dept=6", str(path), "--plan=maybe", "nowhere.py", "--depth=5")
    for part in "--dept;", ".py:1: ", ".py:2: ", ".py:3: ", "--plan=maybe", "nowhere.py":
        assert sum(part in error for error in errors) == 1
    assert len(errors) == 6


def test_the_environment_gives_a_default_that_files_and_command_line_replace(script, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "/from/environment")
    path = tmp_path / "config.py"
    path.write_text("base_dir = '/from/file'")
    for argv, value, source in [
        ([], "/from/environment", "environment NANOCHAT_BASE_DIR"),
        ([str(path)], "/from/file", f"{path}:1"),
        ([str(path), "--base_dir=/from/line"], "/from/line", "command line"),
    ]:
        _, variables, record, _, _ = configure(script, argv)
        assert (variables["base_dir"], record.sources["base_dir"]) == (value, source)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "")
    assert values_of(script)["base_dir"] == "~/.cache/nanochat"


def declared(tmp_path, text):
    """{name: Setting} of a script with this text."""
    path = tmp_path / "declares.py"
    path.write_text(text)
    return configurator._declared_settings(path)


def test_the_defaults_of_a_script_are_read_without_running_it(script, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "/elsewhere")  # gives a run's value, not the script's default
    found = configurator.defaults(script)
    assert [*found.items()] == [*DEFAULTS.items()] and configurator.defaults(str(script)) == found
    assert all(same(found[name], default) for name, default in DEFAULTS.items())


def test_the_defaults_of_the_training_script_are_known_to_other_scripts():
    found = configurator.defaults(ROOT / "scripts" / "base_train.py")
    assert found["depth"] == 20 and found["matrix_lr"] > 0 and found["model_tag"] is None


GROUPS = '''\
# far above
import os
a = 1
# Group
# goes on
b = 2  # help of b
        # indented deeper: no heading
c = 3
# dropped

# ------
# == Next: one ==
# ------

d = """
# in text
"""  # help of d
# of a statement that is no setting
os.x = 5
e = 5
'''


def test_a_heading_is_the_first_line_with_a_word_of_the_comments_above_a_setting(tmp_path):
    found = declared(tmp_path, GROUPS)
    assert [setting.group for setting in found.values()] == ["", "Group", "Group", "Next: one", "Next: one"]
    assert [setting.help for setting in found.values()] == ["", "help of b", "", "help of d", ""]


def test_settings_end_at_the_call_and_stand_in_the_block_that_holds_it(tmp_path):
    module = "a = 1\nif b:\n    c = 3\nd = 4\n"
    assert [*declared(tmp_path, f"{module}configure(globals())\ne = 5")] == ["a", "d"]
    assert [*declared(tmp_path, f"{module}x = configurator.configure(globals())\ne = 5")] == ["a", "d"]
    main = f"{module}if __name__ == '__main__':\n"
    assert [*declared(tmp_path, f"{main}    configure(globals())\n    e = 5")] == ["a", "d"]
    found = declared(tmp_path, f"{main}    # G\n    e = 5  # h\n    configure(globals())\n    f = 6")
    assert found == {"e": ((int,), 5, "G", "h")}


def test_only_single_names_with_literal_values_are_settings(tmp_path):
    text = "a = b = 1\nc, d = 1, 2\ne: int\nf = [1]\ng = f\nh = 3\nh = f\ni = 1\ni = 2.5\nj = b'x'\nk = 1j"
    found = declared(tmp_path, text + "\nl = None\nm = -1\nn += 1\no.p = 1")
    assert {name: setting.default for name, setting in found.items()} == {"i": 2.5, "m": -1}


def test_annotations_give_the_type(tmp_path):
    text = "a: float = 1\nb: str | None = None\nc: typing.Optional[int] = 3\nd: Literal['x', 1] | int = 'x'\n"
    found = declared(tmp_path, text + "e: None | bool = None\nf: typing.Literal['one'] = 'one'")
    kinds = [setting.kind for setting in found.values()]
    assert kinds == [(float,), (str, None), (int, None), ("x", 1, int), (None, bool), ("one",)]
    with pytest.raises(TypeError, match=r"not list\[int\]"):
        declared(tmp_path, "a: list[int] = 3")


def test_help_shows_every_setting_in_its_group_within_the_terminal(script, monkeypatch):
    for columns in "50", "80", "300":
        monkeypatch.setenv("COLUMNS", columns)
        status, _, _, out, err = configure(script, ["--help", "--depth=wrong"])
        assert status == 0 and err == ""
        listing = out[out.index("Model\n") :].splitlines()
        assert max(map(len, listing)) <= min(110, int(columns)) and listing == [x.rstrip() for x in listing]
        words = " ".join(out.split())
        assert words.startswith("Train a small thing. usage: python train.py [CONFIG_FILE ...]")
        assert "Model --depth=20 Transformer layers; every other size (a whole number)" in words
        assert (
            "--width=none columns (none = derived) (a whole number or none) Training --rate=0.0003" in words
        )
        assert "--dtype=auto of the products (one of auto, bfloat16, float32)" in words
        assert "--plan=false print the plan and exit (true or false)" in words
        assert all(words.count(f"--{name}=") == 1 for name in DEFAULTS)
        assert "after" not in words and "heading" not in words and "everything" not in words
    assert configure(script, ["-h"])[3] == out
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "/elsewhere")
    assert "--base_dir=/elsewhere" in configure(script, ["-h"])[3]


def test_a_script_run_by_runpy_is_configured_before_it_goes_on(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--depth=6", "--no-compiled"])
    variables = runpy.run_path(str(script), run_name="__main__")
    assert (variables["depth"], variables["compiled"], variables["after"]) == (6, False, 7)
    assert variables["settings"].record()["depth"] == {"value": 6, "source": "command line"}


@pytest.mark.parametrize("rank", [{"LOCAL_RANK": "1"}, {"RANK": "3"}, {"RANK": "0", "LOCAL_RANK": "2"}])
def test_other_processes_of_a_machine_stop_with_the_same_status_in_silence(script, monkeypatch, rank):
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    for argument, status in ("--dept=6", 2), ("--help", 0):
        stopped, _, _, out, err = configure(script, [argument])
        assert (stopped, out, err) == (status, "", "")
    monkeypatch.setenv("LOCAL_RANK", "0")  # the first process of a second machine speaks
    assert errors_of(script, "--dept=6")


# Real processes


def python(*arguments, folder, **environment):
    """The finished process of `python ARGUMENTS` in a folder, with the project importable."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def test_a_script_started_with_python_m_takes_its_settings_and_gives_its_exit_status(tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "train.py").write_text(SCRIPT + "print(depth, settings.sources['depth'])\n")
    (tmp_path / "config.py").write_text("depth = 3")
    done = python("-m", "pack.train", "config.py", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3 config.py:1\n", "")
    done = python("-m", "pack.train", "--dept=6", folder=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: unknown setting --dept; did you mean --depth?\nhint: --help")
    done = python("-m", "pack.train", "--help", folder=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    assert "python -m pack.train" in done.stdout and "--depth=20" in done.stdout


def test_an_uncaught_user_error_is_one_sentence_with_status_2_and_others_keep_their_hook(tmp_path):
    script = tmp_path / "train.py"
    header = "import configurator, nanochat\nconfigurator.configure(globals())\n"
    script.write_text(header + "raise nanochat.UserError('use 4096 or 8192')\n")
    done = python("train.py", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: use 4096 or 8192\n")
    done = python("train.py", folder=tmp_path, LOCAL_RANK="1")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    script.write_text(header + "raise ValueError('a bug')\n")
    done = python("train.py", folder=tmp_path)
    assert done.returncode == 1 and "Traceback" in done.stderr and "a bug" in done.stderr
    script.write_text("import sys\nsys.excepthook = lambda *_: print('mine')\n" + header * 2 + "1 / 0\n")
    assert python("train.py", folder=tmp_path).stdout == "mine\n"


def test_help_reaches_a_terminal_that_cannot_show_every_character(tmp_path):
    script = "import configurator\nrate = 1.0  # \u03b7 \u2192 0\nconfigurator.configure(globals())\n"
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    done = python("train.py", "--help", folder=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and r"\u03b7" in done.stdout


def test_the_configurator_imports_nothing_heavy(tmp_path):
    code = "import sys, configurator; print({'torch', 'numpy', 'pyarrow', 'tiktoken'} & sys.modules.keys())"
    assert python("-c", code, folder=tmp_path).stdout == "set()\n"
