"""One record a step -> console, metrics.jsonl and wandb."""

import json
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from tqdm import tqdm

from nanochat import UserError
from nanochat.plain_file import open_plain

RECENT_STEPS = 64  # losses that a spike is measured against
EVALUATIONS = ("val_bpb", "samples", "own_score", "core")  # an evaluation's record has one of these at least


@dataclass
class Progress:
    """What the training loop remembers. It is saved in every checkpoint, so a resumed loop goes on with
    it."""

    tokens: int = 0  # trained on so far
    train_seconds: float = 0.0
    skipped: int = 0  # steps whose gradient was not finite
    recent: list[float] = field(default_factory=list)  # losses of the latest good steps
    wandb_id: str | None = None

    def add_step(self, loss: float, tokens: int, seconds: float, finite: bool) -> bool:
        """Count a step, and return whether its loss is a spike."""
        spike = is_spike(loss, self.recent)
        self.tokens += tokens
        self.train_seconds += seconds
        if finite:
            self.recent = [*self.recent, loss][-RECENT_STEPS:]
        else:
            self.skipped += 1
        return spike


class Metrics:
    """Writes records to `<out_dir>/metrics.jsonl` and, where a run has one, to wandb.

    A record is one JSON object on one line, written with one system call: whatever kills the process, the
    file holds whole records. NaN and infinity are written as null, since JSON has neither.
    """

    def __init__(self, out_dir, wandb_run=None, enabled: bool = True):
        self.path = Path(out_dir) / "metrics.jsonl"
        self.wandb_run, self.enabled = wandb_run, enabled
        if enabled:  # the first process writes for all
            self.file = self._open()

    def _open(self) -> int:
        try:
            return open_plain(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise UserError(f"cannot write {self.path} ({error.strerror})") from error

    def write(self, record: dict):
        if not self.enabled:
            return
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        line = (json.dumps(record) + "\n").encode()
        try:
            if os.fstat(self.file).st_nlink == 0:  # what is written now would go nowhere
                self._begin_again()
            written = os.write(self.file, line)
        except OSError as error:
            raise UserError(
                f"cannot write {self.path} ({error.strerror}); make room and start again"
            ) from error
        if written < len(line):  # a resumed run drops the broken line
            raise UserError(f"cannot write {self.path} (the disk is full); make room and start again")
        if self.wandb_run is not None:
            self.wandb_run.log({k: v for k, v in record.items() if v is not None}, step=record["step"])

    def _begin_again(self):
        """Go on in a new file, and a new folder if that is gone too."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        os.close(self.file)
        self.file = self._open()
        print(
            f"warning: {self.path} was deleted while the run goes on; it begins again, without the steps "
            "before. Start no other run in this folder",
            file=sys.stderr,
            flush=True,
        )

    def start_wandb(self, run: str, config: dict, progress: Progress, say):
        """Log to a wandb run of that name too, or go on in the one that `progress` remembers."""
        if self.enabled:
            self.wandb_run = start_wandb(run, "nanochat", config, self.path.parent, progress.wandb_id, say)
            progress.wandb_id = self.wandb_run.id if self.wandb_run else None

    def sync(self):
        """Return when every record is on disk."""
        if self.enabled:
            os.fsync(self.file)

    def close(self):
        if self.enabled:
            os.close(self.file)
        if self.wandb_run is not None:
            self.wandb_run.finish()


def is_spike(loss: float, recent: list[float]) -> bool:
    """Whether a loss is more than 6 standard deviations above the mean of at least 32 recent ones."""
    return len(recent) >= 32 and loss > statistics.fmean(recent) + 6 * statistics.pstdev(recent)


def diverged(step: int, micro_losses: list[float], first_row: int, checkpoints: str) -> UserError:
    """The error that ends a run after three bad steps in a row. It names the first thing that was not
    finite."""
    bad = [i for i, loss in enumerate(micro_losses) if not math.isfinite(loss)]
    where = f"micro-step {bad[0]} of its {len(micro_losses)}" if bad else "its gradient"
    return UserError(
        f"three steps in a row were not finite, the last one step {step} in {where} (rows from {first_row} "
        f"on); {checkpoints}; lower the learning rates or use --dtype=float32"
    )


def read_metrics(path, say=lambda warning: None) -> list[dict]:
    """The whole records of a metrics.jsonl, in order; [] if there is no such file. `say` hears of bad
    lines."""
    if not Path(path).is_file():  # reading a pipe would wait
        return []
    lines = Path(path).read_bytes().split(b"\n")[:-1]  # after the last newline: not a whole record
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record["step"], int) or not record.keys() & {"loss", *EVALUATIONS}:
                raise ValueError("neither a step nor an evaluation")
            records.append(record)
        except (ValueError, KeyError, TypeError, RecursionError):
            say(f"warning: {path}, line {number}, is damaged and skipped")
    return records


def last_evaluation(path, step: int) -> int:
    """The step of the last evaluation in a metrics.jsonl, after at most `step` updates; -1 if there is
    none."""
    steps = (r["step"] for r in read_metrics(path) if "loss" not in r and r["step"] <= step)
    return max(steps, default=-1)


def rewind_metrics(path, step: int, say=print):
    """Drop the records made after `step` updates: training records from `step` on, evaluations after it.

    Training record k is update k, counted from 0; an evaluation at k was made after k updates. The file
    changes at once or not at all.
    """
    path = Path(path)
    if not path.is_file():
        return
    kept = [r for r in read_metrics(path, say) if r["step"] < step or ("loss" not in r and r["step"] == step)]
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)  # a link would lead the next line elsewhere
    with os.fdopen(open_plain(temporary, os.O_WRONLY | os.O_CREAT), "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in kept)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


class Console:
    """Prints a line about each step: on a terminal one line that is rewritten, in a log file a line each."""

    def __init__(self, first_step: int, num_iterations: int, enabled: bool):
        self.enabled, self.terminal = enabled, enabled and sys.stderr.isatty()
        self.smooth, self.seen, self.num_iterations = 0.0, 0, num_iterations
        self.since = (
            None  # (time, step) after the first step, which compiles; the speed is counted from there
        )
        self.bar = tqdm(
            initial=first_step,
            total=num_iterations,
            disable=not self.terminal,
            dynamic_ncols=True,
            leave=False,
        )

    def step(self, record: dict):
        loss = record["loss"]
        if math.isfinite(loss):  # one batch's loss is noisy; show a running mean
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
            since, first = self.since
            each = (now - since) / (done - first) if done > first else record["step_time_s"]
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
        except BrokenPipeError:  # Ctrl-C ends the `tee` behind a run too; the run still has to save
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self):
        self.bar.close()


def start_wandb(run: str, project: str, config: dict, folder, run_id: str | None, say=print):
    """A wandb run named `run`; None for "dummy". Without a network or an API key it logs offline and says so.

    `run_id` continues the run with that id.
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
    except Exception as error:  # a network can fail in many ways; training goes on without it
        say(
            f"wandb cannot be reached ({type(error).__name__}): logging offline (wandb sync uploads it later)"
        )
        wandb.teardown()  # its service still holds the id of the attempt that failed
        return wandb.init(**options, mode="offline")


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc

    try:
        return any("wandb" in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        return False
