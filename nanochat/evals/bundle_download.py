"""Downloads the public evaluation bundle of CORE into base_dir. bundle.py reads the zip file as it is."""

import contextlib
from pathlib import Path
from typing import BinaryIO

from nanochat import UserError
from nanochat.data.download import route
from nanochat.evals.bundle import NAME, open_bundle
from nanochat.files import replacing
from nanochat.terminal import bar, first_line

HOST = "https://karpathy-public.s3.us-west-2.amazonaws.com"  # where karpathy/nanochat has it
FILE = f"{NAME}.zip"
TIMEOUT_S = 15.0  # seconds for the connection, and between two pieces of an answer


def download_bundle(base_path: Path, host: str = HOST) -> None:
    """Get the public bundle unless a good one is there.

    Raises UserError if the download fails or is no bundle, OSError if `base_path` cannot be written. In both
    cases a bundle that was there stays.
    """
    with contextlib.suppress(UserError):
        if there := open_bundle(None, base_path)[0]:
            print(f"the evaluation bundle is in {there.path}")
            return
    base_path.mkdir(parents=True, exist_ok=True)
    with replacing(base_path / FILE) as file:
        _get(host.rstrip("/"), file)
        file.flush()
        bundle, _ = open_bundle(file.name, base_path)
    print(f"the evaluation bundle is in {base_path / FILE}: {len(bundle.tasks)} tasks")


def _get(host: str, file: BinaryIO) -> None:
    """Download the bundle into a file. If the server is busy, try again."""
    import requests
    from urllib3.util import Retry

    again = Retry(3, connect=0, read=0, backoff_factor=1, status_forcelist=[429, 500, 502, 503, 504])
    try:
        with requests.Session() as session:
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
