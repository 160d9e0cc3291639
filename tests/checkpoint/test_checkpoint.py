"""Checkpoints are complete or absent, whatever is killed, full, read-only, damaged or run twice."""

import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import UserError
from nanochat.checkpoint import (
    AsyncSaver,
    Damaged,
    SaveError,
    files,
    find,
    find_weights,
    folder,
    lock_folder,
    open_checkpoint,
    prune,
    save,
    save_and_load,
    set_aside,
)

REPO = Path(__file__).parents[2]


def numbers(seed, n=300):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def save_step(out_dir, step, **more):
    """A checkpoint whose every part tells its step."""
    what = dict(
        model={"wte": numbers(step), "head.weight": numbers(-step)},
        optimizer={"wte.momentum": numbers(step + 1000)},
        state={"step": step},
        files={"tokenizer.json": b'{"pattern": "."}'},
    )
    return save(out_dir, step, **{**what, **more})


def check(checkpoint, step):
    assert checkpoint.step == checkpoint.state["step"] == step
    assert torch.equal(checkpoint.load_model()["wte"], numbers(step))
    assert torch.equal(checkpoint.load_optimizer()["wte.momentum"], numbers(step + 1000))


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def names_in(folder):
    return sorted(p.name for p in folder.iterdir())


# What is saved is what is found


INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda n: n != "__metadata__")


@st.composite
def any_tensor(draw):
    dtype = draw(st.sampled_from(INTEGERS + FLOATS))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    n = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=n, max_size=n))), dtype=torch.uint8)
    tensor = (raw & 1 if dtype == torch.bool else raw).view(dtype).reshape(shape)
    return tensor.transpose(0, -1) if draw(st.booleans()) and shape else tensor  # not contiguous


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAMES, any_tensor(), max_size=4))
def test_any_name_shape_and_bits_come_back_as_they_were(tensors):
    with tempfile.TemporaryDirectory() as folder:
        path = save(folder, 7, model=tensors, optimizer=tensors, state={})
        alone = safetensors.torch.load_file(path / "model.safetensors")
        raw = (path / "model.safetensors").read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:start])
        loaded = find(folder, "auto").load_optimizer()
        assert loaded.keys() == alone.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (start + header[name]["data_offsets"][0]) % tensor.itemsize == 0  # aligned when mapped
            for copy in (alone[name], loaded[name]):
                assert (
                    copy.dtype == tensor.dtype and copy.shape == tensor.shape and bits(copy) == bits(tensor)
                )


def test_half_precision_in_the_model_file_comes_back_as_float32(tmp_path):
    model = {n: numbers(1).to(d) for n, d in dict(b=torch.bfloat16, h=torch.float16, f=torch.float32).items()}
    model["count"] = torch.tensor(3)
    save(tmp_path, 1, model=model, optimizer={"b": model["b"]}, state={})
    loaded = find(tmp_path)
    for name in "bhf":
        assert loaded.load_model()[name].dtype == torch.float32
        assert torch.equal(loaded.load_model()[name].double(), model[name].double())
    assert loaded.load_model()["count"].dtype == torch.int64
    assert loaded.load_optimizer()["b"].dtype == torch.bfloat16


def test_tied_tensors_and_parameters_are_stored_under_each_name(tmp_path):
    weight = torch.nn.Parameter(numbers(1).reshape(20, 15))
    save(tmp_path, 1, model={"wte": weight, "head": weight, "head.t": weight.t()}, optimizer={}, state={})
    model = find(tmp_path).load_model()
    assert torch.equal(model["wte"], weight) and torch.equal(model["head"], weight)
    assert torch.equal(model["head.t"], weight.t()) and not model["wte"].requires_grad


def test_the_checkpoint_holds_its_files_from_bytes_and_paths_and_is_usable_elsewhere(tmp_path):
    (tmp_path / "config.json").write_text('{"depth": 4}')
    files = {"tokenizer.json": b"{}", "config.json": tmp_path / "config.json"}
    elsewhere = shutil.copytree(save_step(tmp_path / "run", 3, files=files), tmp_path / "best model")
    shutil.rmtree(tmp_path / "run")
    checkpoint = find(tmp_path / "run", str(elsewhere))
    check(checkpoint, 3)
    assert (checkpoint.path / "config.json").read_text() == '{"depth": 4}'
    assert {"tokenizer.json", "config.json"} < set(checkpoint.files)


