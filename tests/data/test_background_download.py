"""Downloads while a run trains: whatever goes wrong, the run hears one sentence, and the files come later."""

import contextlib
import errno
import json
import os
import threading
import time

import pytest
from test_download import check_whole, server  # noqa: F401

from nanochat import UserError
from nanochat.data import background_download, download
from nanochat.data.streaming_shards import Arrival

FILES = ["shard_00000.parquet", "shard_00001.parquet"]


@pytest.fixture
def arrival(tmp_path, monkeypatch):
    monkeypatch.setattr(background_download, "LOOK_S", 0.01)
    monkeypatch.setattr(background_download, "LONGEST_PAUSE_S", 0.05)
    yield Arrival(tmp_path, "command", patience_s=60)
    background_download.stop()


def start(server, arrival) -> threading.Thread:  # noqa: F811
    background_download.start({name: f"{server.url}/{name}" for name in FILES}, arrival)
    return background_download._running[-1]


def wait_until(true) -> None:
    deadline = time.monotonic() + 20
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert true()


def said(arrival) -> list[str]:
    lines = []
    while not arrival._news.empty():
        lines.append(arrival._news.get())
    return lines


def warning(file: str, why: str) -> str:
    return (
        f"warning: {file} cannot be downloaded now ({why}); training goes on with the text that is here, and "
        "the download tries again"
    )


def test_bad_answers_are_told_once_until_a_file_comes(server, arrival):  # noqa: F811
    server.faults = {FILES[0]: ["404"] * 3, FILES[1]: ["403", "wrong file", "redirect with another checksum"]}
    start(server, arrival).join(20)
    check_whole(server, arrival.folder, *FILES)
    assert arrival.problem == ""
    first, second = (f"{server.url}/{name}" for name in FILES)
    expected = (FILES[0], f"HTTP 404 Not Found from {first}"), (FILES[1], f"HTTP 403 Forbidden from {second}")
    assert said(arrival) == [warning(*both) for both in expected]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="has no disk that is always full")
def test_a_full_disk_ends_nothing_and_the_files_come_when_there_is_room(server, arrival):  # noqa: F811
    full = arrival.folder / f"{FILES[0]}.part"
    full.symlink_to("/dev/full")
    thread = start(server, arrival)
    wait_until(lambda: sum(FILES[0] in path for path, _, _ in server.requests) > 2)
    assert thread.is_alive() and arrival.problem == os.strerror(errno.ENOSPC)
    full.unlink()
    thread.join(20)
    check_whole(server, arrival.folder, *FILES)
    assert said(arrival) == [warning(FILES[0], os.strerror(errno.ENOSPC))]


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "Permission denied"), RuntimeError("odd")])
def test_a_folder_that_cannot_be_written_and_any_other_error_are_told(server, arrival, monkeypatch, error):  # noqa: F811
    def refuse(folder):
        raise error

    locked = download.locked
    monkeypatch.setattr(download, "locked", refuse)
    thread = start(server, arrival)
    wait_until(lambda: arrival.problem)
    assert thread.is_alive() and not server.requests
    monkeypatch.setattr(download, "locked", locked)
    thread.join(20)
    check_whole(server, arrival.folder, *FILES)
    assert said(arrival) == [warning(FILES[0], getattr(error, "strerror", str(error)))]


@pytest.mark.parametrize("brings", [True, False])
def test_another_download_is_waited_for_and_replaced_when_it_ends(server, arrival, brings):  # noqa: F811
    with download.locked(arrival.folder):
        thread = start(server, arrival)
        wait_until(lambda: "another download into" in arrival.problem)
        if brings:
            entries = {name: {"bytes": len(server.files[name]), "sha256": ""} for name in FILES}
            (arrival.folder / "new").write_text(json.dumps(entries))  # at once, as the command does it
            (arrival.folder / "new").replace(arrival.folder / "checksums.json")
            for name in FILES:
                (arrival.folder / name).write_bytes(server.files[name])
            thread.join(20)
        assert thread.is_alive() != brings and not server.requests
    thread.join(20)
    assert not thread.is_alive() and said(arrival) == []
    assert len(server.requests) == (0 if brings else 2)


def test_files_that_somebody_put_there_are_checked_and_listed(server, arrival):  # noqa: F811
    (arrival.folder / FILES[0]).write_bytes(server.files[FILES[0]])
    (arrival.folder / FILES[1]).write_bytes(server.files[FILES[1]][:-5])  # truncated
    start(server, arrival).join(20)
    check_whole(server, arrival.folder, *FILES)
    assert all(FILES[1] in path for path, _, _ in server.requests) and arrival.is_here(
        arrival.folder / FILES[0]
    )
    (arrival.folder / FILES[0]).write_bytes(b"cut later")
    background_download.fetch({FILES[0]: f"{server.url}/{FILES[0]}"}, arrival.folder)
    check_whole(server, arrival.folder, *FILES)


def test_the_end_of_a_run_does_not_wait_for_a_silent_server(server, arrival, monkeypatch):  # noqa: F811
    monkeypatch.setattr(background_download, "CLOSE_S", 0.1)
    server.faults[FILES[0]] = ["silent"]
    thread = start(server, arrival)
    wait_until(lambda: server.requests)
    began = time.monotonic()
    background_download.stop()
    assert time.monotonic() - began < 2 and thread.daemon and not said(arrival)


def test_what_a_run_needs_at_its_start_is_had_or_refused_in_a_sentence(server, arrival, capsys):  # noqa: F811
    urls = {name: f"{server.url}/{name}" for name in FILES}
    server.faults[FILES[1]] = ["404"]
    with pytest.raises(UserError, match=f"{FILES[1]} cannot be downloaded .HTTP 404.*HF_ENDPOINT"):
        background_download.fetch(urls, arrival.folder)
    other = contextlib.ExitStack()
    other.enter_context(download.locked(arrival.folder))
    threading.Timer(0.1, other.close).start()
    background_download.fetch(urls, arrival.folder)
    check_whole(server, arrival.folder, *FILES)
    assert capsys.readouterr().err.count("another download into") == 1
    (arrival.folder / "checksums.json").write_text("[")
    with pytest.raises(UserError, match=r"checksums.json is damaged"):
        background_download.fetch(urls, arrival.folder)
    for address in ("no address", "http://", "ftp://a/b"):  # of HF_ENDPOINT: refused at once
        with pytest.raises(UserError, match=r"cannot be downloaded \(bad address .*HF_ENDPOINT can name"):
            background_download.fetch({"shard_00007.parquet": address}, arrival.folder / "new")
    (arrival.folder / "elsewhere" / ".lock").mkdir(parents=True)
    with pytest.raises(UserError, match=r"elsewhere cannot be written \(Is a directory\); make room"):
        background_download.fetch(urls, arrival.folder / "elsewhere")
