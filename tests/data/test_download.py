"""Downloads against a real server that misbehaves: every fault ends in the right bytes or a clear refusal."""

import contextlib
import hashlib
import http.server
import itertools
import json
import os
import re
import runpy
import signal
import subprocess
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
from nanochat.data.parquet import footer_digest, iterate_documents
from nanochat.data.public import Public
from nanochat.data.sources import open_dataset

ROOT = Path(__file__).parents[2]


class Server(http.server.ThreadingHTTPServer):
    """Serves `files` by the last part of the path; `faults[name]` are what goes wrong, one a request."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, list[str]] = {}
        self.requests: list[tuple[str, dict, int]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.active = self.most_active = 0

    def handle_error(self, request, client_address):
        """A client that has gone away is no error of the server, which would print a traceback into
        whichever test runs by then."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        name = self.path.rsplit("/", 1)[-1]
        faults = self.server.faults.get(name, [])
        fault = faults.pop(0) if faults else ""
        self.server.requests.append((self.path, dict(self.headers), time.monotonic()))
        self.server.active += 1
        self.server.most_active = max(self.server.most_active, self.server.active)
        with contextlib.suppress(ConnectionError):
            self.answer(name, fault)
        self.server.active -= 1

    def answer(self, name: str, fault: str):
        content = self.server.files.get(name)
        if content is None:
            return self.send(404, b"nothing here")
        if match := re.fullmatch(r"(\d{3})(?: after (.*))?", fault):
            return self.send(int(match[1]), b"no", {"Retry-After": match[2]} if match[2] else {})
        if fault == "silent":
            return time.sleep(3)
        if fault == "wrong file":
            return self.send(200, b"<html>please log in</html>")
        if fault == "another shard":
            return self.send(200, self.server.files["other"])
        if fault == "flipped byte":
            content = content[:100] + bytes([content[100] ^ 1]) + content[101:]
        tag = {"ETag": f'"{hashlib.md5(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        if fault == "redirect":
            tag["X-Linked-ETag"] = f'"{hashlib.sha256(content).hexdigest()}"'
            return self.send(302, b"", {**tag, "Location": f"/elsewhere/{name}"})
        if fault == "redirect with another checksum":
            tag["X-Linked-ETag"] = f'"{hashlib.sha256(b"other").hexdigest()}"'
            return self.send(302, b"", {**tag, "Location": f"/elsewhere/{name}"})
        status, body = 200, content
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        same = self.headers.get("If-Range", tag["ETag"]) == tag["ETag"]
        if asked and same and fault != "ignores ranges":
            start = int(asked[1])
            if start >= len(content):
                return self.send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            shift = 5 if fault == "wrong range" else 0
            status, body = 206, content[start - shift :]
            tag["Content-Range"] = f"bytes {start - shift}-{len(content) - 1}/{len(content)}"
        if fault == "no length":
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True
            return
        lie = {"says more": 1000, "says less": -1000}.get(fault, 0)
        sent = body[: len(body) // 2] if fault == "drops" else b"" if fault == "drops at once" else body
        self.send(status, sent, tag, len(body) + lie)

    def send(self, status: int, body: bytes, headers: dict | None = None, length: int | None = None):
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)
        if length not in (None, len(body)):
            self.close_connection = True


def shard(seed: int, documents: int = 1000) -> bytes:
    texts = [hashlib.sha256(b"%d %d" % (seed, i)).hexdigest() * 10 for i in range(documents)]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": texts}), sink, compression="none", row_group_size=100)
    return sink.getvalue().to_pybytes()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(download, "FIRST_PAUSE_S", 0.01)
    server = Server()
    server.files = {f"shard_{i:05d}.parquet": shard(i) for i in range(4)} | {"other": shard(99)}
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def get(server, folder, *names, retries=3, workers=2, timeout=1.0) -> dict[str, str]:
    urls = {name: f"{server.url}/some/where/{name}" for name in names}
    return download.download(urls, folder, footer_digest, workers, timeout, retries)


ONE = "shard_00001.parquet"


def check_whole(server, folder, *names) -> None:
    """The files are there as the server has them and recorded so, and nothing else is left."""
    record = json.loads((folder / "checksums.json").read_text())
    for name in names:
        content = server.files[name]
        assert (folder / name).read_bytes() == content
        assert record[name] == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert set(os.listdir(folder)) == {*names, "checksums.json", ".lock"}


@pytest.mark.parametrize(
    "faults",
    [
        [],
        ["drops"] * 5,  # each time half of the rest comes: progress, however often it breaks
        ["drops at once"] * 3,
        ["drops", "ignores ranges"],
        ["drops", "wrong range"],
        ["drops", "says more", "drops"],
        ["says more"],
        ["says less"],
        ["429", "500", "503"],
        ["429 after 0", "503 after Wed, 21 Oct 2015 07:28:00 GMT"],
        ["silent", "drops"],
        ["wrong file", "another kind"],
        ["no length"],
        ["redirect"],
        ["redirect with another checksum", "redirect"],
        ["redirect", "drops", "redirect"],
        ["drops", "500", "drops", "429", "silent", "drops", "wrong range", "ignores ranges"],
    ],
    ids=str,
)
def test_whatever_the_server_does_the_right_bytes_arrive(server, tmp_path, faults):
    server.faults[ONE] = list(faults)
    assert get(server, tmp_path, ONE) == {}
    check_whole(server, tmp_path, ONE)


def test_after_a_break_the_download_goes_on_where_it_was(server, tmp_path):
    server.faults[ONE] = ["drops", "500", "500"]
    missing = get(server, tmp_path, ONE, retries=1)
    assert "HTTP 500" in missing[ONE] and not (tmp_path / ONE).exists()
    half, size = len(server.files[ONE]) // 2, (tmp_path / f"{ONE}.part").stat().st_size
    assert half - download.CHUNK < size <= half
    assert get(server, tmp_path, ONE) == {}
    assert server.requests[-1][1]["Range"] == f"bytes={size}-"
    check_whole(server, tmp_path, ONE)


def test_a_file_that_changed_on_the_server_between_two_parts_is_not_mixed(server, tmp_path):
    server.faults[ONE] = ["drops", "500"]
    get(server, tmp_path, ONE, retries=0)
    server.files[ONE] = shard(7)
    assert get(server, tmp_path, ONE) == {}
    check_whole(server, tmp_path, ONE)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("404", "HTTP 404"), ("403", "HTTP 403"), ("wrong file", "another kind of file"), ("500", "HTTP 500")],
)
def test_what_never_comes_is_told_with_its_reason_and_the_others_arrive(
    server, tmp_path, fault, reason, capsys
):
    server.faults[ONE] = [fault] * 99
    missing = get(server, tmp_path, "shard_00000.parquet", ONE, "shard_00002.parquet", retries=2)
    assert list(missing) == [ONE] and reason in missing[ONE]
    check_whole(server, tmp_path, "shard_00000.parquet", "shard_00002.parquet")
    said = capsys.readouterr().err
    assert "2 of 3 files are in" in said and f"missing: {ONE}: " in said and reason in said
    assert len(server.requests) == (3 if fault.startswith("4") else 5)  # a refusal is not asked again