def test_a_state_that_is_not_strict_json_is_refused_before_anything_is_written(tmp_path):
    for state in ({"loss": float("nan")}, {"loss": float("inf")}):
        with pytest.raises(ValueError):
            save_step(tmp_path, 1, state=state)
    assert names_in(tmp_path) == []


def test_a_wrong_dtype_is_a_programming_error_that_leaves_nothing_behind(tmp_path):
    with pytest.raises(KeyError):
        save_step(tmp_path, 1, model={"z": torch.zeros(2, dtype=torch.complex64)})
    assert names_in(tmp_path) == []


# Several processes


def save_sharded(out_dir, step, tensors, world_size, token, saver=save):
    """Each rank in a thread of its own, with every world_size-th tensor."""
    errors = []

    def run(rank):
        mine = {n: t for i, (n, t) in enumerate(sorted(tensors.items())) if i % world_size == rank}
        try:
            saver(
                out_dir, step, model={"w": numbers(step)}, optimizer=mine, state={"step": step},
                rank=rank, world_size=world_size, token=token, timeout_s=20,
            )  # fmt: skip
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in reversed(threads):  # rank 0 last: the folder of the save is there already
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_one_then_three_then_two_processes_write_and_read_the_same_state(tmp_path):
    state = {f"layer.{i}": numbers(i, 5 + i) for i in range(7)}
    for step, world_size in enumerate([1, 3, 2], start=1):
        save_sharded(tmp_path, step, state, world_size, token=f"run{step}")
        checkpoint = find(tmp_path)
        assert checkpoint.step == step and len(list(checkpoint.path.glob("optimizer-*"))) == world_size
        loaded = checkpoint.load_optimizer()
        assert loaded.keys() == state.keys() and all(torch.equal(loaded[n], state[n]) for n in state)
        assert checkpoint.load_optimizer({"layer.2", "layer.5"}.__contains__).keys() == {"layer.2", "layer.5"}
        assert not list(checkpoint.path.glob(".*"))
        state = {n: t + 1 for n, t in loaded.items()}


def test_a_process_that_fails_or_stays_away_fails_the_save_of_rank_0_alone(tmp_path):
    rank = dict(world_size=2, token="run", timeout_s=0.1)
    with pytest.raises(SaveError, match="no shard from process 1"):
        save_step(tmp_path, 1, rank=0, **rank)
    assert names_in(tmp_path) == []
    (tmp_path / ".tmp-step_000002-run" / "optimizer-00001-of-00002.safetensors").mkdir(parents=True)
    save_step(tmp_path, 2, rank=1, **rank)  # cannot write its shard: something is in the way
    with pytest.raises(SaveError, match=r"process 1 failed: optimizer-00001.*directory"):
        save_step(tmp_path, 2, rank=0, **rank)
    save_step(tmp_path, 2, rank=1, **rank)  # too late
    save_step(tmp_path, 3, rank=1, **rank)
    save_step(tmp_path, 3, rank=0, **rank)
    assert names_in(tmp_path) == ["step_000003"]


def test_background_savers_of_several_processes_need_no_collective(tmp_path):
    state = {f"layer.{i}": numbers(i) for i in range(4)}
    savers = [AsyncSaver(tmp_path, rank, 3, "run") for rank in range(3)]
    for step in (1, 2, 2, 3):
        for rank, saver in enumerate(savers):
            mine = {n: t + step for i, (n, t) in enumerate(state.items()) if i % 3 == rank}
            saver.submit(step, model={"w": numbers(step)} if rank == 0 else {}, optimizer=mine, state={})
    paths = [saver.close() for saver in reversed(savers)]
    assert paths == [tmp_path / "step_000003"] * 3 and len(names_in(tmp_path)) == 3
    loaded = find(tmp_path).load_optimizer()
    assert all(torch.equal(loaded[n], t + 3) for n, t in state.items())


def test_a_shard_of_a_failed_attempt_never_enters_the_next_one(tmp_path):
    savers, what = [AsyncSaver(tmp_path, rank, 2, "run") for rank in range(2)], dict(model={}, state={})
    savers[0].submit(1, optimizer={"a": numbers(0)}, files={"gone": tmp_path / "gone"}, **what)
    with pytest.raises(SaveError, match="gone: No such file"):
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


# Damage


def flip(position):
    def damage(path):
        raw = bytearray(path.read_bytes())
        raw[int(position * (len(raw) - 1))] ^= 1 << 3
        path.write_bytes(raw)

    return damage


