"""How much of a run is done: its progress, from 0 to 1, which the schedules follow.

With a number of steps, progress is step / num_iterations. With minutes, it is the share of the training time
that has passed: steps made x the time of a step, divided by the same plus the time that is left. So a pause,
the compiler or a machine that becomes slower shortens the rest of the run, and it still ends in time, with
its learning rate at the end of the schedule. The minutes are those of the person who waits: from the command
to its end. Such a run cannot be repeated bit for bit; one with as many steps by --num_iterations can.
"""

import contextlib
import math
import os
import statistics
import subprocess
import time
from collections import deque
from pathlib import Path

RECENT = 16  # steps whose median is the time of a step: one that compiles or is held up does not count
WARM_UP = 3  # steps before progress is more than 0
SAVE_BYTES_S = 200e6  # bytes a second of the last save, which the run waits for
QUESTION_TOKENS = 400  # about so many are read for a question of a task, over all its continuations
END_S = 1.5  # seconds of the last report, and of the end of all processes

_imported = time.monotonic()


class Clock:
    """The progress of a run, the same on all its processes.

    plan: a planning.Plan. loop: the metrics.LoopState, which keeps what a resumed run goes on with. With
    minutes the first process has the time, and the others hear of it with the numbers of each step, so no
    step waits for it.
    """

    def __init__(self, plan, loop, machine, step: int):
        self.minutes, self.num_iterations = plan.horizon.minutes, plan.num_iterations
        self._plan, self._loop, self._machine = plan, loop, machine
        self._recent = deque(maxlen=RECENT)  # seconds of the latest steps
        self._evaluation_s, self._evaluation_tokens = 0.0, 0  # of the longest one so far; that the last reads
        self.ends_soon = False  # another evaluation would not be over before the last one has to begin
        if not self.minutes:
            loop.minutes = 0.0
            return
        # Other minutes than before change the share that is done. Without minutes before, it is that of steps
        share = loop.progress * loop.minutes / self.minutes if loop.minutes else step / self.num_iterations
        loop.progress, loop.minutes = min(1.0, share), self.minutes
        loop.elapsed_s = loop.elapsed_s or 60 * self.minutes * loop.progress
        self._end = time.monotonic() - seconds_since_command() - loop.elapsed_s + 60 * self.minutes

    @property
    def most_steps(self) -> float:
        """How many steps the run makes at most."""
        return math.inf if self.minutes else self.num_iterations

    def expect_evaluation(self, val_tokens: int, *tasks):
        """What the last evaluation reads: tokens of the validation text, and lists of core.Task. Its time is
        guessed from them until one has been timed."""
        questions = sum(len(task.examples) for kind in tasks for task in kind)
        self._evaluation_tokens = val_tokens + QUESTION_TOKENS * questions

    def progress(self, step: int) -> float:
        """The share of the run that is done after `step` steps. It never falls."""
        return self._loop.progress if self.minutes else step / self.num_iterations

    def expected_steps(self, step: int) -> float:
        """How many steps the run makes in all, as it looks after `step` steps."""
        progress = self.progress(step)
        return step / progress if progress > 0 else self.num_iterations

    def now(self, steps: int) -> tuple[float, bool]:
        """What the first process tells all with the numbers of a step: its progress after `steps` steps, and
        whether the run ends soon."""
        if not self.minutes or not self._machine.is_main:
            return 0.0, False
        step_s = statistics.median(self._recent) if self._recent else 0.0
        left = self.seconds_left() - self._last_work_s(step_s)
        if left <= 0:
            return 1.0, True
        made = steps * step_s if len(self._recent) >= WARM_UP else 0.0
        return made / (made + left), left < self._evaluation_s

    def add_step(self, seconds: float, progress: float, ends_soon: float):
        """Count a step that took so long, with what all heard from the first process's `now`."""
        self._recent.append(seconds)
        if self.minutes:
            self._loop.progress = max(self._loop.progress, progress)
            self._loop.elapsed_s = 60 * self.minutes - self.seconds_left()
            self.ends_soon = ends_soon > 0

    def add_evaluation(self, seconds: float):
        """Note how long an evaluation took; the last one may take as long."""
        self._evaluation_s = max(self._evaluation_s, seconds)

    def seconds_left(self) -> float:
        """Until the minutes are over, on this process's clock."""
        return self._end - time.monotonic()

    def _last_work_s(self, step_s: float) -> float:
        """What comes after the last step: an evaluation, a save and the end."""
        needed = self._plan.expected_memory
        save_s = (needed["weights"] + needed["optimizer state"]) / SAVE_BYTES_S
        # To score a token takes a third of the time to train on one
        guess = step_s * self._evaluation_tokens / (3 * self._plan.total_batch_size)
        return END_S + save_s + (self._evaluation_s or guess)


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