def test_a_server_that_restarts_for_ever_without_progress_is_given_up(server, tmp_path):
    server.faults[ONE] = ["drops", "wrong range"] * 50
    missing = get(server, tmp_path, ONE, retries=4)
    assert ONE in missing and len(server.requests) < 20


def test_waiting_grows_and_retry_after_is_obeyed(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "FIRST_PAUSE_S", 0.1)
    server.faults[ONE] = ["500", "500", "500"]
    get(server, tmp_path, ONE)
    times = [at for _, _, at in server.requests]
    waits = [b - a for a, b in itertools.pairwise(times)]
    assert 0.05 <= waits[0] < waits[2] and 0.2 <= waits[2] < 0.6
    server.requests.clear()
    server.faults["shard_00002.parquet"] = ["429 after 1"]
    get(server, tmp_path, "shard_00002.parquet")
    assert server.requests[1][2] - server.requests[0][2] >= 1


def test_a_second_download_takes_what_is_there_after_verifying_it(server, tmp_path):
    names = sorted(server.files)[1:]
    assert get(server, tmp_path, *names) == {}
    server.requests.clear()
    assert get(server, tmp_path, *names) == {} and server.requests == []
    path = tmp_path / names[0]
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)
    (tmp_path / names[1]).write_bytes(b"short")
    assert get(server, tmp_path, *names) == {} and len(server.requests) == 2
    check_whole(server, tmp_path, *names)


