"""The training script as people run it: real processes, a tiny model, a small corpus of parquet shards."""

import json
import math
import os
import re
import signal
from pathlib import Path

import pytest
from helpers import DEFAULTS, Process, assert_same_run, command, losses, records, run, wait_for_step

from nanochat import checkpoint


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    run(command(corpus, out, "--eval_every=4"))
    return out


def test_a_run_leaves_the_files_and_records_that_others_rely_on(undisturbed):
    steps = [r for r in records(undisturbed) if "loss" in r]
    assert [r["step"] for r in steps] == list(range(8))
    names = {"lr_multiplier", "grad_norm", "step_time_s", "data_wait_s", "tok_per_sec", "mfu", "flops"}
    assert all(isinstance(record[name], (int, float)) for record in steps for name in names)
    assert [r["tokens"] for r in steps] == [256 * (k + 1) for k in range(8)]
    assert [r["step"] for r in records(undisturbed) if "val_bpb" in r] == [4, 8]
    assert steps[0]["loss"] == pytest.approx(math.log(300), rel=0.02)
    assert sorted(p.name for p in undisturbed.glob("step_*")) == ["step_000006", "step_000008"]
    assert all(
        (undisturbed / "step_000008" / name).exists() for name in ("model.safetensors", "tokenizer.json")
    )
    config = json.loads((undisturbed / "config.json").read_text())
    assert config["settings"]["depth"] == {"value": 2, "source": "command line"}
    assert config["settings"]["seed"]["source"] == "default"
    report = (undisturbed / "report.md").read_text()
    assert "bits per byte" in report and "## Samples" in report
    assert (undisturbed / "loss.png").stat().st_size > 1000
    assert not list(undisturbed.glob(".tmp*")) and not list(undisturbed.glob("*.tmp"))


def test_a_run_killed_and_started_again_has_the_losses_of_one_never_killed(corpus, undisturbed, tmp_path):
    out = tmp_path / "run"
    line = command(corpus, out, "--eval_every=4")
    process = Process(line)
    wait_for_step(process, out, 4)  # past the checkpoint at 3
    process.kill()
    process.wait()
    assert "going on from" in run([*line, "--profile=7"])
    assert (out / "profile_7.json.gz").exists()  # and it changes no number
    assert_same_run(out, undisturbed)
    weights = [(folder / "step_000008" / "model.safetensors").read_bytes() for folder in (out, undisturbed)]
    assert weights[0] == weights[1]


def test_a_further_validation_set_is_a_curve_of_its_own_and_changes_nothing_else(
    corpus, undisturbed, tmp_path
):
    (tmp_path / "other.txt").write_text("another text " * 30)
    further = f"--val_data={corpus / 'val.parquet'},{tmp_path / 'other.txt'}"
    plain = command(corpus, tmp_path / "run", "--eval_every=4")
    more = [further if argument.startswith("--val_data=") else argument for argument in plain]
    assert "validation of other" in run(more)
    assert losses(tmp_path / "run") == losses(undisturbed)
    found, expected = ([r for r in records(o) if "val_bpb" in r] for o in (tmp_path / "run", undisturbed))
    assert [r["val_bpb"] for r in found] == [r["val_bpb"] for r in expected]
    assert all(r["val_bpb_other"] > 0 and r["val_bpb_other"] != r["val_bpb"] for r in found)
    assert [r["loss_by_position"] for r in found] == [r["loss_by_position"] for r in expected]
    assert "finished already" in run(plain)  # further sets are no part of what a run is


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to catch")
def test_sigterm_saves_and_exits_with_0_and_the_same_command_goes_on(corpus, undisturbed, tmp_path):
    out = tmp_path / "run"
    evaluated = "--eval_every=4"  # which gives the signal time
    process = Process(command(corpus, out, "--save_every=-1", evaluated))
    wait_for_step(process, out, 1)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate()
    assert process.returncode == 0 and "stopped by SIGTERM" in printed
    assert len(list(out.glob("step_*"))) == 1
    run(command(corpus, out, "--save_every=-1"))
    assert losses(out) == losses(undisturbed)


def test_two_processes_and_other_micro_batches_give_the_losses_of_one(corpus, undisturbed, tmp_path):
    expected = losses(undisturbed)
    run(command(corpus, tmp_path / "two", "--eval_every=4", "--profile=7"), processes=2)
    assert [path.name for path in (tmp_path / "two").glob("profile*")] == ["profile_7.json.gz"]
    run(command(corpus, tmp_path / "eight", "--device_batch_size=8", "--save_every=-1"))
    for out in (tmp_path / "two", tmp_path / "eight"):
        assert losses(out) == pytest.approx(expected, abs=1e-4)
    bpb = [[r["val_bpb"] for r in records(out) if "val_bpb" in r] for out in (undisturbed, tmp_path / "two")]
    assert bpb[0] == pytest.approx(bpb[1], abs=1e-4)


