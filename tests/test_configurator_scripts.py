"""The configurator and scripts: what it reads from one, its help page, and real processes."""

import errno
import os
import re
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from helpers import ROOT

import configurator
from nanochat import UserError, explained

SCRIPT = '''\
"""Train a small thing.
Two lines are one paragraph.

    python -m scripts.train --depth=20 # a command keeps its line
"""

from typing import Literal

import configurator

# ------
# == Model: what is trained ==
# a comment goes on
# ------
depth = 20  # Transformer layers; every other size
width: int | None = None  # columns (none = derived) [-1, 1..2**20]
dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of the products

# Training
rate = 3e-4  # size of a step [-1, 0..1e3]
decay: float = 0  # 0 = off (see [1])
plan_only = False  # print the plan and exit
compiled: bool = True
run = "dummy"
base_dir = "~/.cache/nanochat"  # where runs live
settings = configurator.configure(globals(), aliases={"plan": "plan_only"})
after = 7
'''
HELP = """\
Train a small thing. Two lines are one paragraph.

    python -m scripts.train --depth=20 # a command keeps its line

usage: python train.py [CONFIG_FILE ...] [--setting=value ...]

Model: what is trained
  --depth=20                Transformer layers; every other size [int]
  --width=none              columns (none = derived) [-1, 1..2**20|none]
  --dtype=auto              of the products [auto|bfloat16|float32]

Training
  --rate=0.0003             size of a step [-1, 0..1e3]
  --decay=0                 0 = off (see [1]) [float]
  --plan=false              print the plan and exit [bool]
  --compiled=true           [bool]
  --run=dummy               [text]
  --base_dir=~/.cache/nanochat  where runs live [text]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, first_process):
    """A folder with the script train.py, in which the test runs."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# What a script declares


def declared(text):
    """{name: Setting} of a script with this text."""
    Path("declares.py").write_text(text)
    return configurator._declared_settings("declares.py")


def test_settings_end_at_the_call():
    module = "a = 1\nif b:\n    c = 3\nd = 4\nx = y = 1\nf, g = 1, 2\nh: int\ni = [1]\nj = d\n"
    assert [*declared(f"{module}configure(globals())\ne = 5")] == ["a", "d"]
    assert [*declared(f"{module}x = configurator.configure(globals())\ne = 5")] == ["a", "d"]
    main = f"{module}if __name__ == '__main__':\n"
    assert [*declared(f"{main}    configure(globals())\n    e = 5")] == ["a", "d"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a: list[int] = 3", "use int, float, str, bool, Literal or X | None"),
        ("a: int = 1.5", "a whole number"),
        ("a: Literal['on', 'off'] = 'of'", "on, off"),
        ("a = -2.0  # (-1 = off) [-1, 0..5]", "a number from 0 to 5, or -1 (off)"),
        ("a = 1  # [5..0]", "[5..0]"),
        ("a = 1  # [few]", "[few]"),
        ("a: int | None = None  # [1..]", "[1..]"),
    ],
)
def test_a_setting_whose_annotation_or_range_does_not_allow_its_default_is_refused_with_its_line(line, words):
    with pytest.raises(UserError, match=rf"declares\.py:2: a: .*{re.escape(words)}"):
        declared(f"b = 1\n{line}")


def test_the_defaults_of_a_script_are_read_without_running_it(folder, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "/elsewhere")  # gives a run's value, not the script's default
    (folder / "train.py").write_text(SCRIPT.replace("import configurator", "open('executed', 'w')"))
    found = configurator.defaults("train.py")
    assert [*found] == ["depth", "width", "dtype", "rate", "decay", "plan", "compiled", "run", "base_dir"]
    assert [*found.values()] == [20, None, "auto", 3e-4, 0, False, True, "dummy", "~/.cache/nanochat"]
    assert configurator.defaults(folder / "train.py") == found and not (folder / "executed").exists()


# What a person sees


