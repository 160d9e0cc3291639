"""A horizon in minutes: how many steps fit, found by timing the first steps of the run.

The minutes are those of the person who waits: from the command to its end, with everything that has to be
loaded, compiled, evaluated, sampled and saved. The run begins with a guess. When some of its steps are timed,
those that compile apart, and a part of each evaluation too, the number of steps is found, once, and the
checkpoints keep it. If the machine becomes slower later, the run takes longer: from then on no timing changes
the numbers that it computes.
"""

import bisect
import contextlib
import itertools
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from nanochat import UserError, optim
from nanochat.engine import continuations
from nanochat.evals.bits_per_byte import bits_per_byte
from nanochat.evals.tasks import score_tasks
from nanochat.machine import runtime
from nanochat.plan.scaling import MOST_STEPS
from nanochat.terminal import counted

WARM_UP = 2  # steps that are not counted: they compile, and fill caches
TIMED_SHARE = 0.01  # of the minutes goes into the steps that count
FEWEST, LONGEST_S = 3, 30.0  # steps that count, and seconds of them
LATEST = 0.5  # share of the minutes after which the steps timed so far have to suffice
PART, PART_OF_TASK = 3, 16  # validation batches that are timed; of the tasks one question in so many
REPORT_S = 0.4  # seconds of a report with its plots
SAVE_BYTES_S = 200e6  # bytes a second of the last save, which the run waits for
END_S = 1.0  # seconds in which processes and Python end

_imported = time.monotonic()


class FirstSteps:
    """The time of a run's first steps, for a horizon in minutes.

    progress: the loop's. first: the step from which on all are alike, except that some warm up.
    """

    def __init__(self, plan, machine, progress, first: int):
        self._plan, self._machine, self._progress = plan, machine, progress
        self._begins, self._wanted = first + WARM_UP, None  # how many of them are to be timed
        self._at = {}  # seconds in steps, by number of steps
        self.seconds = 0.0  # of a step, on the slowest process

    def are_timed(self, steps: int) -> bool:
        """Note how long the `steps` steps logged so far took; whether the time of a step is known now. Every
        process calls it before each step, and all get the same answer."""
        self._at[steps] = self._progress.train_seconds
        times = [(b - a) / (n - m) for (m, a), (n, b) in itertools.pairwise(self._at.items())]
        alike = [took for step, took in zip(self._at, times, strict=False) if step >= self._begins]
        # Until some count the fastest: one of the others may have compiled
        mine = statistics.fmean(alike) if alike else min(times, default=0.0)
        seconds = 60 * self._plan.horizon.minutes
        late = seconds_since_command() > LATEST * seconds or steps >= self._plan.num_iterations // 2
        self.seconds, late = map(max, zip(*self._machine.all_gather((mine, late)), strict=True))
        if alike and self._wanted is None:
            self._wanted = max(FEWEST, int(min(LONGEST_S, TIMED_SHARE * seconds) / self.seconds))
        return (late and len(times) > 1) or (len(alike) > 0 and len(alike) >= self._wanted)


