"""The coordinate check: with the dial's rates, what the first steps change does not depend on the width."""

import pytest

from experiments import coordinates
from experiments.coordinates import MEASURED, dial_rates, measure, slope

WIDTHS, STEPS = [64, 128, 256], 3
# The largest slope that counts as none. Where the width is four times as large, 0.1 is 15 % more and 0.25 is
# 41 %, which is what three steps of warm-up do to small matrices. Gates are not flat: docs/scale.md.
FLAT = dict.fromkeys(MEASURED, 0.25) | dict.fromkeys(("logits", "stream", "head"), 0.1)
del FLAT["gates"]


@pytest.fixture(scope="module")
def found():
    return measure(WIDTHS, STEPS, seeds=1)


@pytest.mark.parametrize("name", FLAT)
def test_with_the_rates_of_the_dial_a_change_is_as_large_at_every_width(found, name):
    assert set(found[name]) == set(WIDTHS)
    assert abs(slope(found[name])) < FLAT[name]


def test_without_a_factor_for_the_width_the_heads_update_grows_with_it():
    assert 0.85 < slope(measure([64, 256], 2, seeds=1, rates_of=lambda width: dial_rates(768))["head"]) < 1.15


@pytest.mark.slow
def test_up_to_width_1024_the_changes_stay_as_large():
    sizes = measure(coordinates.widths_up_to(1024), coordinates.steps, seeds=1)
    for name, most in FLAT.items():
        assert abs(slope(sizes[name])) < most, name
