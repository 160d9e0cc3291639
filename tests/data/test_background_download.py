"""Downloads while a run trains: whatever goes wrong, the run hears one sentence, and the files come later."""

import errno
import os
import threading
import time

import pytest
from helpers import wait_until
from hub_server import full_disk

from nanochat.data import download
from nanochat.data.download import BackgroundDownload
from nanochat.data.streaming_shards import Arrival

FILES = ["shard_00000.parquet", "shard_00001.parquet"]


@pytest.fixture
def arrival(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "PAUSE_S", 0.01)
    monkeypatch.setattr(download, "LONGEST_PAUSE_S", 0.05)
    arrival = Arrival(tmp_path, "command", patience_s=60)
    yield arrival
    arrival.closed.set()


def start(arrival) -> threading.Thread:
    thread = BackgroundDownload("somebody/texts", FILES, arrival)
    thread.start()
    return thread


def said(arrival) -> list[str]:
    lines = []
    while not arrival._news.empty():
        lines.append(arrival._news.get())
    return lines


def check_whole(hub, arrival) -> None:
    assert all((arrival.folder / name).read_bytes() == hub.files[name] for name in FILES)


def test_bad_answers_are_told_once_until_a_file_comes(hub, arrival, capfd):
    hub.faults = {FILES[0]: ["404"] * 3, FILES[1]: ["403", "cut", "500"]}
    start(arrival).join(300)
    check_whole(hub, arrival)
    assert arrival.problem == ""
    first, second = said(arrival)
    assert FILES[0] in first and "404" in first and FILES[1] in second and "403" in second
    assert [name for method, name, _ in hub.requests if method == "HEAD"] == [FILES[0]] * 4 + [FILES[1]] * 4
    assert capfd.readouterr() == ("", "")  # no bar, no line of the library


def test_a_hub_that_is_gone_and_a_full_disk_end_nothing(hub, arrival, monkeypatch):
    import huggingface_hub.file_download as library

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    thread = start(arrival)
    wait_until(lambda: "127.0.0.1:9" in arrival.problem)
    with monkeypatch.context() as patch:
        patch.setattr(library, "http_get", full_disk)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        wait_until(lambda: arrival.problem == os.strerror(errno.ENOSPC))
        assert thread.is_alive()
    thread.join(300)
    check_whole(hub, arrival)
    assert len(said(arrival)) == 1


def test_two_downloads_into_one_folder_get_each_file_once(hub, arrival):
    (arrival.folder / FILES[0]).write_bytes(hub.files[FILES[0]])  # somebody put it there
    hub.held = {FILES[1]}
    threads = [start(arrival), start(arrival)]
    wait_until(lambda: hub.got(FILES[1]))
    time.sleep(0.2)
    hub.held.clear()
    for thread in threads:
        thread.join(300)
    check_whole(hub, arrival)
    assert len(hub.got(FILES[1])) == 1 and hub.got(FILES[0]) == [] and said(arrival) == []


def test_the_end_of_a_run_does_not_wait_for_a_silent_server(hub, arrival):
    hub.held = {FILES[0]}
    thread = start(arrival)
    wait_until(lambda: hub.got(FILES[0]))
    arrival.closed.set()
    hub.held.clear()
    thread.join(300)
    assert thread.daemon and not thread.is_alive() and not hub.got(FILES[1]) and not said(arrival)
