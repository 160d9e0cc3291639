"""The softcapped cross-entropy: against one written out in float64, in chunks of any size, and compiled."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nanochat.ops.loss
from nanochat.ops import kernels
from nanochat.ops.kernels import distance
from nanochat.ops.loss import SOFTCAP, softcap, softcapped_cross_entropy


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


@pytest.fixture
def in_chunks_of(monkeypatch):
    """in_chunks_of(n): from now on n rows are a chunk, on any device and in any dtype."""
    return lambda rows: monkeypatch.setattr(nanochat.ops.loss, "chunk_rows", lambda *_, **__: rows)


@pytest.fixture(params=["plain", "kernel"])
def way(request, monkeypatch):
    """Both ways of a chunk; on a CPU the operators of the kernels have a plain implementation."""
    monkeypatch.setattr(kernels, "IN_USE", {"loss", "head"} if request.param == "kernel" else set())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [1, 4, 22, 23, 100])
def test_value_and_gradients_are_those_written_out_in_chunks_of_any_size(reduction, rows, in_chunks_of, way):
    in_chunks_of(rows)
    x, weight, targets = random_problem()
    loss = softcapped_cross_entropy(x, weight, targets, reduction)
    with torch.no_grad():
        value = softcapped_cross_entropy(x, weight, targets, reduction)
    expected = reduced(slow_losses(x, weight, targets), targets, reduction)
    for found in (loss, value):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=5e-6)
    for ours, slow in zip(gradients(loss, x, weight), gradients(expected, x, weight), strict=True):
        torch.testing.assert_close(ours, slow, rtol=1e-4, atol=1e-5)
        assert distance(ours, slow.double()) < 2e-6


@pytest.mark.parametrize("vocab_size, N", [(257, 1), (4099, 300), (50_021, 3), (7, 1025)])
def test_sizes_that_nothing_divides_give_the_plain_loss_and_its_gradients(vocab_size, N):
    x, weight, targets = random_problem(N=N, V=vocab_size, scale=0.3)
    targets[0] = 1
    loss = softcapped_cross_entropy(x, weight, targets)
    plain = F.cross_entropy(
        SOFTCAP * torch.tanh(x.double() @ weight.double().T / SOFTCAP), targets, ignore_index=-1
    )
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    for ours, theirs in zip(gradients(loss, x, weight), gradients(plain, x, weight), strict=True):
        assert distance(ours, theirs.double()) < 5e-6  # float32's rounding in a sum of V exponentials


def rounding(problem, dtype, loss_of, scale=1.0):
    """How far the gradients of x and of the weight are from float64's, if x has `dtype` and the loss is
    multiplied by `scale`, and one of them divided by it."""
    x, weight, targets = problem
    low = x.detach().to(dtype).requires_grad_()
    exact = low.detach().double().requires_grad_(), weight.detach().to(dtype).double().requires_grad_()
    expected = gradients(reduced(slow_losses(*exact, targets), targets, "mean"), *exact)
    found = torch.autograd.grad(scale * loss_of(low, weight, targets), (low, weight))
    assert [g.dtype for g in found] == [dtype, weight.dtype]
    return [distance(g.double() / scale, e) for g, e in zip(found, expected, strict=True)]


def plain(x, weight, targets):
    return F.cross_entropy(softcap(F.linear(x, weight.to(x.dtype))), targets, ignore_index=-1)


@pytest.mark.parametrize("dtype, scale, most", [(torch.bfloat16, 1, 8e-3), (torch.float16, 2.0**16, 1e-3)])
def test_16_bit_gradients_are_as_near_to_float64_as_those_of_the_plain_loss(
    dtype, scale, most, in_chunks_of, way
):
    problem = random_problem(N=70, C=16, V=513, scale=0.5)
    in_chunks_of(32)
    ours = rounding(problem, dtype, softcapped_cross_entropy, scale)
    for a, b in zip(ours, rounding(problem, dtype, plain, scale), strict=True):
        assert a < most and a < 1.5 * b


def test_float16_keeps_gradients_as_small_as_those_of_a_large_vocabulary():
    # All logits are equal, so each gradient of a logit is 1 / V = 1.5e-5: eight bits in float16
    x, weight, targets = random_problem(N=64, C=4, V=65_537)
    weight.data.mul_(1e-4)
    targets[:] = 5
    x = x.detach().half().requires_grad_()
    (gradient,) = torch.autograd.grad(softcapped_cross_entropy(x, weight, targets, "sum"), weight)
    p = (x.double() @ weight.double().T).softmax(-1).detach()
    assert distance(gradient[6:], (p.T @ x.detach().double())[6:]) < 1e-3


def test_a_gradient_far_below_float16s_range_reaches_x_if_the_scaler_lifts_it(way):
    x, weight, targets = random_problem()
    (whole,) = torch.autograd.grad(softcapped_cross_entropy(x, weight, targets, "sum"), x)
    low = x.detach().half().requires_grad_()
    share = softcapped_cross_entropy(low, weight, targets, "sum") / 2.0**30  # of a step of 2^30 targets
    (gradient,) = torch.autograd.grad(share * 2.0**30, low)
    assert distance(gradient, whole.double()) < 2e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_products_are_in_its_dtype_and_float32_gets_float32_gradients(dtype):
    x, weight, targets = random_problem()
    with torch.amp.autocast("cpu", dtype):
        loss = softcapped_cross_entropy(x, weight, targets)
    low = x.detach().to(dtype).requires_grad_()
    same = softcapped_cross_entropy(low, weight.detach().to(dtype).requires_grad_(), targets)
    assert loss.dtype == torch.float32 and torch.equal(loss, same)
    assert all(g.dtype == torch.float32 for g in gradients(loss, x, weight))


def test_chunks_whose_targets_are_all_unscored_count_for_nothing(in_chunks_of, way):
    x, weight, targets = random_problem()
    targets[:10] = -1
    x.data[:10] = 1e4  # so that any share of theirs would be seen
    expected = softcapped_cross_entropy(x[10:], weight, targets[10:])
    in_chunks_of(5)
    loss = softcapped_cross_entropy(x, weight, targets)
    torch.testing.assert_close(loss, expected)
    (dx, dw), (slow_dx, slow_dw) = gradients(loss, x, weight), gradients(expected, x, weight)
    assert not dx[:10].any()
    torch.testing.assert_close(dx, slow_dx)
    torch.testing.assert_close(dw, slow_dw)


def test_a_frozen_head_or_an_x_without_gradient_leaves_the_other_gradient_as_it_is():
    x, weight, targets = random_problem()
    both = gradients(softcapped_cross_entropy(x, weight, targets), x, weight)
    for wanted, expected in ((x, both[0]), (weight, both[1])):
        frozen = [tensor if tensor is wanted else tensor.detach() for tensor in (x, weight)]
        loss = softcapped_cross_entropy(*frozen, targets)
        (found,) = torch.autograd.grad(loss, wanted)
        assert torch.equal(found, expected)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator of PyTorch gives."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
        return out


def largest(function) -> int:
    with Largest() as mode:
        function()
    return mode.numel


def test_nothing_of_the_size_of_all_logits_exists_forward_or_backward():
    x, weight, targets = random_problem(N=2049, C=4, V=4096)
    assert largest(lambda: plain(x, weight, targets).backward()) == 2049 * 4096  # so such tensors are seen
    assert largest(lambda: softcapped_cross_entropy(x, weight, targets).backward()) <= 512 * 4096
    with torch.no_grad():
        assert largest(lambda: softcapped_cross_entropy(x, weight, targets)) <= 512 * 4096


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, as_on_a_gpu", [(torch.float32, False), (torch.float16, False), (torch.bfloat16, True)]
)
def test_compiled_it_is_one_graph_that_gives_the_same_and_keeps_no_logits(
    dtype, as_on_a_gpu, monkeypatch, in_chunks_of
):
    in_chunks_of(8)
    if as_on_a_gpu:  # the chunk's part is then compiled too
        monkeypatch.setattr(nanochat.ops.loss, "COMPILED_ON", {"cpu"})
    x, weight, targets = random_problem(N=21, C=8, V=131)
    low = x.detach().to(dtype).requires_grad_()
    torch._dynamo.reset()

    def model(low, weight, targets):  # with something before it, as in a model
        return softcapped_cross_entropy(2 * low, weight, targets)

    kept = []
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        loss = compiled(low, weight, targets)
    assert 0 < max(kept) <= max(low.numel(), weight.numel())
    monkeypatch.undo()
    in_chunks_of(8)
    expected = model(low, weight, targets)
    close = 1e-2 if as_on_a_gpu else 1e-6  # such code does not round to bfloat16 where eager code does
    torch.testing.assert_close(loss, expected, rtol=close, atol=close)
    for ours, eager in zip(gradients(loss, low, weight), gradients(expected, low, weight), strict=True):
        assert distance(ours, eager.double()) < close
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True, dynamic=True)(low, weight, targets)
    torch.testing.assert_close(found, expected.detach(), rtol=close, atol=close)
