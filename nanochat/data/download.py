"""Gets files of data sets on the Hugging Face Hub, by the library huggingface_hub.

    fetch("karpathy/climbmix-400b-shuffle", ["shard_00000.parquet"], folder)     # now, or a UserError
    BackgroundDownload(repo, ["shard_00001.parquet"], arrival).start()           # while a run trains

A file gets its name when it is complete. The library continues a broken download, compares sizes, and obeys
HF_ENDPOINT (a mirror), HF_TOKEN, HF_HUB_OFFLINE and HF_HUB_DOWNLOAD_TIMEOUT. What we add: an error is one
sentence, a Hub that does not answer is reported within seconds, and no two processes get the same file.
"""

import contextlib
import os
import re
import sys
import threading
import time
import urllib.request
from multiprocessing.pool import ThreadPool
from pathlib import Path
from urllib.parse import urlsplit

from nanochat import UserError
from nanochat.data.dataset import writing
from nanochat.data.streaming_shards import UNFINISHED, Arrival
from nanochat.terminal import bar, first_line, is_terminal

HOST = "https://huggingface.co"
ANSWER_S = 8.0  # seconds for the connection to the Hub, and again for its first answer
MOST_FAILED = 4  # files; after more failures the rest is not tried
STALE_S = 3600.0  # seconds; an unfinished file that has not grown for so long is left from a kill
PAUSE_S = 1.0  # seconds before the second attempt in the background; each further pause doubles,
LONGEST_PAUSE_S = 60.0  # up to this


def endpoint() -> str:
    """The address of the Hub, or of its mirror in HF_ENDPOINT. Raises UserError if it is no address."""
    address = (os.environ.get("HF_ENDPOINT") or HOST).rstrip("/")
    if not re.fullmatch(r"https?://[\w.-][^\s\[\]]*", address):
        raise UserError(f"the mirror {address!r} is no address of a server; use one like {HOST}")
    return address


def look_up(repo: str, revision: str | None = None, files: bool = False):
    """The huggingface_hub.DatasetInfo of a data set OWNER/NAME; files: with the sizes of its files.

    Raises UserError if there is no such data set, or if the Hub does not answer within seconds.
    """
    address = endpoint()
    try:
        api = _library().HfApi(endpoint=address)
        return api.dataset_info(repo, revision=revision, files_metadata=files, timeout=ANSWER_S)
    except Exception as error:  # its HTTP client, and so the errors, differ between versions of the library
        raise UserError(f"{repo} cannot be had from {route(address)}: {_why(error, repo)}") from error


def fetch(
    repo: str,
    files: list[str],
    folder: Path,
    revision: str | None = None,
    workers: int = 4,
    compare: bool = False,
) -> None:
    """Get the files of a data set that are missing in `folder`, `workers` at a time.

    compare: also files that are here and differ from the Hub's. Raises UserError if a file cannot be
    downloaded or the folder cannot be written; complete files stay.
    """
    missing = [name for name in files if not (folder / name).exists()]
    wanted = files if compare else missing
    if not wanted:
        return
    try:
        commit = look_up(repo, revision).sha
    except UserError as error:
        if missing:
            raise
        print(f"{folder} has all files; not compared with the Hub's: {error}", file=sys.stderr)
        return
    with writing(folder):
        failed, left = _get_all(repo, wanted, commit, folder, workers)
    if failed:
        name, error = next(iter(failed.items()))
        raise UserError(
            f"{len(left)} of {len(files)} files did not come into {folder}: {name} cannot be had from "
            f"{route(endpoint())}: {_why(error, repo)}; the same command goes on"
        ) from error


def _get_all(
    repo: str, files: list[str], commit: str, folder: Path, workers: int
) -> tuple[dict[str, Exception], list[str]]:
    """Get files; returns ({name: error}, the missing files). Raises OSError if a file cannot be written.

    The threads of a pool are daemons, so Ctrl-C ends the process at once and does not wait for files.
    """
    failed, left = {}, dict.fromkeys(files)

    def get(name: str) -> str:
        if len(failed) <= MOST_FAILED:
            try:
                _get(repo, name, commit, folder)
                del left[name]
            except Exception as error:
                failed[name] = error
        return name

    _remove_stale(folder)
    # On a terminal the library draws a bar for each file
    hidden = is_terminal(sys.stderr)
    with bar("downloading", "files", len(files), hidden) as progress, ThreadPool(workers) as pool:
        for name in pool.imap_unordered(get, files):
            progress.update(name not in left)
            if _is_of_disk(failed.get(name)):
                raise failed[name]
    return failed, [*left]


