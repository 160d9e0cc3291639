"""Runs that are killed, moved to another number of processes, or on a full disk. They are real processes, and
most of these tests are slow."""

import random
import shutil
import signal
import time

import pytest
from helpers import (
    Process,
    assert_same_run,
    command,
    disk,
    insert,
    losses,
    records,
    run,
    together,
    wait_for_step,
    wait_until,
    whole_lines,
)

from nanochat import checkpoint

LONG = ["--num_iterations=400", "--save_every=3", "--eval_every=100", "--keep_checkpoints=2"]


@pytest.mark.slow
def test_a_run_killed_at_40_random_moments_equals_an_undisturbed_one_bit_for_bit(corpus, tmp_path):
    run(command(corpus, tmp_path / "calm", *LONG))
    out, draw, inside_a_save = tmp_path / "killed", random.Random(1), 0
    # A run takes some seconds to start; the kills are spread over its first steps and saves
    for _ in range(40):
        process = Process(command(corpus, out, *LONG))
        before = whole_lines(out)
        if draw.random() < 0.5:  # in the middle of a save: as soon as its temporary folder is there
            wait_until(lambda: list(out.glob(".tmp-*")), process, every_s=0.0005)
            time.sleep(draw.choice([0, 0.001, 0.003, 0.01]))
        else:
            wait_until(lambda before=before: whole_lines(out) > before, process, every_s=0.002)
            time.sleep(draw.random() * 0.1)
        process.kill()
        assert process.wait() == -signal.SIGKILL, "it ended before the 40th kill"
        inside_a_save += bool(list(out.glob(".tmp-*")))
    run(command(corpus, out, *LONG))
    assert inside_a_save >= 5
    assert_same_run(out, tmp_path / "calm")
    assert not list(out.glob(".tmp*")) and len(list(out.glob("step_*"))) == 2


REAL = [  # the real model and data, 12 rows a batch: for 1, 2, 3 and 4 processes
    "scripts.base_train", "--depth=4", "--aspect_ratio=32", "--head_dim=32", "--max_seq_len=128",
    "--vocab_size=1024", "--total_batch_size=1536", "--num_iterations=50",
    "--dtype=float32", "--compile=off", "--eval_every=-1", "--eval_tokens=20000", "--sample_every=-1",
    "--core_metric_every=-1", "--save_every=10",
]  # fmt: skip


@pytest.mark.slow
def test_one_to_four_processes_have_the_same_losses_even_if_a_run_moves_between_them(tmp_path):
    def start(name, processes, *more):
        run([*REAL, f"--out_dir={tmp_path / name}", f"--base_dir={tmp_path}", *more], processes=processes)
        return losses(tmp_path / name)

    expected = start("one", 1)
    assert len(expected) == 50 and expected[0] > expected[49] + 1
    for processes in (2, 3, 4):
        assert start(f"{processes}", processes) == pytest.approx(expected, abs=1e-4)
    out = tmp_path / "moved"
    for processes, stop_at in ((1, 10), (2, 20), (3, 30), (4, 40)):
        started = together([*REAL, f"--out_dir={out}", f"--base_dir={tmp_path}"], range(processes))
        wait_for_step(started[0], out, stop_at)
        for process in started:  # as torchrun passes it on
            process.send_signal(signal.SIGTERM)
        assert [process.wait() for process in started] == [0] * processes
        newest = checkpoint.find(out, "auto")
        assert stop_at < newest.step < 50
        assert len(list(newest.path.glob("optimizer-*"))) == processes
    run([*REAL, f"--out_dir={out}", f"--base_dir={tmp_path}"])
    assert losses(out) == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_a_disk_that_fills_up_costs_no_good_checkpoint_and_the_run_goes_on(corpus, tmp_path):
    with disk(tmp_path / "disk", "6m") as small:
        out, filler = small / "run", small / "filler"
        run(command(corpus, out, "--num_iterations=4", "--save_every=2", "--keep_checkpoints=1"))
        good = checkpoint.find(out, "auto")
        room = 40_000  # bytes: enough for metrics, too little for a checkpoint
        filler.write_bytes(bytes(shutil.disk_usage(small).free - room))
        more = ["--num_iterations=40", "--save_every=2"]
        printed = run(command(corpus, out, *more), status=2)
        assert "could not save" in printed and "MB are free" in printed
        assert len(losses(out)) < 20, "it does not go on for nothing"
        assert checkpoint.find(out, "auto").step == good.step
        filler.unlink()
        run(command(corpus, out, *more))
        assert sorted(losses(out)) == list(range(40))


