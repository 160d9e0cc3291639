"""The progress of a run: of its steps exactly, and of its minutes whatever the machine does."""

import math
import os
import time
import types

import pytest
from helpers import command, losses, python, records, run
from watch import Watch

from nanochat import checkpoint
from nanochat.run import clock as clock_module
from nanochat.run.clock import Clock
from nanochat.run.metrics import LoopState

MAIN = types.SimpleNamespace(is_main=True)


def make_plan(minutes=0.0, num_iterations=1000, total_batch_size=8192):
    return types.SimpleNamespace(
        horizon=types.SimpleNamespace(minutes=minutes),
        num_iterations=num_iterations,
        total_batch_size=total_batch_size,
        expected_memory={"weights": 10**7, "optimizer state": 10**7},
    )


@pytest.fixture
def watch(monkeypatch):
    """The time, which a test moves on. The process began 8 seconds before the clock is made."""
    monkeypatch.setattr(clock_module, "time", watch := Watch())
    monkeypatch.setattr(clock_module, "seconds_since_command", lambda: watch.now - 992.0)
    return watch


def train(watch, clock, step_s, evaluation_s=3.0, eval_every=100, stop_at=math.inf):
    """The loop of a run, in which a step takes step_s(step, seconds since the command). Returns the progress
    before each step."""
    found, step = [], 0
    while True:
        last_step = clock.progress(step) >= 1 or step >= stop_at
        due = step > 0 and step % eval_every == 0
        if last_step or (due and not clock.ends_soon):
            watch.now += evaluation_s
            clock.add_evaluation(evaluation_s)
        if last_step:
            return found
        found.append(clock.progress(step))
        seconds = step_s(step, watch.now - 992.0)
        watch.now += seconds
        clock.add_step(seconds, *clock.now(step + 1))
        step += 1


MACHINES = {
    "steady": lambda step, t: 0.25,
    "the eleventh step compiles": lambda step, t: 30.0 if step == 10 else 0.3 if step < 10 else 0.2,
    "half the speed in the middle": lambda step, t: 0.2 if t < 60 else 0.4,
    "stopped for 30 seconds": lambda step, t: 30.0 if step == 200 else 0.2,
    "a slow first minute": lambda step, t: 1.5 if t < 60 else 0.2,
}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_run_in_minutes_ends_in_time_with_its_schedule_at_its_end_whatever_the_machine_does(watch, machine):
    clock = Clock(make_plan(minutes=2.0), LoopState(), MAIN, 0)
    found = train(watch, clock, MACHINES[machine])
    assert 0.95 * 120 < watch.now - 992.0 < 1.05 * 120
    assert found[0] == 0 and found == sorted(found) and found[-1] > 0.9
    # Where the speed does not change, progress is the share of the steps, as with a number of steps
    if machine in ("steady", "the eleventh step compiles"):
        share = [step / len(found) for step in range(len(found))]
        assert max(abs(a - b) for a, b in zip(found, share, strict=True)) < 0.05


def test_the_last_evaluation_has_its_time_and_none_begins_shortly_before_it(watch):
    clock = Clock(make_plan(minutes=2.0), LoopState(), MAIN, 0)
    train(watch, clock, lambda step, t: 0.25, evaluation_s=15.0, eval_every=20)
    assert watch.now - 992.0 < 1.05 * 120


def test_before_an_evaluation_was_timed_its_time_is_guessed_from_its_tokens_and_no_step_that_compiles(watch):
    clock = Clock(make_plan(minutes=2.0), LoopState(), MAIN, 0)
    task = types.SimpleNamespace(examples=[0] * 100)
    clock.expect_evaluation(30 * 8192, [task], [])  # as long as some 6 steps; or 6 minutes of such first ones
    found = train(watch, clock, lambda step, t: 60.0 if step == 0 else 1.0, 6.0, eval_every=10**6)
    assert 40 < len(found) < 49 and 0.95 * 120 < watch.now - 992.0 < 1.05 * 120


def test_a_resumed_run_goes_on_with_its_minutes_and_other_minutes_change_its_progress(watch):
    loop = LoopState()
    clock = Clock(make_plan(minutes=2.0), loop, MAIN, 0)
    train(watch, clock, lambda step, t: 0.25, stop_at=200)
    kept = LoopState(progress=loop.progress, minutes=loop.minutes, elapsed_s=loop.elapsed_s)
    assert 0.4 < kept.progress < 0.6 and kept.elapsed_s == pytest.approx(8 + 3 + 50, abs=4)
    watch.now = 1000.0  # another process, which began 8 seconds ago
    again = Clock(make_plan(minutes=2.0), LoopState(**vars(kept)), MAIN, 200)
    assert again.progress(200) == kept.progress
    assert again.seconds_left() == pytest.approx(120 - 8 - kept.elapsed_s)
    longer = Clock(make_plan(minutes=4.0), LoopState(**vars(kept)), MAIN, 200)
    assert longer.progress(200) == pytest.approx(kept.progress / 2)
    shorter = Clock(make_plan(minutes=0.5), LoopState(**vars(kept)), MAIN, 200)
    assert shorter.progress(200) == 1.0


