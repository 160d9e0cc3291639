"""One record a step -> console, metrics.jsonl and wandb."""

import json
import math
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

from tqdm import tqdm

from nanochat import UserError


class Metrics:
    """Writes records to `<out_dir>/metrics.jsonl` and, where a run has one, to wandb.

    A record is one JSON object on one line, written with one system call: whatever kills the process, the
    file holds whole records. Not-a-number and infinity become null, which JSON has and they are not part
    of.
    """

    def __init__(self, out_dir, wandb_run=None, enabled: bool = True):
        self.path = Path(out_dir) / "metrics.jsonl"
        self.wandb_run, self.enabled = wandb_run, enabled
        if enabled:  # the first process writes for all
            self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, record: dict):
        if not self.enabled:
            return
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        line = (json.dumps(record) + "\n").encode()
        try:
            written = os.write(self.file, line)
        except OSError as error:
            raise UserError(
                f"cannot write {self.path} ({error.strerror}); make room and start again"
            ) from error
        if written < len(line):  # what stands there of it is dropped when the run goes on
            raise UserError(f"cannot write {self.path} (the disk is full); make room and start again")
        if self.wandb_run is not None:
            self.wandb_run.log({k: v for k, v in record.items() if v is not None}, step=record["step"])

    def sync(self):
        """Return when every record is on disk."""
        if self.enabled:
            os.fsync(self.file)

    def close(self):
        if self.enabled:
            os.close(self.file)
        if self.wandb_run is not None:
            self.wandb_run.finish()


RECENT_STEPS = 64  # losses that a spike is measured against


def is_spike(loss: float, recent: list[float]) -> bool:
    """Whether a loss lies more than 6 standard deviations over the mean of the recent ones (at least 32)."""
    return len(recent) >= 32 and loss > statistics.fmean(recent) + 6 * statistics.pstdev(recent)


def first_bad(micro_losses: list[float]) -> str:
    """What of a step first was not finite, for a message: one of its micro-steps, else its gradient."""
    bad = [i for i, loss in enumerate(micro_losses) if not math.isfinite(loss)]
    return f"micro-step {bad[0]} of its {len(micro_losses)}" if bad else "its gradient"


def read_metrics(path) -> list[dict]:
    """The whole records of a metrics.jsonl, in order; [] where there is none."""
    try:
        lines = Path(path).read_bytes().split(b"\n")[:-1]  # after the last newline: not a whole record
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def last_evaluation(path, step: int) -> int:
    """The step of the last evaluation after at most `step` updates that a metrics.jsonl holds, or -1."""
    return max((r["step"] for r in read_metrics(path) if "val_bpb" in r and r["step"] <= step), default=-1)


def rewind_metrics(path, step: int):
    """Drop what was recorded after `step` updates (atomically): training records from `step` on,
    evaluations after it.

    Training record k is the k-th update from 0; an evaluation at k was made after k updates.
    """
    path = Path(path)
    if not path.exists():
        return
    kept = [r for r in read_metrics(path) if r["step"] < step or ("loss" not in r and r["step"] == step)]
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in kept)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


class Console:
    """The line about a step: a progress line that rewrites itself on a terminal, a plain line each in a
    log."""

    def __init__(self, first_step: int, num_iterations: int, enabled: bool):
        self.enabled, self.terminal = enabled, enabled and sys.stderr.isatty()
        self.smooth, self.seen, self.num_iterations = 0.0, 0, num_iterations
        self.since = None  # the time and step after which speed is even: the first step of a process compiles
        self.bar = tqdm(
            initial=first_step,
            total=num_iterations,
            disable=not self.terminal,
            dynamic_ncols=True,
            leave=False,
        )

    def step(self, record: dict):
        loss = record["loss"]
        if math.isfinite(loss):  # a single batch's loss is noise; show the running mean of those there are
            self.smooth, self.seen = 0.9 * self.smooth + 0.1 * loss, self.seen + 1
            loss = self.smooth / (1 - 0.9**self.seen)
        text = (
            f"loss {loss:.4f} | lr x{record['lr_multiplier']:.2f} | {1000 * record['step_time_s']:.0f} ms "
            f"| {record['tok_per_sec']:,.0f} tok/s | mfu {100 * record['mfu']:.1f} %"
        )
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update()
        done, now = record["step"] + 1, time.monotonic()
        self.since = self.since or (now, done)
        if self.enabled and not self.terminal:
            each = (
                (now - self.since[0]) / (done - self.since[1])
                if done > self.since[1]
                else record["step_time_s"]
            )
            eta = timedelta(seconds=round(each * (self.num_iterations - done)))
            self.print(f"step {done}/{self.num_iterations} | {text} | {eta} left")

    def print(self, *lines):
        """Lines above the progress line."""
        if not self.enabled:
            return
        try:
            for line in lines:
                tqdm.write(str(line), file=sys.stdout)
            sys.stdout.flush()
        except BrokenPipeError:  # Ctrl-C ends the `tee` behind a run too; the run is still to save
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self):
        self.bar.close()


def start_wandb(run: str, project: str, config: dict, folder, run_id: str | None, say=print):
    """A wandb run named `run` (None for "dummy"); offline, saying so, where there is no network or no API
    key.

    `run_id` continues the run of that id.
    """
    if run == "dummy":
        return None
    try:
        import wandb  # only where it is used: a machine may not have it
    except ImportError:
        say("wandb is not installed, so nothing is logged there: pip install wandb, or leave --run out")
        return None
    mode = os.environ.get("WANDB_MODE")
    options = {
        "project": project,
        "name": run,
        "config": config,
        "dir": str(folder),
        "id": run_id,
        "resume": "allow",
        "settings": wandb.Settings(silent=True, console="off", init_timeout=20),
    }
    if mode is None and not _has_wandb_key():
        say("wandb has no API key here: logging offline (wandb login; wandb sync uploads it later)")
        mode = "offline"
    try:
        return wandb.init(**options, mode=mode)
    except Exception as error:  # every way a network can fail; training does not depend on it
        say(
            f"wandb cannot be reached ({type(error).__name__}): logging offline (wandb sync uploads it later)"
        )
        wandb.teardown()  # or its service still holds the run's id for the attempt that failed
        return wandb.init(**options, mode="offline")


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc

    try:
        return any("wandb" in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        return False
