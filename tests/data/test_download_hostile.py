"""Downloads from a server that means harm or talks nonsense: a reason for that file, and the rest arrives."""

import contextlib
import hashlib
import io
import os
import re
import runpy
import shutil
import socket
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat import UserError
from nanochat.data import download
from nanochat.data import sources as dataset
from nanochat.data.parquet import footer_digest
from nanochat.data.public import Public
from nanochat.data.sources import open_dataset

GOOD = "good.parquet"
BAD = "bad.parquet"


def shard(seed: int) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": [f"{seed} {i}" for i in range(50)]}), file)
    return file.getvalue()


def answer(body: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    """A whole HTTP answer as bytes; a header's underscores become hyphens."""
    headers = {"Content_Length": str(len(body)), "Connection": "close", **headers}
    lines = [f"{key.replace('_', '-')}: {value}" for key, value in headers.items()]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode("latin-1") + body


class Server:
    """Sends bytes as they are: `answers[name]` is the answer to all requests, or a list of one for each."""

    def __init__(self):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.answers = {GOOD: answer(shard(1))}
        self.heads: list[str] = []
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                threading.Thread(target=self.reply, args=(connection,), daemon=True).start()

    def reply(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(4096)
            self.heads.append(head.decode("latin-1"))
            found = self.answers[head.split()[1].decode().rsplit("/", 1)[-1]]
            for part in [found.pop(0) if isinstance(found, list) else found]:
                for chunk in [part] if isinstance(part, bytes) else part():
                    connection.sendall(chunk)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(download, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(download, "LONGEST_RETRY_AFTER_S", 0.05)
    made = Server()
    yield made
    made.socket.close()


def get(server, folder: Path, *names: str, retries: int = 1, workers: int = 2) -> dict[str, str]:
    urls = {name: f"{server.url}/{name}" for name in names}
    return download.download(urls, folder, footer_digest, workers, 2.0, retries)


DIGITS = "9" * 5000


@pytest.mark.parametrize(
    "bad",
    [
        answer(status="503 no", Retry_After="²"),
        answer(status="503 no", Retry_After=DIGITS),
        answer(status="503 no", Retry_After="Wed, 21 Oct 999999999 07:28:00 GMT"),
        answer(status="503 no", Retry_After="Fri, 31 Dec 0001 00:00:00 +2359"),
        answer(b"x", Content_Length="²"),
        answer(b"x", Content_Length=DIGITS),
        answer(b"x", Content_Length="-5"),
        answer(b"x", status="206 Part", Content_Range=f"bytes 0-{DIGITS}/{DIGITS}"),
        answer(b"x", status="206 Part", Content_Range="bytes 0-1/²"),
        answer(status="416 Range", Content_Range="bytes */0"),
        answer(status="416 Range"),
        answer(b"x", ETag='"\xe9\xff"'),
        answer(b"x", ETag='"' + "e" * 60_000 + '"'),
        answer(status="302 There", Location="http://[::"),
        answer(status="302 There", Location="http://a\xff\xfe.example:99999999/"),
        answer(status="302 There", Location="file:///etc/passwd"),
        answer(b"\x1f\x8bnot gzip", Content_Encoding="gzip"),
        answer(b"zz\r\n", Transfer_Encoding="chunked"),
        b"\x00\xff" * 50 + b"\r\n\r\n",
        b"HTTP/1.1 " + b"9" * 5000 + b" no\r\n\r\n",
        b"",
    ],
    ids=lambda bad: repr(bad[:80]),
)
def test_nonsense_in_an_answer_is_the_reason_for_that_file_alone(server, tmp_path, bad):
    server.answers[BAD] = bad
    missing = get(server, tmp_path, BAD, GOOD)
    assert list(missing) == [BAD] and len(missing[BAD]) < 300
    assert "written" not in missing[BAD]
    assert (tmp_path / GOOD).read_bytes() == shard(1)


def test_an_odd_tag_of_a_part_does_not_spoil_the_rest(server, tmp_path):
    content = shard(2)
    half = answer(content[:900], Content_Length=str(len(content)), ETag='"\xe9 \xff"')
    server.answers[BAD] = [half, answer(content)]
    assert get(server, tmp_path, BAD) == {} and (tmp_path / BAD).read_bytes() == content
    (tmp_path / BAD).unlink()
    (tmp_path / f"{BAD}.part").write_bytes(content[:100])
    (tmp_path / f"{BAD}.part.etag").write_bytes(b'"\xff\n\x00"')
    server.answers[BAD] = answer(content)
    assert get(server, tmp_path, BAD) == {} and (tmp_path / BAD).read_bytes() == content


@pytest.mark.parametrize("status", ["404 \x1b[2J\x1b]0;title\x07gone \x9b31m", "500 \x1b[31m" + "x" * 9000])
def test_the_words_of_a_server_reach_the_terminal_without_control_characters(
    server, tmp_path, capsys, status
):
    server.answers[BAD] = answer(status=status)
    reason = get(server, tmp_path, BAD)[BAD]
    said = capsys.readouterr().err
    assert f"HTTP {status[:3]} " in reason and len(reason) < 300
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", reason + said.replace("\r", ""))


def test_a_file_without_an_end_is_given_up_at_the_limit_and_leaves_nothing(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "LARGEST_FILE", 1 << 20)

    def endless():
        yield b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
        while True:
            yield bytes(1 << 16)

    for bad in (endless, answer(b"x", Content_Length=str(1 << 40))):
        server.answers[BAD] = bad
        assert "more than 1,048,576 bytes" in get(server, tmp_path, BAD, GOOD)[BAD]
        assert not list(tmp_path.glob(f"{BAD}*"))


@pytest.mark.parametrize(
    "mirror", ["http://[::", "nowhere", "http://", "http://a:b/", "file:///x", "http://a b"]
)
def test_a_mirror_that_is_no_address_is_refused(tmp_path, monkeypatch, mirror):
    arguments = [f"--base_dir={tmp_path}", "--name=climbmix", "--num_shards=1", f"--mirror={mirror}"]
    monkeypatch.setattr(sys, "argv", ["download", *arguments])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the script sets its own
    with pytest.raises(UserError, match="mirror"):
        runpy.run_module("scripts.download", run_name="__main__")


# -- one file under two names


def test_of_equal_files_that_come_at_once_one_is_taken(server, tmp_path, monkeypatch):
    names = [f"shard_{i:05d}.parquet" for i in range(4)]
    server.answers |= dict.fromkeys(names, answer(shard(3)))
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (sync(file), time.sleep(0.3)))  # all are at the same place
    missing = get(server, tmp_path, *names, workers=4)
    assert len(missing) == 3 and all("the server sent shard_" in reason for reason in missing.values())
    assert len(list(tmp_path.glob("*.parquet"))) == 1 and len(download.read_checksums(tmp_path)) == 1


def test_files_put_there_by_hand_may_not_be_twins(server, tmp_path):
    (tmp_path / GOOD).write_bytes(shard(1))
    shutil.copy(tmp_path / GOOD, tmp_path / BAD)
    server.answers[BAD] = answer(shard(2))
    server.answers[GOOD] = answer(shard(1))
    assert get(server, tmp_path, GOOD, BAD, workers=1) == {}  # the first one that is checked stays
    assert len({(tmp_path / name).read_bytes() for name in (GOOD, BAD)}) == 2


def test_validation_that_equals_a_training_shard_is_refused(server, tmp_path, monkeypatch):
    monkeypatch.setitem(dataset.PUBLIC, "climbmix", Public("karpathy/climbmix-400b-shuffle", 4))
    folder = tmp_path / "data" / "climbmix"
    folder.mkdir(parents=True)
    entries = []
    for i, seed in enumerate([1, 2, 5, 2]):
        content = shard(seed)
        (folder / f"shard_{i:05d}.parquet").write_bytes(content)
        entry = f'{{"bytes": {len(content)}, "sha256": "{hashlib.sha256(content).hexdigest()}"}}'
        entries.append(f'"shard_{i:05d}.parquet": {entry}')
    (folder / "checksums.json").write_text("{" + ", ".join(entries) + "}")
    twins = r"shard_00001.parquet .*shard_00003.parquet have the same content"
    with pytest.raises(UserError, match=twins):
        open_dataset("climbmix", base_dir=tmp_path)
    (folder / "checksums.json").unlink()
    with pytest.raises(UserError, match=twins):
        open_dataset(folder, folder / "shard_00003.parquet", base_dir=tmp_path)