def test_another_file_than_the_recorded_one_is_never_taken(server, tmp_path):
    assert get(server, tmp_path, ONE) == {}
    good = server.files[ONE]
    (tmp_path / ONE).unlink()
    server.faults[ONE] = ["another shard"] * 99
    missing = get(server, tmp_path, ONE)
    assert (
        "another file than the one recorded in checksums.json" in missing[ONE]
        and not (tmp_path / ONE).exists()
    )
    server.faults[ONE] = ["flipped byte", "another shard"]
    assert get(server, tmp_path, ONE) == {} and (tmp_path / ONE).read_bytes() == good


def test_one_shard_under_two_names_is_not_taken_for_two(server, tmp_path):
    server.files["shard_00002.parquet"] = server.files[ONE]
    missing = get(server, tmp_path, ONE, "shard_00002.parquet", workers=1)
    assert "the server sent shard_00001.parquet" in missing["shard_00002.parquet"]
    check_whole(server, tmp_path, ONE)


def test_files_put_there_by_hand_are_checked_and_recorded(server, tmp_path):
    (tmp_path / ONE).write_bytes(server.files[ONE])
    (tmp_path / "shard_00002.parquet").write_bytes(b"no shard")
    assert get(server, tmp_path, ONE, "shard_00002.parquet") == {} and len(server.requests) == 1
    check_whole(server, tmp_path, ONE, "shard_00002.parquet")


def test_several_files_come_at_once_but_no_more_than_asked(server, tmp_path):
    names = sorted(server.files)[1:]
    for name in names:
        server.faults[name] = ["silent"]
    get(server, tmp_path, *names, workers=2, timeout=0.3)
    assert server.most_active >= 2
    check_whole(server, tmp_path, *names)


def test_a_full_disk_stops_everything_with_the_error(server, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        get(server, tmp_path, *sorted(server.files)[1:])
    assert not list(tmp_path.glob("*.parquet"))


def test_two_downloads_into_one_folder_are_refused(server, tmp_path):
    with download.locked(tmp_path), pytest.raises(UserError, match="another download"):
        get(server, tmp_path, ONE)


# -- the command, and the data set it makes


@pytest.fixture
def small(monkeypatch, server):
    """The public data set climbmix with 4 shards in place of 6543."""
    monkeypatch.setitem(dataset.PUBLIC, "climbmix", Public("karpathy/climbmix-400b-shuffle", 4))
    return server


def command(server, base_dir: Path, *arguments: str) -> subprocess.Popen:
    """python -m scripts.download, with short waits."""
    script = "import runpy; from nanochat.data import download; download.FIRST_PAUSE_S = 0.01\n"
    script += "runpy.run_module('scripts.download', run_name='__main__', alter_sys=True)\n"
    command = [sys.executable, "-W", "ignore", "-c", script]
    command += [f"--base_dir={base_dir}", f"--mirror={server.url}", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_the_command_gets_training_shards_and_the_pinned_validation_shard(server, tmp_path):
    server.files["shard_06542.parquet"] = shard(42)
    process = command(server, tmp_path / "base", "--name=climbmix", "--num_shards=3", "--workers=2")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "4 of 4 files are in" in err
    paths = {path for path, _, _ in server.requests}
    assert f"/datasets/karpathy/climbmix-400b-shuffle/resolve/main/{ONE}" in paths
    data = open_dataset("climbmix", base_dir=tmp_path / "base")
    assert [path.name for path in data.train_shards] == [f"shard_{i:05d}.parquet" for i in range(3)]
    assert [path.name for path in data.val_shards] == ["shard_06542.parquet"]
    assert len(list(iterate_documents(data.train_shards))) == 3000


def test_the_command_ends_with_an_error_when_anything_is_missing(server, tmp_path):
    process = command(server, tmp_path / "base", "--name=fineweb-edu", "--num_shards=1")
    _, err = process.communicate(timeout=60)
    assert (
        process.returncode == 1 and "1 of 2 files" in err and "missing: shard_01822.parquet: HTTP 404" in err
    )
    with pytest.raises(
        UserError, match=r"lacks shard_01822.parquet, the validation split; .*--name=fineweb-edu"
    ):
        open_dataset("fineweb-edu", base_dir=tmp_path / "base")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --name="),
        (["--name=nothing"], "no public data set nothing; choose one of climbmix, fineweb-edu"),
        (["--name=climbmix", "--num_shards=6543"], "6542 training shards; give --num_shards=-1"),
        (["--name=climbmix", "--val_data=x"], "--val_data goes with --data"),
        (["--name=climbmix", "--data=x"], "give either"),
        (["--data=/nowhere"], "data=/nowhere does not exist"),
        (["--name=climbmix", "--base_dir=~nouser0815/x"], "--base_dir=~nouser0815/x begins with a user"),
    ],
)
def test_bad_settings_are_refused(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "argv", ["download", f"--base_dir={tmp_path / 'base'}", *arguments])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the script sets its own
    with pytest.raises(UserError, match=message):
        runpy.run_module("scripts.download", run_name="__main__")


