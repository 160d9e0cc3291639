"""Every way attention is computed against one masked softmax, written out in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.attention import attention


def slow_attention(q, k, v, window):
    """One query at a time: the softmax over the positions it may see."""
    Tq, Tk, D = q.size(2), k.size(2), q.size(3)
    y = torch.empty_like(q)
    for i in range(Tq):
        position = Tk - Tq + i
        seen = slice(max(0, position - window + 1), position + 1)
        scores = (q[:, :, i, None] * k[:, :, seen]).sum(-1) / D**0.5  # (B, H, seen)
        y[:, :, i] = (scores.softmax(-1)[..., None] * v[:, :, seen]).sum(2)
    return y


def random_qkv(Tq, Tk, dtype, B=2, H=3, D=8):
    generator = torch.Generator().manual_seed(Tq * 1000 + Tk)
    return [torch.randn(B, H, T, D, generator=generator, dtype=torch.float64).to(dtype) for T in (Tq, Tk, Tk)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_attention_is_the_slow_one_for_any_lengths_and_window(data):
    Tk = data.draw(st.integers(1, 40), label="Tk")
    Tq = data.draw(st.one_of(st.just(Tk), st.just(1), st.integers(1, Tk)), label="Tq")
    divisors = [n for n in range(1, Tk + 1) if Tk % n == 0]
    window = data.draw(st.one_of(st.sampled_from(divisors), st.integers(1, 50)), label="window")
    dtype, close = data.draw(st.sampled_from([(torch.float64, 1e-12), (torch.float32, 1e-5)]), label="dtype")
    q, k, v = random_qkv(Tq, Tk, dtype)
    y = attention(q, k, v, window)
    assert y.dtype == dtype
    expected = slow_attention(q.double(), k.double(), v.double(), window)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=close)


@pytest.mark.parametrize("T, window", [(12, 4), (12, 12), (12, 5)])
def test_attention_in_bfloat16_is_within_its_rounding(T, window):
    q, k, v = random_qkv(T, T, torch.bfloat16)
    y = attention(q, k, v, window)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(
        y.double(), slow_attention(q.double(), k.double(), v.double(), window), rtol=0.02, atol=0.02
    )


@pytest.mark.parametrize("T, window", [(6, 6), (6, 2), (6, 3), (6, 1), (5, 2)])
def test_gradients_are_those_of_finite_differences(T, window):
    qkv = [x.requires_grad_() for x in random_qkv(T, T, torch.float64, B=1, H=2, D=2)]
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, window), qkv)


def test_gradients_of_the_banded_way_are_those_of_full_attention_under_a_mask():
    T, window = 32, 8
    qkv = [x.requires_grad_() for x in random_qkv(T, T, torch.float64)]
    weights = torch.randn(2, 3, T, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    distance = torch.arange(T)[:, None] - torch.arange(T)
    mask = (distance >= 0) & (distance < window)
    full = F.scaled_dot_product_attention(*qkv, attn_mask=mask)
    expected = torch.autograd.grad((full * weights).sum(), qkv)
    found = torch.autograd.grad((attention(*qkv, window) * weights).sum(), qkv)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("Tq, window", [(16, 16), (16, 4), (16, 5), (1, 5), (3, 5), (3, 99)])
def test_positions_outside_of_the_window_do_not_count_whatever_they_hold(Tq, window):
    Tk = 16
    q, k, v = random_qkv(Tq, Tk, torch.float64)
    y = attention(q, k, v, window)
    for position in range(Tk):
        k2, v2 = k.clone(), v.clone()
        k2[:, :, position] += 100
        v2[:, :, position] = -100
        moved = (attention(q, k2, v2, window) - y).abs().amax(dim=(0, 1, 3)) > 0  # (Tq,)
        own = torch.arange(Tk - Tq, Tk)
        sees = (own >= position) & (own - position < window)
        assert torch.equal(moved, sees), position


def test_a_window_that_divides_the_row_needs_no_mask_of_its_square():
    T, window = 1024, 32
    q, k, v = random_qkv(T, T, torch.float32, B=1, H=1, D=4)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        attention(q, k, v, window)
    assert 0 < largest <= 2 * T * window
