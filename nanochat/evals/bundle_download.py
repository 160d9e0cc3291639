"""Downloads the public evaluation bundle of CORE and unpacks it into <base_dir>/eval_bundle.

It is unpacked into a temporary folder, which gets its name when it is complete and can be opened.
"""

import contextlib
import os
import zipfile
from pathlib import Path

from nanochat import UserError
from nanochat.data.download import route
from nanochat.evals.bundle import GET, NAME, UNREADABLE, open_bundle, root_of
from nanochat.files import building
from nanochat.terminal import bar, first_line, gib

HOST = "https://karpathy-public.s3.us-west-2.amazonaws.com"  # where karpathy/nanochat has it
FILE = f"{NAME}.zip"
TIMEOUT_S = 15.0  # seconds for the connection, and between two pieces of an answer
LARGEST_BUNDLE = 1 << 31  # bytes of all its files, unpacked


def download_bundle(base_path: Path, host: str = HOST) -> None:
    """Get the public bundle unless a good one is there.

    Raises UserError if the download fails or is no bundle, OSError if `base_path` cannot be written. In both
    cases a bundle that was there stays.
    """
    folder = base_path / NAME
    with contextlib.suppress(UserError):
        if folder.exists() and open_bundle(folder, base_path)[0]:
            print(f"the evaluation bundle is in {folder}")
            return
    with building(folder) as temporary:
        archive = temporary / FILE
        _get(host.rstrip("/"), archive)
        tasks = install(archive, folder)
    print(f"the evaluation bundle is in {folder}: {tasks} tasks")


def _get(host: str, path: Path) -> None:
    """Download the bundle into a file. If the server is busy, try again."""
    import requests
    from urllib3.util import Retry

    again = Retry(3, connect=0, read=0, backoff_factor=1, status_forcelist=[429, 500, 502, 503, 504])
    try:
        with requests.Session() as session, open(path, "wb") as file:
            session.mount(host, requests.adapters.HTTPAdapter(max_retries=again))
            with session.get(f"{host}/{FILE}", stream=True, timeout=TIMEOUT_S) as answer:
                answer.raise_for_status()
                size = int(answer.headers.get("Content-Length", 0)) or None
                with bar("downloading", "B", size) as progress:
                    for chunk in answer.iter_content(1 << 20):
                        file.write(chunk)
                        progress.update(len(chunk))
    except requests.RequestException as error:
        raise UserError(
            f"{FILE} cannot be had from {route(host)}: {first_line(error)[:300]}; check the network, or name "
            "another server with --mirror"
        ) from error


def install(archive_path: Path, folder: Path) -> int:
    """Replace `folder` by the content of a bundle's zip file; returns the number of its tasks.

    Only a bundle's own files are unpacked. zipfile compares checksums, writes nothing outside of the folder
    and makes no links. Raises UserError if the file is damaged or no bundle; then `folder` stays as it was.
    """
    with building(folder) as temporary:
        unpacked = temporary / "unpacked"
        try:
            with zipfile.ZipFile(archive_path) as archive:
                root = root_of(archive.namelist())
                parts = (f"{root}core.yaml", f"{root}eval_meta_data.csv", f"{root}eval_data/")
                members = [member for member in archive.infolist() if member.filename.startswith(parts)]
                if (size := sum(member.file_size for member in members)) > LARGEST_BUNDLE:
                    raise UserError(f"{archive_path} would take {gib(size)}, which is no evaluation bundle")
                archive.extractall(unpacked, members)
        except (FileExistsError, NotADirectoryError, IsADirectoryError, *UNREADABLE) as error:
            raise UserError(f"{archive_path} is damaged ({first_line(error)}); run {GET} again") from error
        bundle, _ = open_bundle(unpacked / root, folder.parent)
        if folder.is_symlink() or folder.exists():
            os.replace(folder, temporary / "before")
        os.replace(unpacked / root, folder)
    return len(bundle.tasks)
