"""A horizon in minutes: how many steps fit, and how a run goes on with the number that was found."""

import json
import os
import re
import shutil
import time
from dataclasses import dataclass

import pytest
from helpers import ROOT, command, losses, make_plan, python_m, records

import configurator
from nanochat import UserError, optim
from nanochat.checkpoint import find
from nanochat.gpt import GPT, GPTConfig
from nanochat.machine.hardware import Hardware
from nanochat.plan import scaling, time_budget
from nanochat.plan.time_budget import Cost, FirstSteps, Work

DEFAULTS = configurator.defaults(ROOT / "scripts" / "base_train.py")
DIAL = {"depth": 4, "max_seq_len": 512, "target_minutes": 5.0}
PEAK = 1e12


def horizon(before=None, **changes):
    return scaling.horizon_of(DEFAULTS | DIAL | changes, 4096, PEAK, before)[1]


# ------------------------------------------------------------------------------------------------------
# Which horizon decides, and the guess before anything is timed


def test_the_first_positive_one_decides_and_minutes_come_before_the_ratio():
    assert horizon(num_iterations=7).num_iterations == 7
    by_flops = horizon(target_flops=1e12)
    assert by_flops.reason.startswith("1e+12 FLOPs") and not by_flops.estimated and not by_flops.minutes
    assert horizon().minutes == 5 and horizon().estimated
    assert "tokens for each of" in horizon(target_minutes=-1.0).reason


def test_before_timing_the_minutes_are_a_guess_of_flops_at_the_assumed_share_of_the_peak():
    config, guessed = scaling.horizon_of(DEFAULTS | DIAL | {"total_batch_size": 2048}, 4096, PEAK)
    tokens = 0.3 * PEAK * 300 / scaling.on_meta(config).flops_per_token()
    assert guessed.num_iterations == round(tokens / 2048)
    same_flops = horizon(target_minutes=-1.0, target_flops=0.3 * PEAK * 300)
    assert horizon().total_batch_size == same_flops.total_batch_size > 0
    hardware = Hardware("cpu", 1, None, "", 1, PEAK, "")
    tokens = scaling.horizon_tokens(DEFAULTS | DIAL | {"total_batch_size": 2048}, hardware, 4096)
    assert tokens == guessed.tokens


def test_as_long_as_the_steps_are_a_guess_their_time_is_that_of_the_minutes():
    for peak in (1e11, 1e15):  # a slow machine begins to compile for as many minutes as a fast one
        plan, _ = make_plan(target_minutes=5.0, total_batch_size=4096, peak_flops=peak)
        assert plan.expected_seconds == 300 and plan.num_iterations >= 100
    found = plan.with_iterations(50, "timed", DEFAULTS)
    assert found.expected_seconds == 50 * plan.expected_step_seconds < 300


def test_a_resumed_run_keeps_its_number_of_steps_and_its_batch_on_any_machine():
    before = {"num_iterations": 1234, "total_batch_size": 8192, "target_minutes": 5.0}
    kept = horizon(before)
    assert (kept.num_iterations, kept.total_batch_size, kept.estimated) == (1234, 8192, False)
    assert horizon(before, total_batch_size=4096).total_batch_size == 4096
    longer = horizon(before, target_minutes=12.0)
    assert longer.num_iterations == round(1234 * 12 / 5) and not longer.estimated
    assert "1,234 steps as timed for 5 minutes, times 12 / 5" in longer.reason
    again = {"num_iterations": longer.num_iterations, "total_batch_size": 8192, "target_minutes": 12.0}
    assert horizon(again, target_minutes=12.0).num_iterations == longer.num_iterations
    other_horizon = {"num_iterations": 50, "total_batch_size": 8192}  # it was not in minutes
    assert horizon(other_horizon).num_iterations == 50 and "num_iterations" in horizon(other_horizon).reason


def test_the_optimizer_gets_the_rates_and_decays_of_the_number_of_steps_that_was_found():
    guess, _ = make_plan(10**6, target_minutes=5.0, total_batch_size=4096, peak_flops=1e11)
    plan = guess.with_iterations(400, "timed", DEFAULTS)  # reads the text 1.6 times
    assert guess.table_decay == 0 < plan.table_share < 1
    model = GPT(GPTConfig(2, 32, 2, 50, 16))
    groups, expected = (
        optim.parameter_groups(model, p.rates, p.weight_decay, p.table_decay) for p in (guess, plan)
    )
    optimizer = optim.MuonAdamW(groups)
    time_budget._set_rates(optimizer, model, plan)
    for group, new in zip(optimizer.param_groups, expected, strict=True):
        assert group["initial_lr"] == group["lr"] == new["lr"]
        assert group["initial_weight_decay"] == group["weight_decay"] == new["weight_decay"]
    assert sum(group["weight_decay"] > 0 for group in expected if group["method"] == "adamw") == 2


def test_a_text_that_is_too_short_is_refused_when_the_number_of_steps_is_known():
    plan, text = make_plan(10**4, target_minutes=5.0, total_batch_size=4096)
    assert plan.epochs > 1000 and not plan.refusal("") and "epochs" not in text.partition("warning")[2]
    assert not plan.with_iterations(1, "timed", DEFAULTS).refusal("")
    assert "would read its text" in plan.with_iterations(1000, "timed", DEFAULTS).refusal("")


