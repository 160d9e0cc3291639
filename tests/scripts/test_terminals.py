"""A terminal that is not UTF-8, and text and paths that are not: a run prints, saves and goes on."""

import os
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, command, records

ASCII = [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
ODD = b"caf\xc3\xa9-\xff"  # a name that is not UTF-8, as Linux allows


def base_train(arguments, environment, status=0):
    """The bytes that a run prints."""
    started = [os.fsencode(word) for word in (sys.executable, "-m", *arguments)]
    done = subprocess.run(started, cwd=ROOT, env=os.environ | environment, capture_output=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    assert b"Traceback" not in done.stderr
    return done.stderr if status else done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other names of files")
@pytest.mark.parametrize("environment", [*ASCII, {}])
def test_a_run_prints_samples_and_paths_that_its_terminal_lacks_and_goes_on(corpus, tmp_path, environment):
    folder = tmp_path / os.fsdecode(ODD)
    shutil.copytree(corpus, folder / "corpus")
    prompts = os.fsdecode("--sample_prompts=東京 é|".encode() + b"\xff\xed\xa0\x80")
    out = tmp_path / os.fsdecode("é東".encode())
    often = [prompts, "--sample_every=2", "--eval_every=2", "--save_every=2"]
    for steps in 3, 5:
        arguments = command(folder / "corpus", out, *often, f"--num_iterations={steps}")
        printed = base_train(arguments, environment)
        assert f"step {steps}/{steps}".encode() in printed and (max(printed) < 128 or not environment)
    assert [r["step"] for r in records(out) if "loss" in r] == [*range(5)]
    report = (out / "report.md").read_text("utf-8")  # the arguments of a C locale are ASCII
    assert "東京" in report or "LC_ALL" in environment


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other names of files")
def test_a_folder_from_which_no_checkpoint_could_be_read_is_refused_at_the_start(corpus, tmp_path):
    out = tmp_path / os.fsdecode(ODD)
    printed = base_train(command(corpus, out), {}, status=2)
    assert rb"-\udcff is not UTF-8; give another --out_dir" in printed and not out.exists()
