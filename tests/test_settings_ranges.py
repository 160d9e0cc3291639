"""Every numeric setting of every script has a range, and nothing that a person gives ends in a traceback."""

import contextlib
import functools
import io
import random

import pytest
from helpers import ROOT, command

import configurator
from configurator import read_range
from nanochat import UserError
from nanochat.machine import hardware

SCRIPTS = [path for path in ROOT.glob("*/*.py") if "configurator.configure(" in path.read_text("utf-8")]
SCRIPTS = {str(path.relative_to(ROOT)): path for path in sorted(SCRIPTS) if path.parent.name != "tests"}
NUMBERS = {  # script -> its numeric settings
    script: {name: s for name, s in configurator._declared_settings(path).items() if {int, float} & {*s.kind}}
    for script, path in SCRIPTS.items()
}
pytestmark = pytest.mark.usefixtures("first_process")


def refusal(script, *argv):
    """What the configurator prints for a command line of the script; empty if it accepts it."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        configurator.configure({"__file__": str(SCRIPTS[script])}, argv)
    return err.getvalue()


def test_every_numeric_setting_of_every_script_has_a_range():
    assert NUMBERS["scripts/base_train.py"]
    missing = [f"{script}: {name}" for script, of in NUMBERS.items() for name in of if not of[name].range]
    assert not missing


def test_an_empty_text_is_accepted_or_refused_with_a_sentence():
    for script, path in SCRIPTS.items():
        for name, setting in configurator._declared_settings(path).items():
            if str in setting.kind and (said := refusal(script, f"--{name}=")):
                assert said.startswith(f"error: --{name}=''") and "empty" in said


# Every numeric setting of every script x nasty values, in one warm interpreter

# fmt: off
NASTY = [
    "0", "-0.0", "1", "-1", "-2", "2", "3", "7", "0.5", "-0.5", "1.5", "1e-300", "5e-324", "1e-6", "1e6",
    "1e9", "1e38", "1e100", "1e308", "-1e308", "1e309", "nan", "inf", "-inf", "2**20", "2**31", "2**53+1",
    "2**62", "2**63", "2**64", "10**18", "-10**18", "9" * 400, "1/0", "", " ", "many", "none", "true",
    "0x10", "1_000", "1,5", "\u0663", "\udcff",
]
# fmt: on


def accepted(script):
    """The arguments that the configurator accepts, of the nasty values, the bounds of a setting's range and
    numbers next to them; every other one got its sentence."""
    for name, setting in NUMBERS[script].items():
        bounds = [bound for pair in read_range(setting.range) for bound, _ in pair]
        near = dict.fromkeys(f"{bound}{step}" for bound in bounds for step in ("", "+1", "-1"))
        for value in (*NASTY, *near):
            argument = f"--{name}={value}"
            said = refusal(script, argument)
            if not said:
                yield argument
            else:
                assert said.startswith(f"error: --{name}=") and said.count("\n") == 2, (argument, said)


@pytest.fixture
def plan(corpus, run_script, capsys, monkeypatch):
    """A function that runs base_train --plan in this process; it returns what it printed, or its error."""
    arguments = command(corpus, corpus / "never", "--plan", "--depth=1")[1:]
    monkeypatch.setattr(hardware, "peak_flops", lambda *_: (1e12, "not measured"))

    def plan(*more):
        with pytest.raises((SystemExit, UserError)) as end:
            run_script("base_train", *arguments, *more)
        printed = capsys.readouterr().out
        assert not isinstance(end.value, SystemExit) or (end.value.code == 0 and "memory" in printed)
        return printed if isinstance(end.value, SystemExit) else str(end.value)

    return plan


@pytest.fixture(autouse=True)
def scripts_are_read_once(monkeypatch):
    monkeypatch.setattr(configurator, "_declared_settings", functools.cache(configurator._declared_settings))


@pytest.mark.parametrize("script", NUMBERS)
def test_a_nasty_number_is_a_sentence_or_a_value_in_its_range(script):
    assert [*accepted(script)] or not NUMBERS[script]


ENDLESS = [  # each of these took more than 20 seconds: all numbers up to the rows of the batch were tried
    "--total_batch_size=2**32 --max_seq_len=2 --device_batch_size=-1",
    "--total_batch_size=2**32-2 --max_seq_len=2 --device_batch_size=-1 --depth=512",
    "--num_iterations=-1 --target_flops=1e22 --total_batch_size=-1 --device_batch_size=-1",
    "--num_iterations=1e9 --total_batch_size=-1 --device_batch_size=-1 --max_seq_len=2",
]


def combinations(arguments, many):
    """Command lines of several of these arguments, each for another setting; the same ones every time."""
    draw, of_setting = random.Random(0), {}
    for argument in arguments:
        of_setting.setdefault(argument.split("=")[0], []).append(argument)
    for _ in range(many):
        yield [draw.choice(of_setting[name]) for name in draw.sample([*of_setting], draw.randint(2, 7))]


def test_a_plan_of_nasty_numbers_is_a_plan_or_a_sentence(plan):
    for line in ENDLESS:
        assert "micro-steps" in plan(*line.split()), line
    arguments = [*accepted("scripts/base_train.py")]
    for line in combinations(arguments, 40):
        assert plan(*line), line


@pytest.mark.slow
def test_a_plan_of_every_nasty_number_is_a_plan_or_a_sentence(plan):
    for argument in accepted("scripts/base_train.py"):
        assert plan(argument), argument
