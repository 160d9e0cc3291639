"""The rules from depth to everything else, each against its formula, and refusals whose advice works."""

import math
import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nanochat import UserError
from nanochat.plan import scaling
from nanochat.plan.counts import flops_per_token, on_meta, scaling_parameters

SIZES = {"aspect_ratio": 64, "head_dim": 128, "max_seq_len": 2048, "vocab_size": 32768, "window_pattern": "L"}
FEW = settings(max_examples=25)
MANY = settings(max_examples=100)


def config(depth=4, **changes):
    return scaling.model_config(depth, **{**SIZES, **changes})


def horizon(model, num_iterations=-1, flops=-1.0, ratio=-1.0, batch=-1):
    return scaling.derive_horizon(model, num_iterations, flops, ratio, batch)


# -- Width


@given(st.integers(1, 60), st.integers(1, 200), st.integers(1, 128).map(lambda n: 2 * n))
def test_width_is_depth_times_aspect_ratio_in_whole_heads(depth, aspect_ratio, head_dim):
    model = config(depth, aspect_ratio=aspect_ratio, head_dim=head_dim)
    assert model.head_dim == head_dim and model.width == model.num_heads * head_dim
    assert 0 <= model.width - depth * aspect_ratio < head_dim


@pytest.mark.parametrize(
    "setting, value, says",
    [
        ("head_dim", 7, "even"),
        ("window_pattern", "", "window_pattern"),
        ("window_pattern", "LX", "window_pattern is 'LX'"),
    ],
)
def test_sizes_that_no_model_can_have_are_refused_in_one_sentence(setting, value, says):
    with pytest.raises(UserError, match=says) as refusal:
        config(**{"depth": 4, setting: value})
    assert "\n" not in str(refusal.value)


def width(flops, depth=4, head_dim=64, before=None, **changes):
    """The width with which a run of so many FLOPs begins, if nobody gives an aspect ratio."""
    given = {"aspect_ratio": -1, "depth": depth, "head_dim": head_dim, "max_seq_len": 512} | changes
    ratio = scaling.aspect_ratio_for(given, 4096, flops, before or {})
    return config(depth, aspect_ratio=ratio, head_dim=head_dim, vocab_size=4096, max_seq_len=512).width


@MANY  # an aspect ratio is a whole number, so a model of more layers than a head has channels can lose a head
@given(st.integers(1, 12), st.integers(2, 32), st.sampled_from([32, 64, 128]))
def test_the_width_is_the_one_that_reads_the_best_number_of_tokens_for_a_parameter(heads, depth, head_dim):
    assume(heads * head_dim <= 64 * depth)
    model = config(depth, aspect_ratio=1, head_dim=head_dim, vocab_size=4096, max_seq_len=512)
    model = replace(model, width=heads * head_dim, num_heads=heads)
    tokens = scaling.BEST_RATIO * scaling_parameters(model)
    flops = tokens * flops_per_token(on_meta(model))
    assert width(flops, depth, head_dim) == model.width


def test_the_width_is_64_a_layer_unless_flops_decide_the_run_or_somebody_says_otherwise():
    assert width(0) == width(-1) == width(1e18) == 256 and width(1e10) == 64
    assert width(1e10, aspect_ratio=48) == 192 and width(1e10, before={"aspect_ratio": 48}) == 192
    assert width(1e10, before={"fp8": False}) == 256  # begun before there was a rule
    for depth in (4, 12, 24):  # as many tokens as the default asks for
        model = config(depth)
        tokens = scaling.REFERENCE_RATIO * scaling_parameters(model)
        flops = tokens * flops_per_token(on_meta(model))
        given = {"aspect_ratio": -1, "depth": depth, "head_dim": 128, "max_seq_len": 2048}
        assert scaling.aspect_ratio_for(given, 32768, flops, {}) == scaling.WIDEST


# -- Horizon


