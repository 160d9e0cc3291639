"""Downloads by the real huggingface_hub from a small Hub on loopback: what a person can meet on the way."""

import errno
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from helpers import Process, wait_until
from hub_server import full_disk, shard

from nanochat import UserError
from nanochat.data import download
from nanochat.data import sources as dataset
from nanochat.data.download import fetch
from nanochat.data.parquet import Documents
from nanochat.data.public import Public
from nanochat.data.sources import open_dataset

REPO = "somebody/texts"
ZERO, ONE, TWO = (f"shard_{i:05d}.parquet" for i in range(3))


def check_whole(hub, folder, *names) -> None:
    """The files are there as the Hub has them, and nothing else that is not hidden."""
    assert {name: (folder / name).read_bytes() for name in names} == {name: hub.files[name] for name in names}
    assert {path.name for path in folder.iterdir() if path.name != ".cache"} == set(names)


def test_a_busy_hub_is_asked_again_and_after_a_break_only_the_rest_comes(hub, tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.faults[ONE] = ["429", "drops"]
    fetch(REPO, [ZERO, ONE], tmp_path)
    half = len(hub.files[ONE]) // 2 // 1000 * 1000
    _, first, second = hub.got(ONE)
    assert "range" not in first and second["range"] == f"bytes={half}-"
    check_whole(hub, tmp_path, ZERO, ONE)


@pytest.mark.parametrize("fault, reason", [
    ("404", "404"), ("403", "403.*HF_TOKEN"), ("401", "HF_TOKEN"), ("500", "HTTP 500"), ("cut", "size"),
])  # fmt: skip
def test_a_file_that_never_comes_is_told_with_its_reason_and_the_others_arrive(hub, tmp_path, fault, reason):
    hub.faults[ONE] = [fault]
    with pytest.raises(UserError, match=f"1 of 3 files .*{ONE}.*{hub.url}.*{reason}"):
        fetch(REPO, [ZERO, ONE, TWO], tmp_path)
    check_whole(hub, tmp_path, ZERO, TWO)
    fetch(REPO, [ZERO, ONE, TWO], tmp_path)
    assert len(hub.got(ZERO)) == 1
    check_whole(hub, tmp_path, ZERO, ONE, TWO)


@pytest.mark.parametrize("refusal, reason", [
    ((401, "RepoNotFound"), "no such data set.*HF_TOKEN"), ((403, "GatedRepo"), "gated.*HF_TOKEN"),
    ((404, "RevisionNotFound"), "revision"), ((403, ""), "403.*HF_TOKEN"), ((503, ""), "HTTP 503"),
])  # fmt: skip
def test_a_data_set_that_may_not_be_read_is_a_sentence(hub, tmp_path, refusal, reason):
    hub.refusal = refusal
    with pytest.raises(UserError, match=f"{REPO}.*{reason}") as error:
        fetch(REPO, [ZERO], tmp_path)
    assert "\n" not in str(error.value) and not list(tmp_path.glob("*.parquet"))


def test_a_hub_that_is_gone_is_named_with_its_proxy_within_seconds(hub, tmp_path, monkeypatch):
    import huggingface_hub.utils

    with socket.socket() as silent:  # it takes connections, and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(download, "ANSWER_S", 0.3)
        monkeypatch.setenv("HF_ENDPOINT", f"http://{address}")
        with pytest.raises(UserError, match=f"{REPO} cannot be had from http://{address}.*time.*HF_ENDPOINT"):
            fetch(REPO, [ZERO], tmp_path)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        for name in "http_proxy", "no_proxy":
            monkeypatch.setenv(name, f"http://me:secret@{address}" if name == "http_proxy" else "")
        renew_client = getattr(huggingface_hub.utils, "close_session", lambda: None)
        renew_client()  # it reads the proxy when it is made
        with pytest.raises(UserError, match=f"{hub.url}.* through the proxy {address}:") as error:
            fetch(REPO, [ZERO], tmp_path)
        assert "secret" not in str(error.value)
    renew_client()
    assert download.ANSWER_S < 10 and not hub.requests


@pytest.mark.parametrize("mirror", ["nowhere", "file:///x", "http://a["])
def test_a_mirror_that_is_no_address_is_refused(tmp_path, monkeypatch, mirror):
    monkeypatch.setenv("HF_ENDPOINT", mirror)
    with pytest.raises(UserError, match="mirror"):
        fetch(REPO, [ZERO], tmp_path)


def test_what_is_here_needs_no_network_and_is_compared_when_asked(hub, tmp_path, monkeypatch, capsys):
    (tmp_path / ZERO).write_bytes(hub.files[ZERO])  # somebody put it there
    fetch(REPO, [ZERO, ONE], tmp_path, compare=True)
    assert hub.got(ZERO) == [] and len(hub.got(ONE)) == 1
    for name, content in (ZERO, b"short"), (ONE, b"x" * len(hub.files[ONE])):
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, (time.time() + 10,) * 2)  # changed later than the download
    hub.requests.clear()
    fetch(REPO, [ZERO, ONE], tmp_path)
    assert hub.requests == []
    fetch(REPO, [ZERO, ONE], tmp_path, compare=True)
    check_whole(hub, tmp_path, ZERO, ONE)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    fetch(REPO, [ZERO, ONE], tmp_path, compare=True)
    assert "not compared" in capsys.readouterr().err


