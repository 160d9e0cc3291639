"""The coordinate check: with the dial's rates, what the first steps change does not depend on the width."""

import pytest

from experiments import coordinates
from experiments.coordinates import MEASURED, RULES, measure, plot, slope, table

WIDTHS, STEPS = [64, 128, 256], 3
# The largest slope that counts as none. Where the width is four times as large, 0.1 is 15 % more and 0.25 is
# 41 %, which is what three steps of warm-up do to small matrices. Gates are not flat: docs/scale.md.
FLAT = dict.fromkeys(MEASURED, 0.25) | dict.fromkeys(("logits", "stream", "head"), 0.1)
del FLAT["gates"]


@pytest.fixture(scope="module")
def found():
    return {rule: measure(rule, WIDTHS, STEPS, seeds=1) for rule in RULES}


@pytest.mark.parametrize("name", FLAT)
def test_with_the_rates_of_the_dial_a_change_is_as_large_at_every_width(found, name):
    assert set(found["dial"][name]) == set(WIDTHS)
    assert abs(slope(found["dial"][name])) < FLAT[name]


def test_with_the_rule_before_the_heads_update_grows_and_that_of_value_embeddings_shrinks(found):
    slopes = {name: slope(sizes) for name, sizes in found["old"].items()}
    assert 0.4 < slopes["head"] < 0.6 and slopes["logits"] > 0.25
    assert -0.6 < slopes["value_embeddings"] < -0.4


def test_without_a_factor_for_the_width_the_heads_update_grows_with_it(monkeypatch):
    fixed = coordinates.dial_rates(768)
    monkeypatch.setitem(RULES, "dial", lambda width: fixed)
    assert 0.85 < slope(measure("dial", [64, 256], 2, seeds=1)["head"]) < 1.15


def test_a_change_of_one_kind_is_that_of_its_own_weights_alone():
    """With a rate of 0 for all others, the change of the logits is that of the head's update."""
    rates = dict.fromkeys(coordinates.dial_rates(64), 0.0)
    sizes = coordinates.changes(64, rates | {"unembedding_lr": 0.1}, 2, seed=0)
    assert sizes["logits"] == pytest.approx(sizes["head"], rel=1e-4) and sizes["head"] > 0.1
    others = [size for name, size in sizes.items() if name not in ("logits", "head")]
    assert others == [0] * len(others)


def test_the_rates_are_those_of_a_run_and_meet_the_settings_at_the_reference_width():
    at_reference = {name: coordinates.DEFAULTS[name] for name in coordinates.dial_rates(768)}
    for rates in RULES.values():
        assert rates(768) == pytest.approx(at_reference)
        assert rates(192)["matrix_lr"] == at_reference["matrix_lr"]
    assert RULES["dial"](192)["unembedding_lr"] == pytest.approx(4 * at_reference["unembedding_lr"])
    assert RULES["old"](192)["embedding_lr"] == pytest.approx(2 * at_reference["embedding_lr"])


def test_the_slope_of_a_power_of_the_width_is_its_exponent():
    for exponent in (-0.5, 0.0, 1.0):
        assert slope({w: 3 * w**exponent for w in (128, 256, 512, 1024)}) == pytest.approx(exponent)


def test_the_table_and_the_picture_show_everything_that_is_measured(tmp_path):
    made_up = {
        "dial": {name: {128: 1.0, 256: 1.0, 512: 1.0} for name in MEASURED},
        "old": {name: {128: 1.0, 256: 2.0} for name in MEASURED},
    }
    lines = table(made_up).splitlines()
    assert lines[0] == "| change of | 128 | 256 | 512 | slope | slope with the old rule |"
    assert lines[2:] == [f"| {words} | 1 | 1 | 1 | +0.00 | +1.00 |" for words in MEASURED.values()]
    plot(made_up, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_up_to_width_1024_the_changes_stay_as_large():
    sizes = measure("dial", coordinates.widths_up_to(1024), coordinates.steps, seeds=1)
    for name, most in FLAT.items():
        assert abs(slope(sizes[name])) < most, name
