"""metrics.jsonl through crashes and resumes, and what the loop remembers."""

import errno
import json
import math
import os
import signal
from dataclasses import asdict

import numpy as np
import pytest
import torch
from helpers import python, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from test_report import write_records

from nanochat import UserError
from nanochat.run.metrics import LoopState, diverged, is_spike, read_metrics, rewind_metrics

# -- The file


def test_records_come_back_to_the_last_digit_and_numbers_that_json_does_not_have_become_null(tmp_path):
    write_records(tmp_path, {"step": 0, "loss": math.pi * 1e-5, "name": "a\nb"})
    # a second process appends
    write_records(tmp_path, {"step": 1, "loss": math.nan, "grad_norm": math.inf, "by": {"a": (-math.inf,)}})
    # a number of one's own may be a tensor, or of numpy
    own = {"norm": torch.tensor(2.0), "count": np.int64(3), "by": {"a": torch.tensor(math.nan)}}
    write_records(tmp_path, {"step": 2, "loss": 1.0, **own})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=lambda word: pytest.fail(word)) for line in lines] == [
        {"step": 0, "loss": math.pi * 1e-5, "name": "a\nb"},
        {"step": 1, "loss": None, "grad_norm": None, "by": {"a": [None]}},
        {"step": 2, "loss": 1.0, "norm": 2.0, "count": 3, "by": {"a": None}},
    ]


WRITER = """
import sys
from nanochat.run.metrics import Metrics
log, step = Metrics(sys.argv[1]), 0
while True:
    log.write({"step": step, "loss": 1 / (step + 1), "padding": "x" * (step % 5000)})
    step += 1
"""


def test_a_writer_killed_at_any_moment_leaves_whole_records_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with python(WRITER, tmp_path) as child:
        wait_until(lambda: path.exists() and path.stat().st_size >= 200_000, child)
    assert child.returncode == -signal.SIGKILL
    records = read_metrics(path)
    assert len(records) > 50
    steps = range(len(records) + 1)
    expected = [{"step": i, "loss": 1 / (i + 1), "padding": "x" * (i % 5000)} for i in steps]
    assert records == expected[:-1]
    rest = path.read_bytes().rpartition(b"\n")[2]  # Linux may stop a write where a page of the file ends
    assert json.dumps(expected[-1]).encode().startswith(rest)


# -- Going back to a checkpoint


def run_of(first, last, every, evaluated=-1):
    """The records of steps first..last - 1 as the script writes them: an evaluation stands before the
    training step of its number, and one that was made before is not made again."""
    records = []
    for step in range(first, last + 1):
        if step % every == 0 and step != evaluated:
            records.append({"step": step, "samples": ["def f"]})
            records.append({"step": step, "val_bpb": 1 / (step + 1), "tokens": step})
            records.append({"step": step, "own_score": 0.5, "own_tasks": {"a": step / 9}})
        if step < last:
            # a loss that is not finite is a training record, too
            records.append({"step": step, "loss": None if step % 5 == 3 else step / 7})
    return records


@settings(max_examples=80)
@given(st.data())
def test_a_run_that_was_rewound_and_went_on_has_the_records_of_one_never_stopped(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("run")
    length, every = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 6))
    crash = data.draw(st.integers(0, length))
    checkpoint = data.draw(st.integers(0, crash))
    write_records(folder, *run_of(0, crash, every))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(data.draw(st.sampled_from(["", '{"step": 3, "lo'])))
    rewind_metrics(folder / "metrics.jsonl", checkpoint)
    evaluated = checkpoint if checkpoint % every == 0 else -1
    write_records(folder, *run_of(checkpoint, length, every, evaluated))
    assert read_metrics(folder / "metrics.jsonl") == run_of(0, length, every)


@pytest.mark.parametrize("fails_at", ["fsync", "replace"])
def test_a_rewind_that_fails_leaves_the_records_as_they_were(tmp_path, monkeypatch, fails_at):
    write_records(tmp_path, *run_of(0, 9, 3))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def fail(*args):
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(os, fails_at, fail)
    with pytest.raises(UserError, match=r"disk full.*make room"):
        rewind_metrics(tmp_path / "metrics.jsonl", 4)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


# -- What the loop remembers


def test_a_spike_is_a_loss_six_sigma_over_the_recent_ones():
    recent = [2.0 + 0.1 * (-1) ** i for i in range(40)]  # mean 2, deviation 0.1
    assert not is_spike(2.59, recent) and is_spike(2.61, recent)
    assert not is_spike(100.0, recent[:31]), "too few to know what is usual"
    assert not is_spike(float("nan"), recent), "that is a bad step, counted elsewhere"


def test_the_first_bad_place_of_a_step_is_a_micro_step_or_else_the_gradient():
    said = str(diverged(7, [1.0, float("inf"), float("nan")], 56, "runs/d4"))
    assert "step 7 in micro-step 1 of its 3 (rows from 56 on)" in said and "runs/d4" in said
    assert "step 7 in its gradient" in str(diverged(7, [1.0, 2.0], 56, "runs/d4"))


def test_progress_counts_good_and_bad_steps_and_remembers_good_losses_only():
    progress = LoopState()
    spikes = [progress.add_step(4.0 + 0.01 * (i % 2), 100, 0.5, finite=True)["spike"] for i in range(70)]
    assert not any(spikes)
    assert progress.tokens == 7000 and progress.train_seconds == 35 and len(progress.recent) == 64
    # a spike, which counts as recent from now on
    totals = progress.add_step(9.0, 100, 0.5, finite=True)
    assert totals["spike"] and totals["tokens"] == 7100 and totals["train_time_s"] == 35.5
    assert progress.recent[-1] == 9.0 and progress.skipped == 0
    totals = progress.add_step(float("nan"), 100, 0.5, finite=False)
    assert not totals["spike"] and totals["skipped"] == progress.skipped == 1
    assert progress.recent[-1] == 9.0 and progress.tokens == 7200
    assert LoopState(**asdict(progress)) == progress


def test_the_smoothed_loss_is_a_weighted_mean_and_goes_on_after_a_resume():
    progress, losses = LoopState(), [5.0, 4.0, math.nan, 3.0, math.inf, 2.0]
    assert math.isnan(progress.smoothed_loss)
    for loss in losses:
        totals = progress.add_step(loss, 1, 1.0, math.isfinite(loss))
        progress = LoopState(**json.loads(json.dumps(asdict(progress))))
    weights, good = [0.9**3, 0.9**2, 0.9, 1.0], [5.0, 4.0, 3.0, 2.0]
    mean = sum(w * loss for w, loss in zip(weights, good, strict=True)) / sum(weights)
    assert totals["smoothed_loss"] == progress.smoothed_loss == pytest.approx(mean)
