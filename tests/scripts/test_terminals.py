"""A terminal that is not UTF-8, and text and paths that are not: a run prints, saves and goes on."""

import os
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, command, python_m, records

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ODD = b"caf\xc3\xa9-\xff"  # a name that is not UTF-8, as Linux allows


def in_c_locale(arguments):
    """A process of its own: Python reads the locale when it starts."""
    started = [os.fsencode(word) for word in (sys.executable, "-m", *arguments)]
    return subprocess.run(started, cwd=ROOT, env=os.environ | C_LOCALE, capture_output=True, timeout=300)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other names of files")
def test_a_run_prints_samples_and_paths_that_its_terminal_lacks_and_goes_on(corpus, tmp_path):
    folder = tmp_path / os.fsdecode(ODD)
    shutil.copytree(corpus, folder / "corpus")
    prompts = os.fsdecode("--sample_prompts=東京 é|".encode() + b"\xff\xed\xa0\x80")
    out = tmp_path / os.fsdecode("é東".encode())
    arguments = command(
        folder / "corpus", out, prompts, "--sample_every=2", "--eval_every=2", "--save_every=2"
    )
    # The same run begins in the C locale and goes on at an ASCII and at a UTF-8 terminal
    for steps, encoding in (3, "C"), (5, "ascii"), (6, "utf-8"):
        more = [*arguments, f"--num_iterations={steps}"]
        done = in_c_locale(more) if encoding == "C" else python_m(more, encoding=encoding)
        assert done.returncode == 0, (done.stderr, done.stdout)
        printed = done.stdout.decode("ascii") if encoding == "C" else done.stdout
        assert f"step {steps}/{steps}" in printed and ("東京" in printed) == (encoding == "utf-8")
        # The arguments of a C locale are ASCII
        assert encoding == "C" or "東京" in (out / "report.md").read_text("utf-8")
    assert [r["step"] for r in records(out) if "loss" in r] == [*range(6)]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other names of files")
def test_a_folder_from_which_no_checkpoint_could_be_read_is_refused_at_the_start(corpus, tmp_path):
    out = tmp_path / os.fsdecode(ODD)
    done = python_m(command(corpus, out))
    assert done.returncode == 2 and r"-\udcff is not UTF-8; give another --out_dir" in done.stderr
    assert "Traceback" not in done.stderr and not out.exists()