def test_the_first_process_has_the_time_and_the_others_hear_of_it(watch):
    loop = LoopState()
    clock = Clock(make_plan(minutes=2.0), loop, types.SimpleNamespace(is_main=False), 0)
    watch.now += 50
    assert clock.now(10) == (0.0, False)
    clock.add_step(5.0, 0.4, 1.0)
    assert clock.progress(11) == loop.progress == 0.4 and clock.ends_soon


PROGRAM = """
import time
began = time.monotonic()
from nanochat.run.clock import seconds_since_command
first = seconds_since_command()
time.sleep(0.5)
print(first, seconds_since_command() - first, time.monotonic() - began)
"""


def test_the_clock_begins_with_the_process():
    began = time.monotonic()
    with python(PROGRAM) as child:
        printed, errors = child.communicate()
    seconds, tick = time.monotonic() - began, 2 / os.sysconf("SC_CLK_TCK")
    assert child.returncode == 0, errors
    first, later, waited = map(float, printed.split())
    assert 0 <= first <= seconds + tick and 0.5 - tick <= later <= waited + tick


def test_the_time_before_a_restart_by_torchrun_counts_only_once(monkeypatch):
    alone = clock_module.seconds_since_command()
    with python("input()") as torchrun:  # in place of torchrun, a process that began later than this one
        monkeypatch.setattr(os, "getppid", lambda: torchrun.pid)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        assert clock_module.seconds_since_command() < alone
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert clock_module.seconds_since_command() >= alone


# -- Whole runs

MINUTES = ["--num_iterations=-1", "--save_every=10", "--keep_checkpoints=-1"]
MINUTES += ["--warmdown_ratio=0.8", "--final_lr_frac=0.05", "--total_batch_size=128"]
A_SECOND_A_STEP = """
import runpy, sys
sys.path.append("tests")
from watch import Watch
from nanochat.run import clock
clock.time, clock.seconds_since_command, add_step = Watch(), lambda: 2.0, clock.Clock.add_step
def add_a_second(self, seconds, *reading):
    clock.time.now += self._machine.is_main  # the clocks of the others stand still
    add_step(self, 1.0, *reading)
clock.Clock.add_step = add_a_second
runpy.run_module("scripts.base_train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_every_record_of_a_run_in_minutes_has_its_progress_which_it_keeps_if_it_goes_on(
    corpus, tmp_path, processes
):
    (program := tmp_path / "program.py").write_text(A_SECOND_A_STEP)
    arguments = command(corpus, out := tmp_path / "a", *MINUTES, "--target_minutes=0.5")[1:]
    run(line := [str(program), *arguments], processes=processes)
    found = [r["progress"] for r in records(out)]
    assert found == sorted(found) and found[0] == 0 and found[-1] == 1
    for r in records(out):
        if "loss" in r and r["progress"] > 0.2:  # it has fallen linearly since then, to a twentieth
            assert r["lr_multiplier"] == pytest.approx(0.05 + 0.95 * (1 - r["progress"]) / 0.8)
    before = {r["step"]: r["progress"] for r in records(out)}
    assert "finished already" in run(line, processes=processes)
    run([*line, "--resume=10"], processes=processes)
    after = {r["step"]: r["progress"] for r in records(out)}
    assert after[10] == pytest.approx(before[10], abs=0.05) and max(after.values()) == 1


def test_a_run_whose_minutes_are_over_before_its_first_step_ends_with_a_model_and_says_so(corpus, tmp_path):
    said = run(command(corpus, tmp_path / "a", *MINUTES, "--target_minutes=0.01"))
    assert "warning: --target_minutes=0.01" in said
    assert len(losses(tmp_path / "a")) <= 3 and max(checkpoint.checkpoints_in(tmp_path / "a")) <= 3
    assert "val_bpb" in records(tmp_path / "a")[-1] and (tmp_path / "a" / "report.html").exists()


def test_steps_after_minutes_end_these_and_other_minutes_begin_anew():
    loop = LoopState(progress=0.5, minutes=2.0, elapsed_s=60.0)
    Clock(make_plan(num_iterations=800), loop, MAIN, 200)
    Clock(make_plan(minutes=10.0, num_iterations=800), loop, MAIN, 600)
    assert loop.progress == 0.75 and loop.elapsed_s == 0.75 * 600
