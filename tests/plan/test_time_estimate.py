"""The time of a step, before one is timed: its counts, and how it follows the machine."""

import types

import pytest
import torch

from nanochat.plan import scaling, simulation
from nanochat.plan.time_estimate import muon_flops, seconds_of_step


def config(depth=4, aspect_ratio=64, positions=512):
    return scaling.model_config(depth, aspect_ratio, 64, positions, 4096, "L")


def seconds(tokens, compiled=False, dtype=torch.bfloat16, device_type="cpu", peak_flops=1e12, **sizes):
    hardware = types.SimpleNamespace(device_type=device_type, dtype=dtype, peak_flops=peak_flops)
    return seconds_of_step(config(**sizes), tokens, compiled, hardware)


@pytest.mark.parametrize("aspect_ratio", [16, 48, 64, 128])  # the short cut begins at a width of 128
def test_muons_flops_by_formula_are_those_that_torch_counts(aspect_ratio):
    model = config(4, aspect_ratio)
    assert muon_flops(model) == pytest.approx(simulation.optimizer_flops(model, 1), rel=1e-3)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_step_takes_longer_than_its_products_and_half_the_time_on_a_machine_of_twice_the_peak(
    compiled, dtype
):
    found = seconds(4096, compiled, dtype)
    assert found > (4096 * scaling.on_meta(config()).flops_per_token() + muon_flops(config())) / 1e12
    assert seconds(4096, compiled, dtype, peak_flops=2e12) == pytest.approx(found / 2)


def test_small_models_and_small_batches_reach_less_of_the_peak():
    def mfu(tokens, **sizes):
        flops = tokens * scaling.on_meta(config(**sizes)).flops_per_token()
        return flops / seconds(tokens, **sizes) / 1e12

    assert mfu(4096, aspect_ratio=48) < mfu(4096, aspect_ratio=96) < 1
    assert mfu(1024) < mfu(8192)


def test_on_other_devices_a_share_of_the_peak_is_assumed():
    flops = 4096 * scaling.on_meta(config()).flops_per_token()
    assert seconds(4096, device_type="cuda") == pytest.approx(flops / 0.3e12)