def test_the_first_positive_one_of_iterations_flops_and_ratio_decides():
    model = config(4)
    batch, parameters = 2**14, scaling_parameters(model)
    given_steps = horizon(model, num_iterations=7, flops=1e18, ratio=20, batch=batch)
    by_flops = horizon(model, flops=1e15, ratio=20, batch=batch)
    by_ratio = horizon(model, ratio=20, batch=batch)
    assert (given_steps.num_iterations, given_steps.tokens) == (7, 7 * batch)
    assert by_flops.num_iterations == round(1e15 / flops_per_token(on_meta(model)) / batch)
    assert by_ratio.num_iterations == round(20 * parameters / batch)
    with pytest.raises(UserError, match="num_iterations"):
        horizon(model, batch=batch)
    assert horizon(model, flops=1.0, batch=batch).num_iterations == 1  # never none


def test_a_horizon_of_more_steps_than_a_run_can_have_is_refused_and_minutes_are_cut():
    off = dict.fromkeys(("num_iterations", "target_minutes", "target_param_data_ratio"), -1)
    given = off | {"total_batch_size": -1, "aspect_ratio": -1, "depth": 1, "head_dim": 16, "max_seq_len": 64}
    given |= {"window_pattern": "L", "bigrams": -1, "target_flops": 1e30}
    with pytest.raises(UserError, match=r"1e\+30 FLOPs / .* steps, and a run has at most 1,000,000,000"):
        scaling.horizon_of(given, 512, 1e12, {})
    _, horizon = scaling.horizon_of(given | {"target_flops": -1.0, "target_minutes": 1e6}, 512, 1e18, {})
    assert horizon.num_iterations == scaling.MOST_STEPS


def test_the_reference_model_at_its_own_horizon_gets_the_reference_batch():
    reference = horizon(config(12), ratio=12)
    assert reference.total_batch_size == scaling.REFERENCE_BATCH
    tokens = 12 * scaling_parameters(config(12))
    assert reference.d12_tokens == tokens
    assert abs(reference.tokens - tokens) <= reference.total_batch_size / 2


@FEW
@given(st.floats(6, 13), st.sampled_from([64, 512, 2048, 3000]))
def test_the_batch_grows_with_tokens_in_powers_of_two_rows_and_faster_below_d12(log_tokens, T):
    tokens, d12_tokens = 10**log_tokens, 1.3e9
    batch = scaling.best_batch(tokens, d12_tokens, T)
    rows = batch / T
    assert rows == 2 ** round(math.log2(rows)) and rows >= 1
    exact = 2**19 * min((tokens / d12_tokens) ** 0.383, (tokens / d12_tokens) ** 0.77)
    assert rows == 1 or abs(math.log2(batch / exact)) <= 0.5 + 1e-9
    assert scaling.best_batch(2 * tokens, d12_tokens, T) >= batch


@FEW
@given(st.integers(1, 10**6), st.sampled_from([64, 512, 2048]))
def test_with_the_steps_given_the_batch_is_the_best_one_for_the_tokens_it_makes(steps, T):
    d12_tokens = 1.3e9
    low, high = 1e-12, 1e12  # B = 2^19 (steps B / d12_tokens)^exponent has one solution: bisect for it
    for _ in range(200):
        middle = math.sqrt(low * high)
        ratio = steps * middle / d12_tokens
        grows = 2**19 * min(ratio**0.383, ratio**0.77) > middle
        low, high = (middle, high) if grows else (low, middle)
    batch = scaling.best_batch(scaling.tokens_of_steps(steps, d12_tokens), d12_tokens, T)
    assert batch == T or abs(math.log2(batch / low)) <= 0.5 + 1e-6
    assert batch >= T and batch % T == 0


# -- Rows that n-grams share


def bigrams_for(V, tokens, data_tokens, setting=-1, before=None, width=768):
    given = {"spelling": "auto", "bigrams": setting, "copying": "auto"}
    config, length = scaling.model_config(1, width, width, 256, V, "L"), scaling.Horizon(tokens, 1, 0, "", "")
    return scaling.tables_for(given, config, length, data_tokens, before or {})["bigrams"]


