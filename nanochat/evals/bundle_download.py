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
from nanochat.data.download import download
from nanochat.evals.bundle import GET, NAME, UNREADABLE, open_bundle, root_of

HOST = "https://karpathy-public.s3.us-west-2.amazonaws.com"  # where karpathy/nanochat has it
FILE = f"{NAME}.zip"
LARGEST_BUNDLE = 1 << 31  # bytes of all its files, unpacked
MOST_FILES = 10_000


def download_bundle(base_path: Path, host: str = HOST, timeout: float = 30.0, retries: int = 8) -> str:
    """Get the public bundle unless a good one is there. Returns the reason if it cannot be had, else "".

    An interrupted download goes on where it stopped. timeout: seconds without a byte; retries: failures in a
    row. Raises UserError if the file is no bundle, and OSError if `base_path` cannot be written.
    """
    folder, downloads = base_path / NAME, base_path / f"{NAME}.download"
    with contextlib.suppress(UserError):
        if folder.exists() and open_bundle(folder, base_path)[0]:
            print(f"the evaluation bundle is in {folder}")
            return ""
    failed = download({FILE: f"{host.rstrip('/')}/{FILE}"}, downloads, _check_zip, 1, timeout, retries)
    if failed:
        return failed[FILE]
    try:
        tasks = install(downloads / FILE, folder)
    finally:
        shutil.rmtree(downloads, ignore_errors=True)  # after a failure too: the next command begins afresh
    print(f"the evaluation bundle is in {folder}: {tasks} tasks")
    return ""


def _check_zip(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except UNREADABLE as error:
        raise ValueError("no zip file") from error
    if root_of(names) + "core.yaml" not in names:
        raise ValueError("no evaluation bundle")


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
