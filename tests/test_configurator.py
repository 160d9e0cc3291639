"""What the configurator makes of command lines and config files: valid ones, wrong ones, chaotic ones."""

import contextlib
import io
import json
import math
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import configurator

SCRIPT = """\
from typing import Literal

import configurator

_private = 5
computed = len("abc")
listed = [1, 2]
unknown_type = None

# Model
depth = 20  # Transformer layers; every other size
width: int | None = None  # columns (none = derived)
rate = 3e-4  # step size
decay: float = 0  # 0 = off
batch = 2**4 * 1024
steps = -1  # -1 = as long as it takes
share = 0.5  # of the run [0..1]
every: int | None = 10  # steps between saves (-1 = off) [-1, 1..2**10, 1e6]
dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of the products
plan_only = False  # print the plan and exit
compiled: bool = True
run = "dummy"  # name
tag: str | None = None
note = ""  # an empty default: it may be empty
prompt = "def"  # a text to continue; may be empty
base_dir = "~/.cache/nanochat"
settings = configurator.configure(globals(), aliases={"plan": "plan_only"})
after = 7
"""
texts = st.text() | st.sampled_from(["--x", "-x", "-h", "a=b", "true", "none", " kept ", "2**3", "5", ""])
texts = texts.filter(lambda text: "\0" not in text)
full = texts.filter(str.strip)
KINDS = {  # setting -> its default and the values it may take
    "depth": (20, st.integers(-(2**70), 2**70)),
    "width": (None, st.none() | st.integers(-(2**70), 2**70)),
    "rate": (3e-4, st.floats(-1e300, 1e300)),
    "decay": (0, st.floats(-1e300, 1e300)),
    "batch": (16384, st.integers(-(10**6), 10**6)),
    "steps": (-1, st.integers(-10, 10)),
    "share": (0.5, st.floats(0, 1)),
    "every": (10, st.none() | st.sampled_from([-1, 10**6]) | st.integers(1, 2**10)),
    "dtype": ("auto", st.sampled_from(["auto", "bfloat16", "float32"])),
    "plan": (False, st.booleans()),
    "compiled": (True, st.booleans()),
    "run": ("dummy", full),
    "tag": (None, st.none() | full.filter(lambda text: text.lower() != "none")),
    "note": ("", texts),
    "prompt": ("def", texts),
    "base_dir": ("~/.cache/nanochat", full),
}
DEFAULTS = {name: default for name, (default, _) in KINDS.items()}
VARIABLES = {name: name for name in KINDS} | {"plan": "plan_only"}  # in the script
OTHERS = {"_private": 5, "computed": 3, "listed": [1, 2], "unknown_type": None, "after": "not yet"}
many = settings(max_examples=300)
pytestmark = pytest.mark.usefixtures("first_process")


@pytest.fixture(scope="module", autouse=True)
def script(tmp_path_factory):
    """A script in the folder in which these tests run, so that they name config files without a folder."""
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)
        yield path


def configure(argv):
    """(exit status or None, the script's globals, Settings or None, stdout, stderr) of one call."""
    defaults = {VARIABLES[name]: default for name, default in DEFAULTS.items()}
    variables = {"__file__": "train.py", "__doc__": "Train.", **defaults, **OTHERS}
    out, err = io.StringIO(), io.StringIO()
    status = record = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            record = configurator.configure(variables, argv)
        except SystemExit as stop:
            status = stop.code
    assert all(variables[name] == value for name, value in OTHERS.items())  # never a changed non-setting
    assert variables.keys() == {"__file__", "__doc__", *defaults, *OTHERS}
    if status is not None:
        assert {name: variables[name] for name in defaults} == defaults
    return status, variables, record, out.getvalue(), err.getvalue()


def settings_of(*argv):
    """The `Settings` after a command line that has to be accepted, in silence."""
    status, variables, record, out, err = configure(list(argv))
    assert (status, out, err) == (None, "", ""), err
    assert all(same(record.values[name], variables[VARIABLES[name]]) for name in DEFAULTS)
    entries = {name: {"value": record.values[name], "source": record.sources[name]} for name in DEFAULTS}
    assert json.loads(json.dumps(record.record())) == entries
    return record


