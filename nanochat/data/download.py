"""Files from the network into a folder: each arrives whole and verified under its name, or not at all.

A file grows under NAME.part, goes on there after a break (HTTP ranges), and gets its name when it has the
announced size and passes the check. Size and SHA-256 are recorded in checksums.json at the first download;
from then on a file of that name must have them.
"""

import contextlib
import email.utils
import hashlib
import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from nanochat import UserError

RECORD = "checksums.json"
CHUNK = 1 << 14  # bytes; a break loses less than that
FIRST_PAUSE_S = 1.0  # before the first retry; it doubles with each failure in a row, up to
LONGEST_PAUSE_S = 60.0
LONGEST_RETRY_AFTER_S = 600.0  # a server that asks for more is asked again sooner


def download(
    urls: dict[str, str],
    folder: Path,
    check: Callable[[Path], object],
    workers: int = 4,
    timeout: float = 30.0,
    retries: int = 8,
) -> dict[str, str]:
    """Get the files {name: URL} that `folder` lacks; returns {name: reason} of those that are missing still.

    `check` raises an exception where a complete file is not what it should be. A file of right size and
    checksum is left alone, a damaged one is got again. OSError where the folder cannot be written.
    """
    if workers < 1 or retries < 0 or timeout <= 0:
        raise UserError("workers must be at least 1, retries at least 0, and timeout positive")
    folder.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    with _locked(folder), _Progress(len(urls)) as progress:
        fetcher = _Fetcher(folder, check, timeout, retries, progress)
        pool = ThreadPoolExecutor(min(workers, max(1, len(urls))))
        try:
            tasks = {pool.submit(fetcher.get, name, url): name for name, url in urls.items()}
            for task in as_completed(tasks):
                try:
                    task.result()
                except _GivenUp as error:
                    failed[tasks[task]] = str(error)
                progress.file_done(len(failed))
        except BaseException:  # Ctrl-C, or a full disk: the other files need not go on
            fetcher.stop.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    say = [f"{len(urls) - len(failed)} of {len(urls)} files are in {folder}, sizes and checksums verified"]
    say += [f"missing: {name}: {reason}" for name, reason in sorted(failed.items())]
    say += ["run the same command again: it goes on where it stopped"] if failed else []
    print("\n".join(say), file=sys.stderr)
    return failed


def read_record(folder: Path) -> dict[str, dict]:
    """{name: {"bytes": size, "sha256": hex}} of all files ever downloaded into a folder."""
    path = folder / RECORD
    try:
        record = json.loads(path.read_text("utf-8"))
        return {name: {"bytes": int(e["bytes"]), "sha256": str(e["sha256"])} for name, e in record.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged; remove it, and the download command makes it anew") from error


class _GivenUp(Exception):
    """A file that will not come; the message says why."""


class _TryAgain(Exception):
    """A failure that may pass; `after` is how many seconds the server asked to wait, if it did."""

    def __init__(self, reason: str, after: float | None = None):
        super().__init__(reason)
        self.after = after


class _Fetcher:
    def __init__(self, folder: Path, check: Callable, timeout: float, retries: int, progress: "_Progress"):
        self._folder, self._check, self._progress = folder, check, progress
        self._timeout, self._retries = timeout, retries
        self._lock = threading.Lock()  # of the record
        self._record = read_record(folder)
        self._announced: dict[str, str | None] = {}  # SHA-256 that the server told
        self.stop = threading.Event()

    def get(self, name: str, url: str) -> None:
        """Have the file under its name; _GivenUp where that is not possible."""
        path, part = self._folder / name, self._folder / f"{name}.part"
        if path.exists():
            self._progress.expect(name, path.stat().st_size)
            if self._is_good(path, name):
                self._progress.arrived(name, path.stat().st_size)
                return
            path.unlink()
        failures, most = 0, _size(part)
        while True:
            try:
                self._fetch(name, url, part)
                self._finish(name, part, path)
                return
            except _TryAgain as error:
                failures = 1 if _size(part) > most else failures + 1
                most = max(most, _size(part))  # only what never came before is progress
                if failures > self._retries:
                    raise _GivenUp(f"{error} ({failures} failures in a row)") from error
                pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (failures - 1)) * random.uniform(0.5, 1)
                if error.after is not None:
                    pause = min(LONGEST_RETRY_AFTER_S, error.after)
                if self.stop.wait(pause):
                    raise _GivenUp("stopped") from error

    def _is_good(self, path: Path, name: str) -> bool:
        """Whether a file that is there is the recorded one; where nothing is recorded, the check decides."""
        wanted = self._record.get(name)
        if wanted and path.stat().st_size != wanted["bytes"]:
            return False
        if not wanted and not self._passes(path):
            return False
        digest = self._sha256(path)
        if not wanted:
            self._note(name, path.stat().st_size, digest)
        return not wanted or digest == wanted["sha256"]

    def _passes(self, path: Path) -> bool:
        try:
            self._check(path)
        except ValueError:
            return False
        return True

    def _fetch(self, name: str, url: str, part: Path) -> None:
        """One request: have all of the file in `part`, or as much as comes before it breaks (_TryAgain)."""
        import requests

        tag_path = _tag_path(part)
        had = _size(part)
        headers = {"Accept-Encoding": "identity"}  # the size announced is that of the file
        if had:
            headers["Range"] = f"bytes={had}-"
            if tag_path.exists():  # go on only if it is still the same file, else send all of it
                headers["If-Range"] = tag_path.read_text("utf-8")
        try:
            with requests.get(url, headers=headers, stream=True, timeout=self._timeout) as answer:
                self._announced[name] = _announced_sha256([*answer.history, answer])
                start, total = self._read_head(answer, part, had)
                if start is None:
                    return
                tag = answer.headers.get("ETag", "")
                if tag.startswith('"'):  # weak tags do not promise the same bytes
                    tag_path.write_text(tag, "utf-8")
                else:
                    tag_path.unlink(missing_ok=True)
                self._progress.expect(name, total)
                self._write_body(name, answer, part, start)
        except requests.RequestException as error:
            raise _TryAgain(_kind_of(error)) from error
        if total is not None and _size(part) < total:
            raise _TryAgain(f"the connection broke off at {_size(part):,} of {total:,} bytes")

    def _read_head(self, answer, part: Path, had: int) -> tuple[int | None, int | None]:
        """Where in the file the body begins and the size of the file; (None, None) if all of it is here."""
        status = answer.status_code
        span = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+)", answer.headers.get("Content-Range", ""))
        if status == 416:  # nothing after what we have
            if span and int(span[2]) == had:
                return None, None
            _discard(part)
            raise _TryAgain("the server has less than what came before; beginning anew")
        if status == 206:
            if not span or span[1] is None or int(span[1]) != had:
                _discard(part)
                raise _TryAgain("the server sent another range than was asked for; beginning anew")
            return had, int(span[2])
        if status == 429 or status >= 500 or status == 408:
            raise _TryAgain(f"HTTP {status} {answer.reason}", _retry_after(answer.headers.get("Retry-After")))
        if status != 200:
            raise _GivenUp(f"HTTP {status} {answer.reason} from {answer.url.split('?')[0]}")
        length = answer.headers.get("Content-Length", "")
        return 0, int(length) if length.isdigit() else None

    def _write_body(self, name: str, answer, part: Path, start: int) -> None:
        at = start
        self._progress.arrived(name, at)
        with open(part, "r+b" if start else "wb") as file:
            file.seek(start)
            for chunk in answer.iter_content(CHUNK):
                if self.stop.is_set():
                    raise _GivenUp("stopped")
                file.write(chunk)
                at += len(chunk)
                self._progress.arrived(name, at)

    def _finish(self, name: str, part: Path, path: Path) -> None:
        """Check a complete part, record it if it is the first of its name, and give it its name."""
        digest, size = self._sha256(part), part.stat().st_size
        wanted = self._record.get(name)
        if wanted and (wanted["bytes"], wanted["sha256"]) != (size, digest):
            _discard(part)
            raise _TryAgain(f"what came is not the file recorded in {RECORD}")
        if digest != (self._announced[name] or digest) or not self._passes(part):
            _discard(part)
            raise _TryAgain("what came is damaged or another kind of file")
        if twin := next((n for n, e in self._record.items() if n != name and e["sha256"] == digest), None):
            _discard(part)
            raise _TryAgain(f"what came is {twin}")
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        self._note(name, size, digest)
        os.replace(part, path)
        _tag_path(part).unlink(missing_ok=True)

    def _sha256(self, path: Path) -> str:
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                if self.stop.is_set():
                    raise _GivenUp("stopped")
        return digest.hexdigest()

    def _note(self, name: str, size: int, digest: str) -> None:
        with self._lock:
            self._record[name] = {"bytes": size, "sha256": digest}
            temporary = self._folder / f".{RECORD}.new"
            temporary.write_text(json.dumps(dict(sorted(self._record.items())), indent=1) + "\n", "utf-8")
            os.replace(temporary, self._folder / RECORD)