DAMAGES = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "lengthened": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "removed": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a bit flipped at the start": flip(0),
    "a bit flipped inside": flip(0.5),
    "a bit flipped at the end": flip(1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damaged_file_is_named_and_the_checkpoint_before_is_taken(tmp_path, damage):
    save_step(tmp_path, 10)
    newest = save_step(tmp_path, 20)
    shutil.copytree(newest, tmp_path / "good")
    files = names_in(newest)
    assert len(files) == 5
    for name in files:
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


def test_a_run_of_which_nothing_is_intact_does_not_silently_start_anew(tmp_path):
    for step in (1, 2):
        (save_step(tmp_path, step) / "state.json").unlink()
    said = []
    with pytest.raises(UserError, match="--resume=never"):
        find(tmp_path, "auto", say=said.append)
    assert len(said) == 2


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path):
    save_step(tmp_path, 1).rename(tmp_path / "step_000002")
    with pytest.raises(Damaged, match="step 1"):
        find(tmp_path, 2)


@pytest.mark.parametrize("version", [0, 2, 99])
def test_a_checkpoint_of_another_version_is_refused_by_its_number(tmp_path, version):
    save_step(tmp_path, 1)
    path = save_step(tmp_path, 2)
    body = json.loads((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_text(json.dumps({**body, "version": version}))
    with pytest.raises(UserError, match=f"version {version}"):  # edited by hand
        find(tmp_path, 2)
    del body["checksum"]
    (path / "manifest.json").write_bytes(save_and_load._manifest({**body, "version": version}))
    for resume in ("auto", 2):  # a real one: going on from an older checkpoint instead would lose work
        with pytest.raises(UserError, match=f"version {version}.*reads 1"):
            find(tmp_path, resume)


class Bomb:
    def __reduce__(self):
        return (os.mkdir, (self.target,))


def test_loading_runs_no_code_from_a_checkpoint_made_by_a_stranger(tmp_path):
    bomb = Bomb()
    bomb.target = str(tmp_path / "boom")
    path = save_step(tmp_path / "run", 1)
    body = json.loads((path / "manifest.json").read_bytes())
    for name in ("model.safetensors", "optimizer-00000-of-00001.safetensors"):
        body["files"][name] = files.write(path / name, [pickle.dumps(bomb)])
    del body["checksum"]
    (path / "manifest.json").write_bytes(save_and_load._manifest(body))
    stranger = open_checkpoint(path)
    for load in (stranger.load_model, stranger.load_optimizer):
        with pytest.raises(UserError, match="cannot be read"):
            load()
    assert not (tmp_path / "boom").exists()
    body["files"]["../../outside"] = body["files"]["state.json"]
    (path / "manifest.json").write_bytes(save_and_load._manifest(body))
    with pytest.raises(UserError, match="outside"):
        open_checkpoint(path)


# Which one to go on from


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


def test_never_sets_the_old_run_aside_and_keeps_the_lock(tmp_path):
    run, said = tmp_path / "run", []
    lock = lock_folder(run)
    assert find(run, "never", said.append) is None and not said  # nothing to set aside
    for n in (1, 2):
        save_step(run, n)
        (run / "metrics.jsonl").write_text("{}\n")
        assert find(run, "never", said.append) is None
        assert names_in(run) == [".lock"] and f"run.old-{n}" in said[-1]
        check(find(tmp_path / f"run.old-{n}"), n)
        assert (tmp_path / f"run.old-{n}" / "metrics.jsonl").exists()
    with pytest.raises(UserError, match="in use"):
        lock_folder(run)
    lock.close()


def test_going_on_from_an_earlier_step_puts_the_later_ones_away(tmp_path):
    run = tmp_path / "run"
    for step in (1, 2, 3):
        save_step(run, step)
    assert names_in(set_aside(run, after=1)) == ["step_000002", "step_000003"]
    assert set_aside(run, after=1) is None
    check(find(run), 1)


# Replacing and pruning


def test_a_step_that_is_reached_again_replaces_its_checkpoint(tmp_path):
    save_step(tmp_path, 1)
    save_step(tmp_path, 1, state={"step": 1, "again": True})
    assert find(tmp_path).state["again"] and names_in(tmp_path) == ["step_000001"]


def test_what_a_dead_process_of_the_same_number_left_does_not_enter_a_checkpoint(tmp_path):
    stale = tmp_path / f".tmp-step_000001-{os.getpid()}"
    stale.mkdir()
    (stale / "junk").touch()
    assert "junk" not in names_in(save_step(tmp_path, 1)) and names_in(tmp_path) == ["step_000001"]


def test_prune_keeps_the_newest_and_the_permanent_ones(tmp_path):
    for step in range(1, 8):
        save_step(tmp_path, step)
    for keep in (0, -1, 7):
        prune(tmp_path, keep)
        assert len(names_in(tmp_path)) == 7
    prune(tmp_path, 2, permanent_every=3)
    assert names_in(tmp_path) == [f"step_{n:06d}" for n in (3, 5, 6, 7)]
    prune(tmp_path, 1)
    assert names_in(tmp_path) == ["step_000007"]


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


# In the background


def test_the_background_saver_saves_what_the_tensors_held_when_it_was_called(tmp_path):
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
        checkpoint = find(tmp_path, step)
        assert checkpoint.state == {"list": [step]}
        assert torch.equal(checkpoint.load_optimizer()["w.m"], numbers(1) * 2**step)
    assert torch.allclose(checkpoint.load_model()["w"], numbers(0) + 2)


def test_a_failed_background_save_is_raised_once_and_the_next_one_runs(tmp_path):
    what, run = dict(model={"w": numbers(0)}, optimizer={}, state={}), tmp_path / "run"
    saver = AsyncSaver(run)
    run.write_text("in the way")
    saver.submit(1, **what)
    while not saver.done():
        pass
    run.unlink()
    with pytest.raises(SaveError, match="step_000001"):
        saver.submit(2, **what)
    assert saver.wait() == run / "step_000002" and saver.wait() is None
    run.rename(tmp_path / "away")
    run.write_text("in the way again")
    saver.submit(3, **what)
    with pytest.raises(SaveError, match="step_000003"):
        saver.close()


# Kills

FORKING = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from nanochat import checkpoint
from nanochat.checkpoint import files, folder, save_and_load
sys.path[:0] = ["tests", "tests/checkpoint"]
from test_checkpoint import *

FILES = {m.__file__ for m in (save_and_load, folder, files, shutil)}

def die_at(line):
    left = line
    def trace(frame, event, arg):
        nonlocal left
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)

def fork(work):
    if pid := os.fork():
        return pid
    try:
        work()
    finally:
        os._exit(0)

def killed_at_each_line(prepare, work, after):
    line, killed = 0, True
    while killed:
        run = Path(sys.argv[1]) / f"run{line}" / "run"
        prepare(run)
        status = os.waitpid(fork(lambda: (die_at(line), work(run))), 0)[1]
        killed = os.WIFSIGNALED(status)
        assert killed or os.WEXITSTATUS(status) == 0
        after(run, killed)
        lock_folder(run).close()
        after(run, killed)
        assert not [n for n in names_in(run) if n.startswith((".tmp", ".old"))], names_in(run)
        shutil.rmtree(run.parent)
        line += STRIDE
    assert line > 30
"""


@pytest.fixture
def memory():
    """A folder in memory, where there is such a thing: kills do not care, and it syncs at once."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield folder


every_line = pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.slow)])