# ------------------------------------------------------------------------------------------------------
# How many steps fit


def by_hand(cost: Cost, steps: int) -> float:
    """Seconds of a run, step by step."""
    seconds = cost.waited
    for step in range(cost.done, steps + 1):  # what is due after the steps done has been done
        for work in cost.work:
            if step == steps or (work.every > 0 and step > cost.done and step % work.every == 0):
                seconds += work.seconds
        seconds += cost.step * (step < steps)
    return seconds


@pytest.mark.parametrize("done", [0, 1, 7, 15])
@pytest.mark.parametrize("every", [-1, 1, 7, 100, 10**9])
@pytest.mark.parametrize("minutes", [0.5, 1.0, 3.3])
def test_the_steps_are_the_most_that_end_in_time(done, every, minutes):
    work = [Work("validation", 0.913, every), Work("tasks", 0.7, 30), Work("end", 2.0, -1)]
    cost = Cost(8.5, 0.25, work, done)
    steps = cost.steps(minutes)
    assert steps > done and by_hand(cost, steps) <= 60 * minutes < by_hand(cost, steps + 1)
    assert cost.seconds(steps) == pytest.approx(by_hand(cost, steps))


def test_minutes_in_which_nothing_fits_are_refused_with_some_that_do():
    cost = Cost(20.0, 1.0, [Work("validation", 30.0, -1)])
    with pytest.raises(
        UserError, match=r"target_minutes 0.5 is too short: .* --target_minutes=1 or more"
    ) as e:
        cost.steps(0.5)
    assert "20 s have gone into the start and 0 steps" in str(e.value) and cost.steps(1.0) == 10
    with pytest.raises(UserError, match=r"into the start and 12 steps, .* --target_minutes=1 or more"):
        Cost(20.0, 1.0, [Work("validation", 30.0, -1)], 12).steps(0.5)
    assert Cost(20.0, 1.0, [Work("validation", 30.0, -1)], 12).steps(1.0) == 22


@dataclass
class Loop:
    """What FirstSteps sees of a training loop: a plan, the processes and the progress, whose clock it is."""

    minutes: float
    others: list = ()  # what the other processes say, as functions of what this one says
    num_iterations: int = 1000
    train_seconds: float = 0.0

    @property
    def horizon(self):
        return self

    def all_gather(self, mine):
        return [mine, *(other(mine) for other in self.others)]


def timed_steps(monkeypatch, loop: Loop, step_seconds, first: int, since_command=0.0):
    """(steps logged when the time of a step is known, that time) in a loop with such steps."""
    monkeypatch.setattr(time_budget, "seconds_since_command", lambda: since_command + loop.train_seconds)
    first_steps = FirstSteps(loop, loop, loop, first)
    for steps in range(10**6):
        if first_steps.are_timed(steps):
            return steps, first_steps.seconds
        loop.train_seconds += step_seconds(steps)


def test_only_steps_that_are_like_the_later_ones_count(monkeypatch):
    def seconds(step):  # ten eager ones, one that compiles, one that fills caches
        return 9.0 if step < 10 else 40.0 if step == 10 else 5.0 if step == 11 else 0.5

    steps, step_seconds = timed_steps(monkeypatch, Loop(minutes=10.0), seconds, first=10)
    assert step_seconds == pytest.approx(0.5) and steps == 12 + 0.01 * 600 / 0.5
    # Not more than half a minute of steps, not less than three of them
    assert timed_steps(monkeypatch, Loop(1000.0), lambda step: 0.5, 0) == (62, pytest.approx(0.5))
    assert timed_steps(monkeypatch, Loop(10.0), lambda step: 7.0, 0) == (5, pytest.approx(7.0))
    # Half of the guessed steps are done
    assert timed_steps(monkeypatch, Loop(9.0, num_iterations=20), lambda step: 0.1, 0)[0] == 10


def test_after_half_of_the_minutes_what_has_been_timed_has_to_do(monkeypatch):
    assert timed_steps(monkeypatch, Loop(1.0), lambda step: 8.0, first=10) == (4, 8.0)
    compiles = {10: 40.0}  # and takes all the time
    steps, seconds = timed_steps(monkeypatch, Loop(1.0), lambda step: compiles.get(step, 0.2), 10)
    assert steps == 11 and seconds == pytest.approx(0.2)
    compiles = {0: 40.0}
    steps, seconds = timed_steps(monkeypatch, Loop(1.0), lambda step: compiles.get(step, 0.2), 0)
    assert steps == 2 and seconds == pytest.approx(0.2)
    assert timed_steps(monkeypatch, Loop(1.0), lambda step: 8.0, first=10, since_command=100.0) == (2, 8.0)


def test_the_slowest_process_decides_for_all(monkeypatch):
    slower, late = lambda mine: (2 * mine[0], mine[1]), lambda mine: (mine[0], True)
    assert timed_steps(monkeypatch, Loop(10.0, [slower]), lambda step: 1.0, 0) == (5, 2.0)
    assert timed_steps(monkeypatch, Loop(10.0, [slower, late]), lambda step: 1.0, 0) == (2, 2.0)