def test_a_run_holds_its_folder_and_minutes_alone_make_its_checkpoints(corpus, tmp_path):
    """Each save by the clock starts after the one before it has ended."""
    out = tmp_path / "run"
    often = ["--save_every=-1", "--save_minutes=0.0001", "--keep_checkpoints=-1", "--num_iterations=100000"]
    process = Process(command(corpus, out, *often))
    try:
        wait_for_step(process, out, 20)
        assert f"is in use by process {process.pid}" in run(command(corpus, out), status=2)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
    steps = sorted(int(path.name.removeprefix("step_")) for path in out.glob("step_*"))
    assert len(steps) > 2 and steps[0] < 20 and steps[-1] == len(losses(out))
    checkpoint.lock_folder(out).close()


SAVE_OF_STEP_6_LASTS = """
import nanochat.checkpoint.background as background
background.save = lambda save=background.save, **what: what["step"] != 6 and save(**what) or time.sleep(600)
"""


@pytest.mark.parametrize(("moment", "said"), [
    ("step == 2", "there is no checkpoint yet; 2 steps are lost"),
    ("step == 4 and not output._saver.finish(60)", "the newest checkpoint is of step 3; 1 step is lost"),
    ("step == 7", "the newest checkpoint is of step 3, that of step 6 is not complete; 4 steps are lost"),
])  # fmt: skip
def test_a_second_ctrl_c_ends_a_run_at_once_and_says_what_is_lost(tree, corpus, tmp_path, moment, said):
    twice = f"if {moment}: [__import__('signal').raise_signal(2) for _ in range(2)]"
    insert(tree, SAVE_OF_STEP_6_LASTS, twice)
    process = Process(command(corpus, tmp_path / "run"), tree)
    assert process.wait() == 130 and process.stderr.endswith(f"stopped at once: {said}\n"), process.stderr


def test_changes_are_refused_by_name_and_accepted_by_name(corpus, tmp_path):
    out = tmp_path / "run"
    run(command(corpus, out, "--num_iterations=3"))
    longer = ["--num_iterations=5", "--seed=7", "--total_batch_size=512"]
    printed = run(command(corpus, out, *longer, "--accept=seed"), status=2)
    assert "total_batch_size was 256, is 512" in printed and "--accept=total_batch_size" in printed
    assert "seed was" not in printed
    printed = run(command(corpus, out, *longer, "--accept=seed,total_batch_size"))
    assert "seed, total_batch_size changed, so the text is read from its start" in printed
    assert "the learning rate rises again" in printed
    steps = [record for record in records(out) if "loss" in record]
    assert [record["step"] for record in steps] == list(range(5))
    assert [record["tokens"] for record in steps] == [256, 512, 768, 1280, 1792]


def test_permanent_checkpoints_stay_beside_the_newest_ones(corpus, tmp_path):
    out = tmp_path / "run"
    keep = ["--permanent_every=4", "--keep_checkpoints=1"]
    run(command(corpus, out, *keep, "--num_iterations=10"))
    assert sorted(p.name for p in out.glob("step_*")) == ["step_000004", "step_000008", "step_000010"]


def test_with_a_damaged_newest_checkpoint_the_one_before_is_used(corpus, tmp_path):
    out = tmp_path / "run"
    run(command(corpus, out))
    expected, path = losses(out), out / "step_000008" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    printed = run(command(corpus, out))
    assert "is damaged: model.safetensors" in printed and f"going on from {out / 'step_000006'}" in printed
    assert losses(out) == expected


@pytest.mark.slow
def test_the_command_of_the_original_scripts_header_works_on_an_empty_base_dir(tmp_path):
    known = (
        "--depth=4 --max_seq_len=512 --device_batch_size=1 --eval_tokens=512 --core_metric_every=-1 "
        "--total_batch_size=512 --num_iterations=20"
    )
    run(["scripts.base_train", *known.split(), f"--base_dir={tmp_path}"])
    run_folder = tmp_path / "base_checkpoints" / "d4"
    assert not checkpoint.find(run_folder, "auto").resolved["compiled"], (
        "it must not compile for longer than it trains"
    )
    assert sorted(losses(run_folder)) == list(range(20))
    again = ["scripts.base_train", *known.replace("-1", "2").split(), f"--base_dir={tmp_path}"]
    assert "finished already" in run(again)
    printed = run([*again, "--resume=never", "--num_iterations=2"])
    assert "CORE was left out" in printed and "scripts.download --name=core" in printed
    assert "own_score" in records(tmp_path / "base_checkpoints" / "d4")[-1]
