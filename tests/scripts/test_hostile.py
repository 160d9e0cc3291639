"""Attacks on a run while it goes on, and runs that go wrong: what is said, and what is left."""

import json
import os
import re
import signal
import time

import pytest
import torch
from helpers import Process, command, craft, insert, losses, multiply_loss, records, run, run_tree
from safetensors.torch import load_file, save


def test_a_run_whose_folder_is_deleted_makes_it_again_and_says_so(tree, corpus, tmp_path):
    insert(tree, at_step_end='if step == 1: __import__("shutil").rmtree(run_path)')
    out = tmp_path / "run"
    printed = run_tree(tree, command(corpus, out))
    assert printed.count("was deleted while the run goes on") == 1 and "could not save" not in printed
    saved = json.loads((out / "step_000008" / "config.json").read_text())
    assert saved["settings"]["depth"]["value"] == 2 and sorted(losses(out)) == [1, 2, 3, 4, 5, 6, 7]
    (tree / "nanochat" / "muon.py").write_bytes((tree / "nanochat" / "muon.py").read_bytes() + b"# edited\n")
    said = run_tree(tree, command(corpus, out))
    assert "finished already" in said and "nanochat/muon.py" in said


def test_weights_that_are_not_finite_end_the_run_and_are_never_saved(tree, corpus, tmp_path):
    insert(tree, at_step_end='if step == 1: model.head.weight.data[0] = float("nan")')
    out = tmp_path / "run"
    more = ["--grad_clip=-1", "--save_every=2"]
    printed = run_tree(tree, command(corpus, out, *more), status=2)
    assert "head.weight" in printed and "is not saved" in printed and "has no checkpoint" in printed
    assert not list(out.glob("step_*")) and "done" not in printed.splitlines()[-1]


def test_what_is_said_of_the_checkpoints_before_is_true(tree, corpus, tmp_path):
    multiply_loss(tree, "inf if step > 3 else 1")
    printed = run_tree(tree, command(corpus, tmp_path / "with", "--save_every=2"), status=2)
    assert "three steps in a row were not finite" in printed
    assert re.search("newest checkpoint of step [46] is in", printed)  # that of 6 may still be written
    printed = run_tree(tree, command(corpus, tmp_path / "without", "--save_every=-1"), status=2)
    assert "three steps in a row were not finite" in printed and "has no checkpoint" in printed


def test_a_validation_that_is_not_a_number_ends_the_run_with_status_2(tree, corpus, tmp_path):
    code = """
def forward(self, *arguments, plain=GPT.forward, **options):
    return plain(self, *arguments, **options) * (1 if torch.is_grad_enabled() else float("nan"))

GPT.forward = forward
"""
    insert(tree, after_settings=code)
    printed = run_tree(tree, command(corpus, tmp_path / "run"), status=2)
    assert "validation" in printed and "not a number" in printed and "done:" not in printed
    assert not any(r.get("val_bpb") for r in records(tmp_path / "run"))


def test_resuming_from_weights_that_are_not_finite_is_refused(tree, corpus, tmp_path):
    out = tmp_path / "run"
    run_tree(tree, command(corpus, out, "--num_iterations=2"))
    weights = load_file(out / "step_000002" / "model.safetensors")
    weights["head.weight"][0, 0] = torch.nan
    craft(out / "step_000002", {"model.safetensors": save(weights)})
    printed = run_tree(tree, command(corpus, out, "--num_iterations=4"), status=2)
    assert "head.weight" in printed and "not finite" in printed and "--resume=never" in printed


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to catch")
def test_sigterm_in_set_up_or_compilation_ends_the_run(corpus, tmp_path):
    cache = str(tmp_path / "cache")  # compile again
    process = Process(command(corpus, tmp_path / "run", "--compile=on"), TORCHINDUCTOR_CACHE_DIR=cache)
    try:
        while "plan" not in process.stdout:  # the plan is printed; next come build and compilation
            assert process.poll() is None, process.stderr
            time.sleep(0.01)
        time.sleep(8)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        assert "stopped by SIGTERM before the first step" in process.stderr
    finally:
        process.kill()


def test_damaged_lines_of_the_metrics_are_skipped_and_named(corpus, tmp_path):
    out = tmp_path / "run"
    run(command(corpus, out, "--num_iterations=5"))
    lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[1:4] = [b'{"step": 1, "lo\n', b"[1, 2]\n", b"\xff\xfe\n"]
    (out / "metrics.jsonl").write_bytes(b"".join(lines))
    printed = run(command(corpus, out, "--num_iterations=6"))
    assert re.search(r"metrics.jsonl: .*skipped \(2, 3, 4\)", printed), printed
    assert sorted(losses(out)) == [0, 4, 5]
