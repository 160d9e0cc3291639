"""Gets public shards: the first ones before a run begins, the others in the background while it trains.

The background thread gets one file after the other, in the order in which the run reads them. Whatever goes
wrong, it tries again after a pause: a run that has text left does not end. It never ends the process, nor
keeps it from ending: what a kill leaves behind is a part of a file, which the next download continues.
"""

import atexit
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from nanochat import UserError
from nanochat.data import download
from nanochat.data.dataset import writing
from nanochat.data.parquet import first_line, footer_digest
from nanochat.data.streaming_shards import Arrival
from nanochat.terminal import DownloadBar

TIMEOUT_S = 30.0  # seconds without a byte after which a connection counts as broken
RETRIES = 3  # failures in a row, within some seconds, after which the console says so
LOOK_S = 1.0  # seconds between two looks whether another download has finished
LONGEST_PAUSE_S = 60.0  # seconds between two attempts
CLOSE_S = 2.0  # seconds that the end of the run gives the thread

_running: list["_Download"] = []


def fetch(urls: dict[str, str], folder: Path) -> None:
    """Get files {name: URL} now, with a progress bar. If another download uses the folder, wait for it.

    Raises UserError if a file cannot be had.
    """
    said = False
    with writing(folder):
        while names := missing(urls, folder):
            try:
                failed = download.download(
                    {n: urls[n] for n in names}, folder, footer_digest, timeout=TIMEOUT_S
                )
            except download.Busy as busy:
                if not said:
                    print(f"{busy}", file=sys.stderr, flush=True)
                said = True
                time.sleep(LOOK_S)
                continue
            if failed:
                name, reason = next(iter(failed.items()))
                raise UserError(
                    f"{name} cannot be downloaded ({reason}); the same command tries again, and HF_ENDPOINT "
                    "can name a mirror of huggingface.co"
                )


def missing(names: Iterable[str], folder: Path) -> list[str]:
    """The files that are not there, that checksums.json does not list, or that have another size than there.

    A file that somebody has put there counts as missing: a download checks and lists it. Raises UserError if
    checksums.json is damaged.
    """
    listed = download.read_checksums(folder)

    def is_complete(path: Path) -> bool:
        return path.name in listed and path.exists() and path.stat().st_size == listed[path.name]["bytes"]

    return [name for name in names if not is_complete(folder / name)]


def start(urls: dict[str, str], arrival: Arrival) -> None:
    """Begin to get files {name: URL} in this order."""
    if urls:
        _running.append(_Download(urls, arrival))
        _running[-1].start()


def stop() -> None:
    """End the downloads of this process. A part of a file stays for the next one."""
    while _running:
        thread = _running.pop()
        thread.stop.set()
        thread.join(CLOSE_S)  # it may wait for a server; then it ends with the process


atexit.register(stop)


class _Download(threading.Thread):
    def __init__(self, urls: dict[str, str], arrival: Arrival):
        super().__init__(name="nanochat-download", daemon=True)
        self.stop = threading.Event()
        self._urls, self._arrival = urls, arrival
        self._wanted = next(iter(urls))  # the file that comes next
        self._pause_s = LOOK_S  # after the next failure
        self._warned = False

    def run(self) -> None:
        while not self.stop.is_set():
            try:
                self._get_all()
                return
            except download.Busy as busy:
                # Another process brings the same files; if it dies, this one goes on
                self._arrival.problem = str(busy)
                self.stop.wait(LOOK_S)
            except Exception as error:  # whatever it is, a run that has text left goes on
                self._warn(error)
                self.stop.wait(self._pause_s)
                self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)

    def _get_all(self) -> None:
        """Get what is missing, or raise what went wrong."""
        folder = self._arrival.folder
        if not missing(self._urls, folder):
            return
        with download.locked(folder), DownloadBar(len(self._urls), hidden=True) as progress:
            fetcher = download.Fetcher(folder, footer_digest, TIMEOUT_S, RETRIES, progress, self.stop)
            for name in missing(self._urls, folder):
                self._wanted = name
                fetcher.get(name, self._urls[name])
                self._arrival.problem, self._warned, self._pause_s = "", False, LOOK_S

    def _warn(self, error: Exception) -> None:
        """Say once what is wrong, until a file has come again."""
        what = (error.strerror or first_line(error)) if isinstance(error, OSError) else str(error)
        self._arrival.problem = what
        if not self._warned and not self.stop.is_set():
            self._arrival.say(
                f"warning: {self._wanted} cannot be downloaded now ({what}); training goes on with the text "
                "that is here, and the download tries again"
            )
        self._warned = True