def errors_of(*argv):
    """The error lines, without their marks, of a command line that has to be refused."""
    status, _, _, out, err = configure(list(argv))
    *lines, hint = err.splitlines() or [""]
    assert status == 2 and out == "" and hint.startswith("hint: --help"), (status, out, err)
    assert lines and all(line.startswith("error: ") for line in lines)
    return [line.removeprefix("error: ") for line in lines]


def write(name, text):
    """A config file in the tests' folder; its name."""
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


def same(left, right):
    return type(left) is type(right) and left == right


# Valid input: what is written is what counts


@st.composite
def spelled(draw, name, in_file):
    """(text, value): one of the ways to write a value of the setting `name`."""
    value = draw(KINDS[name][1])
    short = ["bf16"] if (name, value) == ("dtype", "bfloat16") else []
    if in_file:
        ways = [*map(repr, [value, *short])]
    elif isinstance(value, bool):
        words = "false False 0 no No off OFF", "true True 1 yes YES on ON"
        ways = words[value].split()
    else:
        ways = ["none", "None"] if value is None else [str(value), *short]
    if type(value) is int:
        ways += [f"{value:_}", f"({value})", f"{value} + 0", f"-(-({value}))", f"{value * 2}//2", hex(value)]
        ways += [f"+{value}", f"- {-value}", f"{value}*1", f"({value - 3}+1)*1 + 2"]
    if type(value) is int and abs(value) < 2**50:
        ways += [f"{value}.0", f"{value}e0", f"{value * 4} / 2**2", f"{value * 4}*2**-2"]
    if type(value) is float:
        ways += [f"+{value!r}", f"1*{value!r}"]
        ways += [f"{int(value)}", f"{int(value)}."] if value.is_integer() else []
        ways += [f"{value!r}".replace("0.", ".")] if 0.001 < abs(value) < 1 else []
    return draw(st.sampled_from(ways)), value


@st.composite
def config_files(draw, number):
    """(text, {setting: value}, {setting: source}) of a valid config file."""
    lines, values, sources = ['"""Settings."""'] if draw(st.booleans()) else [], {}, {}
    for name in draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=4)):
        lines += draw(st.sampled_from([[], [""], ["# a comment"], ["", "# two", "# lines"]]))
        text, values[name] = draw(spelled(name, in_file=True))
        mark = draw(st.sampled_from(["=", " = ", ": int = ", "   =\t"]))
        typed = draw(st.sampled_from([name, VARIABLES[name]]))
        lines.append(typed + mark + text + draw(st.sampled_from(["", "  # why", ";"])))
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
        key = "--" + draw(st.sampled_from([name, VARIABLES[name]])).replace("_", draw(st.sampled_from("-_")))
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
def test_every_valid_command_line_gives_the_values_and_sources_that_were_written(line):
    argv, files, values, sources = line
    for number, text in enumerate(files):
        write(f"file{number}.py", text)
    record = settings_of(*argv)
    for name, default in DEFAULTS.items():
        assert same(record.values[name], values.get(name, default)), name
        assert record.sources[name] == sources.get(name, "default")


def test_the_environment_gives_a_default_that_files_and_command_line_replace(monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "/environment")
    path = write("config.py", "base_dir = '/file'")
    for argv, value, source in [
        ([], "/environment", "environment NANOCHAT_BASE_DIR"),
        ([path], "/file", "config.py:1"),
        ([path, "--base_dir=/line"], "/line", "command line"),
    ]:
        record = settings_of(*argv)
        assert (record.values["base_dir"], record.sources["base_dir"]) == (value, source)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "")  # as if it were not set
    assert settings_of().values["base_dir"] == "~/.cache/nanochat"
    monkeypatch.setenv("NANOCHAT_BASE_DIR", " ")
    assert errors_of()[0].startswith("NANOCHAT_BASE_DIR: ")