def run_forking(folder, source, stride=1):
    """Run the scenario in a fresh process without threads; its forks are killed for real."""
    script = FORKING + f"STRIDE = {stride}\n" + textwrap.dedent(source)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, "-c", script, folder], cwd=REPO, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@every_line
def test_killed_at_any_line_of_a_save_the_new_or_the_old_checkpoint_stands(memory, stride):
    run_forking(
        memory,
        """
        def after(run, killed):
            found = find(run, say=None)
            check(found, 2 if not killed or found.step == 2 else 1)

        killed_at_each_line(lambda run: save_step(run, 1), lambda run: save_step(run, 2), after)
        """,
        stride,
    )


@every_line
def test_killed_at_any_line_of_a_replacement_one_of_the_two_stands(memory, stride):
    run_forking(
        memory,
        """
        def after(run, killed):
            found = find(run, say=None)
            check(found, 1)
            assert killed or "again" in found.state

        replace = lambda run: save_step(run, 1, state={"step": 1, "again": True})
        killed_at_each_line(lambda run: save_step(run, 1), replace, after)
        """,
        stride,
    )


@every_line
def test_killed_at_any_line_of_pruning_or_setting_aside_no_half_checkpoint_is_left(memory, stride):
    run_forking(
        memory,
        """
        def prepare(run):
            for step in (1, 2, 3):
                save_step(run, step)

        def whole(run):
            for step in folder.checkpoints_in(run):
                check(find(run, step), step)
            return sorted(folder.checkpoints_in(run))

        def after_prune(run, killed):
            assert whole(run) in ([[1, 2, 3], [2, 3], [3]] if killed else [[3]])

        def after_set_aside(run, killed):
            kept, gone = whole(run), whole(run.parent / "run.old-1")
            assert kept + gone == [1, 2, 3] and (killed or not kept)

        killed_at_each_line(prepare, lambda run: prune(run, 1), after_prune)
        killed_at_each_line(prepare, lambda run: find(run, "never"), after_set_aside)
        """,
        stride,
    )