@FEW
@given(st.integers(256, 2**20), st.integers(1, 10**10), st.integers(1, 10**10), st.sampled_from([64, 768]))
def test_rows_grow_with_the_tokens_that_are_new_up_to_an_end(V, tokens, data_tokens, width):
    rows = V * bigrams_for(V, tokens, data_tokens, width=width)
    assert 8 * V <= rows <= max(8 * V, 2**27 / width)
    assert 8 * V <= V * bigrams_for(V, tokens // 2, data_tokens, width=width) <= rows
    assert rows <= max(8 * V, min(tokens, data_tokens) / 16)


def test_rows_are_those_of_the_setting_or_of_the_runs_first_start():
    assert bigrams_for(2048, 10**9, 10**9, setting=3) == 3 and bigrams_for(2048, 10**9, 10**9, setting=0) == 0
    assert bigrams_for(2048, 10**9, 10**9, before={"bigrams": 20}) == 20


# -- Batch: refusals offer numbers that are then taken


def numbers_offered(refusal):
    offer = re.search(r"use (.+?)(; or use --device_batch_size=\d+)?$", str(refusal.value)).group(1)
    numbers = [int(n) for n in offer.split(" or ")]
    assert all(n > 0 for n in numbers)
    return numbers


@MANY
@given(
    st.one_of(st.integers(1, 20_000), st.integers(1, 40).map(lambda n: 512 * n)),
    st.sampled_from([1, 7, 512, 2048]),
    st.one_of(st.just(-1), st.integers(1, 40)),
    st.integers(1, 9),
)
def test_batches_that_do_not_come_out_even_are_refused_with_some_that_do(batch, T, device_rows, world_size):
    unit = T * world_size * max(1, device_rows)
    if batch % unit == 0:
        rows = scaling.rows_per_process(batch, T, device_rows, world_size)
        assert rows * world_size * T == batch and rows % max(1, device_rows) == 0
        return
    with pytest.raises(UserError, match=f"{batch} is not a multiple of .* = {unit}") as refusal:
        scaling.rows_per_process(batch, T, device_rows, world_size)
    for n in numbers_offered(refusal):
        assert scaling.rows_per_process(n, T, device_rows, world_size) * world_size * T == n
    if fewer := re.search(r"--device_batch_size=(\d+)$", str(refusal.value)):
        even = [n for n in range(1, device_rows) if batch % (n * T * world_size) == 0]
        assert int(fewer[1]) == even[-1]
    else:
        assert device_rows == -1 or batch % (T * world_size)


# -- Rates


BATCHES, TOKENS = st.sampled_from([2**11, 2**15, 2**20]), st.floats(1e6, 1e12)
D12_TOKENS = 1.3e9


def test_rates_and_decay_hold_as_they_stand_at_the_reference():
    assert scaling.rate_scale(2**19, D12_TOKENS, D12_TOKENS) == 1
    assert scaling.scaled_weight_decay(0.2, 1.0, 2**19, D12_TOKENS, D12_TOKENS) == 0.2


@given(BATCHES, TOKENS)
def test_rates_go_with_the_root_of_the_batch_fall_with_the_horizon_and_have_an_end(batch, tokens):
    scale = scaling.rate_scale(batch, tokens, D12_TOKENS)
    assert 0 < scale <= 2
    assert scaling.rate_scale(batch, 2 * tokens, D12_TOKENS) <= scale
    assert scaling.rate_scale(4 * batch, tokens, D12_TOKENS) == pytest.approx(min(2, 2 * scale))


@given(BATCHES, TOKENS)
def test_weight_decay_forgets_over_the_same_share_of_any_run_that_is_not_very_short(batch, tokens):
    """Decay averages over 1 / (rate x decay) steps; that is to be the same share of any run's steps."""

    def decay_and_share(batch, tokens):
        scale = scaling.rate_scale(batch, tokens, D12_TOKENS)
        decay = scaling.scaled_weight_decay(0.28, scale, batch, tokens, D12_TOKENS)
        return scale * decay, 1 / (0.02 * scale * decay) / (tokens / batch)

    decay, share = decay_and_share(batch, tokens)
    _, reference = decay_and_share(2**19, D12_TOKENS)
    most = 0.28 * scaling.MOST_DECAY
    if decay < 0.999 * most:
        assert share == pytest.approx(reference)
    else:
        assert decay == pytest.approx(most) and share >= 0.999 * reference
