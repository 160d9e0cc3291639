"""The background saver: it saves what the tensors held when it was called, and a failure ends nothing."""

import errno
import os
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import names_in, numbers

from nanochat import UserError
from nanochat.checkpoint import AsyncSaver, SaveError, find, make_room, open_checkpoint, prune
from nanochat.run.output import RunOutput


def test_the_saver_saves_what_the_tensors_held_when_it_was_called(tmp_path):
    model, optimizer, state = {"w": numbers(0)}, {"w.m": numbers(1)}, {"list": [0]}
    saver, calls = AsyncSaver(tmp_path), []
    saver.reserve(model, optimizer)
    assert saver.wait() is None and saver.done()
    for step in range(3):
        release = threading.Event()
        saver.submit(
            step, model=model, optimizer=optimizer, state=state,
            before_publish=release.wait, after_publish=lambda: calls.append(names_in(tmp_path)),
        )  # fmt: skip
        assert not saver.done() and len(calls) == step
        model["w"].add_(1)
        optimizer["w.m"].mul_(2)
        state["list"][0] += 1
        release.set()
    assert saver.close() == tmp_path / "step_000002"
    assert calls == [[f"step_{n:06d}" for n in range(k)] for k in (1, 2, 3)]
    for step in range(3):
        found = find(tmp_path, step)
        assert found.state == {"list": [step]}
        assert torch.equal(found.load_optimizer()["w.m"], numbers(1) * 2**step)
    assert torch.allclose(found.load_model()["w"], numbers(0) + 2)


def test_a_failed_save_is_raised_once_and_the_next_one_runs(tmp_path):
    what, run = dict(model={"w": numbers(0)}, optimizer={}, state={}), tmp_path / "run"
    saver = AsyncSaver(run)
    run.write_text("in the way")
    saver.submit(1, **what)
    saver.finish(60)
    assert saver.done()
    run.unlink()
    with pytest.raises(SaveError, match="step_000001"):
        saver.submit(2, **what)
    assert saver.wait() == run / "step_000002" and saver.wait() is None
    run.rename(tmp_path / "away")
    run.write_text("in the way again")
    saver.submit(3, **what)
    with pytest.raises(SaveError, match="step_000003"):
        saver.close()


def test_a_folder_that_cannot_be_listed_before_and_after_a_save_costs_no_save(tmp_path, monkeypatch):
    def fails(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "listdir", fails)
    saver, what = AsyncSaver(tmp_path), dict(model={"w": numbers(0)}, optimizer={}, state={})
    clean_up = {"make_room": partial(make_room, tmp_path, 1), "after_publish": partial(prune, tmp_path, 1)}
    saver.submit(1, **what, **clean_up)
    assert saver.close() == tmp_path / "step_000001"


def test_a_save_is_told_also_if_older_ones_cannot_be_listed(tmp_path):
    def fails():
        raise UserError("the folder cannot be listed")

    (tmp_path / "step_000002").mkdir()
    said = []
    run = SimpleNamespace(_path=tmp_path, _prune=fails, console=SimpleNamespace(print=said.append))
    RunOutput._published(run, 2, time.monotonic())
    assert run._saved_step == 2 and len(said) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no priority of a thread")
def test_the_thread_that_saves_lets_training_go_first_whatever_the_priority_of_the_run(tmp_path):
    priorities = []

    def note():
        priorities.append(os.getpriority(os.PRIO_PROCESS, 0))

    def nice_run():
        os.setpriority(os.PRIO_PROCESS, 0, 15)
        saver = AsyncSaver(tmp_path)
        note()
        saver.submit(1, model={}, optimizer={}, state={}, after_publish=note)
        saver.close()

    run = threading.Thread(target=nice_run)
    run.start()
    run.join()
    assert priorities[1] > priorities[0]


def test_one_then_three_then_two_processes_write_and_read_the_same_state_without_a_collective(tmp_path):
    state = {f"layer.{i}": numbers(i, 5 + i) for i in range(7)}
    for step, world_size in enumerate([1, 3, 2], start=1):
        savers = [AsyncSaver(tmp_path, rank, world_size, f"run{step}") for rank in range(world_size)]
        for again in (False, True):
            for rank, saver in enumerate(savers):
                mine = {n: t + again for i, (n, t) in enumerate(state.items()) if i % world_size == rank}
                saver.submit(step, model={"w": numbers(step)} if rank == 0 else {}, optimizer=mine, state={})
        paths = [saver.close() for saver in reversed(savers)]
        assert paths == [tmp_path / f"step_{step:06d}"] * world_size and len(names_in(tmp_path)) == step
        found = find(tmp_path)
        assert len(list(found.path.glob("optimizer-*"))) == world_size and not list(found.path.glob(".*"))
        loaded = found.load_optimizer()
        assert loaded.keys() == state.keys() and all(torch.equal(loaded[n], state[n] + 1) for n in state)
        assert found.load_optimizer({"layer.2", "layer.5"}.__contains__).keys() == {"layer.2", "layer.5"}
        state = {n: loaded[n] for n in state}


def test_a_part_of_a_failed_attempt_never_enters_the_next_one(tmp_path):
    savers, what = [AsyncSaver(tmp_path, rank, 2, "run") for rank in range(2)], dict(model={}, state={})
    savers[0].submit(1, optimizer={"a": numbers(0)}, files={"not/there": b""}, **what)
    with pytest.raises(SaveError, match="there: No such file"):
        savers[0].wait()
    savers[1].submit(1, optimizer={"b": numbers(1)}, **what)  # late
    savers[1].wait()
    savers[0].submit(1, optimizer={"a": numbers(2)}, **what)
    time.sleep(0.2)
    assert not savers[0].done()
    savers[1].submit(1, optimizer={"b": numbers(3)}, **what)
    savers[1].close()
    loaded = open_checkpoint(savers[0].close()).load_optimizer()
    assert torch.equal(loaded["a"], numbers(2)) and torch.equal(loaded["b"], numbers(3))
