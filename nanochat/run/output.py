"""What a run writes: metrics, console, loggers, checkpoints and the report."""

import contextlib
import functools
import json
import math
import time
from dataclasses import asdict
from pathlib import Path

import torch

from nanochat import UserError, checkpoint, optim
from nanochat.files import write_whole
from nanochat.machine import distributed, memory, runtime
from nanochat.plan import wording
from nanochat.plan.planning import Plan
from nanochat.run import metrics
from nanochat.run.clock import WARM_UP, Clock
from nanochat.run.console import Console
from nanochat.run.loggers import Loggers
from nanochat.run.report import write_report
from nanochat.terminal import counted, short

MOST_BAD_STEPS = 3  # in a row that are not finite; then the run ends
MOST_FAILED_SAVES = 3  # in a row; then the run ends, since what it computes would be lost


def begin(resumed, identity: dict, settings, plan: Plan, machine, accept: str):
    """Where a run begins: (step, step of its last evaluation, what changed, loop state, clock). All processes
    call it; a run that is finished already says so and ends here.

    resumed: of checkpoint.enter. identity: what must stay the same when a run is resumed; a difference that
    `accept` does not name is refused. Other settings may differ, and a line says which. Raises UserError if
    the processes differ.
    """
    machine.check_same(
        identity | {"compute dtype": str(plan.hardware.dtype), "num_iterations": plan.num_iterations}
    )
    changed = checkpoint.changes(resumed, identity, accept)
    step, last_eval_step = resumed.step if resumed else 0, -1
    loop = metrics.LoopState.of(resumed)
    clock = Clock(plan, loop, machine, step)
    if resumed:
        records = metrics.read_metrics(resumed.path.parent / "metrics.jsonl")
        evaluated = [r["step"] for r in records if "loss" not in r and r["step"] <= step]
        last_eval_step = machine.all_gather(max(evaluated, default=-1))[0]  # the first process wrote the file
        done = clock.progress(step)
        finished = done > 1 or (done == 1 and last_eval_step == step)
        facts = {"settings": settings.record(), **machine.environment}
        for line in checkpoint.differences(resumed, facts):
            machine.print(f"changed since {resumed.path.name}: {line}")
        machine.print(
            checkpoint.resume_message(resumed, plan.num_iterations, changed, finished, settings.values)
        )
        if finished:
            machine.exit()
    return step, last_eval_step, changed, loop, clock


def restore(resumed, model: torch.nn.Module, optimizer, scaler, machine):
    """Load a checkpoint's weights, the optimizer's state, the loss scale of float16 and the state of the
    random number generators."""
    checkpoint.load_weights(resumed, model)
    optim.load_state(optimizer, model, resumed)
    if resumed.state["scaler"]:  # empty unless the run was in float16
        scaler.load_state_dict(resumed.state["scaler"])
    runtime.set_random_state(resumed.load_optimizer(runtime.is_random_state), machine.device)


def scores_in_words(record: dict) -> list[str]:
    """The scores of further validation sets and of tasks in a record of metrics.jsonl, as lines for the
    console."""
    bits = {name.removeprefix("val_bpb_"): v for name, v in record.items() if name.startswith("val_bpb_")}
    lines = [f"validation of {name} {value:.4f} bits per byte" for name, value in bits.items()]
    if "own_tasks" in record:
        each = ", ".join(f"{label} {100 * accuracy:.0f} %" for label, accuracy in record["own_tasks"].items())
        lines.append(f"tasks {record['own_score']:.3f} ({each} right)")
    if "core" in record:
        lines.append(f"CORE {record['core']:.4f}")
    return lines


