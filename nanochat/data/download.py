"""Downloads files into a folder. A file appears under its name only when it is complete and verified.

A file grows under NAME.part. If the connection breaks, an HTTP range request continues it. When the size is
the announced one and the content passes the check, the file gets its name. Size and SHA-256 are written to
checksums.json at the first download; later files of that name must match them.
"""

import contextlib
import hashlib
import json
import os
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from nanochat import UserError
from nanochat.data.http_answers import announced_sha256, kind_of, retry_after, safe, strong_tag
from nanochat.data.parquet import first_line
from nanochat.terminal import DownloadBar

CHECKSUMS = "checksums.json"
CHUNK = 1 << 14  # bytes written at once; a break loses at most these
FIRST_PAUSE_S = 1.0  # before the first retry; every further failure in a row doubles it,
LONGEST_PAUSE_S = 60.0  # up to this
LARGEST_FILE = 1 << 30  # bytes; a public shard has some 100 MB, and more means that the answer is no shard
LONGEST_RETRY_AFTER_S = 600.0  # a server that asks for a longer pause gets the next request after this one


def download(
    urls: dict[str, str],
    folder: Path,
    check: Callable[[Path], object],
    workers: int = 4,
    timeout: float = 30.0,
    retries: int = 8,
) -> dict[str, str]:
    """Get the files {name: URL} that are missing in `folder`; returns {name: reason} for those that failed.

    `check(path)` raises ValueError if a complete file has the wrong content. A file with the recorded size
    and checksum stays; a damaged one is downloaded again. `workers` files come at the same time, `timeout`
    is in seconds without a byte, `retries` counts failures in a row. Raises UserError while another download
    uses the folder, and OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    with locked(folder), DownloadBar(len(urls)) as progress:
        fetcher = Fetcher(folder, check, timeout, retries, progress, threading.Event())
        pool = ThreadPoolExecutor(min(workers, max(1, len(urls))))
        try:
            tasks = {pool.submit(fetcher.get, name, url): name for name, url in urls.items()}
            for task in as_completed(tasks):
                try:
                    task.result()
                except GivenUp as error:
                    failed[tasks[task]] = str(error)
                progress.file_done(len(failed))
        except BaseException:  # Ctrl-C, or a full disk: stop the other files too
            fetcher.stop.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    say = [f"{len(urls) - len(failed)} of {len(urls)} files are in {folder}, sizes and checksums verified"]
    say += [f"missing: {name}: {reason}" for name, reason in sorted(failed.items())]
    say += ["run the same command again: it continues where it stopped"] if failed else []
    print("\n".join(say), file=sys.stderr)
    return failed


def read_checksums(folder: Path) -> dict[str, dict]:
    """{name: {"bytes": size, "sha256": hex}} of all files that were ever downloaded into a folder.

    It is empty if the folder has no checksums.json. Raises UserError if that file is damaged.
    """
    path = folder / CHECKSUMS
    try:
        content = json.loads(path.read_text("utf-8"))
        if any(Path(name).name != name for name in content):
            raise ValueError("a name that is a path")
        return {name: {"bytes": int(e["bytes"]), "sha256": str(e["sha256"])} for name, e in content.items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); repair or remove it") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise UserError(f"{path} is damaged; remove it and run the download command again") from error


class Busy(UserError):
    """Another process downloads into the folder."""


class GivenUp(Exception):
    """The download of a file has failed for good; the message says why."""


class _TryAgain(Exception):
    """A failure that may pass. `after` is the pause in seconds that the server asked for, or None."""

    def __init__(self, reason: str, after: float | None = None):
        super().__init__(reason)
        self.after = after


class Fetcher:
    """Downloads single files; several threads call `get` at the same time. Setting `stop` ends them all."""

    def __init__(
        self,
        folder: Path,
        check: Callable,
        timeout: float,
        retries: int,
        progress: DownloadBar,
        stop: threading.Event,
    ):
        self.stop = stop
        self._folder, self._check, self._progress = folder, check, progress
        self._timeout, self._retries = timeout, retries
        self._lock = threading.Lock()  # for the checksums
        self._checksums = read_checksums(folder)
        self._announced: dict[str, str | None] = {}  # SHA-256 of each file, if the server gave it

    def get(self, name: str, url: str) -> None:
        """Download a file unless a good one is there. Raises GivenUp after too many failures."""
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
                most = max(most, _size(part))  # only bytes that never came before are progress
                if failures > self._retries:
                    raise GivenUp(f"{error} (failures in a row: {failures})") from error
                pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (failures - 1)) * random.uniform(0.5, 1)
                if error.after is not None:
                    pause = min(LONGEST_RETRY_AFTER_S, error.after)
                if self.stop.wait(pause):
                    raise GivenUp("stopped") from error

    def _is_good(self, path: Path, name: str) -> bool:
        """Whether a complete file matches its recorded checksum. Without a recorded one the check decides."""
        wanted = self._checksums.get(name)
        if wanted and path.stat().st_size != wanted["bytes"]:
            return False
        if not wanted and not self._passes(path):
            return False
        digest = self._sha256(path)
        if not wanted:
            return self._accept(name, path, path, digest) is None
        return digest == wanted["sha256"]

    def _passes(self, path: Path) -> bool:
        try:
            self._check(path)
        except ValueError:
            return False
        return True

    def _fetch(self, name: str, url: str, part: Path) -> None:
        """One request for what `part` still lacks. Raises _TryAgain if the file is not complete after it."""
        import requests

        tag_path = _tag_path(part)
        had = _size(part)
        headers = {"Accept-Encoding": "identity"}  # uncompressed, so the announced size is the file's size
        if had:
            headers["Range"] = f"bytes={had}-"
            if tag_path.exists() and (tag := strong_tag(tag_path.read_text("latin-1"))):
                headers["If-Range"] = tag  # if the file has changed since, the server sends all of it
        try:
            with requests.get(url, headers=headers, stream=True, timeout=self._timeout) as answer:
                self._announced[name] = announced_sha256([*answer.history, answer])
                start, total = self._read_head(answer, part, had)
                if start is None:
                    return
                if tag := strong_tag(answer.headers.get("ETag", "")):
                    tag_path.write_text(tag, "utf-8")
                else:
                    tag_path.unlink(missing_ok=True)
                self._progress.expect(name, total)
                self._write_body(name, answer, part, start)
        except requests.RequestException as error:
            if isinstance(error, ValueError):  # an address that is none stays so
                raise GivenUp(f"bad address ({safe(first_line(error))})") from error
            raise _TryAgain(kind_of(error)) from error
        except ValueError as error:  # of urllib3, for an address in a redirect
            raise GivenUp(f"the server's answer makes no sense ({safe(first_line(error))})") from error
        if total is not None and _size(part) < total:
            raise _TryAgain(f"the connection broke at {_size(part):,} of {total:,} bytes")

    def _read_head(self, answer, part: Path, had: int) -> tuple[int | None, int | None]:
        """(where the body begins in the file, bytes of the file), or (None, None) if the part is complete."""
        status = answer.status_code
        number = "([0-9]{1,18})"
        span = re.fullmatch(
            rf"bytes (?:{number}-[0-9]+|\*)/{number}", answer.headers.get("Content-Range", "")
        )
        if status == 416 and had:  # the file has no bytes after those we have
            if span and int(span[2]) == had:
                return None, None
            _discard(part)
            raise _TryAgain("the file on the server is shorter than the part here; starting it again")
        if status == 206:
            if not span or span[1] is None or int(span[1]) != had:
                _discard(part)
                raise _TryAgain("the server sent another range than the requested one; starting again")
            return had, self._within_limit(int(span[2]), part)
        if status == 429 or status >= 500 or status == 408:
            pause = retry_after(answer.headers.get("Retry-After"))
            raise _TryAgain(f"HTTP {status} {safe(answer.reason)}", pause)
        if status != 200:
            raise GivenUp(f"HTTP {status} {safe(answer.reason)} from {safe(answer.url.split('?')[0])}")
        length = answer.headers.get("Content-Length", "")
        return 0, self._within_limit(int(length), part) if re.fullmatch(number, length) else None

    def _within_limit(self, size: int, part: Path) -> int:
        """The size of a file, or GivenUp if no shard is so large: a stream without an end fills the disk."""
        if size > LARGEST_FILE:
            _discard(part)
            raise GivenUp(f"the server sends more than {LARGEST_FILE:,} bytes, which is no shard")
        return size

    def _write_body(self, name: str, answer, part: Path, start: int) -> None:
        size = start
        self._progress.arrived(name, size)
        with open(part, "r+b" if start else "wb") as file:
            file.seek(start)
            for chunk in answer.iter_content(CHUNK):
                if self.stop.is_set():
                    raise GivenUp("stopped")
                size = self._within_limit(size + len(chunk), part)
                file.write(chunk)
                self._progress.arrived(name, size)

    def _finish(self, name: str, part: Path, path: Path) -> None:
        """Check a complete part, record its checksum if the name has none yet, and give it its name."""
        digest, size = self._sha256(part), part.stat().st_size
        wanted = self._checksums.get(name)
        if wanted and (wanted["bytes"], wanted["sha256"]) != (size, digest):
            _discard(part)
            raise _TryAgain(f"the server sent another file than the one recorded in {CHECKSUMS}")
        if digest != (self._announced[name] or digest) or not self._passes(part):
            _discard(part)
            raise _TryAgain("the server sent a damaged file or another kind of file")
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        if twin := self._accept(name, part, path, digest):
            _discard(part)
            raise _TryAgain(f"the server sent {twin}")
        _tag_path(part).unlink(missing_ok=True)

    def _sha256(self, path: Path) -> str:
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                if self.stop.is_set():
                    raise GivenUp("stopped")
        return digest.hexdigest()

    def _accept(self, name: str, complete: Path, path: Path, digest: str) -> str | None:
        """Record the checksum of a complete file and give it its name, or return the name of an equal file.

        All of it happens under one lock: of equal files that come at the same time only one is accepted.
        """
        with self._lock:
            for other, entry in self._checksums.items():
                if other != name and entry["sha256"] == digest:
                    return other
            self._checksums[name] = {"bytes": complete.stat().st_size, "sha256": digest}
            temporary = self._folder / f".{CHECKSUMS}.new"
            content = json.dumps(dict(sorted(self._checksums.items())), indent=1) + "\n"
            temporary.write_text(content, "utf-8")
            os.replace(temporary, self._folder / CHECKSUMS)
            os.replace(complete, path)
        return None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises Busy if another download holds it."""
    with open(folder / ".lock", "a") as file:  # "w" would empty a file behind a link
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows
            pass
        except BlockingIOError as error:
            raise Busy(f"another download into {folder} is running; wait for it or stop it") from error
        except OSError:  # a file system without locks
            pass
        yield


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tag_path(part: Path) -> Path:
    """The file with the ETag that the server gave for the bytes in a part."""
    return part.with_name(f"{part.name}.etag")


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _tag_path(part).unlink(missing_ok=True)