def test_a_refusal_is_one_sentence_and_status_2(server, tmp_path):
    process = command(server, tmp_path / "base", "--name=climbmix", "--num_shards=6543")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and err.startswith("error: climbmix has") and err.count("\n") == 1


def test_the_command_imports_local_text(server, tmp_path):
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"body": "text {i}"}}\n' for i in range(200)))
    process = command(server, tmp_path / "base", f"--data={tmp_path}/texts.jsonl", "--text_field=body")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "") and "training and" in out


def test_ctrl_c_stops_it_and_the_next_command_goes_on(server, tmp_path):
    server.faults["shard_00000.parquet"] = ["drops"] + ["429 after 60"] * 99
    server.files["shard_06542.parquet"] = shard(42)
    process = command(server, tmp_path / "base", "--name=climbmix", "--num_shards=1")
    part = tmp_path / "base" / "data" / "climbmix" / "shard_00000.parquet.part"
    deadline = time.monotonic() + 30
    while len(server.requests) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1 and "continues the download" in err and "Traceback" not in err
    assert part.stat().st_size > 0
    server.faults.clear()
    process = command(server, tmp_path / "base", "--name=climbmix", "--num_shards=1")
    process.communicate(timeout=60)
    assert process.returncode == 0
    check_whole(server, part.parent, "shard_00000.parquet", "shard_06542.parquet")


def test_downloaded_shards_are_opened_by_name_and_validation_never_moves(small, tmp_path):
    folder = tmp_path / "data" / "climbmix"
    with pytest.raises(
        UserError, match=r"lacks shard_00003.parquet.* python -m scripts.download --name=climbmix"
    ):
        open_dataset("climbmix", base_dir=tmp_path)
    get(small, folder, "shard_00003.parquet")
    with pytest.raises(UserError, match=r"lacks shard_00000.parquet, the first training shard"):
        open_dataset("climbmix", base_dir=tmp_path)
    seen = []
    for name in ("shard_00000.parquet", "shard_00001.parquet"):
        get(small, folder, name)
        data = open_dataset("climbmix", base_dir=tmp_path)
        assert [path.name for path in data.val_shards] == ["shard_00003.parquet"]
        assert data.train_shards[-1].name == name
        seen.append(data.fingerprint)
    assert seen[0] == seen[1]  # the checkpoints keep how many of them a run reads
    (folder / "shard_00002.parquet").write_bytes(b"not recorded, so not complete")
    assert open_dataset("climbmix", base_dir=tmp_path) == data
    (folder / "shard_00003.parquet").unlink()
    with pytest.raises(UserError, match=r"lacks shard_00003.parquet, the validation split"):
        open_dataset("climbmix", base_dir=tmp_path)
    own = tmp_path / "own.parquet"
    own.write_bytes(shard(5))
    assert open_dataset("climbmix", own, base_dir=tmp_path).val_shards == [own]
    (folder / "shard_00000.parquet").write_bytes(b"short")
    with pytest.raises(UserError, match="has changed since its download; get it again"):
        open_dataset("climbmix", base_dir=tmp_path)
    (folder / "checksums.json").write_text("[]")
    with pytest.raises(UserError, match=r"checksums.json is damaged"):
        open_dataset("climbmix", base_dir=tmp_path)