def test_killed_at_random_moments_of_background_saves_the_newest_published_one_is_good(memory):
    run_forking(
        memory,
        """
        run = Path(sys.argv[1]) / "run"

        def train():
            lock_folder(run)
            step = found.step if (found := find(run)) else 0
            saver = AsyncSaver(run)
            while True:
                step += 1
                what = dict(model={"wte": numbers(step), "big": torch.zeros(1_000_000)}, state={"step": step})
                saver.submit(step, optimizer={"wte.momentum": numbers(step + 1000)}, **what,
                             after_publish=lambda: prune(run, 2))

        reached, seed = 0, random.Random(0)
        for _ in range(8):
            pid = fork(train)
            time.sleep(seed.uniform(0.02, 0.2))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if found := find(run, say=sys.exit):
                check(found, found.step)
                assert found.step >= reached
                reached = found.step
        lock_folder(run)
        assert reached > 3 and len(names_in(run)) <= 4, names_in(run)
        """,
    )


# The lock


def test_a_run_keeps_others_out_until_it_is_killed(tmp_path):
    """Even if a worker that it forked lives on."""
    source = """
        import os, sys, time
        from nanochat.checkpoint import lock_folder
        lock_folder(sys.argv[1])
        worker = os.fork()
        if worker:
            print(worker, flush=True)
        time.sleep(100)
        """
    (tmp_path / ".tmp-step_000001-99").mkdir()
    command = [sys.executable, "-c", textwrap.dedent(source), str(tmp_path)]
    holder = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
    worker = int(holder.stdout.readline())
    try:
        assert names_in(tmp_path) == [".lock"]
        (tmp_path / ".tmp-step_000002-99").mkdir()
        with pytest.raises(UserError, match=f"in use by process {holder.pid} on host .* since .*--out_dir"):
            lock_folder(tmp_path)
        assert (tmp_path / ".tmp-step_000002-99").exists()  # not ours to clear away
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        os.kill(worker, 0)
        lock_folder(tmp_path).close()
        assert names_in(tmp_path) == [".lock"]
    finally:
        holder.kill()
        os.kill(worker, signal.SIGKILL)
        holder.stdout.close()


def test_a_lock_is_given_back_by_close_and_not_by_losing_sight_of_it(tmp_path):
    lock = lock_folder(tmp_path)
    lock.close()
    lock.close()
    fd = lock_folder(tmp_path).fd
    with pytest.raises(UserError, match=f"process {os.getpid()}"):
        lock_folder(tmp_path)
    os.close(fd)
    folder._held.discard(fd)


def test_a_file_system_without_locks_is_named_once_and_used(tmp_path, monkeypatch):
    import errno
    import fcntl

    def no_locks(fd, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / ".tmp-step_000001-99").mkdir()
    said = []
    lock_folder(tmp_path, say=said.append).close()
    assert len(said) == 1 and "no locks" in said[0]
    assert (tmp_path / ".tmp-step_000001-99").exists()  # perhaps another run's


def test_a_place_that_cannot_be_a_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match=r"^cannot write to .*--out_dir[^\n]*$"):
            lock_folder(place)


# Full and read-only disks


@contextmanager
def disk(path, options):
    """A real small file system."""
    path.mkdir()
    mounting = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True)
    if mounting.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def fill(disk, leave):
    """Fill it up but for some bytes."""
    with open(disk / "filler", "wb", buffering=0) as f:
        try:
            while f.write(bytes(4096)):
                pass
        except OSError:
            f.truncate(max(0, f.tell() - leave))


