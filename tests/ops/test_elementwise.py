"""Norms, rotation and leaky ReLU squared: by hand and plain, against float64."""

from unittest import mock

import pytest
import torch

from nanochat.ops import elementwise

SCALE = 1.2
B, T, H, D = 2, 16, 3, 8
FUNCTIONS = {
    "norm": lambda x: elementwise.norm(x),
    "norm_and_rotate": lambda x: elementwise.norm_and_rotate(x, *angles(x.dtype), SCALE),
    "norm_and_rotate_shifted": lambda x: elementwise.norm_and_rotate(x, *angles(x.dtype), SCALE, True),
    "shift_in_documents": lambda x: elementwise.norm_and_rotate(x, *angles(x.dtype), SCALE, True, VISIBLE),
    "squared_leaky_relu": lambda x: elementwise.squared_leaky_relu(1 * x),
}
CLASSES = {
    "norm": elementwise._Norm,
    "norm_and_rotate": elementwise._NormAndRotate,
    "squared_leaky_relu": elementwise._SquaredLeakyReLU,
}
# A document begins at each of these positions of B x T, and in another form: who sees whom
VISIBLE = torch.tensor([0, 5, 6, 16, 20, 32, 32], dtype=torch.int32)
DTYPES = [torch.bfloat16, torch.float32]


def angles(dtype, shape=(T, 1, D // 2)):
    """(cos, cos) and (-sin, sin), as norm_and_rotate takes them."""
    a = 6 * torch.rand(*shape, generator=torch.Generator().manual_seed(1))
    return torch.cat((a.cos(), a.cos()), -1).to(dtype), torch.cat((-a.sin(), a.sin()), -1).to(dtype)


def draw(dtype, seed=0, spread=3.0):
    """(B, T, H, D), with vectors of very different lengths."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(spread * torch.randn(B, T, H, 1, generator=generator))
    return (size * torch.randn(B, T, H, D, generator=generator)).to(dtype)


def result_and_gradient(way, function, x, dy, monkeypatch):
    """The result and the gradient of x, with one of the three ways of computing both."""
    monkeypatch.setattr(elementwise, "_by_hand", lambda x: way == "by hand")
    if way == "compiled":
        torch._dynamo.reset()
        function = torch.compile(function, backend="aot_eager")
    x = x.detach().clone().requires_grad_()
    y = function(x)
    assert y.dtype == x.dtype
    return y.detach(), *torch.autograd.grad(y, x, dy)


def error(got, exact) -> float:
    """The RMS error of each vector, relative to its length; the largest of them."""
    got, exact = got.double(), exact.double()
    length = exact.norm(dim=-1).clamp_min(1e-30)
    return ((got - exact).norm(dim=-1) / length).max().item()


@pytest.mark.parametrize("way", ["by hand", "compiled"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_and_gradients_are_as_near_to_float64_as_those_of_the_plain_formulas(
    name, dtype, way, monkeypatch
):
    x, dy = draw(dtype), draw(dtype, seed=2, spread=1.0)
    if name == "squared_leaky_relu":
        torch.testing.assert_close(FUNCTIONS[name](x.clone()), torch.where(x > 0, x, x / 2) ** 2)
    exact = result_and_gradient("plain", FUNCTIONS[name], x.double(), dy.double(), monkeypatch)
    plain = result_and_gradient("plain", FUNCTIONS[name], x, dy, monkeypatch)
    found = result_and_gradient(way, FUNCTIONS[name], x, dy, monkeypatch)
    for got, other, wanted in zip(found, plain, exact, strict=True):
        assert error(got, wanted) <= max(1.5 * error(other, wanted), 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("by_hand", [True, False])
def test_rows_may_have_positions_of_their_own(by_hand, monkeypatch):
    monkeypatch.setattr(elementwise, "_by_hand", lambda x: by_hand)
    x, (cos, sin) = draw(torch.float32), angles(torch.float32, (B, T, 1, D // 2))
    together = elementwise.norm_and_rotate(x, cos, sin, SCALE)
    for row in range(B):
        alone = elementwise.norm_and_rotate(x[row : row + 1], cos[row], sin[row], SCALE)
        torch.testing.assert_close(together[row : row + 1], alone)


@pytest.mark.parametrize("name", CLASSES)
def test_by_hand_only_without_compiling_and_not_in_float16(name, monkeypatch):
    by_hand = mock.Mock(wraps=CLASSES[name].forward)
    monkeypatch.setattr(CLASSES[name], "forward", by_hand)
    function = FUNCTIONS[name]
    function(draw(torch.float16))
    torch.compile(function, backend="eager")(draw(torch.bfloat16).requires_grad_())
    by_hand.assert_not_called()
    function(draw(torch.bfloat16).requires_grad_())
    by_hand.assert_called_once()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_vector_of_zeros_has_a_finite_gradient(name, dtype):
    x = torch.zeros(B, T, H, D, dtype=dtype, requires_grad=True)
    y = FUNCTIONS[name](x)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert not y.any() and gradient.isfinite().all()
