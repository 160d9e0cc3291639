"""stdout and stderr of a script: they are always there, and no reader stops the script.

A reader may be gone (`| head`), a stream may be closed (cron, daemons), and a reader may stop reading
(`| less`, Ctrl-S, a frozen ssh). Text for a reader who is gone, or for a full disk, goes nowhere. A training
script writes in a thread, so that a reader who has stopped cannot keep it from saving and ending.
"""

import atexit
import contextlib
import errno
import functools
import io
import os
import queue
import stat
import sys
import threading
import time

STALLED_S = 1.0  # seconds in which a reader takes nothing; then flush() waits for it no longer
END_S = 5.0  # the same at the end of a run that has made steps
MOST_WAITING = 2000  # lines, or states of a bar, that wait for a reader while a run trains; more are dropped

_may_drop = False  # see never_wait
_writers = []


class Output(io.RawIOBase):
    """What is below the text of sys.stdout or sys.stderr: a write neither fails nor, with a writer, waits."""

    def __init__(self, stream):
        buffer = getattr(stream, "buffer", None)
        self.raw = getattr(buffer, "raw", buffer)  # None: nobody reads, now and later
        self.writer, self.dropped = None, 0  # lines that were dropped since the last one that was not

    def writable(self):
        return True

    def isatty(self):
        return self.raw is not None and self.raw.isatty()

    def fileno(self):
        return self.raw.fileno() if self.raw else super().fileno()

    def write(self, data):
        data = bytes(data)
        if self.writer:
            self.writer.put(self, data)
        else:
            self.emit(data)
        return len(data)

    def flush(self):
        """Wait until all is written, unless the reader has stopped to read."""
        if self.writer and not self.writer.stalled:
            self.writer.wait(STALLED_S)

    def emit(self, data):
        """Write to the reader, and wait for him."""
        left = memoryview(data)
        try:
            while left and self.raw:
                written = self.raw.write(left)
                left = left[written or 0 :]
                if written is None:  # the file is full, and does not block
                    time.sleep(0.05)
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):  # a disk may get room again
                self.raw = None  # what comes later goes nowhere


class Writer:
    """A thread that writes to one file what streams put into its queue, in this order."""

    def __init__(self):
        self._queue, self._written, self.stalled = queue.SimpleQueue(), 0, False
        threading.Thread(target=self._run, name="output", daemon=True).start()

    def put(self, output: Output, data: bytes):
        """Let the thread write. A signal handler may call this."""
        if _may_drop and data and self._queue.qsize() >= MOST_WAITING:
            output.dropped += data.count(b"\n")
            return
        if output.dropped:
            data = f"({output.dropped} lines are left out, because nobody read)\n".encode() + data
            output.dropped = 0
        self._queue.put(functools.partial(output.emit, data))

    def _run(self):
        while True:
            self._queue.get()()
            self._written += 1
            if self._queue.empty():
                self.stalled = False

    def wait(self, seconds: float | None) -> bool:
        """Wait until all is written, as long as something is every so many seconds (None: for ever). Returns
        whether all is."""
        over = threading.Event()
        self._queue.put(over.set)
        while True:
            before = self._written
            if over.wait(seconds):
                return True
            if self._written == before:
                self.stalled = True
                return False


def secure():
    """Make sys.stdin, stdout and stderr usable, also if they are closed. What the terminal cannot show is
    printed as an escape, such as \\u2192. Streams that a program has replaced stay."""
    with contextlib.suppress(OSError):
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # else a file of the run would become stdout
            os.set_inheritable(fd, True)
        os.close(fd)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            how = {"encoding": getattr(stream, "encoding", "utf-8"), "errors": "backslashreplace"}
            setattr(sys, name, io.TextIOWrapper(Output(stream), **how, line_buffering=True))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def in_background():
    """From now on a thread writes. stdout and stderr share it if both lead to the same file, so that their
    lines keep their order."""
    secure()
    _let_cpp_not_wait()
    writers = {}
    for output in _outputs():
        with contextlib.suppress(OSError, ValueError):  # of a stream that leads nowhere
            status = os.fstat(output.fileno())
            file = status.st_dev, status.st_ino
            output.writer = writers[file] = writers.get(file) or Writer()
    _writers[:] = writers.values()
    atexit.register(_end)
    if hasattr(os, "register_at_fork"):  # a child has no such thread
        os.register_at_fork(after_in_child=_write_directly)


def _let_cpp_not_wait():
    """Open the pipe or terminal behind stdout and stderr once more, so that it does not block this process,
    and other processes as before. What C++ writes there is lost while nobody reads; Python's text waits for
    the reader in `Output.emit`."""
    for fd in 1, 2:
        with contextlib.suppress(OSError, AttributeError):  # a socket, not Linux, a terminal of another user
            if stat.S_ISFIFO(os.fstat(fd).st_mode) or os.isatty(fd):
                again = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
                os.dup2(again, fd)
                os.close(again)


def never_wait():
    """From now on the end of the process does not wait for a reader who has stopped, and lines that too many
    others wait before are dropped."""
    global _may_drop
    _may_drop = True


def from_handler(text: str):
    """Print on stderr from a signal handler, where print() is not safe."""
    never_wait()
    with contextlib.suppress(Exception):  # a program may have replaced the stream
        sys.stderr.buffer.write(text.encode())


def nobody_reads() -> bool:
    """Whether the reader of stdout has gone."""
    buffer = getattr(sys.stdout, "buffer", None)
    return isinstance(buffer, Output) and buffer.raw is None


def drain(seconds: float | None) -> bool:
    """Wait until all is written, or no reader takes anything for so many seconds (None: however long). Call
    it before os._exit."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    for output in _outputs():
        output.write(b"")  # says how many lines were dropped
    return all([writer.wait(seconds) for writer in _writers])


def _end():
    if not drain(END_S if _may_drop else None):
        for output in _outputs():
            output.raw = None  # what is left goes nowhere
    _write_directly()


def _write_directly():
    for output in _outputs():
        output.writer = None
    _writers.clear()


def _outputs():
    buffers = (getattr(stream, "buffer", None) for stream in (sys.stdout, sys.stderr))
    return [buffer for buffer in buffers if isinstance(buffer, Output)]
