"""Bits per byte against a count by hand, token by token."""

import math

import pytest
import torch

from nanochat.evaluate import bits_per_byte
from nanochat.gpt import GPT, GPTConfig
from nanochat.runtime import Machine

ALONE = Machine(torch.device("cpu"))
V, T = 50, 16


@pytest.fixture(scope="module")
def problem():
    """A model, 12 rows of inputs and targets, a third of them not scored, and a length for each token."""
    model = GPT(GPTConfig(2, 32, 2, V, T))
    generator = torch.Generator().manual_seed(0)
    model.init_weights(generator)
    model.head.weight.data.normal_(generator=generator)
    inputs = torch.randint(V, (12, T), generator=generator)
    targets = torch.randint(V, (12, T), generator=generator)
    targets[torch.rand(12, T, generator=generator) < 0.3] = -1
    targets[7] = -1  # a row of padding
    token_bytes = torch.randint(1, 9, (V,), generator=generator)
    return model, inputs, targets, token_bytes


def in_batches(inputs, targets, size):
    return zip(inputs.split(size), targets.split(size), strict=True)


@torch.no_grad()
def by_hand(model, inputs, targets, token_bytes):
    bits, count = 0.0, 0
    for row, row_targets in zip(inputs, targets.tolist(), strict=True):
        probabilities = model(row[None])[0].double().softmax(-1)
        for position, target in enumerate(row_targets):
            if target != -1:
                bits -= math.log2(probabilities[position, target])
                count += token_bytes[target].item()
    return bits / count


@pytest.mark.parametrize("batch_size", [1, 5, 12])
def test_bits_per_byte_is_the_count_by_hand_for_any_batch_size(problem, batch_size):
    model, inputs, targets, token_bytes = problem
    batches = in_batches(inputs, targets, batch_size)
    found = bits_per_byte(model, batches, token_bytes, torch.float32, ALONE)
    assert found == pytest.approx(by_hand(model, inputs, targets, token_bytes), rel=1e-6)


def test_unscored_targets_count_neither_as_bits_nor_as_bytes(problem):
    model, inputs, targets, token_bytes = problem
    rows = (targets >= 0).any(1)
    all_rows = bits_per_byte(model, in_batches(inputs, targets, 4), token_bytes, torch.float32, ALONE)
    some = in_batches(inputs[rows], targets[rows], 4)
    assert bits_per_byte(model, some, token_bytes, torch.float32, ALONE) == pytest.approx(all_rows, rel=1e-6)


def test_a_uniform_model_spends_the_logarithm_of_the_vocabulary_on_each_token(problem):
    _, inputs, targets, token_bytes = problem
    fresh = GPT(GPTConfig(1, 32, 2, V, T))
    fresh.init_weights()
    fresh.head.weight.data.zero_()
    scored = targets[targets >= 0]
    expected = math.log2(V) * len(scored) / token_bytes[scored].sum().item()
    found = bits_per_byte(fresh, in_batches(inputs, targets, 4), token_bytes, torch.float32, ALONE)
    assert found == pytest.approx(expected, rel=1e-6)


def test_bfloat16_is_evaluated_under_autocast_and_comes_close(problem):
    model, inputs, targets, token_bytes = problem
    exact = bits_per_byte(model, in_batches(inputs, targets, 4), token_bytes, torch.float32, ALONE)
    rough = bits_per_byte(model, in_batches(inputs, targets, 4), token_bytes, torch.bfloat16, ALONE)
    assert rough != exact and rough == pytest.approx(exact, rel=0.02)


def test_where_nothing_is_scored_there_is_no_number(problem):
    model, inputs, targets, token_bytes = problem
    nothing = [(inputs, torch.full_like(targets, -1))]
    assert math.isnan(bits_per_byte(model, nothing, token_bytes, torch.float32, ALONE))
    assert math.isnan(bits_per_byte(model, [], token_bytes, torch.float32, ALONE))


def test_evaluation_leaves_no_gradient_behind(problem):
    model, inputs, targets, token_bytes = problem
    model.zero_grad()
    bits_per_byte(model, in_batches(inputs, targets, 4), token_bytes, torch.float32, ALONE)
    assert all(p.grad is None for p in model.parameters())
