"""Runs on GPUs that are not here: counts against numbers worked out by hand, and what is refused."""

import importlib
import re

import pytest
import torch
from helpers import USUAL, run

from nanochat import UserError
from nanochat.plan import scaling, simulation
from nanochat.plan.simulation import known_device, simulate

H100 = known_device("H100")


def test_a_gpu_is_known_by_the_names_that_people_type():
    for typed in ("RTX4090", "rtx 4090", "4090", "NVIDIA GeForce RTX 4090"):
        assert known_device(typed).name == "RTX 4090"
    assert known_device("MI300").name == known_device("mi300x").name == "MI300X"
    with pytest.raises(UserError, match="H100"):
        known_device("H101")


C, L, V, T = 768, 12, 32768, 2048  # d12's width, layers, vocabulary, positions
GATES = L // 2 * C * 6 + L * C * 6 + L * 16  # of value embeddings, heads, the stream before
MATRICES = L * 12 * C * C + GATES  # query, key, value, out, 4 + 4 of the MLP
TABLES = L // 2 + 1 + 2 * scaling.FEWEST_BIGRAMS  # embedding, L / 2 - 1 of values, head, pairs and triples
D12 = MATRICES + TABLES * V * C + C * L + 18  # and scalars


def settings(**changes):
    return USUAL | {"plan": True, "depth": 12, "device": "H100", "world_size": 8} | changes


# -- Counts


def test_a_gpu_sends_over_its_link_and_to_another_machine_over_all_8_adapters():
    for world_size, rate in ((8, 450e9), (64, 8 * 50e9)):
        assert simulation.exchange_seconds(0.7 * rate, H100, world_size) == pytest.approx(1)


def test_the_optimizers_time_is_that_of_the_process_with_the_most_matrices():
    config = scaling.model_config(12, 64, 128, T, V, "L")
    block = 4 * 30 * C**3 + 2 * 60 * C**3
    of_heads = simulation.polar_factor_flops(6, C)  # the gates of the stream are too small to be shared out
    assert simulation.optimizer_flops(config, 1) == L * (block + 1.5 * of_heads)
    assert simulation.optimizer_flops(config, 12) < 1.1 * block
    assert simulation.optimizer_flops(config, 10**6) == 60 * C**3  # one matrix of an MLP
    tiny = scaling.model_config(1, 8, 8, T, V, "L")  # no matrix is large enough to be shared out
    assert simulation.optimizer_flops(tiny, 64) == 0


def test_the_plan_is_made_for_that_hardware():
    found = simulate(settings(depth=20, world_size=64))
    hardware = found.plan.hardware
    assert (hardware.device_type, hardware.world_size, hardware.dtype) == ("cuda", 64, torch.bfloat16)
    assert hardware.peak_flops == 64 * 989e12 and 77 * 2**30 < hardware.memory < 80 * 2**30
    assert found.plan == found.plan.with_largest_micro_batch() and found.plan.compiled
    assert found.plan.device_batch_size * found.plan.grad_accum_steps * 64 * T == found.plan.total_batch_size
    assert simulate(settings(vocab_size=4096)).plan.config.vocab_size == 4096


# -- The run


def test_the_time_of_a_step_is_its_flops_and_bytes_at_the_stated_efficiencies():
    found = simulate(settings())
    flops = 6 * (MATRICES + V * C) + 12 * C * L * T
    computing = flops * 2**19 / (8 * 0.41 * 989e12)
    optimizer = simulation.optimizer_flops(found.plan.config, 8) / (0.41 * 989e12)
    exchange = 2 * 4 * D12 * 7 / 8 / (0.7 * 450e9)  # gradients and weights: as much as DDP's all_reduce
    assert found.seconds == pytest.approx(
        {"forward and backward": computing, "optimizer": optimizer, "exchange": exchange}
    )
    assert found.hours == pytest.approx((computing + optimizer + exchange) * found.plan.num_iterations / 3600)
    assert found.mfu == pytest.approx(0.41 * computing / found.step_seconds)
    assert simulate(settings(world_size=1)).seconds["exchange"] == 0
    half = simulate(settings(gradient_dtype="bfloat16"))
    assert half.seconds["exchange"] == pytest.approx(0.75 * exchange)


def test_d12_on_an_h200_is_as_fast_as_it_was_measured():
    """1,052 ms a step (docs/benchmarks.md)."""
    assert simulate(settings(device="H200", world_size=1)).step_seconds == pytest.approx(1.052, rel=0.03)


def test_a_known_run_is_predicted_within_a_tenth():
    """karpathy/nanochat, d24 with fp8 on 8 H100s: 99 minutes in steps (its dev/LEADERBOARD.md, run 6). Its
    model has windows of a quarter in three layers of four, 8 tokens a parameter and about our sizes."""
    run_6 = settings(depth=24, fp8=True, target_param_data_ratio=8.0, window_pattern="SSSL")
    assert 60 * simulate(run_6).hours == pytest.approx(99, rel=0.1)


# -- In words


def test_the_page_has_memory_by_kind_and_the_price_of_the_run():
    page, found = simulation.page(settings(price_per_hour=24.0)), simulate(settings())
    for kind, size in found.plan.expected_memory.items():
        assert bool(re.search(rf"^  {kind} +{size / 2**30:.1f} GiB$", page, re.MULTILINE)) == (size > 0), kind
    assert f"{24 * found.hours:,.2f} at 24 an hour" in page
    assert "an hour" not in simulation.page(settings()) and "000,000,000,000" not in page


def test_a_run_by_minutes_takes_and_costs_these_minutes():
    minutes = settings(target_minutes=90.0, target_param_data_ratio=-1.0, price_per_hour=24.0)
    assert simulate(minutes).hours == 1.5
    page = simulation.page(minutes)
    assert "36.00 at 24 an hour" in page and "90 min from the command to its end" in page
    assert "come on top" not in page  # they are a part of the minutes


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"device": "H1000"}, r"device 'H1000' is not in the table .* give one of B200, H200, H100"),
        ({"device": None}, r"--world_size .* a cluster .* --device, such as H100"),
        ({"plan": False}, r"--device .* add --plan"),
        ({"dtype": "float32"}, r"the simulation of H100 computes in bfloat16; leave out --dtype"),
        ({"device": "A100", "fp8": True}, r"A100 cannot multiply in fp8; .* one of B200, H200, H100, L40S"),
    ],
)  # fmt: skip
def test_what_cannot_be_imagined_is_one_sentence(change, sentence):
    with pytest.raises(UserError, match=sentence):
        simulation.page(settings(**change))


def test_a_run_that_does_not_fit_is_planned_with_a_warning():
    page = simulation.page(settings(depth=60, world_size=1))
    assert "warning: this run needs about" in page and "are free; lower --depth to " in page
    assert "on this machine" not in page  # where this run would take years


def test_base_train_imagines_without_data_tokenizer_or_folder(tmp_path):
    base = tmp_path / "base"
    cluster = ["--plan", "--world_size=64", "--device=H100", "--depth=12"]
    said = run(["scripts.base_train", *cluster, f"--base_dir={base}"])
    assert "H100 x 64, imagined" in said and "memory of a process" in said and not base.exists()


# -- docs/scale.md


@pytest.mark.slow
def test_the_command_of_the_page_on_scale_has_a_row_for_each_depth(monkeypatch):
    monkeypatch.setattr("sys.argv", ["scale"])
    scale = importlib.import_module("experiments.scale")
    for table in (scale.speeds(), scale.limits()):
        assert all(f"\n| {depth} | " in table for depth in scale.DEPTHS)
    assert scale.deepest() > max(scale.DEPTHS)
