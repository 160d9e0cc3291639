"""What changes from step to step, as a run records it and as its optimizer gets it, against formulas."""

import json
import re

import pytest
from helpers import command, copy_sources, insert, records, run_tree

N = 40  # steps of a run; warm-up takes at most a tenth of them
AT_END = """
groups = {name: [g for g in optimizer.param_groups if g["method"] == name] for name in ("muon", "rowwise")}
print("muon", [[g["betas"][0], g["weight_decay"] / g["initial_weight_decay"]] for g in groups["muon"]])
print("shared rows", [g["lr"] / g["initial_lr"] for g in groups["rowwise"]])
"""
CASES = [
    {"warmup_steps": 3, "warmdown_ratio": 0.5, "final_lr_frac": 0.1},
    {"warmup_steps": 40, "warmdown_ratio": 1.0, "final_lr_frac": 0.0, "table_decay": 1.0},
    {"warmup_steps": 0, "warmdown_ratio": 0.0, "final_lr_frac": 0.05},
]


@pytest.fixture(scope="module", params=CASES, ids=["both", "longest", "constant"])
def trained(request, sources, corpus, tmp_path_factory):
    """The settings of a run; by step, its multiplier of the rates, [momentum, share of the weight decay] of
    each of Muon's groups, and the multiplier of shared rows."""
    out, given = tmp_path_factory.mktemp("schedules") / "run", request.param
    more = [f"--{name}={value}" for name, value in given.items()]
    once = ["--total_batch_size=64", "--save_every=-1", f"--num_iterations={N}"]
    printed = run_tree(sources, command(corpus, out, *once, *more))
    rates = [record["lr_multiplier"] for record in records(out) if "loss" in record]
    muon, shared = (
        [json.loads(line) for line in re.findall(rf"^{name} (.+)$", printed, re.MULTILINE)]
        for name in ("muon", "shared rows")
    )
    assert len(rates) == len(muon) == len(shared) == N
    return given, rates, muon, shared


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy that prints what Muon and shared rows get."""
    tree = copy_sources(tmp_path_factory.mktemp("tree") / "tree")
    insert(tree, at_step_end=AT_END)
    return tree


def test_the_learning_rate_rises_linearly_stays_and_falls_linearly(trained):
    given, rates, *_ = trained
    warmup, warmdown = min(given["warmup_steps"], N // 10), given["warmdown_ratio"] * N
    for step, rate in enumerate(rates):
        up = min(1, (step + 1) / warmup) if warmup else 1
        down = min(1, (N - step) / warmdown) if warmdown else 1
        assert rate == pytest.approx(up * (given["final_lr_frac"] * (1 - down) + down)), step


def test_muons_momentum_rises_over_a_third_of_a_short_run_and_falls_with_the_learning_rate(trained):
    _, rates, muon, _ = trained
    for step, (rate, groups) in enumerate(zip(rates, muon, strict=True)):
        expected = 0.85 + 0.1 * min(step / (N / 3), rate)
        assert groups and all(momentum == pytest.approx(expected) for momentum, _ in groups), step


def test_muons_weight_decay_falls_linearly_to_zero(trained):
    _, _, muon, _ = trained
    for step, groups in enumerate(muon):
        assert groups and all(decay == pytest.approx(1 - step / N) for _, decay in groups), step


def test_shared_rows_follow_half_of_the_schedule_and_all_of_it_where_text_is_read_again(trained):
    given, rates, _, shared = trained
    follows = 1 if "table_decay" in given else 0.5
    for step, (rate, groups) in enumerate(zip(rates, shared, strict=True)):
        assert groups and all(got == pytest.approx(1 - follows * (1 - rate)) for got in groups), step