CLOCK = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from nanochat.plan.time_budget import seconds_since_command

began, first = time.monotonic(), seconds_since_command()
time.sleep(0.5)
print(first, seconds_since_command() - first, time.monotonic() - began)
"""


def test_the_clock_begins_with_the_process(tmp_path):
    (tmp_path / "clock.py").write_text(CLOCK)
    began = time.monotonic()
    done = python_m(["clock"], tmp_path)
    seconds, tick = time.monotonic() - began, 2 / os.sysconf("SC_CLK_TCK")
    assert done.returncode == 0, done.stderr
    first, later, waited = map(float, done.stdout.split())
    assert 0 <= first <= seconds + tick and 0.5 - tick <= later <= waited + tick


# ------------------------------------------------------------------------------------------------------
# A whole run. After 4 steps are logged the first process finds 10, whatever the speed of the machine

TIMED = f"""
import os, runpy, sys
sys.path.insert(0, {str(ROOT)!r})
from nanochat.plan import time_budget

time_budget.seconds_since_command = lambda: 10 + int(os.environ.get("RANK", 0))
time_budget.FirstSteps.are_timed = lambda first_steps, steps: steps >= 4
time_budget.Cost.steps = lambda cost, minutes: cost.waited
runpy.run_module("scripts.base_train", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def timed(tmp_path, corpus):
    """A function that runs base_train with a horizon in minutes; the timing finds 10 steps (in process 1
    11)."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "timed.py").write_text(TIMED)

    def timed(out, *more, processes=1):
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "-m"]
        arguments = ["--num_iterations=-1", "--target_minutes=0.01", "--core_metric_every=4", *more]
        _, *arguments = command(corpus, out, *arguments)
        arguments = [*(torchrun if processes > 1 else []), "timed", *arguments]
        done = python_m(arguments, folder=tmp_path / "code")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return timed


def test_the_first_steps_have_the_rates_of_a_guess_and_the_others_those_of_the_number_found(
    timed, corpus, tmp_path
):
    said = timed(tmp_path / "a", "--eval_every=-1")
    assert "timed\n" in said and "10 steps, 2,560 tokens (0.01 minutes: " in said
    assert re.search(r"step 4/\d{3,} \|", said) and "step 10/10 |" in said
    done = python_m(command(corpus, tmp_path / "b", "--num_iterations=10", "--eval_every=-1"))
    assert done.returncode == 0
    multipliers = [[r["lr_multiplier"] for r in records(tmp_path / run) if "loss" in r] for run in "ab"]
    guessed = min(step for step in range(10) if multipliers[0][step:] == multipliers[1][step:])
    assert len(multipliers[0]) == 10 and guessed == 5
    facts = json.loads((tmp_path / "a" / "config.json").read_text())
    assert facts["derived"]["num_iterations"] == 10
    assert any(line.startswith("horizon: 10 steps") for line in facts["plan"])
    assert (tmp_path / "a" / "step_000010" / "config.json").read_text() == json.dumps(facts, indent=2)


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_it_was_timed_and_other_minutes_change_it_in_proportion(timed, tmp_path):
    tasks = "--core_metric_every=4"  # their time is taken, too
    assert " s for tasks" in timed(tmp_path / "a", tasks)
    whole = losses(tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "step_000010")
    said = timed(tmp_path / "a", tasks)
    assert "timed\n" not in said and "going on from" in said and "as timed at the run's first start" in said
    assert losses(tmp_path / "a") == whole
    said = timed(tmp_path / "a", tasks, "--target_minutes=0.02")
    assert max(losses(tmp_path / "a")) == 19 and "the horizon grew from 10 to 20 steps" in said
    assert find(tmp_path / "a").state["resolved"]["target_minutes"] == 0.02


@pytest.mark.slow
def test_a_run_that_goes_on_before_its_steps_are_timed_goes_on_with_the_same_guess(timed, tmp_path):
    timed(tmp_path / "a", "--save_every=2", "--keep_checkpoints=-1")
    whole = losses(tmp_path / "a")
    for later in (4, 6, 8, 10):
        shutil.rmtree(tmp_path / "a" / f"step_{later:06}")
    assert find(tmp_path / "a").state["resolved"]["estimated"]
    said = timed(tmp_path / "a", "--save_every=2")
    assert "going on from" in said and "timed\n" in said
    assert losses(tmp_path / "a") == whole


@pytest.mark.slow
def test_two_processes_take_the_number_of_steps_of_the_slower_one(timed, tmp_path):
    said = timed(tmp_path / "a", "--eval_every=-1", processes=2)
    assert "  horizon       11 steps" in said and "x 2 processes" in said
    assert len(losses(tmp_path / "a")) == 11


def test_the_plan_in_minutes_says_that_its_number_of_steps_is_a_guess(timed, tmp_path):
    said = timed(tmp_path / "a", "--plan", "--target_minutes=0.5")
    assert "horizon       about " in said and "the first steps, which are timed, decide" in said
    assert not (tmp_path / "a").exists()
