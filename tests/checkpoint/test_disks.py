"""Full, read-only and unwritable disks: the save in progress fails in one sentence, older ones stay good."""

import functools
import os
import resource
import subprocess
import types
from pathlib import Path

import pytest
import torch
from helpers import check, disk, names_in, save_step

from nanochat import UserError
from nanochat.checkpoint import AsyncSaver, SaveError, find, lock_folder, make_room, prune

PAGE = 4096  # bytes


@pytest.fixture
def small_disk(tmp_path):
    with disk(tmp_path / "disk", "256k") as path:
        yield path


def fill(folder, leave):
    """Fill the disk up, except for so many bytes."""
    with open(folder / "filler", "wb", buffering=0) as f:
        try:
            while f.write(bytes(PAGE)):
                pass
        except OSError:
            f.truncate(max(0, f.tell() - leave))


def test_a_disk_that_fills_up_anywhere_in_a_save_costs_that_save_alone(small_disk):
    run, pages, saved, failed = small_disk / "run", 0, False, set()
    lock = lock_folder(run)
    save_step(run, 1)
    while not saved:
        fill(small_disk, leave=pages * PAGE)
        before = os.statvfs(small_disk).f_bfree
        try:
            save_step(run, 2)
            saved = True
        except SaveError as e:
            failed.add(Path(e.__cause__.filename).name)
            for words in ("step_000002", "No space left on device", "MB are free", "untouched"):
                assert words in str(e) and "\n" not in str(e)
            assert names_in(run) == [".lock", "step_000001"] and os.statvfs(small_disk).f_bfree == before
            check(find(run), 1)
        (small_disk / "filler").unlink()
        pages += 1
    assert {"optimizer-00000-of-00001.safetensors", "model.safetensors", "manifest.json"} < failed
    check(find(run), 2)
    lock.close()


@pytest.mark.parametrize("quota", [False, True])
def test_old_checkpoints_make_room_for_the_next_one_and_the_newest_always_stays(
    small_disk, monkeypatch, quota
):
    """A quota limits a user, and not what the disk says is free."""
    if quota:
        monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=2**40))
    run, said, failed = small_disk / "run", [], []
    saver = AsyncSaver(run)
    for step in range(1, 7):
        saver.submit(
            step,
            model={"wte": torch.full((16_000,), float(step))},  # 64 kB: the disk has room for three
            optimizer={},
            state={"step": step},
            make_room=functools.partial(make_room, run, 3, say=said.append),
            after_publish=functools.partial(prune, run, 3),
        )
        try:
            saver.wait()
        except SaveError:
            failed.append(step)
    assert failed == ([4, 6] if quota else [])  # with a quota, the save after a failed one has room
    assert "step 1" in said[0] and len(said) == len(failed or [4, 5, 6])
    assert names_in(run)[-1] == ("step_000005" if quota else "step_000006")
    assert not any(name.startswith(".tmp") for name in names_in(run))
    make_room(run, 1, failed=True)
    assert len(names_in(run)) == 1
    saver.close()


def test_a_process_that_finds_the_disk_full_makes_room_to_report_it_to_rank_0(small_disk):
    rank = dict(world_size=2, run_id="run", timeout_s=0.1)
    save_step(small_disk, 1, rank=1, optimizer={"b": torch.zeros(100_000)}, **rank)
    with pytest.raises(SaveError, match=r"process 1 failed: optimizer-00001.*No space left"):
        save_step(small_disk, 1, rank=0, **rank)
    assert names_in(small_disk) == []


def test_what_a_killed_run_left_on_a_full_disk_does_not_keep_the_next_from_starting(small_disk):
    (small_disk / ".tmp-step_000001-99").mkdir()
    fill(small_disk / ".tmp-step_000001-99", leave=0)
    lock_folder(small_disk).close()
    save_step(small_disk, 1)
    os.truncate(small_disk / ".lock", 0)
    fill(small_disk, leave=0)
    with pytest.raises(UserError, match="No space left on device"):
        lock_folder(small_disk)


def test_a_read_only_disk_is_one_sentence_and_still_readable(small_disk):
    run = small_disk / "run"
    for step in (1, 2):
        save_step(run, step)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for place in (run, small_disk / "new"):
        with pytest.raises(UserError, match=r"Read-only file system.*--base_dir"):
            lock_folder(place)
    with pytest.raises(SaveError, match="Read-only file system"):
        save_step(run, 3)
    with pytest.raises(UserError, match=r"Read-only file system.*--out_dir"):
        find(run, "never")
    said = []
    prune(run, 1, say=said.append)
    assert len(said) == 1 and "step 1" in said[0] and "Read-only" in said[0]
    check(find(run, 1), 1)
    check(find(run), 2)


def test_an_out_dir_on_a_disk_of_its_own_cannot_be_set_aside_and_says_so(small_disk):
    save_step(small_disk, 1)
    with pytest.raises(UserError, match="choose another --out_dir"):
        find(small_disk, "never")
    assert names_in(small_disk.parent) == ["disk"]
    check(find(small_disk), 1)


def test_a_file_size_limit_in_the_middle_of_the_model_is_named_with_the_file(tmp_path):
    save_step(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(SaveError, match=r"model\.safetensors: File too large"):
            save_step(tmp_path, 2, model={"wte": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names_in(tmp_path) == ["step_000001"]
    check(find(tmp_path), 1)
