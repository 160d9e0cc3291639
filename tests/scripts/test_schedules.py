"""The three schedules of base_train.py and the two of mid_train.py: what changes from step to step."""

from itertools import pairwise

import pytest
from helpers import schedules
from hypothesis import given, settings
from hypothesis import strategies as st

MANY = settings(max_examples=60, deadline=None)
RUN = {
    "num_iterations": st.integers(1, 3000),
    "warmup_steps": st.integers(-1, 400),
    "warmdown_ratio": st.floats(0, 1),
    "final_lr_frac": st.floats(0, 1),
}


@MANY
@given(**RUN)
def test_the_learning_rate_has_no_jumps_in_a_run_of_any_length(
    num_iterations, warmup_steps, warmdown_ratio, final_lr_frac
):
    multiplier, _, _ = schedules(num_iterations, warmup_steps, warmdown_ratio, final_lr_frac)
    warmdown = warmdown_ratio * num_iterations
    rise = 1 / warmup_steps if warmup_steps > 0 else 0
    fall = (1 - final_lr_frac) / max(1, warmdown) if warmdown > 0 else 0
    values = [multiplier(step) for step in range(num_iterations + 1)]
    for step, (now, then) in enumerate(pairwise(values)):
        assert -fall - 1e-9 <= then - now <= rise + 1e-9
        assert 0 <= now <= 1
        if step + 1 >= warmup_steps and num_iterations - step >= warmdown:
            assert now == pytest.approx(1)
    if warmup_steps <= num_iterations and warmdown > 0:
        assert values[-1] == pytest.approx(final_lr_frac)
    if warmup_steps > 0:
        assert values[0] <= rise + 1e-9


@MANY
@given(**RUN)
def test_muons_momentum_rises_evenly_and_falls_with_the_learning_rate(
    num_iterations, warmup_steps, warmdown_ratio, final_lr_frac
):
    multiplier, momentum, _ = schedules(num_iterations, warmup_steps, warmdown_ratio, final_lr_frac)
    values = [momentum(step) for step in range(num_iterations + 1)]
    ramp = min(300, max(1, num_iterations / 3))
    most = max(1 / ramp, 1 / warmup_steps if warmup_steps > 0 else 0)
    fall = (1 - final_lr_frac) / max(1, warmdown_ratio * num_iterations) if warmdown_ratio > 0 else 0
    assert values[0] == pytest.approx(0.85)
    assert all(0.85 <= value <= 0.95 + 1e-9 for value in values)
    assert all(-0.1 * fall - 1e-9 <= b - a <= 0.1 * most + 1e-9 for a, b in pairwise(values))
    for step, value in enumerate(values):
        if step >= ramp:
            assert value == pytest.approx(0.85 + 0.1 * multiplier(step))


@given(st.integers(1, 3000))
def test_weight_decay_falls_evenly_to_zero(num_iterations):
    _, _, decay = schedules(num_iterations)
    assert decay(0) == 1 and decay(num_iterations) == 0
    assert decay(num_iterations // 2) == pytest.approx(1 - num_iterations // 2 / num_iterations)


def test_the_momentum_of_mid_train_follows_its_rate():
    rate, momentum = schedules(100, warmup_steps=10, final_lr_frac=0.0, script="mid_train")
    assert [round(momentum(step), 9) for step in (0, 9, 20, 60, 100)] == [0.86, 0.95, 0.95, 0.9, 0.85]
    assert rate(60) == pytest.approx(0.5)
