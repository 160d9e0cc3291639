"""The softcapped cross-entropy: against one written out in float64, and in pieces against whole."""

import math

import pytest
import torch

from nanochat.loss import SOFTCAP, softcap, softcapped_cross_entropy

REDUCTIONS = ["mean", "sum", "none"]


def random_problem(N=23, C=8, V=31, scale=3.0):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, C, generator=generator).requires_grad_()
    weight = (scale * torch.randn(V, C, generator=generator)).requires_grad_()
    targets = torch.randint(V, (N,), generator=generator)
    targets[torch.rand(N, generator=generator) < 0.3] = -1
    return x, weight, targets


def slow_losses(x, weight, targets):
    """Row by row in float64: log of the sum of exponentials, minus the target's logit; 0 if not scored."""
    losses = []
    for row, target in zip(x.double(), targets.tolist(), strict=True):
        logits = SOFTCAP * torch.tanh((weight.double() @ row) / SOFTCAP)
        losses.append(logits.exp().sum().log() - logits[target] if target >= 0 else logits.sum() * 0)
    return torch.stack(losses)


def reduced(losses, targets, reduction):
    if reduction == "none":
        return losses
    return losses.sum() / ((targets >= 0).sum() if reduction == "mean" else 1)


def gradients(loss, x, weight):
    return torch.autograd.grad(
        (loss * torch.linspace(1, 2, loss.numel()).view(loss.shape)).sum(), (x, weight)
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("chunk_rows", [0, 1, 4, 22, 23, 100])
def test_value_and_gradients_are_those_written_out_in_any_chunks(reduction, chunk_rows):
    x, weight, targets = random_problem()
    loss = softcapped_cross_entropy(x, weight, targets, reduction, chunk_rows)
    assert loss.dtype == torch.float32
    expected = reduced(slow_losses(x, weight, targets), targets, reduction)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    for ours, slow in zip(gradients(loss, x, weight), gradients(expected, x, weight), strict=True):
        torch.testing.assert_close(ours, slow, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_chunks_give_the_plain_loss_under_bfloat16_autocast_too(reduction):
    x, weight, targets = random_problem()
    results = []
    for chunk_rows in (0, 5):
        with torch.amp.autocast("cpu", torch.bfloat16):
            loss = softcapped_cross_entropy(x, weight, targets, reduction, chunk_rows)
        assert loss.dtype == torch.float32
        results.append((loss, *gradients(loss, x, weight)))
    for whole, pieces in zip(*results, strict=True):
        torch.testing.assert_close(pieces, whole, rtol=0.02, atol=0.02)


def test_chunks_whose_targets_are_all_unscored_count_for_nothing():
    x, weight, targets = random_problem()
    targets[:10] = -1
    whole = softcapped_cross_entropy(x, weight, targets)
    torch.testing.assert_close(softcapped_cross_entropy(x, weight, targets, chunk_rows=5), whole)


def test_in_chunks_nothing_of_the_size_of_all_logits_is_kept_for_the_backward_pass():
    x, weight, targets = random_problem(N=64, C=4, V=512)  # x and weight are kept in any case: 1/14 of it
    kept = {}

    def remember(tensor):
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    for chunk_rows, holds in ((0, True), (8, False)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            softcapped_cross_entropy(x, weight, targets, chunk_rows=chunk_rows)
        assert (sum(kept.values()) >= 64 * 512) == holds


def test_softcap_is_bounded_odd_rising_and_the_identity_near_zero():
    x = torch.linspace(-100, 100, 2001)
    y = softcap(x)
    assert y.abs().max() <= SOFTCAP
    assert (y.diff() >= 0).all()
    torch.testing.assert_close(softcap(-x), -y)
    torch.testing.assert_close(softcap(x / 1000), x / 1000, rtol=1e-3, atol=1e-6)
    assert softcap(torch.tensor([1e30, -1e30])).tolist() == [SOFTCAP, -SOFTCAP]
    assert softcap(x.bfloat16()).dtype == torch.float32


def test_no_loss_is_larger_than_the_softcap_allows():
    x, weight, targets = random_problem(scale=1e4)
    losses = softcapped_cross_entropy(x, weight, targets.clamp_min(0), "none")
    assert losses.max() <= 2 * SOFTCAP + math.log(weight.size(0))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("chunk_rows", [0, 1, 5, 100])
def test_without_gradients_the_value_is_the_same(reduction, chunk_rows):
    x, weight, targets = random_problem()
    with torch.no_grad():
        loss = softcapped_cross_entropy(x, weight, targets, reduction, chunk_rows)
    assert loss.dtype == torch.float32
    expected = reduced(slow_losses(x, weight, targets), targets, reduction)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=5e-6)
