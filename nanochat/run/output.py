"""What a run writes: metrics, console, wandb, checkpoints and the report."""

import functools
import json
import time
from pathlib import Path

import torch

from nanochat import checkpoint, optim
from nanochat.machine import distributed, runtime
from nanochat.plan import planning
from nanochat.run import metrics
from nanochat.run.console import Console
from nanochat.run.report import write_report


class RunOutput:
    """Opens a run's outputs, once every process knows where the run begins.

    The first process writes `log` (metrics.jsonl, wandb), the `console`, config.json and the report; of a
    checkpoint each process writes its share. What the folder holds from after the checkpoint `resumed` is set
    aside first. facts: what config.json holds.
    """

    def __init__(
        self,
        path: Path,
        run_id: str,  # of checkpoint.enter
        machine: runtime.Machine,
        facts: dict,
        tokenizer,
        resumed: checkpoint.Checkpoint | None,
        progress: metrics.Progress,
        num_iterations: int,
        wandb_run: str,  # its name, or dummy
        keep_checkpoints: int,
        permanent_every: int = -1,
    ):
        step = resumed.step if resumed else 0
        if machine.is_main:
            checkpoint.set_future_aside(path, resumed, machine.print)
            metrics.rewind_metrics(path / "metrics.jsonl", step, machine.print)
        self._path, self._machine, self._progress = path, machine, progress
        self._files = {"tokenizer.json": tokenizer.to_bytes()}
        self._write_facts(facts)
        self.log = metrics.Metrics(path, enabled=machine.is_main)
        self.log.start_wandb(wandb_run, facts, progress, machine.print)
        self.console = Console(step, num_iterations, machine.is_main, progress)
        self._saver = checkpoint.AsyncSaver(path, machine.rank, machine.world_size, run_id)
        distributed.before_end(self._saver.finish)  # if any process fails, a save under way is finished first
        self._prune = functools.partial(
            checkpoint.prune, path, keep_checkpoints, permanent_every, self.console.print
        )
        self._saved_at = time.monotonic()

    def _write_facts(self, facts: dict):
        self._facts, self._files["config.json"] = facts, json.dumps(facts, indent=2).encode()
        if self._machine.is_main:
            checkpoint.write_whole(self._path / "config.json", self._files["config.json"])

    def new_plan(self, plan, sections: dict, accept: str):
        """The number of steps has changed, and with it the plan, a planning.Plan with its sections."""
        changed = {"plan": planning.lines(sections, plan), "derived": plan.numbers()}
        self.console.print(planning.text({"timed": plan.training_section}, plan.warnings(accept)))
        self.console.num_iterations = plan.num_iterations
        self.console.forget_speed()
        self._write_facts(self._facts | changed)
        self.log.new_config(changed)

    def prepare_to_save(self, model: torch.nn.Module, optimizer):
        """Make the buffers of a save, once the optimizer has its state (after its first step)."""
        self._saver.reserve(model.state_dict(), optim.named_state(optimizer, model, self._machine.rank))

    def save(self, step: int, model: torch.nn.Module, optimizer, state: dict):
        """Start to write a checkpoint after `step` updates. Every process calls it at the same step.

        state: what else the run needs to continue, ready for JSON; the same on all processes. Raises
        UserError if the model's weights are not finite. If the save before this one failed, the console says
        so.
        """
        random_state = runtime.random_state(self._machine.device) if self._machine.is_main else {}
        try:
            self._saver.submit(
                step,
                model=model.state_dict(),
                optimizer=optim.named_state(optimizer, model, self._machine.rank) | random_state,
                state=state | {"optimizer": type(optimizer).__name__},
                files=self._files,
                before_publish=self.log.sync,
                after_publish=self._prune,
            )
        except checkpoint.SaveError as error:  # training goes on
            self.console.print(f"warning: {error}")
        self._saved_at = time.monotonic()

    def save_is_overdue(self, minutes: float) -> bool:
        """Whether the last save began more than `minutes` ago and is done (minutes <= 0: never). False on all
        processes but the first, whose clock decides."""
        since = time.monotonic() - self._saved_at
        return self._machine.is_main and self._saver.done() and 0 < 60 * minutes < since

    def report(self, final: bool):
        """Write the report of what the run has done so far. final: it goes no further now."""
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
            memory = f"{self._machine.peak_memory() / 2**30:.2f} GiB at most"
            said = f"done: {self._progress.train_seconds:.0f} s in steps, {memory}"
            said += f"\nreport: {self._path / 'report.html'}"
        self._machine.print(said)
