"""Progress bars on stderr: often redrawn in a terminal, seldom in a log file."""

import sys
import threading


def bar(description: str, unit: str, total: int | None = None, hidden: bool = False):
    """A tqdm bar over bytes or characters, with k, M, G in its numbers."""
    from tqdm import tqdm

    interval = 0.2 if sys.stderr.isatty() else 10  # seconds between two updates: a log gets few lines
    return tqdm(
        desc=description, unit=unit, total=total, unit_scale=True, mininterval=interval, disable=hidden
    )


class DownloadProgress:
    """One bar over the bytes of all files. A file of unknown size counts as the mean of the known ones."""

    def __init__(self, files: int):
        self._bar = bar(f"0/{files} files", "B")
        self._files, self._done = files, 0
        self._sizes: dict[str, int] = {}  # bytes of each file, once known
        self._arrived: dict[str, int] = {}  # bytes of each file that are here
        self._lock = threading.Lock()

    def __enter__(self) -> "DownloadProgress":
        return self

    def __exit__(self, *exception) -> None:
        self._bar.close()

    def expect(self, name: str, size: int | None) -> None:
        """The size of a file in bytes, if the server gave it."""
        with self._lock:
            if size:
                self._sizes[name] = size
                self._bar.total = sum(self._sizes.values()) * self._files // len(self._sizes)

    def arrived(self, name: str, size: int) -> None:
        """`size` bytes of a file are here: fewer than before if the file starts again."""
        with self._lock:
            self._bar.update(size - self._arrived.get(name, 0))
            self._arrived[name] = size

    def file_done(self, failed: int) -> None:
        """One more file is complete or given up; `failed` is how many have been given up so far."""
        self._done += 1
        self._bar.set_description_str(
            f"{self._done - failed}/{self._files} files" + (f", {failed} failed" if failed else "")
        )
