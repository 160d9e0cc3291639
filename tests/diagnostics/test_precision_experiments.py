"""The experiments behind docs/precision.md: what the page concludes holds on any machine."""

import pytest
import torch
from helpers import run
from small_model import BF16, F16

import experiments.autocast_rules as rules
import experiments.precision_experiments as experiments


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table, without its head."""
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def test_bfloat16_has_float32s_range_and_float16_more_digits():
    table = {name: rest for name, *rest in cells(experiments.formats())}
    bits = [table[name][0] for name in ("float32", "bfloat16", "float16")]
    assert bits == ["1 + 8 + 23", "1 + 8 + 7", "1 + 5 + 10"]
    assert table["float16"][6] == "inf" and table["bfloat16"][6] == "70144"


def test_autocasts_lists_asked_of_fake_tensors_are_those_of_the_real_cpu():
    probes = [probe for group in rules.PROBES.values() for probe in group]
    for low in (BF16, F16):
        for probe in probes:
            assert rules.policy(probe, "cpu", low) == rules.policy(probe, "cpu", low, fake=False)
    assert not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")
    assert torch.get_autocast_dtype("cpu") == BF16  # torch's default, though float16 was asked last
    cuda = {name: rules.policy(group[0], "cuda") for name, group in rules.PROBES.items()}
    cpu = {name: rules.policy(group[0], "cpu") for name, group in rules.PROBES.items()}
    assert (cuda["softmax, log_softmax"], cpu["softmax, log_softmax"]) == ("float32", "as its input")
    assert cuda["linear, matmul, bmm"] == cpu["linear, matmul, bmm"] == "low"
    assert cuda["gelu, relu, tanh, sigmoid"] == cpu["gelu, relu, tanh, sigmoid"] == "as its input"


def test_products_add_up_in_more_than_their_dtype_and_fused_attention_rounds_less():
    shares = {row[1]: float(row[2].rstrip(" %")) for row in cells(experiments.accumulation((BF16,)))}
    assert shares["`a @ b`"] > 98 and shares["every partial sum rounded"] < 20
    errors = experiments.attention_errors()
    assert errors["exact, rounded once"] < errors["fused (SDPA)"] < errors["by hand, softmax in float32"]


def test_operators_of_bfloat16_numbers_compute_in_float32_inside():
    for name, (operator, steps) in experiments.inside().items():
        assert operator > 0.999 > 0.5 > steps, name


def test_gradients_underflow_in_float16_without_scaling_and_in_nothing_else():
    figures = experiments.underflow_figures(64)
    lost, distance = ({name: f[i] for name, f in figures.items()} for i in (0, 1))
    assert lost["float16"] > 0.0002 > 1000 * lost["bfloat16"]
    assert lost["float16, loss x 65,536"] < lost["float16"] / 100
    assert distance["float16, loss x 65,536"] < distance["float16"] / 3
    assert distance["float16, loss x 65,536"] < distance["bfloat16"] / 3  # three more bits


def test_small_updates_are_lost_in_short_formats():
    lost = experiments.lost_updates()
    assert lost["float32"] == 0 and 0.02 < lost["bfloat16"] < 0.5 < lost["int8"] < lost["int4"]
    squares = experiments.vanished_squares()
    assert squares["float32"] == squares["bfloat16"] == 0 and squares["float16"] > 0.1


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


@pytest.mark.slow
def test_the_command_of_the_experiments_prints_their_tables():
    printed = run(["experiments.precision_experiments"])
    assert len([line for line in printed.splitlines() if line.startswith("| ")]) > 70
