"""On a GPU the loop gives step n + 1 to the device before it reads the numbers of step n.

A run on a CPU that is told to do so leaves what a run without it leaves, and stops and fails in good order.
"""

import json

import pytest
from helpers import assert_same_run, command, insert, losses, multiply_loss, python_m, records, run, run_tree

from nanochat import checkpoint


@pytest.fixture(scope="module")
def plain(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain") / "run"
    run(command(corpus, out, "--eval_every=4", "--keep_checkpoints=-1"))
    return out


@pytest.fixture
def ahead(tree):
    """The sources, with a CPU that is one step ahead."""
    insert(tree, at_step_end="type(machine).steps_ahead = 1")
    return tree


def lasting(out) -> list[dict]:
    """What the records say but for times and memory."""
    times = "step_time_s", "data_wait_s", "tok_per_sec", "mfu", "train_time_s", "eval_time_s", "peak_memory"
    return [{name: value for name, value in r.items() if name not in times} for r in records(out)]


def test_a_run_one_step_ahead_leaves_the_records_and_checkpoints_of_one_that_is_not(
    ahead, corpus, plain, tmp_path
):
    out = tmp_path / "ahead"
    run_tree(ahead, command(corpus, out, "--eval_every=4", "--keep_checkpoints=-1"))
    assert lasting(out) == lasting(plain) and len(lasting(out)) == 8 + 2
    for step in (3, 6, 8):
        loops = [checkpoint.open_checkpoint(o / f"step_{step:06d}").state["loop"] for o in (out, plain)]
        times = [loop.pop("train_seconds") for loop in loops]
        assert loops[0] == loops[1] and loops[0]["tokens"] == 256 * step
        # The time of the steps in a checkpoint is that of the steps it was made after
        in_steps = sum(r["step_time_s"] for r in records(out) if "loss" in r and r["step"] < step)
        assert times[0] == pytest.approx(in_steps)
    assert_same_run(out, plain)


def test_three_bad_steps_end_a_run_one_step_ahead_before_the_save_that_is_due(ahead, corpus, tmp_path):
    """Step 5 is the third: the save after it is due, and its numbers are read first."""
    multiply_loss(ahead, "inf if step > 2 else 1")
    printed = run_tree(ahead, command(corpus, tmp_path / "run"), status=2)
    assert "the last one step 5 in its gradient (rows from 40 on)" in printed
    assert sorted(losses(tmp_path / "run")) == [0, 1, 2, 3, 4, 5]
    assert [path.name for path in (tmp_path / "run").glob("step_*")] == ["step_000003"]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_signal_stops_a_run_one_step_ahead_after_one_more_step_and_it_goes_on(
    ahead, corpus, plain, tmp_path, processes
):
    term = "if step == 2 and machine.rank == machine.world_size - 1: __import__('signal').raise_signal(15)"
    insert(ahead, at_step_end=term)
    out, arguments = tmp_path / "run", command(corpus, tmp_path / "run", "--save_every=-1")
    assert "stopped by" in run(arguments, processes=processes, folder=ahead)
    assert sorted(losses(out)) == [0, 1, 2, 3, 4] and checkpoint.find(out, "auto").step == 5
    run(arguments, processes=processes, folder=ahead)
    expected = losses(plain)
    assert losses(out) == (expected if processes == 1 else pytest.approx(expected, abs=1e-4))


def test_a_step_waits_for_the_device_once_for_what_the_log_needs(corpus, tmp_path):
    """In float16, where a loss scale is read too."""
    settings = ["--dtype=float16", "--save_every=-1"]
    arguments = command(corpus, tmp_path / "run", *settings)[1:]
    done = python_m(["experiments.device_waits", *arguments])
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["steps"] == 6 and list(found["waits"].values()) == [6], found
    assert "transfers.py" in next(iter(found["waits"]))
