"""A run's folder: one process holds it, old checkpoints go, old runs are set aside."""

import errno
import os
import signal

import pytest
from helpers import check, names_in, python, save_step

from nanochat import UserError
from nanochat.checkpoint import changes, find, folder, lock_folder, set_aside

# What goes and what stays


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


def test_only_what_a_run_wrote_is_set_aside(tmp_path):
    run = tmp_path / "run"
    (run / "thesis").mkdir(parents=True)
    (run / "log.txt").write_text("stdout of the run")
    assert find(run, "never") is None and names_in(run) == ["log.txt", "thesis"]
    written = ["config.json", "metrics.jsonl", "report.md", "base_eval_000001.md", "profile_3.json.gz"]
    for name in written:
        (run / name).touch()
    save_step(run, 1)
    assert sorted([*written, "step_000001"]) == names_in(set_aside(run))
    assert names_in(run) == ["log.txt", "thesis"]


def test_a_folder_that_is_no_runs_is_not_set_aside_nor_written_to(tmp_path):
    for name in ("report.md", "config.json"):
        (tmp_path / name).write_text("of something else")
        with pytest.raises(UserError, match="not a run's folder; choose another --out_dir"):
            find(tmp_path, "never")
    assert names_in(tmp_path) == ["config.json", "report.md"]


def test_a_run_that_continues_from_an_earlier_step_puts_the_later_ones_away(tmp_path):
    run = tmp_path / "run"
    for step in (1, 2, 3):
        save_step(run, step)
    assert names_in(set_aside(run, after=1)) == ["step_000002", "step_000003"]
    assert set_aside(run, after=1) is None
    check(find(run), 1)


# The same run or another one


def test_what_differs_from_the_checkpoint_is_refused_by_name_and_accepted_by_name(tmp_path):
    then = {"model": {"depth": 2}, "data": "a", "tokenizer": "b", "seed": 42}
    save_step(tmp_path, 3, state={"step": 3, "identity": then})
    found = find(tmp_path)
    assert changes(found, then) == changes(found, then, accept="seed, data") == []
    newer = {"depth": 2, "spelled": False, "value_tables": 1, "bigrams": 0, "copying": False}
    assert changes(found, then | {"model": newer}) == []  # the checkpoint is from before these had names
    now = then | {"seed": 7, "data": "c"}
    sentence = r"step_000003 is from another run: data was a, is c; seed was 42, is 7\. .*--accept=data,seed$"
    with pytest.raises(UserError, match=sentence):
        changes(found, now)
    with pytest.raises(UserError, match=r"another run: seed was 42, is 7\. .*--accept=seed$"):
        changes(found, now, accept="data")
    assert sorted(changes(found, now, accept="seed, data")) == ["data", "seed"]
    with pytest.raises(UserError, match="accept cannot name depth, model; it takes data, seed, tokenizer"):
        changes(found, now, accept="model,depth,seed")
    assert changes(None, now, accept="seed") == []
    with pytest.raises(UserError, match="accept cannot name sed"):
        changes(None, now, accept="sed")  # of a new run too
    sentence = r"another run: model's depth was 2, is 4\. .*--resume=never or another --model_tag$"
    with pytest.raises(UserError, match=sentence):
        changes(found, now | {"model": newer | {"depth": 4}}, accept="seed,data")


# The lock


HOLDER = """
import os, sys, time
from nanochat.checkpoint import lock_folder
lock_folder(sys.argv[1])
if os.fork() == 0:  # the worker says when it runs: then it no longer holds the lock
    print(os.getpid(), flush=True)
time.sleep(100)
"""


def test_a_run_keeps_others_out_until_it_is_killed(tmp_path):
    """Even if a worker that it forked lives on."""
    (tmp_path / ".tmp-step_000001-99").mkdir()
    with python(HOLDER, tmp_path) as holder:
        worker = int(holder.stdout.readline())
        try:
            assert names_in(tmp_path) == [".lock"]
            (tmp_path / ".tmp-step_000002-99").mkdir()
            with pytest.raises(
                UserError, match=f"in use by process {holder.pid} on host .* since .*--out_dir"
            ):
                lock_folder(tmp_path)
            assert (tmp_path / ".tmp-step_000002-99").exists()  # only the holder may clean up
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            os.kill(worker, 0)
            lock_folder(tmp_path).close()
            assert names_in(tmp_path) == [".lock"]
        finally:
            os.kill(worker, signal.SIGKILL)


ATTEMPT = """
import os, sys
from nanochat.checkpoint import enter
from nanochat.machine.runtime import Machine
found, _ = enter(sys.argv[1], "never", Machine(device="cpu"))
print(found.step if found else "new")
"""


def test_a_run_that_torchrun_restarts_does_not_begin_again_with_resume_never(tmp_path):
    state = {"identity": {}, "resolved": {}, "num_iterations": 9, "loader": {}, "scaler": {}, "loop": {}}

    def attempt(number: int) -> str:
        environment = os.environ | {"TORCHELASTIC_RESTART_COUNT": str(number)}
        with python(ATTEMPT, tmp_path / "run", env=environment) as process:
            return process.communicate()[0].split()[-1]

    assert attempt(0) == "new"
    assert attempt(1) == "new"  # it failed before the first save
    save_step(tmp_path / "run", 3, state=state)
    assert attempt(2) == "3"
    assert attempt(0) == "new"  # a torchrun of its own
    save_step(tmp_path / "run", 4, state=state)
    lock = tmp_path / "run" / ".lock"
    lock.write_bytes(lock.read_bytes().replace(str(os.getpid()).encode(), b"0"))  # of another torchrun
    assert attempt(1) == "new"


def test_a_file_system_without_locks_is_named_once_and_used(tmp_path, monkeypatch):
    import fcntl

    def no_locks(fd, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / ".tmp-step_000001-99").mkdir()
    said = []
    lock_folder(tmp_path, say=said.append).close()
    assert len(said) == 1 and "no locks" in said[0]
    assert (tmp_path / ".tmp-step_000001-99").exists()  # it may be another run's


def test_a_place_that_cannot_be_a_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match=r"^cannot write to .*--out_dir[^\n]*$"):
            lock_folder(place)


# Several processes


class OneOfTwo:
    """The machine of rank 0 beside a process that sees the folder, or does not."""

    world_size, is_main = 2, True

    def __init__(self, other_sees):
        self.other_sees = other_sees

    def all_gather(self, value):
        return [value, self.other_sees if isinstance(value, bool) else value]


def test_a_folder_that_a_process_does_not_see_is_refused_and_one_that_all_see_gets_an_id(tmp_path):
    run_ids = {folder.check_shared(tmp_path, OneOfTwo(True)) for _ in range(2)}
    assert len(run_ids) == 2 and all(run_ids)
    with pytest.raises(UserError, match=r"process 1 does not see what process 0 writes to .*--out_dir"):
        folder.check_shared(tmp_path, OneOfTwo(False))
    assert names_in(tmp_path) == []
