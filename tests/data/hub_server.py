"""A small Hugging Face Hub on loopback: as much of it as the real client, huggingface_hub, asks for."""

import contextlib
import errno
import hashlib
import http.server
import json
import os
import re
import sys
import tempfile
import threading
import time
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

# Without the token and the cache of the person who runs the tests; the client reads these when it is imported
os.environ |= {
    "HF_HOME": tempfile.mkdtemp(),
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
}

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Of an address: the data set, the revision, the file
ADDRESS = re.compile(r"(?:/api)?/datasets/([^/]+/[^/]+)(?:/(?:revision|resolve)/([^/]+))?(?:/(.+))?")


class Hub(http.server.ThreadingHTTPServer):
    """Serves the data set somebody/texts, and `files` by name at any other address.

    `faults[name]` are what goes wrong, one a GET: "404" or another status, "drops" (half comes), "cut" (the
    file has lost its end). `refusal` is (status, X-Error-Code) of all of the data set's addresses.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, list[str]] = {}
        self.refusal: tuple[int, str] | None = None
        self.commit = COMMIT
        self.held: set[str] = set()  # files of which half comes, and the rest when they are taken out
        self.requests: list[tuple[str, str, dict]] = []  # (method, file name or address, headers)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def got(self, name: str) -> list[dict]:
        """The headers of each GET of a file."""
        return [headers for method, asked, headers in self.requests if (method, asked) == ("GET", name)]

    def handle_error(self, request, client_address):
        """A client that has gone away is no error of the server."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        match = ADDRESS.fullmatch(path)
        repo, revision, file = match.groups() if match else (None, None, None)
        name = file or path.lstrip("/")
        headers = {key.lower(): value for key, value in self.headers.items()}
        self.server.requests.append((self.command, name, headers))
        with contextlib.suppress(ConnectionError):
            if repo and (refusal := self.refusal(repo, revision)):
                self.send(refusal[0], headers={"X-Error-Code": refusal[1]})
            elif repo and not file:
                sizes = {name: len(content) for name, content in self.server.files.items()}
                siblings = [{"rfilename": name, "size": n, "blobId": ""} for name, n in sizes.items()]
                info = {"id": repo, "sha": self.server.commit, "siblings": siblings}
                self.send(200, json.dumps(info).encode())
            elif name not in self.server.files:
                self.send(404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.server.commit})
            else:
                self.file(name)

    def refusal(self, repo: str, revision: str | None) -> tuple[int, str] | None:
        if repo != "somebody/texts":
            return 404, "RepoNotFound"
        if revision not in (None, "main", "v1", self.server.commit):
            return 404, "RevisionNotFound"
        return self.server.refusal

    def file(self, name: str) -> None:
        content = self.server.files[name]
        digest = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": self.server.commit, "Accept-Ranges": "bytes"}
        headers |= {"X-Xet-Hash": digest, "X-Xet-Refresh-Route": "/no/xet/here"}  # as the Hub, not a mirror
        faults = self.server.faults.get(name, []) if self.command == "GET" else []
        fault = faults.pop(0) if faults else ""
        if fault.isdigit():
            return self.send(int(fault))
        content = content[:-100] if fault == "cut" else content
        status, asked = 200, re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked:
            headers["Content-Range"] = f"bytes {asked[1]}-{len(content) - 1}/{len(content)}"
            status, content = 206, content[int(asked[1]) :]
        self.send(status, content, headers, name, fault == "drops")

    def send(self, status: int, body: bytes = b"", headers: dict | None = None, name="", drops=False):
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) // 2])
        while name in self.server.held:
            time.sleep(0.02)
        if drops:
            self.close_connection = True
        else:
            self.wfile.write(body[len(body) // 2 :])


def parquet(values: list, column: str = "text", **options) -> bytes:
    """The bytes of a parquet file; `options` are those of pyarrow's write_table."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({column: values}), sink, **options)
    return sink.getvalue().to_pybytes()


def shard(seed: int) -> bytes:
    """A shard of 1000 documents without compression."""
    texts = [hashlib.sha256(b"%d %d" % (seed, i)).hexdigest() * 10 for i in range(1000)]
    return parquet(texts, compression="none")


@pytest.fixture
def hub(monkeypatch):
    """A Hub with shard_00000 to shard_00003, to which HF_ENDPOINT points."""
    server = Hub()
    server.files = {f"shard_{i:05d}.parquet": shard(i) for i in range(4)}
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield server
    server.held.clear()
    server.shutdown()
    thread.join()
    server.server_close()


def full_disk(*_, **__):
    """In place of huggingface_hub.file_download.http_get."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
