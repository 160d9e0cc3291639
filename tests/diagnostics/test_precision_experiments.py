"""The experiments behind docs/precision.md: what the page concludes holds on any machine."""

import pytest
from helpers import run

import experiments.precision_experiments as experiments


def test_gradients_underflow_in_float16_without_scaling_and_in_nothing_else():
    figures = experiments.underflow_figures(64)
    lost, distance = ({name: f[i] for name, f in figures.items()} for i in (0, 1))
    assert lost["float16"] > 0.0002 > 1000 * lost["bfloat16"]
    assert lost["float16, loss x 65,536"] < lost["float16"] / 100
    assert distance["float16, loss x 65,536"] < distance["float16"] / 3
    assert distance["float16, loss x 65,536"] < distance["bfloat16"] / 3  # three more bits


def test_an_overflow_changes_no_weight_and_halves_the_scale():
    records = experiments.scaler_steps()
    overflowed = [not r["norm"] < float("inf") for r in records]
    assert any(overflowed) and not all(overflowed)
    for record, bad, following in zip(records, overflowed, [*records[1:], None], strict=True):
        assert record["moved"] != bad
        if following and bad:
            assert following["scale"] == record["scale"] / 2
        elif following:
            assert following["scale"] in (record["scale"], 2 * record["scale"])
            assert record["scaled"] == pytest.approx(record["norm"] * record["scale"], rel=1e-3)


def test_one_of_the_experiments_can_be_asked_for():
    printed = run(["experiments.precision_experiments", "--what=formats"])
    assert "bfloat16" in printed and "underflow" not in printed


@pytest.mark.slow
def test_the_command_of_the_experiments_prints_their_tables():
    printed = run(["experiments.precision_experiments"])
    assert len([line for line in printed.splitlines() if line.startswith("| ")]) > 70