class _Progress:
    """One bar over all bytes; a file whose size is not known yet counts as the mean of the others."""

    def __init__(self, files: int):
        from tqdm import tqdm

        interval = 0.2 if sys.stderr.isatty() else 10
        self._bar = tqdm(unit="B", unit_scale=True, desc=f"0/{files} files", mininterval=interval)
        self._files, self._done = files, 0
        self._sizes: dict[str, int] = {}
        self._at: dict[str, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *exception) -> None:
        self._bar.close()

    def expect(self, name: str, size: int | None) -> None:
        with self._lock:
            if size:
                self._sizes[name] = size
                self._bar.total = sum(self._sizes.values()) * self._files // len(self._sizes)

    def arrived(self, name: str, at: int) -> None:
        """So many bytes of a file are here; fewer than before where it is begun anew."""
        with self._lock:
            self._bar.update(at - self._at.get(name, 0))
            self._at[name] = at

    def file_done(self, failed: int) -> None:
        self._done += 1
        self._bar.set_description_str(
            f"{self._done - failed}/{self._files} files" + (f", {failed} failed" if failed else "")
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder: of two downloads at once into one folder the second is refused."""
    with open(folder / ".lock", "w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows
            pass
        except BlockingIOError as error:
            raise UserError(f"another download into {folder} is running; wait for it or stop it") from error
        except OSError:  # a file system without locks
            pass
        yield


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tag_path(part: Path) -> Path:
    """Where the ETag lies that the server gave for what is in a part."""
    return part.with_name(f"{part.name}.etag")


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _tag_path(part).unlink(missing_ok=True)


def _announced_sha256(answers: list) -> str | None:
    """Hugging Face tells the SHA-256 of a large file on the way to where it lies."""
    for answer in answers:
        tag = answer.headers.get("X-Linked-ETag", "").strip('"')
        if re.fullmatch("[0-9a-f]{64}", tag):
            return tag
    return None


def _retry_after(value: str | None) -> float | None:
    """Seconds to wait by the header Retry-After: seconds or a date."""
    if value is None:
        return None
    if value.strip().isdigit():
        return float(value)
    with contextlib.suppress(TypeError, ValueError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None


def _kind_of(error: Exception) -> str:
    """A failure of the connection in a few words."""
    import requests

    if isinstance(error, requests.Timeout):
        return "the server did not answer in time"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection broke off"
    return f"no connection ({type(error).__name__})"