def test_a_disk_that_fills_up_anywhere_in_a_save_costs_that_save_alone(tmp_path):
    page, saved, failed = 4096, False, set()
    with disk(tmp_path / "disk", "size=256k") as small:
        run = small / "run"
        lock = lock_folder(run)
        save_step(run, 1)
        pages = 0
        while not saved:
            fill(small, leave=pages * page)
            before = os.statvfs(small).f_bfree
            try:
                save_step(run, 2)
                saved = True
            except SaveError as e:
                failed.add(Path(e.__cause__.filename).name)
                for words in ("step_000002", "No space left on device", "MB are free", "untouched"):
                    assert words in str(e) and "\n" not in str(e)
                assert names_in(run) == [".lock", "step_000001"] and os.statvfs(small).f_bfree == before
                check(find(run), 1)
            (small / "filler").unlink()
            pages += 1
        assert {"optimizer-00000-of-00001.safetensors", "model.safetensors", "manifest.json"} < failed
        check(find(run), 2)
        fill(small, leave=0)
        saver = AsyncSaver(run)
        for step in (3, 4):
            saver.submit(step, model={"w": numbers(0)}, optimizer={}, state={})
            if step == 3:
                with pytest.raises(SaveError, match="No space left"):
                    saver.wait()
                (small / "filler").unlink()  # room is made, and the same process goes on
        assert saver.close() == run / "step_000004" and find(run).step == 4
        lock.close()


def test_a_process_that_finds_the_disk_full_makes_room_to_report_it_to_rank_0(tmp_path):
    with disk(tmp_path / "disk", "size=256k") as small:
        rank = dict(world_size=2, token="run", timeout_s=0.1)
        save_step(small, 1, rank=1, optimizer={"b": torch.zeros(100_000)}, **rank)
        with pytest.raises(SaveError, match=r"process 1 failed: optimizer-00001.*No space left"):
            save_step(small, 1, rank=0, **rank)
        assert names_in(small) == []


def test_what_a_killed_run_left_on_a_full_disk_does_not_keep_the_next_from_starting(tmp_path):
    with disk(tmp_path / "disk", "size=256k") as small:
        (small / ".tmp-step_000001-99").mkdir()
        fill(small / ".tmp-step_000001-99", leave=0)
        lock_folder(small).close()
        save_step(small, 1)
        os.truncate(small / ".lock", 0)
        fill(small, leave=0)
        with pytest.raises(UserError, match="No space left on device"):
            lock_folder(small)


def test_a_read_only_disk_is_one_sentence_and_still_readable(tmp_path):
    with disk(tmp_path / "disk", "size=1m") as small:
        run = small / "run"
        for step in (1, 2):
            save_step(run, step)
        subprocess.run(["mount", "-o", "remount,ro", small], check=True)
        for place in (run, small / "new"):
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


def test_an_out_dir_on_a_disk_of_its_own_cannot_be_set_aside_and_says_so(tmp_path):
    with disk(tmp_path / "disk", "size=1m") as run:
        save_step(run, 1)
        with pytest.raises(UserError, match="choose another --out_dir"):
            find(run, "never")
        check(find(run), 1)


def test_a_folder_without_write_permission_is_one_sentence(tmp_path):
    save_step(tmp_path, 1)
    tmp_path.chmod(0o555)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("permissions do not bind root; the read-only disk stands in for this")
        with pytest.raises(UserError, match="Permission denied"):
            lock_folder(tmp_path)
        with pytest.raises(SaveError, match="Permission denied"):
            save_step(tmp_path, 2)
        check(find(tmp_path), 1)
    finally:
        tmp_path.chmod(0o755)


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


# Weights to start from


def test_weights_to_start_from_are_of_the_same_model_and_tokenizer(tmp_path):
    identity = {"model": {"depth": 2}, "tokenizer": "abc"}
    save_step(tmp_path, 3, state={"step": 3, "identity": identity | {"seed": 1}})
    for path in (tmp_path, tmp_path / "step_000003"):
        assert find_weights(path, identity | {"seed": 2}).step == 3
    with pytest.raises(UserError, match=r"is {'depth': 2}, this one {'depth': 4}"):
        find_weights(tmp_path, identity | {"model": {"depth": 4}})
    with pytest.raises(UserError, match=r"--tokenizer=.*step_000003/tokenizer.json"):
        find_weights(tmp_path, identity | {"tokenizer": "abd"})
    with pytest.raises(UserError, match=r"no checkpoint in .*/nothing"):
        find_weights(tmp_path / "nothing", identity)