def _get(repo: str, name: str, commit: str, folder: Path) -> None:
    """Get one file. If another process downloads it, wait; then the library finds it here."""
    library, locks = _library(), folder / ".cache" / "huggingface" / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with library.utils.WeakFileLock(locks / f"{name.replace('/', '--')}.lock"):
        library.hf_hub_download(
            repo, name, repo_type="dataset", revision=commit, local_dir=folder, endpoint=endpoint()
        )


def _remove_stale(folder: Path) -> None:
    """Remove the unfinished files of killed downloads: newer versions of the library start them again."""
    for path in folder.glob(UNFINISHED):
        with contextlib.suppress(OSError):  # another process completes or removes it just now
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink()


def _library():
    """huggingface_hub, imported where it is needed.

    It uses plain HTTP: a mirror does not serve Xet, the Hub's other protocol (huggingface_hub issue 4475),
    and a download by Xet may hang without a time-out (xet-core issue 898). HF_HUB_DISABLE_XET=0 in the
    environment allows it.
    """
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.utils

    if "HF_HUB_DISABLE_XET" not in os.environ:
        huggingface_hub.constants.HF_HUB_DISABLE_XET = True
    return huggingface_hub


# -- errors


def _is_of_disk(error: Exception | None) -> bool:
    """Whether an error comes from the file system: its errors have a number, the library's have none."""
    return isinstance(error, OSError) and isinstance(error.errno, int)


def route(address: str) -> str:
    """A server, where its address is from, and the proxy on the way to it, without a password."""
    parts, said = urlsplit(address), address
    if address == (os.environ.get("HF_ENDPOINT") or "").rstrip("/"):
        said += " (HF_ENDPOINT)"
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(parts.hostname):
        said += f" through the proxy {proxy.rpartition('@')[2]}"
    return said


def _why(error: Exception, repo: str) -> str:
    """The reason of an error in a few words, and what to do."""
    errors = _library().errors
    if isinstance(error, errors.LocalEntryNotFoundError):  # its cause is the error of the network
        error = error.__cause__ or error
    status = getattr(getattr(error, "response", None), "status_code", None)  # of HTTP
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; get it with a network first, or unset HF_HUB_OFFLINE"
    if isinstance(error, errors.GatedRepoError):
        return f"it is gated; ask for access on {HOST}/datasets/{repo} and set HF_TOKEN to your token"
    if isinstance(error, errors.RevisionNotFoundError):
        return "it has no such revision; name a branch, a tag or a commit of it"
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        return "no such data set, or it is private; check the name, or set HF_TOKEN to your token"
    if status == 403:
        return "HTTP 403, access denied; set HF_TOKEN to a token that may read it"
    if status == 404:
        return "HTTP 404, not found"
    if status:
        return f"HTTP {status}; try again later"
    said = "".join(c if c.isprintable() else "?" for c in first_line(error))[:300]  # may be a server's text
    with contextlib.suppress(AttributeError, RuntimeError):  # the Hub sends a client elsewhere for a file
        if (host := urlsplit(str(error.request.url)).netloc) != urlsplit(endpoint()).netloc:
            said += f" at {host}"
    return f"{said.rstrip('.')}; check the network and HF_ENDPOINT, which can name a mirror of huggingface.co"


# -- while a run trains


class BackgroundDownload(threading.Thread):
    """Gets the missing files of a data set, one after the other, until the arrival is closed.

    After any error it waits and tries again, so a run ends only if its text runs out. The thread is a daemon:
    the process does not wait for it at its end.
    """

    def __init__(self, repo: str, files: list[str], arrival: Arrival):
        super().__init__(name="nanochat-download", daemon=True)
        self._repo, self._files, self._arrival = repo, files, arrival

    def run(self) -> None:
        library = _library()
        library.utils.disable_progress_bars()  # the console belongs to the run
        library.utils.logging.set_verbosity_error()
        for name in self._files:
            pause = PAUSE_S
            while not self._arrival.closed.is_set():
                try:
                    if not (self._arrival.folder / name).exists():
                        _get(self._repo, name, look_up(self._repo).sha, self._arrival.folder)
                    self._arrival.problem = ""
                    break
                except Exception as error:
                    self._warn(name, error)
                    self._arrival.closed.wait(pause)
                    pause = min(LONGEST_PAUSE_S, 2 * pause)

    def _warn(self, name: str, error: Exception) -> None:
        """Print what is wrong, once, until a file has come again."""
        if isinstance(error, UserError):
            what = str(error)
        else:
            what = error.strerror if _is_of_disk(error) else _why(error, self._repo)
        if not self._arrival.problem and not self._arrival.closed.is_set():
            self._arrival.say(
                f"warning: {name} cannot be downloaded now ({what}); training goes on with the text that is "
                "here, and the download tries again"
            )
        self._arrival.problem = what
