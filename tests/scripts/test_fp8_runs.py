"""Whole runs in fp8, on a CPU: a copy of the sources that allows it there."""

import shutil

import pytest
from helpers import command, losses, run, run_tree
from safetensors.torch import load_file

SIZES = ["--fp8", "--dtype=bfloat16", "--aspect_ratio=64", "--head_dim=64"]  # width 128: all products fit
# A quarter of the rates: the two processes show their own rounding, not its growth
SIZES += ["--matrix_lr=0.005", "--embedding_lr=0.15", "--unembedding_lr=0.001"]


@pytest.mark.slow
def test_a_run_in_fp8_resumes_to_the_bit_needs_fp8_again_and_agrees_with_two_processes(
    tree, corpus, tmp_path
):
    with open(tree / "nanochat" / "ops" / "fp8.py", "a", encoding="utf-8") as file:
        file.write("\n\nmissing_for_fp8 = lambda device: ''\n")
    whole, halves, two = tmp_path / "whole", tmp_path / "halves", tmp_path / "two"
    printed = run_tree(tree, command(corpus, whole, *SIZES))
    assert "the large products of the blocks in fp8" in printed
    shutil.copytree(whole, halves)
    shutil.rmtree(halves / "step_000008")
    assert "began with --fp8; give it again" in run_tree(tree, command(corpus, halves, *SIZES[1:]), status=2)
    assert "step_000006" in run_tree(tree, command(corpus, halves, *SIZES))
    assert losses(halves) == losses(whole)
    weights = [load_file(out / "step_000008" / "model.safetensors") for out in (whole, halves)]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    run_tree(tree, ["scripts.chat", f"--source={whole}", "--prompt=a", "--max_tokens=2"])

    run(command(corpus, two, *SIZES), processes=2, folder=tree)
    # Each process scales its own part of the batch, so the values are rounded otherwise
    assert [*losses(two).values()] == pytest.approx([*losses(whole).values()], rel=1e-3)
    assert losses(two) != losses(whole)