class RunOutput:
    """The outputs of a run. All processes make one, once they know where the run begins.

    The first process writes `log` (metrics.jsonl, loggers), the `console`, config.json and the report; each
    process writes its share of a checkpoint. Newer checkpoints than `resumed` are set aside first. settings,
    sections (of the plan) and identity: for config.json; checkpoints have the identity too.
    """

    def __init__(
        self,
        path: Path,
        run_id: str,  # of checkpoint.enter
        machine: runtime.Machine,
        plan: Plan,
        settings,
        sections: dict,
        identity: dict,
        tokenizer,
        resumed: checkpoint.Checkpoint | None,
        loop: metrics.LoopState,
        clock: Clock,
        loggers: list[str],  # of loggers.choose
        run_name: str,  # the setting `run`
        keep_checkpoints: int,
        permanent_every: int = -1,
    ):
        step = resumed.step if resumed else 0
        if machine.is_main:
            checkpoint.set_future_aside(path, resumed, machine.print)
            metrics.rewind_metrics(path / "metrics.jsonl", step, machine.print)
        self._path, self._machine, self._plan, self._loop, self._clock = path, machine, plan, loop, clock
        self._identity = identity
        facts = {"settings": settings.record(), "identity": identity, **machine.environment}
        facts |= {"plan": wording.lines(sections), "derived": plan.numbers()}
        self._files = {
            "tokenizer.json": tokenizer.to_bytes(),
            "config.json": json.dumps(facts, indent=2).encode(),
        }
        self.log = metrics.Metrics(path, enabled=machine.is_main)  # its file is what makes it a run's folder
        if machine.is_main:
            write_whole(path / "config.json", self._files["config.json"])
            self.log.loggers = Loggers(loggers, run_name, path, facts, loop, step, machine.print)
        self.console = Console(step, machine.is_main, loop, clock, plan.bytes_per_token)
        self._saver = checkpoint.AsyncSaver(path, machine.rank, machine.world_size, run_id)
        distributed.before_end(self._saver.finish)  # if a process fails, a save under way is finished first
        kept = path, keep_checkpoints, permanent_every, self.console.print
        self._prune = functools.partial(checkpoint.prune, *kept)
        # Updates that were made, that the newest checkpoint has, and that the last one begun has
        self._steps = self._saved_step = self._saving_step = step
        self._make_room = functools.partial(checkpoint.make_room, *kept)
        self._failed_saves = 0  # in a row
        self._saved_at = time.monotonic()

    @torch.profiler.record_function("log")  # its name in a trace
    def log_step(self, record: dict, started: float, loss_scale: float, clock_reading, micro_losses):
        """Complete and write the record of a step that has just ended.

        record: step, loss, grad_norm, and what else the script gives. started: when Python began the step, on
        time.perf_counter(). micro_losses: this process's, to name a loss that is not finite. Raises UserError
        after MOST_BAD_STEPS bad steps in a row.
        """
        plan, loop = self._plan, self._loop
        tokens, seconds = plan.total_batch_size, loop.step_seconds(started)
        finite = math.isfinite(record["grad_norm"])
        overflow = not finite and loss_scale > 1  # of float16: the scale is halved, the step is not bad
        loop.bad_steps = 0 if finite or overflow else loop.bad_steps + 1
        record |= {
            "step_time_s": seconds,
            "tok_per_sec": tokens / seconds,
            "mfu": plan.flops_per_token * tokens / seconds / plan.hardware.peak_flops,
            **loop.add_step(record["loss"], tokens, seconds, finite),  # smoothed_loss, tokens, ...
            "flops": loop.tokens * plan.flops_per_token,
        }
        if plan.hardware.dtype == torch.float16:
            record["loss_scale"] = loss_scale
        self._clock.add_step(seconds, *clock_reading)
        self.log.write(record)
        self.console.step(record)
        self._steps = record["step"] + 1
        if loop.bad_steps == MOST_BAD_STEPS:
            first_row = record["step"] * tokens // plan.config.max_seq_len
            newest = checkpoint.newest_in_words(self._path)
            raise metrics.diverged(record["step"], micro_losses.tolist(), first_row, newest)

    def log_evaluation(self, record: dict, began: float, said: str = "", final: bool = False):
        """Print and write the record of an evaluation, and write the report.

        record: its step and scores. began: when it began, on time.monotonic(). said: words to print after the
        bits per byte. final: this process makes no more steps.
        """
        loop, step = self._loop, record["step"]
        if "val_bpb" in record:
            loop.val_bpb = record["val_bpb"]
            self.console.print(f"step {step}: validation {loop.val_bpb:.4f} bits per byte{said} ({_now()})")
        self.console.print(*(f"step {step}: {line}" for line in scores_in_words(record)))
        self.console.print(*(f"--- {text}" for text in record.get("samples", ())))
        totals = {"progress": self._clock.progress(step), "tokens": loop.tokens}
        totals |= {"train_time_s": loop.train_seconds, "peak_memory": memory.peak(self._machine.device)}
        self.log.write(record | totals | {"eval_time_s": time.monotonic() - began})
        self.report(final)
        self._clock.add_evaluation(time.monotonic() - began)

    def prepare_to_save(self, model: torch.nn.Module, optimizer):
        """Make the buffers for saving. Call it after the optimizer's first step, which makes its state."""
        self._saver.reserve(model.state_dict(), optim.named_state(optimizer, model, self._machine.rank))

    def save(self, step: int, model: torch.nn.Module, optimizer, **state):
        """Start to write a checkpoint after `step` updates. Every process calls it at the same step.

        state: what else changes in a run, ready for JSON; the same on all processes. Raises UserError if the
        model's weights are not finite. Prints a warning if the save before failed, and raises its SaveError
        if it was the last of MOST_FAILED_SAVES in a row.
        """
        plan, kept = self._plan, {"identity": self._identity, "optimizer": type(optimizer).__name__}
        kept |= {"resolved": plan.resolved, "num_iterations": plan.num_iterations, "loop": asdict(self._loop)}
        random_state = runtime.random_state(self._machine.device) if self._machine.is_main else {}
        try:
            self._saver.submit(
                step,
                model=model.state_dict(),
                optimizer=optim.named_state(optimizer, model, self._machine.rank) | random_state,
                state=kept | state,
                files=self._files,
                before_publish=self.log.sync,
                after_publish=functools.partial(self._published, step, time.monotonic()),
                make_room=self._make_room,
            )
            self._failed_saves, self._saving_step = 0, step
        except checkpoint.SaveError as error:
            self._failed_saves += 1
            if self._failed_saves == MOST_FAILED_SAVES:
                raise
            self.console.print(f"warning: {error}")  # training goes on
        self._saved_at = time.monotonic()

    def _published(self, step: int, began: float):
        """Delete old checkpoints, and say that the one of `step` is on disk. On the saver's thread."""
        self._saved_step = step
        with contextlib.suppress(OSError, UserError):  # the next save tries again
            self._prune()
        with contextlib.suppress(OSError):  # somebody deleted it
            size = sum(file.stat().st_size for file in (self._path / f"step_{step:06d}").iterdir())
            took = f"{short(size)}B in {time.monotonic() - began:.1f} s"
            self.console.print(f"step {step}: saved, {took} ({_now()})")

    def what_is_lost(self) -> str:
        """What the run loses if it ends now, in words; "" in other processes than the first. A signal handler
        may call it."""
        if not self._machine.is_main:
            return ""
        newest, lost = self._saved_step, self._steps - self._saved_step
        if lost <= 0:
            return f"step {newest:,} is saved, nothing is lost"
        kept = f"the newest checkpoint is of step {newest:,}" if newest else "there is no checkpoint yet"
        if self._saving_step > newest and not self._saver.done():
            kept += f", that of step {self._saving_step:,} is not complete"
        return f"{kept}; {counted(lost, 'step is', 'steps are')} lost"

    def save_is_overdue(self, minutes: float) -> bool:
        """Whether the last save began more than `minutes` ago and is done (minutes <= 0: never). The clock of
        the first process decides: on others it is False."""
        since = time.monotonic() - self._saved_at
        return self._machine.is_main and self._saver.done() and 0 < 60 * minutes < since

    def report(self, final: bool):
        """Write the report. final: this process makes no more steps."""
        if self._machine.is_main:
            write_report(self._path, final, self.console.print)

    def finish(self, step: int, stopped_by: str, resume: str):
        """Finish the save under way, close everything, and say how the run ended after `step` updates.

        stopped_by: the signal that stopped it, "" if it is done. resume: the setting. Raises SaveError if the
        last save failed.
        """
        if stopped_by:
            self.report(final=True)
        for opened in (self._saver, self.console, self.log):
            opened.close()
        if stopped_by:
            again = "" if resume == "auto" else " with --resume=auto"
            said = f"stopped by {stopped_by} after {step} steps and saved; the same command{again} goes on"
        else:
            peak = memory.peak(self._machine.device)
            said = f"done: {self._loop.train_seconds:.0f} s in steps, {peak / 2**30:.2f} GiB at most"
            said += f"\nreport: {self._path / 'report.html'}"
            if (minutes := self._clock.minutes) and step <= WARM_UP:
                said += f"\nwarning: --target_minutes={minutes:g} left time for {step} steps only; give more"
        self._machine.print(said)


def _now() -> str:
    """The time of day."""
    return time.strftime("%H:%M:%S")
