"""What a run prints: on a terminal one line that is redrawn, in a log file a line every few seconds."""

import math
import shutil
import sys
import time

from nanochat.run.clock import Clock
from nanochat.run.metrics import LoopState
from nanochat.terminal import bar, duration, is_terminal, print_line, printable

FULL_STEPS = 12  # first steps of a process that have a line each: on a CPU the eleventh compiles
LOG_S = 5.0  # seconds between two later lines of a log file
REDRAW_S = 0.1  # seconds between two updates on a terminal
UNLIKE = 10  # times as long as the mean: such a step says nothing about the next ones


class Console:
    """Prints lines about training steps, each with means since the line before, and other lines and bars
    between them.

    In a log file the first FULL_STEPS steps have a line each. The last step, and a step whose loss is not
    finite, have one on a terminal too. From `loop` come the last validation's bits per byte and the number of
    skipped steps, from `clock` the progress. bytes_per_token: the training text's mean, which turns the loss
    into bits per byte (0: unknown).
    """

    def __init__(self, first_step: int, enabled: bool, loop: LoopState, clock: Clock, bytes_per_token: float):
        self.enabled, self.first_step, self.clock = enabled, first_step, clock
        self.nats_per_bit = math.log(2) * bytes_per_token  # of a token's loss; 0: unknown
        self.loop, self.time_left = loop, TimeLeft()
        self.unshown: list[dict] = []  # records of the steps since the last line
        self.terminal = enabled and is_terminal(sys.stdout) and is_terminal(sys.stderr)
        self.live = None  # the line that is redrawn, if there is one
        self.shown_at = -math.inf  # on time.monotonic(): when a step was last printed or drawn
        self.drawn = ""  # the text of the live line; "" if it was printed as a line too

    def step(self, record: dict):
        """Show a training step, or count it for the next line. record: what metrics.jsonl gets."""
        if not self.enabled:
            return
        now = time.monotonic()
        self.time_left.add(record["step_time_s"], now)
        self.unshown.append(record)
        waited, done = now - self.shown_at, record["step"] + 1
        whole_line = self.clock.progress(done) >= 1 or not math.isfinite(record["loss"])
        if not self.terminal:
            whole_line |= done <= self.first_step + FULL_STEPS or waited >= LOG_S
        if whole_line or (self.terminal and waited >= REDRAW_S):
            self._show(whole_line)
            self.shown_at = now

    def print(self, *lines):
        """Lines above the live line."""
        if not self.enabled or not lines:
            return
        print_line(printable("\n".join(map(str, lines))), sys.stdout, above=self.terminal)

    def bar(self, description: str, unit: str, total: int):
        """terminal.bar in place of the live line."""
        self._hide()
        return bar(description, unit, total, hidden=not self.enabled, terminal=self.terminal, leave=False)

    def over(self, batches, text: str):
        """Yield the batches of a sequence, under a bar."""
        with self.bar(text, "batches", len(batches)) as shown:
            for batch in batches:
                yield batch
                shown.update()

    def close(self):
        """Print the steps since the last line."""
        if self.unshown:
            self._show(whole_line=True)
        elif self.drawn:
            self.print(self.drawn)
        self._hide()

    def _show(self, whole_line: bool):
        pieces = self._pieces()
        self.unshown, self.drawn = [], "" if whole_line else " | ".join(pieces)
        if whole_line:
            self.print(" | ".join(pieces))
            return
        if self.live is None:
            from tqdm import tqdm

            self.live = tqdm(bar_format="{desc}", leave=False)
        columns = shutil.get_terminal_size().columns - 1
        while len(pieces) > 1 and len(" | ".join(pieces)) > columns:
            pieces.pop()
        self.live.set_description_str(" | ".join(pieces)[:columns])

    def _hide(self):
        if self.live is not None:
            self.live.close()
            self.live = None

    def _pieces(self) -> list[str]:
        """The parts of a line, the most important first: a narrow terminal shows only the first ones."""
        record, loop, clock = self.unshown[-1], self.loop, self.clock
        seconds = sum(r["step_time_s"] for r in self.unshown)
        tok_per_sec, mfu = (
            sum(r[name] * r["step_time_s"] for r in self.unshown) / seconds for name in ("tok_per_sec", "mfu")
        )
        done = record["step"] + 1
        loss = record["smoothed_loss"] if math.isfinite(record["loss"]) else record["loss"]
        of = f" ({clock.progress(done):.0%})" if clock.minutes else f"/{clock.num_iterations}"
        pieces = [f"step {done}{of}", f"loss {loss:.4f}"]
        if clock.progress(done) < 1 and (left := self._seconds_left(done)) is not None:
            pieces.append(f"{duration(left)} left")
        bpb = [f"train {loss / self.nats_per_bit:.3f}"] if self.nats_per_bit else []
        bpb += [f"val {loop.val_bpb:.4f}"] if loop.val_bpb is not None else []
        pieces += [f"bpb {', '.join(bpb)}"] if bpb else []
        pieces += [f"{tok_per_sec:,.0f} tok/s", f"mfu {100 * mfu:.1f} %"]
        pieces += [f"lr x{record['lr_multiplier']:.2f}", f"{1000 * seconds / len(self.unshown):.0f} ms"]
        if loop.skipped:
            pieces.append(f"{loop.skipped} skipped")
        return pieces

    def _seconds_left(self, done: int) -> float | None:
        """Seconds to the end of the run, with what comes after its last step; None: not known yet."""
        if self.clock.minutes:
            return max(0.0, self.clock.seconds_left())
        last_s = self.clock.last_work_s(self.time_left.seconds_per_step)
        return self.time_left.after(self.clock.num_iterations - done, last_s)


class TimeLeft:
    """Estimates the time of the steps to come, with the evaluations, samples and saves between them.

    A step takes the mean of about the last hundred. Time between two steps is a pause if it is longer than
    the step after it; the coming pauses take as much time a step as those so far. The first step, which
    compiles, and the time after it, which makes the buffers for saving, are not counted. A step UNLIKE those
    before counts as a first one: on a CPU the eleventh compiles.
    """

    def __init__(self):
        self.begin()

    def begin(self):
        self.last = None  # on time.monotonic(): the end of the last step
        self.steps, self.seconds_per_step, self.paused, self.pause_per_step = 0, 0.0, 0.0, 0.0

    def add(self, seconds: float, now: float):
        """Count a step of so many seconds that ended at `now` on time.monotonic()."""
        if self.steps and seconds > UNLIKE * self.seconds_per_step:
            self.begin()
        if self.last is not None:
            self.steps += 1
            pause = now - self.last - seconds if self.steps > 1 else 0.0
            if pause > seconds:
                self.paused += pause
                self.pause_per_step = self.paused / self.steps
            else:
                seconds += max(0.0, pause)
            self.seconds_per_step += (seconds - self.seconds_per_step) / min(self.steps, 100)
        self.last = now

    def after(self, steps: int, last_s: float = 0.0) -> float | None:
        """Seconds that so many steps will take, and last_s at least after them; None before a step has been
        measured."""
        pauses = max(steps * self.pause_per_step, last_s)
        return steps * self.seconds_per_step + pauses if self.steps else None
