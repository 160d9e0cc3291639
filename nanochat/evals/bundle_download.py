"""Downloads the public evaluation bundle of CORE and unpacks it into <base_dir>/eval_bundle.

The zip file comes from a stranger. Only a bundle's own files are taken out of it, each under a size limit,
into a temporary folder. The folder gets its name when all of it is there and can be opened.
"""

import contextlib
import os
import shutil
import stat
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from nanochat import UserError
from nanochat.data.parquet import first_line
from nanochat.evals.bundle import GET, NAME, UNREADABLE, open_bundle, root_of
from nanochat.terminal import bar

HOST = "https://karpathy-public.s3.us-west-2.amazonaws.com"  # where karpathy/nanochat has it
FILE = f"{NAME}.zip"
TIMEOUT_S = 15.0  # seconds for the connection, and between two pieces of an answer
LARGEST_BUNDLE = 1 << 31  # bytes of all its files, unpacked
MOST_FILES = 10_000


def download_bundle(base_path: Path, host: str = HOST) -> None:
    """Get the public bundle unless a good one is there.

    Raises UserError if the server does not send it whole or it is no bundle, OSError if `base_path` cannot be
    written. Then the bundle that was there stays.
    """
    folder = base_path / NAME
    with contextlib.suppress(UserError):
        if folder.exists() and open_bundle(folder, base_path)[0]:
            print(f"the evaluation bundle is in {folder}")
            return
    base_path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base_path, prefix=f".{NAME}.") as temporary:
        archive = Path(temporary) / FILE
        _get(f"{host.rstrip('/')}/{FILE}", archive)
        tasks = install(archive, folder)
    print(f"the evaluation bundle is in {folder}: {tasks} tasks")


def _get(url: str, path: Path) -> None:
    """Write what a URL gives into a file. A busy server is asked again; `unpack` compares the checksums."""
    import requests
    from urllib3.util import Retry

    again = Retry(3, connect=0, backoff_factor=1, status_forcelist=[429, 500, 502, 503, 504])
    try:
        with requests.Session() as session, open(path, "wb") as file:
            session.mount(url, requests.adapters.HTTPAdapter(max_retries=again))
            with session.get(url, stream=True, timeout=TIMEOUT_S) as answer:
                answer.raise_for_status()
                size = int(answer.headers.get("Content-Length", 0)) or None
                with bar("downloading", "B", size) as progress:
                    for chunk in answer.iter_content(1 << 20):
                        file.write(chunk)
                        progress.update(len(chunk))
    except requests.RequestException as error:
        raise UserError(
            f"{url} cannot be downloaded ({first_line(error)[:300]}); check the network and the proxy, or "
            "name another server with --mirror"
        ) from error


def install(archive_path: Path, folder: Path) -> int:
    """Unpack the zip file of a bundle as `folder`, in the place of what is there; the number of its tasks.

    Raises UserError if it is damaged or holds what no bundle needs: too much, a link, or a path outside.
    """
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{NAME}."))
    try:
        unpack(archive_path, temporary / NAME)
        bundle, _ = open_bundle(temporary / NAME, folder.parent)
        if folder.is_symlink() or folder.exists():
            os.replace(folder, temporary / "before")
        os.replace(temporary / NAME, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return len(bundle.tasks)


def unpack(archive_path: Path, folder: Path) -> None:
    """Write core.yaml, eval_meta_data.csv and eval_data/ of a zip file into a new folder."""
    left = LARGEST_BUNDLE
    try:
        with zipfile.ZipFile(archive_path) as archive:
            members = archive.infolist()
            if len(members) > MOST_FILES:
                raise UserError(f"{archive_path} holds more than {MOST_FILES:,} files, which is no bundle")
            root = root_of([member.filename for member in members])
            for member in members:
                name = member.filename.removeprefix(root)
                path = PurePosixPath(name)
                if ".." in path.parts or path.is_absolute() or "\\" in name or ":" in name:
                    raise UserError(f"{archive_path} has a path that leads out of it: {name[:80]!r}")
                if stat.S_ISLNK(member.external_attr >> 16):
                    raise UserError(f"{archive_path} has a link: {name[:80]!r}")
                if member.is_dir() or path.parts[0] not in ("core.yaml", "eval_meta_data.csv", "eval_data"):
                    continue
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, open(folder / path, "xb") as file:
                    while chunk := source.read(1 << 20):
                        left -= len(chunk)
                        if left < 0:
                            raise UserError(f"{archive_path} unpacks to more than {LARGEST_BUNDLE:,} bytes")
                        file.write(chunk)
    except UserError as error:
        raise UserError(f"{error}; nothing of it was kept; is {HOST} the server that sent it?") from error
    except (FileExistsError, NotADirectoryError, *UNREADABLE) as error:
        raise UserError(f"{archive_path} is damaged ({type(error).__name__}); run {GET} again") from error
