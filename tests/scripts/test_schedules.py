"""What changes from step to step, as a run records it and as its optimizer gets it, against formulas."""

import json
import re

import pytest
from helpers import command, copy_sources, insert, records, run_tree

N = 40  # steps of a run; warm-up takes at most a tenth of them
AT_END = "groups = [g for g in optimizer.param_groups if g.get('method') == 'muon']\n" + (
    "print('muon', [[g['betas'][0], g['weight_decay'] / g['initial_weight_decay']] for g in groups])"
)
CASES = [
    {"warmup_steps": 3, "warmdown_ratio": 0.5, "final_lr_frac": 0.1},
    {"warmup_steps": 40, "warmdown_ratio": 1.0, "final_lr_frac": 0.0},
    {"warmup_steps": 0, "warmdown_ratio": 0.0, "final_lr_frac": 0.05},
]


@pytest.fixture(scope="module", params=CASES, ids=["both", "longest", "constant"])
def trained(request, sources, corpus, tmp_path_factory):
    """The settings of a run; by step, its multiplier of the rates, and [momentum, share of the weight decay]
    of each of Muon's groups."""
    out, given = tmp_path_factory.mktemp("schedules") / "run", request.param
    more = [f"--{name}={value}" for name, value in given.items()]
    once = ["--total_batch_size=64", "--eval_every=-1", "--save_every=-1", f"--num_iterations={N}"]
    printed = run_tree(sources, command(corpus, out, *once, *more))
    rates = [record["lr_multiplier"] for record in records(out) if "loss" in record]
    muon = [json.loads(line) for line in re.findall(r"^muon (.+)$", printed, re.MULTILINE)]
    assert len(rates) == len(muon) == N
    return given, rates, muon


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy that prints what Muon gets."""
    tree = copy_sources(tmp_path_factory.mktemp("tree") / "tree")
    insert(tree, at_step_end=AT_END)
    return tree


def test_the_learning_rate_rises_linearly_stays_and_falls_linearly(trained):
    given, rates, _ = trained
    warmup, warmdown = min(given["warmup_steps"], N // 10), given["warmdown_ratio"] * N
    for step, rate in enumerate(rates):
        up = min(1, (step + 1) / warmup) if warmup else 1
        down = min(1, (N - step) / warmdown) if warmdown else 1
        assert rate == pytest.approx(up * (given["final_lr_frac"] * (1 - down) + down)), step


def test_muons_momentum_rises_over_a_third_of_a_short_run_and_falls_with_the_learning_rate(trained):
    _, rates, muon = trained
    for step, (rate, groups) in enumerate(zip(rates, muon, strict=True)):
        expected = 0.85 + 0.1 * min(step / (N / 3), rate)
        assert groups and all(momentum == pytest.approx(expected) for momentum, _ in groups), step


def test_muons_weight_decay_falls_linearly_to_zero(trained):
    *_, muon = trained
    for step, groups in enumerate(muon):
        assert groups and all(decay == pytest.approx(1 - step / N) for _, decay in groups), step