def test_a_full_disk_and_a_folder_that_is_a_file_are_told_at_once(hub, tmp_path, monkeypatch):
    import huggingface_hub.file_download as library

    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file cannot be written .*--base_dir"):
        fetch(REPO, [ZERO], tmp_path / "file")
    monkeypatch.setattr(library, "http_get", full_disk)
    with pytest.raises(UserError, match=f"cannot be written .{os.strerror(errno.ENOSPC)}"):
        fetch(REPO, [ZERO, ONE], tmp_path / "there")
    assert not list((tmp_path / "there").glob("*.parquet"))


def test_unfinished_files_of_killed_downloads_go(hub, tmp_path):
    left = tmp_path / ".cache" / "huggingface" / "download"
    left.mkdir(parents=True)
    for name, age_s in ("old.incomplete", 2 * download.STALE_S), ("new.incomplete", 0):
        (left / name).write_bytes(b"half")
        os.utime(left / name, (time.time() - age_s,) * 2)
    (left / "gone.incomplete").symlink_to("nowhere")  # as if another process removed it just now
    fetch(REPO, [ZERO], tmp_path)
    assert {path.name for path in tmp_path.glob(download.UNFINISHED)} == {"new.incomplete", "gone.incomplete"}


# -- the command, and the data set that it makes


def command(base_dir: Path, *arguments: str, **environment: str) -> Process:
    """python -m scripts.download, with a data set of 4 shards as climbmix."""
    script = base_dir / "download.py"
    script.write_text(
        "import runpy; from nanochat.data import public\n"
        f"public.PUBLIC['climbmix'] = public.Public('{REPO}', 4)\n"
        "runpy.run_module('scripts.download', run_name='__main__', alter_sys=True)\n"
    )
    return Process([str(script), f"--base_dir={base_dir}", *arguments], **environment)


def run(*arguments, status: int = 0, **environment) -> str:
    process = command(*arguments, **environment)
    out, err = process.communicate()
    assert process.returncode == status and "Traceback" not in err, err
    return out + err


