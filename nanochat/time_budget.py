"""A horizon in minutes: how many steps fit, found by timing the run's own work before its first step.

The minutes are those of the person who waits: from the command to its end, with everything that has to be
loaded, compiled, evaluated, sampled and saved. What is done before the first step has been waited for; what
comes is timed in small parts. The number of steps is found once, and the checkpoints keep it. A timing never
changes the numbers that a run computes: the schedules know the number of steps from step 0 on, and if the
machine becomes slower later, the run takes longer.
"""

import bisect
import contextlib
import itertools
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from nanochat import UserError, optim, planning, precision, runtime
from nanochat.engine import continuations
from nanochat.evaluate import bits_per_byte
from nanochat.gradients import clip_grad_norm_
from nanochat.memory_trial import made_up_batch
from nanochat.task_scores import score_tasks

MOST_STEPS = 10**9  # of a run, as in base_train's num_iterations
WARM_UP = 2  # steps that are not counted: they compile, and fill caches
TIMED_SHARE = 0.01  # of the minutes goes into timed steps
FEWEST, LONGEST_S = 3, 30.0  # timed steps, and seconds of them
PART, PART_OF_TASK = 3, 16  # validation batches that are timed; of the tasks one question in so many
REPORT_S = 0.4  # seconds of a report with its plots
SAVE_BYTES_S = 200e6  # bytes a second of the last save, which the run waits for
END_S = 1.0  # seconds in which processes and Python end

_imported = time.monotonic()


@dataclass(frozen=True)
class Work:
    """Work that a run does every so many steps, and once at its end."""

    name: str
    seconds: float
    every: int  # steps; -1: only at the end

    def times(self, steps: int) -> int:
        """How often a run of that many steps does it."""
        return 1 + ((steps - 1) // self.every if self.every > 0 else 0)


@dataclass(frozen=True)
class Cost:
    """What a run costs in seconds, timed before its first step."""

    waited: float  # since the command
    step: float
    work: list[Work]

    def seconds(self, steps: int) -> float:
        """From the command to the end of a run of that many steps."""
        return self.waited + steps * self.step + sum(w.times(steps) * w.seconds for w in self.work)

    def steps(self, minutes: float) -> int:
        """The most steps with which the run ends in time. UserError if not even one fits."""
        if self.seconds(1) > 60 * minutes:
            needed = math.ceil(self.seconds(10) / 6) / 10  # minutes: ten steps fit
            raise UserError(
                f"target_minutes {minutes:g} is too short: {self.waited:.0f} s have gone before the first "
                f"step, and what comes after the last one takes {self.seconds(1) - self.waited:.0f} s; use "
                f"--target_minutes={needed:g} or more, or give --num_iterations"
            )
        return bisect.bisect(range(1, MOST_STEPS), 60 * minutes, key=self.seconds)

    def reason(self, minutes: float, steps: int) -> str:
        """How the number of steps was found."""
        rest = ", ".join(f"{w.times(steps) * w.seconds:.1f} s for {w.name}" for w in self.work if w.seconds)
        return (
            f"{minutes:g} minutes: {self.waited:.0f} s before the first step, {steps:,} x "
            f"{1000 * self.step:.3g} ms, {rest}"
        )


def fit_minutes(plan, settings: dict, machine, model, train_model, optimizer, boundaries, *looks):
    """The plan with the number of steps that ends in time; `optimizer` gets the rates of that number.

    A plan whose number of steps is known stays as it is. train_model: what the loop trains, which is `model`
    in its wrappings. boundaries: as in memory_trial. looks: what the script evaluates with: validation,
    token_bytes, tokenizer, tasks, prompts. The weights, the optimizer's state and the random numbers stay as
    they are. Every process calls this, and the slowest decides for all. Raises UserError if the minutes are
    too few, or the text is too short for the steps.
    """
    if not plan.horizon.estimated:
        return plan
    before, minutes = runtime.random_state(machine.device), plan.horizon.minutes
    step = _step_seconds(plan, machine, model, train_model, optimizer, boundaries)
    work = [*_work(plan, settings, machine, model, *looks)]
    runtime.set_random_state(before, machine.device)
    found = machine.all_gather((seconds_since_command(), step, *(w.seconds for w in work)))
    waited, step, *seconds = map(max, zip(*found, strict=True))
    work = [replace(w, seconds=longest) for w, longest in zip(work, seconds, strict=True)]
    cost = Cost(waited, step, work)
    steps = cost.steps(minutes)
    plan = plan.with_iterations(steps, cost.reason(minutes, steps), settings)
    _set_rates(optimizer, model, plan)
    machine.print(planning.text({"timed": plan.training_section}, plan.warnings(settings["accept"])))
    plan.check(settings["accept"])
    return plan


def _step_seconds(plan, machine, model, train_model, optimizer, boundaries) -> float:
    """The mean time of some steps, each like one of the script's loop, on a made-up batch."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # then an update leaves the weights as they are, to the bit
    batch = made_up_batch(plan, machine, boundaries)

    def steps(count: int) -> float:
        machine.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            _step(plan, machine, model, train_model, optimizer, *batch)
        machine.synchronize()
        return (time.perf_counter() - began) / count

    steps(WARM_UP)
    one = max(machine.all_gather(steps(1)))  # all processes time equally many
    seconds = steps(max(FEWEST, int(min(LONGEST_S, 60 * TIMED_SHARE * plan.horizon.minutes) / one)))
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    if isinstance(optimizer, optim.MuonAdamW):  # its state begins with zeros, that of torch's with nothing
        for state in optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()
    else:
        optimizer.state.clear()
    return seconds


def _step(plan, machine, model, train_model, optimizer, inputs, targets, documents):
    """A step as in the loop of the script."""
    for micro_step in range(plan.grad_accum_steps):
        last_micro_step = micro_step == plan.grad_accum_steps - 1
        sync = machine.world_size == 1 or last_micro_step
        with contextlib.nullcontext() if sync else train_model.no_sync():
            with precision.autocast(machine.device, plan.hardware.dtype):
                loss = train_model(inputs, targets, documents=documents) / plan.grad_accum_steps
            loss.backward()
    grad_norm = clip_grad_norm_(model, optimizer, 1.0)
    optim.skip_if_not_finite(optimizer, grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=machine.world_size == 1)
    optimizer.found_inf = None


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
    looks = [settings[name] for name in ("eval_every", "core_metric_every", "sample_every")]
    yield Work("reports", REPORT_S, min((every for every in looks if every > 0), default=-1))
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
    groups = optim.parameter_groups(model, plan.rates, plan.weight_decay)
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
