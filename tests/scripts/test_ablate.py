"""Ablations: each variant is trained once for each seed, and a finished training is not repeated."""

import json
import os
from pathlib import Path

import pytest
from helpers import ROOT, python_m

TINY = ["--depth=1", "--max_seq_len=32", "--vocab_size=300", "--total_batch_size=128", "--num_iterations=3"]


def ablate(folder: Path, *arguments: str, status: int = 0, root: Path = ROOT) -> str:
    """Run the script on a small text in `folder` and return what it printed."""
    texts = folder / "texts.jsonl"
    lines = (json.dumps(f"document {i} " + "word and word " * (i % 90)) for i in range(400))
    texts.write_text("\n".join(lines))
    os.utime(texts, (1, 1))  # the same file for every command
    command = ["scripts.ablate", "--what=packing", "--json", "--dtype=float32", *TINY, "--eval_tokens=500"]
    command += ["--device_type=cpu", f"--data={texts}", f"--base_dir={folder / 'base'}"]
    done = python_m([*command, *arguments], root)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status else done.stdout


def results_of(output: str) -> list[dict]:
    return json.loads(output.splitlines()[-1])["results"]


def test_packing_is_compared_and_a_stopped_command_goes_on(tmp_path):
    output = ablate(tmp_path, "--seeds=1")
    first = results_of(output)
    names = ["best fit, remainders kept", "best fit, cropped", "concatenation"]
    assert [run["variant"] for run in first] == names
    assert len({run["val_bpb"] for run in first}) == 3  # the variants differ
    assert all(0 < run["first_window_bpb"] < 9 and run["loss"] > 0 for run in first)
    assert output.count("seed 0: ") == 3

    # A stopped command leaves a run without its result
    (stopped,) = (tmp_path / "base" / "ablations" / "packing").glob("concatenation-0-*")
    (stopped / "ablation.json").unlink()
    output = ablate(tmp_path, "--seeds=1")
    assert output.count("seed 0: ") == 1
    for before, after in zip(first, results_of(output), strict=True):
        assert before | {"seconds": 0} == after | {"seconds": 0}  # the repeated training is equal too


@pytest.mark.slow
def test_more_seeds_add_to_the_results_of_fewer(tmp_path):
    first = results_of(ablate(tmp_path, "--what=precision", "--seeds=1"))
    output = ablate(tmp_path, "--what=precision", "--seeds=2")
    assert output.count("seed 0: ") == 0 and output.count("seed 1: ") == 2
    results = results_of(output)
    assert results[:2] == first and [run["variant"] for run in first] == ["float32", "bfloat16"]
    assert len({run["loss"] for run in results}) == 4
    table = (tmp_path / "base" / "ablations" / "precision.md").read_text()
    assert table in output and table.count("±") == 4 and "2 seeds" in table


def test_an_edit_that_no_longer_fits_is_refused_before_the_first_training(tree, tmp_path):
    packing = tree / "nanochat" / "data" / "packing.py"
    packing.write_text(packing.read_text().replace("def _cut(self", "def _split(self"))
    output = ablate(tmp_path, status=2, root=tree)
    assert "nanochat/data/packing.py has 0 times" in output and "Traceback" not in output
    assert not (tmp_path / "base").exists()
