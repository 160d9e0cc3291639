"""How much of a run is done: its progress, from 0 to 1, which the schedules follow.

With a number of steps, progress is step / num_iterations. With minutes, it is the share of the training time
that has passed: done / (done + left), where done is the number of steps x the time of a step. So if there is
a pause or the machine becomes slower, the run makes fewer steps, but ends in time and with the schedule
complete. The minutes count from the command to its end. Such a run cannot be repeated bit for bit; a run
with the same number of steps by --num_iterations can.
"""

import contextlib
import math
import os
import statistics
import subprocess
import time
from collections import deque
from pathlib import Path

RECENT = 16  # steps; the time of a step is their median, which a step that compiles does not change
WARM_UP = 3  # steps of a process before the time of a step is known, and progress more than 0
SAVE_BYTES_S = 200e6  # bytes a second: the speed of the last save, which the run waits for
QUESTION_TOKENS = 400  # about the tokens of a question of a task, over all its continuations
MOST_GUESSED = 0.1  # of the minutes, for the last evaluation, until one has been timed
END_S = 1.5  # seconds for the last report and the end of all processes

_imported = time.monotonic()


class Clock:
    """The progress of a run, the same on all its processes.

    plan: a planning.Plan. loop: the metrics.LoopState, which keeps the progress for a resumed run. With
    minutes the first process measures the time. The others get its progress together with the numbers of each
    step, so no step waits for it.
    """

    def __init__(self, plan, loop, machine, step: int):
        self.minutes, self.num_iterations = plan.horizon.minutes, plan.num_iterations
        self._plan, self._loop, self._machine = plan, loop, machine
        self._recent = deque(maxlen=RECENT)  # seconds of the latest steps
        self._evaluation_s = 0.0  # seconds of the longest evaluation so far
        self._evaluation_tokens = 0  # that the last evaluation reads
        self.ends_soon = False  # there is no time for another evaluation before the last one
        if not self.minutes:
            loop.minutes = loop.elapsed_s = 0.0
            return
        # If the minutes were others before, progress changes; if there were none, it is that of the steps
        share = loop.progress * loop.minutes / self.minutes if loop.minutes else step / self.num_iterations
        loop.progress, loop.minutes = min(1.0, share), self.minutes
        loop.elapsed_s = loop.elapsed_s or 60 * self.minutes * loop.progress
        self._end = time.monotonic() - seconds_since_command() - loop.elapsed_s + 60 * self.minutes

    @property
    def most_steps(self) -> float:
        """How many steps the run makes at most."""
        return math.inf if self.minutes else self.num_iterations

    def expect_evaluation(self, val_tokens: int, *tasks):
        """Say what the last evaluation will read: so many validation tokens, and lists of bundle.Task. Until
        an evaluation has been timed, its time is estimated from these."""
        questions = sum(len(task.examples) for kind in tasks for task in kind)
        self._evaluation_tokens = val_tokens + QUESTION_TOKENS * questions

    def progress(self, step: int) -> float:
        """The share of the run that is done after `step` steps. It never decreases."""
        return self._loop.progress if self.minutes else step / self.num_iterations

    def expected_steps(self, step: int) -> float:
        """How many steps the run makes in all, as it looks after `step` steps."""
        progress = self.progress(step)
        return step / progress if progress > 0 else self.num_iterations

    def now(self, steps: int) -> tuple[float, bool]:
        """(progress after `steps` steps, whether the run ends soon), which the first process tells all."""
        if not self.minutes or not self._machine.is_main:
            return 0.0, False
        # The first steps of a process say little: one of them compiles
        step_s = statistics.median(self._recent) if len(self._recent) >= WARM_UP else 0.0
        left = self.seconds_left() - self.last_work_s(step_s)
        if left <= step_s / 2:  # another step would end farther from the minutes than this one
            return 1.0, True
        made = steps * step_s
        return made / (made + left), left < self._evaluation_s

    def add_step(self, seconds: float, progress: float, ends_soon: float):
        """Count a step of so many seconds; progress and ends_soon are from the first process's `now`."""
        self._recent.append(seconds)
        if self.minutes:
            self._loop.progress = max(self._loop.progress, progress)
            self._loop.elapsed_s = 60 * self.minutes - self.seconds_left()
            self.ends_soon = ends_soon > 0

    def add_evaluation(self, seconds: float):
        """Remember how long an evaluation took: the last one may take as long."""
        self._evaluation_s = max(self._evaluation_s, seconds)

    def seconds_left(self) -> float:
        """Until the minutes are over, on this process's clock."""
        return self._end - time.monotonic()

    def last_work_s(self, step_s: float) -> float:
        """Seconds for what comes after the last step: an evaluation, a save and the end. step_s: a step's."""
        needed = self._plan.expected_memory
        save_s = (needed["weights"] + needed["optimizer state"]) / SAVE_BYTES_S
        # Scoring a token takes about a sixth of the time of training on it
        guess = step_s * self._evaluation_tokens / (6 * self._plan.total_batch_size)
        most = MOST_GUESSED * 60 * self.minutes if self.minutes else math.inf
        return END_S + save_s + (self._evaluation_s or min(guess, most))


def seconds_since_command() -> float:
    """Seconds since this process was started, or torchrun, if that started it. After a restart by torchrun
    the checkpoint has the time before."""
    pid = os.getppid() if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" else os.getpid()
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