@dataclass(frozen=True)
class Work:
    """Work that a run does every so many steps, and once at its end."""

    name: str
    seconds: float
    every: int  # steps; -1: only at the end

    def times(self, steps: int, done: int = 0) -> int:
        """How often a run of that many steps does it, after the first `done` of them."""
        return 1 + ((steps - 1) // self.every - done // self.every if self.every > 0 else 0)


@dataclass(frozen=True)
class Cost:
    """What a run costs in seconds, timed in its first steps."""

    waited: float  # since the command
    step: float
    work: list[Work]
    done: int = 0  # steps

    def seconds(self, steps: int) -> float:
        """From the command to the end of a run of that many steps."""
        work = sum(w.times(steps, self.done) * w.seconds for w in self.work)
        return self.waited + (steps - self.done) * self.step + work

    def steps(self, minutes: float) -> int:
        """The most steps with which the run ends in time. UserError if not even one more fits."""
        if self.seconds(self.done + 1) > 60 * minutes:
            needed = math.ceil(self.seconds(self.done + 10) / 6) / 10  # minutes: ten more fit
            steps, rest = counted(self.done, "step", "steps"), self.seconds(self.done + 1) - self.waited
            raise UserError(
                f"target_minutes {minutes:g} is too short: {self.waited:.0f} s have gone into the start and "
                f"{steps}, and one more with what comes after the last one takes {rest:.0f} s; use "
                f"--target_minutes={needed:g} or more, or give --num_iterations"
            )
        return self.done + bisect.bisect(
            range(1, MOST_STEPS), 60 * minutes, key=lambda more: self.seconds(self.done + more)
        )

    def reason(self, minutes: float, steps: int) -> str:
        """How the number of steps was found."""
        work = ((w.times(steps, self.done) * w.seconds, w.name) for w in self.work)
        rest = ", ".join(f"{seconds:.1f} s for {name}" for seconds, name in work if seconds)
        return (
            f"{minutes:g} minutes: {self.waited:.0f} s for the start and {self.done:,} steps, "
            f"{steps - self.done:,} x {1000 * self.step:.3g} ms, {rest}"
        )


def fit_minutes(
    plan, settings: dict, machine, step: int, first_steps: FirstSteps, model, optimizer, *evaluated
):
    """The plan with the number of steps that ends in time; `optimizer` gets the rates of that number.

    step: how many are done. evaluated: what an evaluation takes: validation, token_bytes, tokenizer, tasks,
    prompts. A part of each evaluation is done and timed; the random numbers stay as they are. Every process
    calls this, and the slowest decides for all. Raises UserError if the minutes are too few, or the text is
    too short for the steps.
    """
    before, minutes = runtime.random_state(machine.device), plan.horizon.minutes
    work = [*_work(plan, settings, machine, model, *evaluated)]
    runtime.set_random_state(before, machine.device)
    found = machine.all_gather((seconds_since_command(), *(w.seconds for w in work)))
    waited, *seconds = map(max, zip(*found, strict=True))
    work = [replace(w, seconds=longest) for w, longest in zip(work, seconds, strict=True)]
    cost = Cost(waited, first_steps.seconds, work, step)
    steps = cost.steps(minutes)
    plan = plan.with_iterations(steps, cost.reason(minutes, steps), settings)
    plan.check(settings["accept"])
    _set_rates(optimizer, model, plan)
    return plan


def _work(
    plan, settings, machine, model, validation, token_bytes, tokenizer, tasks, prompts
) -> Iterator[Work]:
    """What the run does besides its steps. A part of each kind is done here, and timed."""
    dtype, batches = plan.hardware.dtype, min(PART, len(validation))

    def validate():
        part = itertools.islice(validation, batches)
        bits_per_byte(model, part, token_bytes, dtype, machine, plan.compiled)

    validate()  # compiles, on a GPU
    yield Work("validation", _timed(validate) * len(validation) / max(1, batches), settings["eval_every"])
    if settings["core_metric_every"] > 0 and any(tasks):
        parts = [[replace(task, examples=task.examples[::PART_OF_TASK]) for task in some] for some in tasks]
        count, part = (sum(len(task.examples) for task in itertools.chain(*of)) for of in (tasks, parts))
        seconds = _timed(lambda: score_tasks(model, tokenizer, *parts, dtype, machine)) * count / part
        yield Work("tasks", seconds, settings["core_metric_every"])
    if prompts:
        seconds = _timed(lambda: machine.is_main and continuations(model, tokenizer, prompts, dtype, 0))
        yield Work("samples", seconds, settings["sample_every"])
    intervals = [settings[name] for name in ("eval_every", "core_metric_every", "sample_every")]
    yield Work("reports", REPORT_S, min((every for every in intervals if every > 0), default=-1))
    needed = plan.expected_memory
    seconds = END_S + (needed["weights"] + needed["optimizer state"]) / SAVE_BYTES_S
    yield Work("the last save and the end", seconds, -1)


def _timed(work: Callable) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _set_rates(optimizer, model, plan):
    """The rates and the decay of the plan, where the optimizer has its groups from PARAMETER_TABLE."""
    if not isinstance(optimizer, optim.MuonAdamW):
        return
    groups = optim.parameter_groups(model, plan.rates, plan.weight_decay, plan.table_decay)
    for group, new in zip(optimizer.param_groups, groups, strict=True):
        group["lr"] = group["initial_lr"] = new["lr"]
        group["weight_decay"] = group["initial_weight_decay"] = new["weight_decay"]


def seconds_since_command() -> float:
    """Seconds since this process was started, or torchrun, if that started it."""
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    with contextlib.suppress(OSError, AttributeError):  # Linux: in ticks after the machine's start
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):  # macOS: [[days-]hours:]mm:ss
        command = ["ps", "-o", "etime=", "-p", str(pid)]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout
        days, _, rest = said.strip().rpartition("-")
        units = zip((1, 60, 3600), reversed(rest.split(":")), strict=False)
        return 86400 * int(days or 0) + sum(unit * int(count) for unit, count in units)
    return time.monotonic() - _imported