def test_a_finished_run_says_so_and_resume_never_sets_it_aside(corpus, tmp_path):
    out = tmp_path / "run"
    short = "--num_iterations=2"
    assert re.search(r"step 2: saved, \S+B in \S+ s \(\d\d:", run(command(corpus, out, short)))
    before = (out / "metrics.jsonl").read_bytes()
    said = run(command(corpus, out, short))
    assert "finished already" in said and "changed" not in said
    said = run(command(corpus, out, short, "--matrix_lr=0.5"))
    assert "finished already" in said and f"matrix_lr {DEFAULTS['matrix_lr']} -> 0.5" in said
    assert (out / "metrics.jsonl").read_bytes() == before
    # A run that was stopped after its last save and before its evaluation has that still to do
    (out / "metrics.jsonl").write_bytes(b"".join(before.splitlines(keepends=True)[:-1]))
    (out / "report.md").unlink()
    scored = records(out)
    assert "step 2: validation" in run(command(corpus, out, short))
    *kept, again = records(out)
    assert kept == scored
    assert again.pop("peak_memory") > 0 and again.pop("eval_time_s") > 0
    assert again.items() <= json.loads(before.splitlines()[-1]).items()
    before = (out / "metrics.jsonl").read_bytes()
    assert "still going on" not in (out / "report.md").read_text()
    run(command(corpus, out, short, "--resume=never"))
    aside = [folder for folder in tmp_path.iterdir() if folder != out]
    assert len(aside) == 1 and (aside[0] / "metrics.jsonl").read_bytes() == before
    assert losses(out) == losses(aside[0])


def test_a_run_starts_from_weights_of_another_or_goes_on_in_another_folder(corpus, undisturbed, tmp_path):
    out = tmp_path / "run"
    run(command(corpus, out, "--num_iterations=2", f"--init_from={undisturbed}"))
    assert losses(out)[0] < losses(undisturbed)[0]
    printed = run(command(corpus, out, f"--resume={undisturbed / 'step_000006'}"))
    assert "going on from" in printed and losses(out) == {k: losses(undisturbed)[k] for k in (6, 7)}
    assert sorted(losses(tmp_path / "run.old-1")) == [0, 1]  # what was there is not mixed with it
    printed = run(command(corpus, out, f"--resume={undisturbed}"))  # which has all its steps
    assert "finished already" in printed and sorted(losses(out)) == [6, 7]


def test_a_run_that_starts_from_another_model_is_told_the_settings_that_make_it(corpus, tmp_path):
    base, of_base = tmp_path / "base", ["--spelling=off", "--bigrams=3", "--copying=off"]
    run(command(corpus, base, "--depth=3", "--num_iterations=1", *of_base))
    start = command(corpus, tmp_path / "run", "--num_iterations=1", f"--init_from={base}")
    advice = re.search(r"give (--.+)", run(start, status=2))[1]
    assert "--bigrams" not in advice  # which rows tokens have comes from the weights
    assert "going on" not in run([*start, *advice.split()])
    found, wanted = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "run", base))
    assert found["identity"]["model"] == wanted["identity"]["model"]


def test_the_weights_that_a_new_run_starts_from_are_not_set_aside(corpus, undisturbed):
    for source in (undisturbed, undisturbed / "step_000006"):
        said = run(command(corpus, undisturbed, "--resume=never", f"--init_from={source}"), status=2)
        assert "--model_tag" in said
    assert checkpoint.find(undisturbed).step == 8 and not undisturbed.with_name("run.old-1").exists()


def test_plan_prints_the_derivation_and_leaves_nothing(corpus, tmp_path):
    printed = run(command(corpus, tmp_path / "run", "--plan"))
    assert "width 32" in printed and "4 micro-steps" in printed
    assert not (tmp_path / "run").exists()


def test_one_text_file_is_enough_and_a_resumed_run_keeps_its_validation(corpus, tmp_path):
    (tmp_path / "one.txt").write_text("".join(f"line {n} of a short text\n" for n in range(400)))
    own = [f"--data={tmp_path / 'one.txt'}", "--val_data=none", "--vocab_size=300"]
    printed = run(command(corpus, tmp_path / "run", *own, "--num_iterations=2"))
    assert "of so few the last tenth of each is validation" in printed
    (tmp_path / "one.txt").touch()  # imported again
    printed = run(command(corpus, tmp_path / "run", *own, "--num_iterations=3"))
    assert "going on from" in printed
    assert [r["step"] for r in records(tmp_path / "run") if "val_bpb" in r] == [2, 3]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--total_batch_size=100"], "use 64 or 128"),
        (["--device_type=cuda"], "this machine has: cpu"),
        (["--num_iterations=-1", "--target_param_data_ratio=-1"], "the run has no end"),
        (["--init_from=auto"], "no checkpoint in auto"),
        (["--depth=24", "--aspect_ratio=4096"], "are free; lower --depth to "),
        (["--data=/no/such/place"], "/no/such/place"),
        (["--resume=~nouser/x"], "~nouser/x"),
        (["--out_dir=~nouser/x"], "~nouser/x"),
        (["--fp8"], "H100 and later), and this run is on cpu; leave it out"),
    ],
)
def test_bad_settings_end_in_one_sentence_and_status_2(corpus, tmp_path, more, sentence):
    printed = run(command(corpus, tmp_path / "run", *more), status=2)
    assert sentence in printed


def test_another_model_in_the_same_folder_is_refused_and_nothing_is_lost(corpus, undisturbed):
    before = sorted((p, p.stat().st_mtime) for p in undisturbed.rglob("*") if p.name != ".lock")
    printed = run(command(corpus, undisturbed, "--aspect_ratio=32", "--num_iterations=20"), status=2)
    assert "is from another run: model's " in printed and "--resume=never" in printed
    assert sorted((p, p.stat().st_mtime) for p in undisturbed.rglob("*") if p.name != ".lock") == before
