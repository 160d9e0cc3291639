"""Signals that ask a run to stop: from a person, a scheduler, or a terminal that closes."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

from nanochat import files, streams

NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGQUIT")  # Windows has the first two
PATIENCE_S = 1.0  # seconds in which Python's own handler should have answered


class StopSignal:
    """Handles the signals in NAMES: until `set_up_done` they end the process; later the loop saves and stops
    after its step.

    A second Ctrl-C (SIGINT) or Ctrl-\\ (SIGQUIT) ends the process at once and says what is lost. If the
    torchrun that started this process dies, that counts as a signal too. Under nohup, SIGHUP stays ignored.
    What is printed is written in the background, so that a reader who has stopped does not keep the run from
    saving.
    """

    def __init__(self):
        streams.in_background()
        self._name, self._in_set_up, self._what_is_lost = "", True, None
        self._torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        with contextlib.suppress(ValueError):  # outside the main thread the handlers stay as they are
            for name in NAMES:
                number = getattr(signal, name, None)
                ignored = name == "SIGHUP" and number and signal.getsignal(number) == signal.SIG_IGN
                if number and not ignored:
                    signal.signal(number, self._remember)
            self._watch()

    @property
    def name(self) -> str:
        """What asked this process to stop, "" if nothing did."""
        torchrun_died = self._torchrun and os.getppid() != self._torchrun
        return self._name or ("the death of torchrun" if torchrun_died else "")

    @property
    def asked(self) -> bool:
        """Whether the loop has to save and stop now."""
        return self.name != ""

    def ask(self, reason: str):
        """Let the loop save and stop after its step, as a signal would."""
        self._name = self._name or reason

    def set_up_done(self, what_is_lost: Callable[[], str] | None = None):
        """The first step is done: from now on there is something to save.

        what_is_lost: says what an end at once loses, "" if another process says it. A signal handler calls
        it, so it must not wait for anything.
        """
        self._in_set_up, self._what_is_lost = False, what_is_lost
        streams.never_wait()

    def _remember(self, number, frame):
        name = signal.Signals(number).name
        if self._in_set_up:
            _end_set_up(number)
        if self._name == name and name in ("SIGINT", "SIGQUIT"):
            self._end_at_once(number)
        self._name = name
        again = "; once more ends the run at once" if name in ("SIGINT", "SIGQUIT") else ""
        streams.from_handler(f"\n{name}: finishing this step, then saving{again}\n")

    def _end_at_once(self, number):
        """End the process without a save. A third signal ends the wait for those who read its output."""
        say, self._what_is_lost = self._what_is_lost, None
        try:
            if say and (lost := say()):
                streams.from_handler(f"\nstopped at once: {lost}\n")
                streams.drain(streams.STALLED_S)
        finally:
            os._exit(128 + number)  # a checkpoint is complete or absent at any moment: nothing to clean up

    def _watch(self):
        """Let a thread end the set-up when the main thread cannot: Python calls `_remember` between two of
        its own instructions, and the main thread may be in C++ code for minutes."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)  # it gets a byte for each signal
        self._sockets = reader, writer  # they live as long as this object

        def wait():
            while self._in_set_up and (number := reader.recv(1)):
                time.sleep(PATIENCE_S)
                if self._in_set_up and signal.Signals(number[0]).name in NAMES:
                    _end_set_up(number[0])

        threading.Thread(target=wait, name="signals", daemon=True).start()


def _end_set_up(number):
    """End the process now: before its first step, a run has nothing to save. Status 0, as after a save, so a
    scheduler puts the job back into its queue."""
    name = signal.Signals(number).name
    streams.from_handler(
        f"\nstopped by {name} before the first step was done; the same command starts again\n"
    )
    streams.drain(streams.STALLED_S)
    files.remove_unfinished()  # of an import; what has its final name is complete
    os._exit(0)