# Mistakes: each is reported once, by name, with what would be right

WRONG = {  # an argument -> words of its error
    "--dept=6": "unknown --dept; --depth?",
    "-depth=6": "unknown -depth; --depth?",
    "--no-plam": "unknown --no-plam; --no_plan?",
    "--plan_onyl": "unknown --plan_onyl; --plan_only?",
    "--no-depth": "unknown --no-depth; --depth?",
    "--base": "unknown --base; --base_dir?",  # and what other programs call a setting
    "--config=a.py": "--config path",
    "--bf16": "--bf16 --dtype=bfloat16",
    "--n-layer=4": "--n-layer --depth",
    "--gpus=8": "--gpus torchrun",
    "--a\nb\x1b[31m": r"unknown '--a\nb\x1b[31m'",
    "--no-plan=true": "--no-plan no value",
    "depth=6": "file depth=6: No such --depth?",
    "": "file '': No such",
    "/": "file /: directory",
    "/dev/zero": "file /dev/zero: 100,000 bytes",
    "--depth": "--depth needs a whole number",
    "--depth=\u0663": "--depth=' whole number",
    "--run=": "--run='': empty",
}
for key in "--zzz", "--_private", "--after", "--", "-1":
    WRONG |= {key: f"unknown {key}", f"{key}=1": f"unknown {key}"}
for name, words, bad in [
    ("depth", "whole number", ["", "1.5", "none", "len('a')"]),
    ("width", "whole number or none", ["x"]),
    ("rate", "number", ["nan", "-inf", "1j", "(1", "true"]),
    ("dtype", "one of auto, bfloat16, float32", ["", "int8", "fp16"]),
    ("plan", "true or false", ["", "2"]),
    ("share", "from 0 to 1", ["-0.1", "1.0001"]),
    ("every", "from 1 to 2**10 -1 (off) 1e6", ["0", "-2", "2**10+1"]),
    ("depth", "too large", ["1e999", "(-8)**.5", "1/0", "2**10**10"]),
]:
    WRONG |= {f"--{name}={text}": f"--{name}= {words}" for text in bad}


def tells(error, words):
    return all(word in error for word in words.split(" "))


def test_one_mistake_gives_one_sentence_that_names_it():
    for argument, words in WRONG.items():
        (error,) = errors_of(argument)
        assert tells(error, words), error
    assert tells(errors_of("--dept", "6", "--plan")[0], WRONG["--dept=6"])  # 6 is no second mistake
    assert len(errors_of("--dept", "missing.py")) == 2


letters = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12)
unknown = letters.filter(lambda word: word.removeprefix("no_") not in {*KINDS, "plan_only"})
mistakes = st.one_of(  # (argument, words of its error)
    st.sampled_from(sorted(WRONG.items())),
    unknown.map(lambda word: (f"--{word}=1", f"unknown --{word}")),
    letters.filter(lambda word: word != "h").map(lambda word: (f"-{word}", f"unknown -{word}")),
    letters.map(lambda word: (f"no/{word}.py", f"no/{word}.py: No such")),
)


@many
@given(st.lists(mistakes, min_size=1, max_size=8), st.data())
def test_every_mistake_of_files_and_command_line_is_reported_once_and_by_name(bad, data):
    path = write("config.py", "depht = 1\nrate = 'fast'\nprint()\n")
    fine = st.sampled_from(["--depth=5", "--plan", "--no-plan", "--run=x"])
    errors = errors_of(path, *[word for argument, _ in bad for word in (argument, data.draw(fine))])
    assert len(errors) == len(bad) + 3
    for words in ["config.py:1: depht", "config.py:2: rate", "config.py:3:", *(words for _, words in bad)]:
        assert any(tells(error, words) for error in errors), (words, errors)


ABSURD = ["9**9**9**9", "(2**1024)**1024", "-(3**99999999999)", "10**308*100", "2.5**99999999", "9" * 5000]
ABSURD += ["9" * 900, "-" * 900 + "x", "(" * 400 + "1" + ")" * 400, "1" + "+.5" * 333]