def test_the_command_gets_the_shards_through_a_mirror_and_offline_they_are_enough(hub, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_ENDPOINT")
    get = ["--name=climbmix", "--num_shards=2", "--workers=2", f"--mirror={hub.url}"]
    offline = {"HF_HUB_OFFLINE": "1"}
    said = run(tmp_path, *get, status=2, **offline)
    assert said.startswith("error: ") and said.count("\n") == 1 and "HF_HUB_OFFLINE" in said
    assert hub.requests == []
    said = run(tmp_path, *get, HF_TOKEN="hf_secret", HF_HUB_DISABLE_IMPLICIT_TOKEN="0")
    assert hub.got(ZERO)[0]["authorization"] == "Bearer hf_secret"
    assert "3 files are in" in said and "\r" not in said  # no bar in a log file
    check_whole(hub, tmp_path / "data" / "climbmix", ZERO, ONE, "shard_00003.parquet")
    assert "3 files are in" in run(tmp_path, *get, **offline)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_download_that_was_stopped_in_the_middle_goes_on_by_the_same_command(hub, tmp_path, number):
    hub.held = {ONE}
    patient = {"HF_HUB_DOWNLOAD_TIMEOUT": "900"}  # the library waits for the server; the end does not
    process = command(tmp_path, "--name=climbmix", "--num_shards=2", **patient)
    folder = tmp_path / "data" / "climbmix"
    wait_until(lambda: hub.got(ONE) and (folder / ZERO).exists())
    process.send_signal(number)
    _, err = process.communicate()
    assert not (folder / ONE).exists()
    assert number == signal.SIGKILL or (process.returncode == 1 and "same command" in err)
    assert "Traceback" not in err
    hub.held.clear()
    run(tmp_path, "--name=climbmix", "--num_shards=2")
    for name in ZERO, ONE, "shard_00003.parquet":
        assert (folder / name).read_bytes() == hub.files[name]
    assert len(hub.got(ZERO)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --name="),
        (["--name=nothing"], "no public data set nothing; choose one of climbmix, fineweb-edu"),
        (["--name=climbmix", "--num_shards=6543"], "6542 training shards; give --num_shards=-1"),
        (["--name=climbmix", "--val_data=x"], "--val_data goes with --data"),
        (["--name=climbmix", "--data=x"], "give either"),
        (["--name=climbmix", "--base_dir=~nouser0815/x"], "--base_dir=~nouser0815/x begins with a user"),
    ],
)
def test_bad_settings_are_refused(tmp_path, monkeypatch, run_script, arguments, message):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the script sets it
    with pytest.raises(UserError, match=message):
        run_script("download", f"--base_dir={tmp_path / 'base'}", *arguments)


def test_downloaded_shards_are_opened_by_name_and_validation_never_moves(hub, tmp_path, monkeypatch):
    monkeypatch.setitem(dataset.PUBLIC, "climbmix", Public(REPO, 4))
    folder = tmp_path / "data" / "climbmix"
    seen = []
    for name in (ZERO, ONE):
        fetch(REPO, [name, "shard_00003.parquet"], folder)
        data = open_dataset("climbmix", base_dir=tmp_path)
        assert [path.name for path in data.val_shards] == ["shard_00003.parquet"]
        assert data.train_shards[-1].name == name and len(list(Documents(data.train_shards[-1:]))) == 1000
        seen.append(data.fingerprint)
    assert seen[0] == seen[1]  # the checkpoints keep how many of them a run reads
    own = tmp_path / "own.parquet"
    own.write_bytes(shard(5))
    assert open_dataset("climbmix", own, base_dir=tmp_path).val_shards == [own]
    (folder / ZERO).write_bytes(hub.files[ZERO][:-100])
    with pytest.raises(UserError, match=rf"{ZERO} cannot be read as a parquet file.*get it again"):
        open_dataset("climbmix", base_dir=tmp_path)


def test_validation_that_equals_a_training_shard_is_refused(hub, tmp_path, monkeypatch):
    monkeypatch.setitem(dataset.PUBLIC, "climbmix", Public(REPO, 4))
    folder = tmp_path / "data" / "climbmix"
    fetch(REPO, list(hub.files), folder)
    (folder / "shard_00003.parquet").write_bytes(hub.files[ONE])
    (tmp_path / "own.parquet").write_bytes(shard(5))
    further = f"{tmp_path / 'own.parquet'},{folder / 'shard_00003.parquet'}"
    for arguments in ("climbmix",), (folder, folder / "shard_00003.parquet"), ("climbmix", further):
        with pytest.raises(UserError, match=rf"{ONE} .*shard_00003.parquet have the same content"):
            open_dataset(*arguments, base_dir=tmp_path)