def stopped(capsys, *argv):
    """(status, stdout, stderr) of the script in this process, with arguments that end it."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, "argv", ["train.py", *argv])
        runpy.run_path("train.py", run_name="__main__")
    return stop.value.code, *capsys.readouterr()


def test_help_gives_each_setting_one_line_in_its_group_where_the_terminal_has_room(capsys, monkeypatch):
    for columns in "80", "110", "300":
        monkeypatch.setenv("COLUMNS", columns)
        assert stopped(capsys, "--help", "--depth=wrong") == (0, HELP, "")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "/elsewhere")
    assert stopped(capsys, "-h")[1].split() == HELP.replace("~/.cache/nanochat", "/elsewhere").split()


@pytest.mark.parametrize("columns", [10, 40, 50, 63])
def test_help_is_wrapped_to_a_narrow_terminal_without_losing_a_word(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = stopped(capsys, "--help")
    assert "".join(out.split()) == "".join(HELP.split())
    whole = "[auto", "bfloat16", "float32]", "[-1, 0..1e3]"  # a choice and a range stay on one line
    assert all(word in out for word in whole)
    wrapped = [line for line in out.splitlines() if "python" not in line]
    assert max(map(len, wrapped)) <= max(40, columns) and len(out.splitlines()) > len(HELP.splitlines())
    assert "\n    python -m scripts.train --depth=20 # a command keeps its line\n" in out


@pytest.mark.parametrize("rank", [{"LOCAL_RANK": "1"}, {"RANK": "3"}, {"RANK": "0", "LOCAL_RANK": "2"}])
def test_other_processes_of_a_machine_stop_with_the_same_status_in_silence(capsys, monkeypatch, rank):
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    assert stopped(capsys, "--dept=6") == (2, "", "") and stopped(capsys, "--help") == (0, "", "")
    monkeypatch.setenv("LOCAL_RANK", "0")  # the first process of a second machine speaks
    assert "error: unknown setting --dept" in stopped(capsys, "--dept=6")[2]


@pytest.mark.parametrize("error, words", [
    (PermissionError(13, "Permission denied", "/a/colleague"), "/a/colleague: no permission"),
    (OSError(errno.ENAMETOOLONG, "File name too long", "a" * 300), "aaa...; give a shorter name"),
    (MemoryError(), "lacks memory"),
    (RuntimeError("can't start new thread"), "ulimit -u"),
    (pa.ArrowMemoryError("malloc of size 64 failed"), "ulimit -v"),
    (pa.ArrowException("Unknown error: Failed to launch worker thread: no resources"), "ulimit -u"),
    (pa.ArrowException("Unknown error: a wrong type"), None),
    (ValueError("a mistake in the code"), None),
])  # fmt: skip
def test_what_a_machine_refuses_is_a_sentence_and_a_mistake_in_the_code_is_none(error, words):
    found = explained(error)
    assert found is error if words is None else isinstance(found, UserError) and words in str(found)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes of POSIX")
def test_a_config_file_comes_from_a_program_and_a_pipe_without_one_is_refused(folder, capsys, monkeypatch):
    monkeypatch.setattr(configurator, "PIPE_S", 0.1)
    os.mkfifo("settings.py")
    status, _, said = stopped(capsys, "settings.py")
    assert status == 2 and "settings.py: it is a pipe or a terminal to which nobody writes" in said
    terminal = os.ttyname(os.openpty()[1])  # as /dev/stdin is
    assert "to which nobody writes" in stopped(capsys, terminal)[2]
    monkeypatch.setattr(configurator, "PIPE_S", 60)
    writer = threading.Thread(target=lambda: Path("settings.py").write_text("depht = 7"))
    writer.start()
    assert "settings.py:1: unknown setting depht" in stopped(capsys, "settings.py")[2]
    writer.join()


def test_help_shows_the_settings_with_a_star_and_help_all_shows_all(folder, capsys):
    (folder / "train.py").write_text(
        SCRIPT.replace("# Transformer", "# * Transformer").replace("# size", "# *size")
    )
    status, out, _ = stopped(capsys, "--help")
    assert status == 0
    shown = [line.split("=")[0].strip() for line in out.splitlines() if line.startswith("  --")]
    assert shown == ["--depth", "--rate"] and "--help=all" in out and "*" not in out
    assert stopped(capsys, "--help=all")[1] == HELP


# Real processes


def python(*arguments, **environment):
    """(exit status, stdout, stderr) of `python ARGUMENTS` in the test's folder; it can import the project."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def test_a_script_started_with_python_m_takes_its_settings_and_gives_its_exit_status(folder):
    (folder / "pack").mkdir()
    show = "print(depth, settings.sources['depth'], plan_only, settings.record()['plan'])\n"
    (folder / "pack" / "train.py").write_text(SCRIPT + show)
    (folder / "config.py").write_text("depth = 3")
    printed = "3 config.py:1 True {'value': True, 'source': 'command line'}\n"
    assert python("-m", "pack.train", "config.py", "--plan") == (0, printed, "")
    status, out, err = python("-m", "pack.train", "--dept=6")
    assert (status, out) == (2, "")
    assert err.startswith("error: unknown setting --dept; did you mean --depth?\nhint: --help")
    status, out, err = python("-m", "pack.train", "--help")
    assert (status, err) == (0, "") and "usage: python -m pack.train" in out and "--depth=20" in out


def test_an_uncaught_user_error_is_one_sentence_with_status_2_and_others_keep_their_hook(folder):
    script, header = folder / "train.py", "import configurator, nanochat\nconfigurator.configure(globals())\n"
    script.write_text(header + "raise nanochat.UserError('use 4096 or 8192')\n")
    assert python("train.py") == (2, "", "error: use 4096 or 8192\n")
    assert python("train.py", LOCAL_RANK="1") == (2, "", "")
    explain = (
        header
        + """
nanochat.explain_errors(lambda error: 'never' if isinstance(error, KeyError) else None)
nanochat.explain_errors(lambda error: 'use less' if isinstance(error, MemoryError) else 1 / 0)
raise """
    )
    script.write_text(explain + "MemoryError('at 0x7f')\n")
    assert python("train.py") == (2, "", "error: use less\n")
    script.write_text(explain + "ValueError('a bug')\n")
    status, _, err = python("train.py")
    assert status == 1 and "Traceback" in err and "a bug" in err and "ZeroDivision" not in err
    script.write_text("import sys\nsys.excepthook = lambda *_: print('mine')\n" + header * 2 + "1 / 0\n")
    assert python("train.py")[1] == "mine\n"


@pytest.mark.parametrize(
    ("script", "happens"),
    [
        ("base_train", "raise KeyboardInterrupt"),
        ("export", "with contextlib.suppress(KeyboardInterrupt): signal.raise_signal(signal.SIGINT)"),
    ],
    ids=["raised", "lost"],  # in what torch imports from C++ it is lost
)
def test_ctrl_c_while_torch_is_imported_ends_the_script_and_prints_nothing(folder, script, happens):
    (folder / "torch.py").write_text(f"import contextlib, signal\n{happens}\nraise SystemExit\n")
    status, *printed = python("-m", f"scripts.{script}")
    assert status and printed == ["", ""]


def test_the_configurator_imports_nothing_heavy():
    code = "import sys, configurator; print({'torch', 'numpy', 'pyarrow', 'tiktoken'} & sys.modules.keys())"
    assert python("-c", code)[1] == "set()\n"
