"""A terminal: progress bars on stderr (in a log file a few lines), text, numbers in words, and what a person
types."""

import atexit
import contextlib
import os
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

QUICK_S = 3.0  # seconds; work that is done sooner leaves no line in a log file
REMIND_S = 60.0  # seconds between two lines about longer work in a log file
# Control characters, which a terminal obeys and does not show, as escapes. A model can write them.
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def is_terminal(stream) -> bool:
    """Whether a line on this stream can be redrawn."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def bar(description: str, unit: str, total: int | None = None, hidden=False, terminal=None, leave=True):
    """A bar over `total` bytes (unit "B") or pieces of work; use it in `with`, and call its update(n).

    total: None if it is not known. hidden: show nothing. terminal: whether it may redraw its line (None: find
    out). leave: whether the complete bar stays on the terminal.
    """
    if terminal is None:
        terminal = is_terminal(sys.stderr)
    if not terminal and not hidden:
        return LogLines(description, unit, total)
    from tqdm import tqdm

    return tqdm(
        desc=description,
        unit=unit if unit == "B" else f" {unit}",
        total=total,
        unit_scale=unit == "B",
        mininterval=0.2,
        dynamic_ncols=True,
        leave=leave,
        disable=hidden,
    )


class LogLines:
    """A bar for a log file: a line after QUICK_S seconds, then one each minute, and one at the end."""

    def __init__(self, description: str, unit: str, total: int | None):
        self.description, self.total = description, total
        self.unit = "" if unit == "B" else f" {unit}"  # bytes have it at each number
        self.done, self.began, self.next_line = 0, time.monotonic(), QUICK_S

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        seconds = time.monotonic() - self.began
        if error is None and seconds >= QUICK_S:
            self._print(f"{self._count(self.done)}{self.unit} in {duration(seconds)}")

    def update(self, n: int = 1):
        self.done += n
        if (seconds := time.monotonic() - self.began) >= self.next_line:
            of = f" of {self._count(self.total)}" if self.total else ""
            self._print(f"{self._count(self.done)}{of}{self.unit} after {duration(seconds)}")
            self.next_line = seconds + REMIND_S

    def set_description_str(self, description: str):
        self.description = description

    def _count(self, number: float) -> str:
        return f"{short(number)}B" if not self.unit else f"{number:,.0f}"

    def _print(self, text: str):
        print_line(f"{self.description}: {text}", sys.stderr)


def print_line(text: str, stream, above: bool = False):
    """Print to a stream. above: print above a bar or line that a terminal redraws."""
    if above:
        from tqdm import tqdm

        tqdm.write(text, file=stream)
        stream.flush()
    else:
        print(text, file=stream, flush=True)


class Typist:
    """A person at a terminal: the texts that he types, and his Ctrl-C.

    Where Python has readline, there are arrow keys and a history, which is kept in a file; a file that cannot
    be read or written is no error. Windows has both in its console.
    """

    def __init__(self, history: Path):
        self.stopped = False  # whether Ctrl-C was pressed since the last text: its answer has to end
        self._at_prompt = False
        signal.signal(signal.SIGINT, self._ctrl_c)
        try:
            import readline
        except ImportError:
            return
        readline.parse_and_bind("set enable-bracketed-paste on")  # lines that are pasted are one text
        readline.set_history_length(1000)
        with contextlib.suppress(OSError):
            readline.read_history_file(history)

        def keep():
            with contextlib.suppress(OSError):
                history.touch(0o600)  # for its owner alone
                readline.write_history_file(history)

        atexit.register(keep)

    def _ctrl_c(self, number, frame):
        if self._at_prompt:
            self._at_prompt = False
            raise KeyboardInterrupt
        if self.stopped:  # a second time, while the answer has not ended yet
            sys.exit(130)
        self.stopped = True

    def texts(self) -> Iterator[str]:
        """Yield each text that is not blank, until Ctrl-D or a second Ctrl-C in a row."""
        presses = 0
        while presses < 2:
            try:
                text = self._read()
            except EOFError:
                break
            except KeyboardInterrupt:
                presses += 1
                if presses == 1:
                    print("\n(once more, or Ctrl-D, ends the program)", file=sys.stderr, flush=True)
                continue
            presses, self.stopped = 0, False
            if text.strip():
                yield text
        print(file=sys.stderr)

    def _read(self) -> str:
        """A line, and the next one after each line that ends in a backslash."""
        self._at_prompt = True
        try:
            lines = [input("> ")]
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(input(". "))
        finally:
            self._at_prompt = False
        return "\n".join(lines)


def printable(text: str) -> str:
    """The text with escapes in place of the control characters, but for newlines and tabs."""
    return text.translate(CONTROL)


def wrapped(text: str, indent: int) -> str:
    """The text in lines of the terminal's width (80 columns in a pipe), the second and later ones indented. A
    longer word, such as a path, keeps its line."""
    columns = max(40, shutil.get_terminal_size().columns)
    kept = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
    return textwrap.fill(text, columns, subsequent_indent=" " * indent, **kept)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def table(rows: list, left: int = 1) -> str:
    """A Markdown table with aligned columns. rows: lists of cells, the head first. The first `left` columns
    are left-aligned, the others right-aligned."""
    rows = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = [f":{'-' * (w - 1)}" if i < left else f"{'-' * (w - 1)}:" for i, w in enumerate(widths)]
    lines = []
    for row in [rows[0], rule, *rows[1:]]:
        pairs = enumerate(zip(row, widths, strict=True))
        cells = (cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in pairs)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fenced(text: str) -> str:
    """A text as a block of code in Markdown."""
    fence = "````"
    return f"{fence}text\n{text.replace(fence, '` ` ` `')}\n{fence}"


def gib(size: int) -> str:
    """A number of bytes as a person says it."""
    return f"{size / 2**30:.1f} GiB"


def counted(number: int, one: str, many: str) -> str:
    """1 step, 2 steps."""
    return f"{number:,} {one if number == 1 else many}"


def duration(seconds: float) -> str:
    """A time as a person says it: 45 s, 12 min, 3.5 h, 168 days."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86_400:,.0f} days"


def short(number: float) -> str:
    """A count in three digits or so: 999, 1.23k, 45.6M."""
    for unit in ("", "k", "M", "G", "T"):
        if number < 999.5 or unit == "T":
            return f"{number:.3g}{unit}" if unit else f"{number:.0f}"
        number /= 1000
