"""The records of a run in metrics.jsonl, and the state of the training loop."""

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from nanochat import UserError
from nanochat.checkpoint import Checkpoint
from nanochat.files import open_plain, write_whole
from nanochat.terminal import counted

RECENT_STEPS = 64  # losses that a spike is measured against
SMOOTHING = 0.9  # share of the old mean in the smoothed loss
MAX_LINE_BYTES = 2**22  # a longer line is no record: its pieces of this length count as damaged lines


@dataclass
class LoopState:
    """What the training loop remembers. Every checkpoint saves it, and a resumed run continues with it."""

    tokens: int = 0  # trained on so far
    train_seconds: float = 0.0
    skipped: int = 0  # steps whose gradient was not finite
    bad_steps: int = 0  # the last steps in a row that were not finite, without overflows of float16
    recent: list[float] = field(default_factory=list)  # losses of the latest good steps
    wandb_id: str | None = None
    val_bpb: float | None = None  # bits per byte of the last validation
    smooth_sum: float = 0.0  # the running mean of the losses, before the correction in smoothed_loss
    smooth_steps: int = 0  # losses in smooth_sum
    progress: float = 0.0  # of a run with --target_minutes: the share that is done, see clock.py
    minutes: float = 0.0  # the --target_minutes of that progress
    elapsed_s: float = 0.0  # seconds of these minutes that have passed

    _ended = -math.inf  # on time.perf_counter(): the end of the last step; no field, so it is not saved

    @classmethod
    def of(cls, checkpoint: Checkpoint | None) -> "LoopState":
        """The state in a checkpoint, or that of a new run. Raises UserError if a checkpoint's has other
        fields."""
        try:
            return cls(**(checkpoint.state["loop"] if checkpoint else {}))
        except TypeError as error:
            raise UserError(
                f"the loop's state in {checkpoint.path} has fields that this version does not know; go on "
                "with the version that wrote it, or start a new run from its weights with --init_from"
            ) from error

    def step_seconds(self, started: float) -> float:
        """Seconds of the step that Python began at `started` on time.perf_counter() and that has ended now.

        A GPU begins a step when the step before has ended, even if Python has asked for it earlier. So the
        times of all steps add up.
        """
        now = time.perf_counter()
        seconds, self._ended = now - max(started, self._ended), now
        return seconds

    def add_step(self, loss: float, tokens: int, seconds: float, finite: bool) -> dict:
        """Count a step, and return what its record gets: the new totals, and whether its loss is a spike."""
        spike = is_spike(loss, self.recent)
        self.tokens += tokens
        self.train_seconds += seconds
        if finite:
            self.recent = [*self.recent, loss][-RECENT_STEPS:]
        else:
            self.skipped += 1
        if math.isfinite(loss):
            self.smooth_sum = SMOOTHING * self.smooth_sum + (1 - SMOOTHING) * loss
            self.smooth_steps += 1
        return {
            "smoothed_loss": self.smoothed_loss,
            "tokens": self.tokens,
            "train_time_s": self.train_seconds,
            "skipped": self.skipped,
            "spike": spike,
        }

    @property
    def smoothed_loss(self) -> float:
        """The exponential moving average of the losses, since one batch's loss is noisy. NaN before the first
        loss. It starts at 0 and is too low at first; the division corrects that, as in Adam.
        """
        return self.smooth_sum / (1 - SMOOTHING**self.smooth_steps) if self.smooth_steps else math.nan


class Metrics:
    """Writes records to `<out_dir>/metrics.jsonl` and to the run's Loggers (loggers.py).

    A record is a line of JSON, written with one system call: if the process is killed, the file has whole
    records and perhaps the beginning of another, which is not read. NaN and infinity are written as null:
    JSON has neither.
    """

    def __init__(self, out_dir, loggers=None, enabled: bool = True):
        self.path = Path(out_dir) / "metrics.jsonl"
        self.loggers, self.enabled = loggers, enabled
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
        record = _plain(record)
        line = (json.dumps(record) + "\n").encode()
        try:
            if os.fstat(self.file).st_nlink == 0:  # the file was deleted
                self._begin_again()
            written = os.write(self.file, line)
        except OSError as error:
            raise UserError(
                f"cannot write {self.path} ({error.strerror}); make room and start again"
            ) from error
        if written < len(line):  # a resumed run drops the broken line
            raise UserError(f"cannot write {self.path} (the disk is full); make room and start again")
        if self.loggers is not None:
            self.loggers.write(record)

    def _begin_again(self):
        """Go on in a new file, and in a new folder if that was deleted too."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        os.close(self.file)
        self.file = self._open()
        print(
            f"warning: {self.path} was deleted while the run goes on; a new file begins, without the steps "
            "before. Start no other run in this folder",
            file=sys.stderr,
            flush=True,
        )

    def sync(self):
        """Return when every record is on disk."""
        if self.enabled:
            os.fsync(self.file)

    def close(self):
        if self.enabled:
            os.close(self.file)
        if self.loggers is not None:
            self.loggers.finish()


def _plain(value):
    """The value for JSON: None in place of NaN and infinity, a number in place of a tensor that holds one."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if hasattr(value, "item"):  # of torch or numpy
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


def records_in(file: BinaryIO, say=lambda warning: None) -> Iterator[dict]:
    """The whole records of an open metrics.jsonl, one by one: all those of a long run need much memory.

    Only training records have a loss. Training record k is update k, from 0; evaluation record k was made
    after k updates. `say` gets a warning about damaged lines.
    """
    damaged = []
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
        if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:  # its writer was killed, or still writes
            break
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        step = record.get("step") if isinstance(record, dict) else None
        if type(step) is int and 0 <= step < 2**53:
            yield record
        else:
            damaged.append(number)
    if damaged:
        which = ", ".join(map(str, damaged[:20])) + (" ..." if len(damaged) > 20 else "")
        lines = counted(len(damaged), "damaged line", "damaged lines")
        say(f"warning: metrics.jsonl: {lines} skipped ({which})")


def read_metrics(path, say=lambda warning: None) -> list[dict]:
    """`records_in` a file; [] if there is no such file."""
    if not Path(path).is_file():  # a pipe would block
        return []
    with open(path, "rb") as file:
        return list(records_in(file, say))


def rewind_metrics(path, step: int, say=print):
    """Drop the records made after `step` updates: training records from `step` on, and later evaluations. The
    file changes at once or not at all; if it cannot, UserError."""
    if Path(path).is_file():
        records = read_metrics(path, say)
        kept = [r for r in records if r["step"] < step or ("loss" not in r and r["step"] == step)]
        write_whole(path, b"".join(json.dumps(record).encode() + b"\n" for record in kept))
