"""Checkpoints: what is saved is what is found, by any number of processes; damage is found and named."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from helpers import check, craft, names_in, numbers, read_manifest, save_step, write_manifest

from nanochat import UserError
from nanochat.checkpoint import (
    Damaged,
    SaveError,
    find,
    find_weights,
    open_checkpoint,
    save,
    save_and_load,
    start_from,
)

OPTIMIZER = "optimizer-00000-of-00001.safetensors"

# What is saved is what is found


def test_half_precision_weights_come_back_as_float32_and_tied_ones_under_each_name(tmp_path):
    model = {n: numbers(1).to(d) for n, d in dict(b=torch.bfloat16, h=torch.float16, f=torch.float32).items()}
    weight = torch.nn.Parameter(numbers(1).reshape(20, 15))
    others = {"count": torch.tensor(3), "wte": weight, "head": weight, "head.t": weight.t()}
    save(tmp_path, 1, model=model | others, optimizer={"b": model["b"]}, state={})
    loaded = find(tmp_path)
    for name, tensor in model.items():
        assert loaded.load_model()[name].dtype == torch.float32
        assert torch.equal(loaded.load_model()[name].double(), tensor.double())
    assert loaded.load_model()["count"].dtype == torch.int64
    assert loaded.load_optimizer()["b"].dtype == torch.bfloat16
    tied = loaded.load_model()
    assert torch.equal(tied["wte"], weight) and torch.equal(tied["head"], weight)
    assert torch.equal(tied["head.t"], weight.t()) and not tied["wte"].requires_grad


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"state": {"loss": float("nan")}}, ValueError),
        ({"model": {"z": torch.zeros(2, dtype=torch.complex64)}}, KeyError),
    ],
)
def test_a_state_or_tensor_that_cannot_be_stored_leaves_nothing_behind(tmp_path, bad, error):
    with pytest.raises(error):
        save_step(tmp_path, 1, **bad)
    assert names_in(tmp_path) == []


def test_a_step_saved_again_replaces_its_checkpoint_and_takes_nothing_from_leftovers(tmp_path):
    save_step(tmp_path, 1)
    stale = tmp_path / f".tmp-step_000001-{os.getpid()}"  # of a dead process with the same number
    stale.mkdir()
    (stale / "junk").touch()
    (tmp_path / ".tmp-report.html").touch()  # a report that is being written
    path = save_step(tmp_path, 1, state={"step": 1, "again": True})
    assert find(tmp_path).state["again"] and names_in(tmp_path) == [".tmp-report.html", "step_000001"]
    assert "junk" not in names_in(path)


def test_everything_is_synced_before_the_name_and_the_name_after(tmp_path, monkeypatch):
    events, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(
        os, "fsync", lambda fd: (fsync(fd), events.append(os.readlink(f"/proc/self/fd/{fd}")))
    )
    monkeypatch.setattr(os, "rename", lambda a, b: (rename(a, b), events.append("rename")))
    path = save_step(tmp_path, 1, before_publish=lambda: events.append("before_publish"))
    at = events.index("rename")
    before = [Path(e) for e in events[: at - 1]]
    assert events[at - 1 :] == ["before_publish", "rename", str(tmp_path)]
    assert before[-1].parent == tmp_path and before[-2].name == "manifest.json"
    assert {p.name for p in before[:-1]} == set(names_in(path))


# Several processes


def test_a_process_that_fails_or_stays_away_fails_the_save_of_rank_0_alone(tmp_path):
    rank = dict(world_size=2, run_id="run", timeout_s=0.1)
    with pytest.raises(SaveError, match="nothing from process 1 in 0 s"):
        save_step(tmp_path, 1, rank=0, **rank)
    assert names_in(tmp_path) == []
    (tmp_path / ".tmp-step_000002-run" / "optimizer-00001-of-00002.safetensors").mkdir(parents=True)
    save_step(tmp_path, 2, rank=1, **rank)  # cannot write its part: something is in the way
    with pytest.raises(SaveError, match=r"process 1 failed: optimizer-00001.*directory"):
        save_step(tmp_path, 2, rank=0, **rank)
    save_step(tmp_path, 2, rank=1, **rank)  # too late
    save_step(tmp_path, 3, rank=1, **rank)
    save_step(tmp_path, 3, rank=0, **rank)
    assert names_in(tmp_path) == ["step_000003"]


# Damage


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1 << 3
    path.write_bytes(raw)


DAMAGES = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "lengthened": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "removed": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a bit flipped": flip,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damaged_file_is_named_and_the_checkpoint_before_is_taken(tmp_path, damage):
    save_step(tmp_path, 10)
    newest = save_step(tmp_path, 20)
    shutil.copytree(newest, tmp_path / "good")
    names = names_in(newest)
    assert len(names) == 5
    for name in names:
        DAMAGES[damage](newest / name)
        said = []
        check(find(tmp_path, "auto", say=said.append), 10)
        assert len(said) == 1 and "step_000020" in said[0] and name in said[0]
        for chosen in (20, "step_000020", str(newest)):
            with pytest.raises(UserError, match=name):
                find(tmp_path, chosen)
        shutil.rmtree(newest)
        shutil.copytree(tmp_path / "good", newest)
        check(find(tmp_path), 20)


def test_any_flipped_bit_of_the_small_files_is_detected(tmp_path):
    path = save_step(tmp_path, 1)
    for name in ("manifest.json", "state.json"):
        raw = (path / name).read_bytes()
        for i in range(len(raw)):
            (path / name).write_bytes(raw[:i] + bytes([raw[i] ^ (1 << i % 8)]) + raw[i + 1 :])
            with pytest.raises(Damaged):
                open_checkpoint(path)
        (path / name).write_bytes(raw)
    check(open_checkpoint(path), 1)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_silently_start_over(tmp_path):
    for step in (1, 2):
        (save_step(tmp_path, step) / "state.json").unlink()
    said = []
    with pytest.raises(UserError, match="--resume=never"):
        find(tmp_path, "auto", say=said.append)
    assert len(said) == 2


@pytest.mark.parametrize("version", [1, 99])
def test_a_checkpoint_of_another_version_is_refused_by_its_number(tmp_path, version):
    save_step(tmp_path, 1)
    path = save_step(tmp_path, 2)
    other = read_manifest(path) | {"version": version}
    (path / "manifest.json").write_text(json.dumps(other | {"checksum": "that of version 1"}))
    with pytest.raises(UserError, match=f"version {version}"):  # edited by hand
        find(tmp_path, 2)
    write_manifest(path, other)
    for resume in ("auto", 2):  # a real one: to take the older checkpoint instead would lose work
        with pytest.raises(UserError, match=f"version {version}.*reads {save_and_load.VERSION}"):
            find(tmp_path, resume)


class Bomb:
    def __reduce__(self):
        return (os.mkdir, (self.target,))


def test_loading_runs_no_code_from_a_checkpoint_made_by_a_stranger(tmp_path):
    bomb = Bomb()
    bomb.target = str(tmp_path / "boom")
    path = save_step(tmp_path / "run", 1)
    opened = open_checkpoint(path)
    craft(path, dict.fromkeys(("model.safetensors", OPTIMIZER), pickle.dumps(bomb)))
    with pytest.raises(Damaged, match=r"safetensors cannot be read"):
        open_checkpoint(path)
    for load in (opened.load_model, opened.load_optimizer):  # what has changed since
        with pytest.raises(UserError, match="cannot be read"):
            load()
    assert not (tmp_path / "boom").exists()


# Which one to continue from


def test_resume_takes_the_newest_a_step_or_a_folder(tmp_path):
    run = tmp_path / "run"
    assert find(run, "auto") is None
    for step in (5, 999_999, 1_000_000):
        save_step(run, step)
    check(find(run), 1_000_000)
    check(find(run, "999999"), 999_999)
    check(find(tmp_path / "new", str(run)), 1_000_000)
    check(find(tmp_path / "new", str(run / "step_000005")), 5)
    with pytest.raises(UserError, match=r"no checkpoint of step 6; there are: 5, 999999, 1000000"):
        find(run, 6)
    for nothing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UserError, match="no checkpoint in"):
            find(run, str(nothing))
    (run / "step_000005").rename(run / "step_000006")
    with pytest.raises(Damaged, match="step 5"):  # under the name of another step
        find(run, 6)


def test_weights_to_start_from_are_of_the_same_model_and_tokenizer(tmp_path):
    model = {"depth": 2, "width": 96, "num_heads": 3, "max_seq_len": 64, "window_pattern": "L"}
    model |= {"spelled": True}
    identity = {"model": model, "tokenizer": "abc"}
    save_step(tmp_path, 3, state={"step": 3, "identity": identity | {"seed": 1}})
    for path in (tmp_path, tmp_path / "step_000003"):
        assert find_weights(path).step == 3

    def refused(wanted, match, path=tmp_path):
        with pytest.raises(UserError, match=match):
            start_from(find_weights(path), wanted, None)

    difference = "another model: model's width was 96, is 128; model's num_heads was 3, is 4; "
    settings = "give --depth=2 --aspect_ratio=48 --head_dim=32 --max_seq_len=64 --window_pattern=L"
    refused(identity | {"model": model | {"width": 128, "num_heads": 4}}, f"{difference}{settings}$")
    refused(identity | {"tokenizer": "abd"}, r"--tokenizer=.*step_000003/tokenizer.json")
    others = {"model": model | {"vocab_size": 300}, "tokenizer": "abd"}
    refused(others, rf"{settings} --tokenizer=.*step_000003/tokenizer.json")
    other = save_step(tmp_path / "other", 1, state={"identity": {"model": model | {"depth": 0}}})
    refused(identity, "give the same settings of the model", other)
    with pytest.raises(UserError, match=r"no checkpoint in .*/nothing"):
        find_weights(tmp_path / "nothing")
