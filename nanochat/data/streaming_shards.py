"""Training on shards while they are downloaded: the loader reads one after the other and waits for the next.

    shards = ArrivingShards(paths, Arrival(folder, ...))
    loader = TrainLoader(shards, ...)      # begins as soon as the first shard is in its folder

The download (`download.py`, or another process) puts shards into the folder. The loader's thread waits for
them. The training loop prints the messages of both, and ends the run if no shard comes for long.
"""

import contextlib
import itertools
import math
import queue
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from nanochat import UserError
from nanochat.terminal import duration, is_terminal, print_line

LOOK_S = 0.2  # seconds between two looks for a shard
MENTION_S = 2.0  # seconds; a longer wait for a shard is mentioned on the console
UNFINISHED = ".cache/huggingface/download/**/*.incomplete"  # files that huggingface_hub has not completed
PATIENCE_S = 600.0  # seconds without a new byte of any shard; then a run that waits for one ends


class Arrival:
    """A folder in which shards arrive, as one process sees it.

    how: the command that downloads the shards, for messages. patience_s: after so many seconds without a new
    byte, a wait ends with a UserError (0: nothing arrives). After `longest_s` it ends even if bytes come.
    """

    def __init__(self, folder: Path, how: str, patience_s: float):
        self.folder, self.how, self.patience_s = folder, how, patience_s
        self.longest_s = math.inf
        self.problem = ""  # why the last attempt to download failed
        self.given_up = ""  # why the run has to end: one sentence
        self._news: queue.SimpleQueue = queue.SimpleQueue()  # lines for the training loop to print
        self.closed = threading.Event()  # set when the run ends, for the download
        self._enabled, self._stop = False, None

    def belong_to(self, enabled: bool, stop, longest_s: float) -> None:
        """Print news if `enabled`, and end the run with `stop`, its StopSignal."""
        self._enabled, self._stop, self.longest_s = enabled, stop, longest_s

    def say(self, line: str) -> None:
        """Let the training loop print a line. Any thread may call this."""
        self._news.put(line)

    def print_news(self) -> None:
        """Print the lines of `say`, above a line that is redrawn."""
        while not self._news.empty():
            line = self._news.get()
            if self._enabled:
                print_line(line, sys.stdout, above=is_terminal(sys.stdout) and is_terminal(sys.stderr))

    @property
    def stopping(self) -> bool:
        """Whether a signal asks the run to stop."""
        return bool(self._stop and self._stop.name)

    def give_up(self, reason: str) -> None:
        """Ask the loop to save and stop after this step."""
        self.given_up = reason
        if self._stop:
            self._stop.ask("missing text")

    def wait(self, shard: Path, cancelled: threading.Event) -> None:
        """Return when a shard is here. Raises UserError if it does not come, RuntimeError if cancelled."""
        began = moved = time.monotonic()
        size, mentioned = self._bytes(), False
        while not shard.exists():
            waited = time.monotonic() - began
            if time.monotonic() - moved >= self.patience_s or waited >= self.longest_s:
                why = f" ({self.problem})" if self.problem else ""
                took = f"has not come for {duration(waited)}" if self.patience_s else "is missing"
                raise UserError(
                    f"the text ends here: {shard.name} {took}{why}; get it: {self.how}; after that the same "
                    "command goes on"
                )
            if not mentioned and waited >= MENTION_S:
                mentioned = True
                self.say(f"waiting for {shard.name}: training is faster than the download")
            if threading.current_thread() is threading.main_thread():
                self.print_news()
            if cancelled.wait(LOOK_S):
                raise RuntimeError("this loader is closed")
            before, size = size, self._bytes()  # it falls when a broken download begins again
            if size > before:
                moved = time.monotonic()

    def _bytes(self) -> int:
        """Bytes of all shards, complete or not."""
        total = 0
        for path in itertools.chain(self.folder.glob("shard_*.parquet"), self.folder.glob(UNFINISHED)):
            with contextlib.suppress(OSError):  # it was renamed just now
                total += path.stat().st_size
        return total


class ArrivingShards(list):
    """Paths of shards in the order in which a run reads them; the first one is here."""

    def __init__(self, paths: Iterable[Path], arrival: Arrival):
        super().__init__(paths)
        self.arrival = arrival