def test_absurd_numbers_are_refused_at_once_and_large_exponents_are_not():
    for text in ABSURD:
        start = time.process_time()
        assert len(errors_of(f"--depth={text}")) == 1
        assert time.process_time() - start < 2
    assert settings_of("--depth=1**2000").values["depth"] == 1


WRONG_FILES = {  # a text -> words of its error, after the file's name
    "\n\ndepht = 3": ":3: unknown depht; depth?",
    "depth = '5'": ":1: depth: whole number",
    "run = ''": ":1: run: empty",
    "\nevery = 0": ":2: every: from 1 to 2**10",
    "run = f'{depth}'": ":1: run: a value is",
    "depth = 'a' * 10**9": ":1: depth: numbers only",
    "'doc'\nimport os": ":2: name = value",
    "depth: int": ":1: name = value",
    "_private = 5": ":1: unknown _private",
    "depth = 5\ndepth = = 6": ":2: invalid syntax",
    b"depth = 5\nrun = '\xff'\n": ":2:",
    b"depth = 5\0\n": ":1:",
}


def test_a_mistake_in_a_file_is_reported_with_its_line():
    for text, words in WRONG_FILES.items():
        (error,) = errors_of(write("config.py", text))
        assert tells(error, f"config.py{words}"), error


# Chaos: nothing is executed, and nothing ends in a traceback

words = [*KINDS, *OTHERS, "--", "-", "=", "--depth", "--plan", "no-", "1e3", "2**19", "none", "true", "(((("]
words += ["9**9**9", "-1", "file0.py", "'", "\0", "\ufeff", "\ud800", " ", "__import__('os')"]
arguments = st.lists(st.text(max_size=20) | st.sampled_from(words), max_size=4).map("".join)
hostile = r"""
open('executed', 'w')
depth = open('executed', 'w')
depth: open('executed', 'w') = 5
@open('executed', 'w')
def f(x=open('executed', 'w')): pass
run = f'{open("executed", "w")}'
import executed
depth = 5
plan = True
depth += 1
depth, rate = 1, 2
run = 'a' 'b'
run = '\d\ud800'
depth = 1if 1else 2
rate = 1e999
# coding: rot13
\
""".splitlines()
hostile += ["depth = " + "(" * 300, "depth = 0x" + "f" * 9000, "\uff44epth = 3"]
hostile += ["\t", "\f", "\0", "#" * 10**5]
wrong = [text for text in WRONG_FILES if isinstance(text, str)]
lines = st.lists(st.sampled_from([*hostile, *wrong]) | st.text(max_size=30), max_size=5)
files = st.one_of(
    lines.map(lambda chosen: "\n".join(chosen).encode()),
    st.binary(max_size=60),
    command_lines().map(lambda line: "\n".join(line[1]).encode()[:-2]),
)


@many
@given(st.lists(arguments, max_size=6), files)
def test_whatever_is_given_ends_in_fitting_values_or_one_report_and_is_never_executed(argv, data):
    status, variables, _, out, err = configure([*argv, write("file0.py", data)])
    assert not os.path.exists("executed")
    if "-h" in argv or "--help" in argv:
        assert status == 0 and out and not err
    elif status is None:
        assert out == err == ""
        kinds = dict(depth=int, batch=int, steps=int, rate=float, plan_only=bool, compiled=bool, run=str)
        assert all(type(variables[name]) is kind for name, kind in kinds.items())
        assert variables["width"] is None or type(variables["width"]) is int
        assert variables["dtype"] in ("auto", "bfloat16", "float32")
        assert 0 <= variables["share"] <= 1 and variables["every"] in (None, -1, 10**6, *range(1, 2**10 + 1))
        assert variables["run"].strip() and variables["base_dir"].strip()
        assert math.isfinite(variables["rate"]) and math.isfinite(variables["depth"])
    else:
        *report, hint = err.splitlines()
        assert status == 2 and out == "" and report and hint.startswith("hint: ")
        assert all(line.startswith("error: ") for line in report) and "Traceback" not in err
