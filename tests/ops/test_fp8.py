"""fp8: the products against float32, what the hardware asks of them, what is converted, what is refused.

On a CPU torch computes the same products, slowly. What cuBLAS asks of memory and sizes is checked by torch's
own rules for CUDA, which tensors on the meta device follow too.
"""

import math
from pathlib import Path

import pytest
import test_gpt
import torch
import torch.nn as nn

from nanochat import UserError, optim
from nanochat.decode import decode_step
from nanochat.ops import fp8
from nanochat.ops.fp8 import E4M3, E5M2, Float8Linear, check_fp8, convert_to_fp8, quantize
from nanochat.plan.counts import flops_per_token

M, C, N = 64, 128, 256


def numbers(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(weight):
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight.clone())
    linear.__class__ = Float8Linear
    return linear


def products(x, weight, grad):
    """Output, gradient of x, gradient of the weight."""
    linear, x = layer(weight), x.clone().requires_grad_()
    y = linear(x)
    y.backward(grad)
    return y.detach(), x.grad, linear.weight.grad


def make_model(depth=2, width=128, num_heads=2):
    return test_gpt.make_model(depth, width, num_heads, 256, 64, stir=0)


# ------------------------------------------------------------------------------------------------------
# Numerics


def every_number_of(dtype):
    """All finite numbers of an 8-bit format, sorted, in float64."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return values[values.isfinite()].unique()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_number_becomes_the_nearest_one_of_the_format(dtype):
    x = (numbers(M, C) * torch.logspace(-9, 3, C, base=2)).bfloat16()  # columns from tiny to large
    x8, scale = quantize(x, dtype)
    table = every_number_of(dtype)
    assert scale == x.abs().max().float() / table[-1].item()
    wanted = x.double() / scale.double()
    distance = (x8.double() - wanted).abs()
    nearest = (table - wanted[..., None]).abs().amin(-1)
    assert torch.allclose(distance, nearest, rtol=1e-5, atol=1e-6)  # the division rounds to float32
    x8, scale = quantize(torch.zeros(4), dtype)
    assert (x8.float() == 0).all() and 0 < scale < 1e-30  # finite, so that products of zeros are zero


def test_the_three_products_are_the_exact_ones_of_the_rounded_factors():
    x, weight, grad = numbers(M, C), numbers(N, C, seed=1, dtype=torch.float32), numbers(M, N, seed=2)
    (x8, weight8, grad8) = (
        q.double() * scale.double()
        for q, scale in (quantize(x, E4M3), quantize(weight, E4M3), quantize(grad, E5M2))
    )
    exact = x8 @ weight8.T, grad8 @ weight8, grad8.T @ x8
    y, grad_x, grad_weight = products(x, weight, grad)
    assert [t.dtype for t in (y, grad_x, grad_weight)] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for found, wanted, half_unit in zip((y, grad_x, grad_weight), exact, (2**-8, 2**-8, 2**-24), strict=True):
        sums = 1e-5 * wanted.abs().max()  # float32 sums of C, N or M products
        assert ((found.double() - wanted).abs() <= half_unit * wanted.abs() + sums).all()


def test_float32_inputs_under_autocast_give_what_their_casts_give():
    """CUDA's autocast computes norms in float32, and they are what these layers read."""
    x, weight, grad = numbers(M, C, dtype=torch.float32), numbers(N, C, seed=1), numbers(M, N, seed=2)
    with torch.autocast("cpu", torch.bfloat16):
        found = products(x, weight, grad)
        assert found[0].dtype == nn.functional.linear(x, weight).dtype == torch.bfloat16
        for one, other in zip(found, products(x.bfloat16(), weight, grad), strict=True):
            assert torch.equal(one.float(), other.float())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_stays_visible(bad):
    grad = numbers(M, N, seed=2)
    grad[3, 5] = bad
    _, grad_x, grad_weight = products(numbers(M, C), numbers(N, C, dtype=torch.float32), grad)
    assert not grad_x.isfinite().all() and not grad_weight.isfinite().all()


def test_the_layouts_and_sizes_are_those_that_cuda_takes(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: False)  # it does not know meta
    with torch.device("meta"):
        linear = layer(torch.empty(N, C))
        x = torch.empty(4, 16, C, dtype=torch.bfloat16, requires_grad=True)
        y = linear(x)
        y.backward(torch.empty_like(y))
        assert y.shape == (4, 16, N) and x.grad.shape == x.shape
        by_columns = torch.empty(C, M, dtype=torch.bfloat16).t(), torch.empty(N, M, dtype=torch.bfloat16).t()
        linear(by_columns[0].requires_grad_()).backward(by_columns[1])
        scale = torch.empty(())
        x8, weight8 = torch.empty(M, C).to(E4M3), torch.empty(N, C).to(E4M3)
        for factors in ((x8, weight8.t().contiguous()), (x8[:, :120], weight8[:, :120].t())):
            with pytest.raises(RuntimeError, match=r"col_major|divisible by 16"):  # so the rules do hold here
                torch._scaled_mm(*factors, scale, scale)


def test_a_short_training_stays_near_bfloat16():
    text = torch.tensor(list(Path(fp8.__file__).read_bytes()))
    curves = []
    for convert in (False, True):
        model = make_model(depth=1)
        rates = {"embedding_lr": 0.3, "unembedding_lr": 0.01, "matrix_lr": 0.02, "scalar_lr": 0.1}
        optimizer = optim.MuonAdamW(optim.parameter_groups(model, rates, 0.0), torch.float32)
        if convert:
            convert_to_fp8(model)
        curve, draw = [], torch.Generator().manual_seed(0)
        for _ in range(16):
            starts = torch.randint(len(text) - 65, (4,), generator=draw)
            rows = torch.stack([text[s : s + 65] for s in starts])
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(rows[:, :-1], rows[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        curves.append(torch.tensor(curve))
    bfloat16, in_fp8 = curves
    assert bfloat16[-5:].mean() < bfloat16[0] - 1.5, "it learned"
    assert not torch.equal(bfloat16[2:], in_fp8[2:])
    assert (bfloat16 - in_fp8).abs().max() < 0.03


# ------------------------------------------------------------------------------------------------------
# What is converted


def test_the_large_products_of_each_block_are_converted_and_nothing_else():
    model = make_model()
    before = dict(model.named_parameters())
    flops = flops_per_token(model)
    names = convert_to_fp8(model)
    fit = {n for n, p in before.items() if p.ndim == 2 and all(s >= 128 and s % 16 == 0 for s in p.shape)}
    assert {f"{name}.weight" for name in names} == {name for name in fit if name.startswith("blocks.")}
    assert {f"blocks.{i}.attention.{kind}" for i in range(2) for kind in ("query", "key", "out")} < {*names}
    assert type(model.head) is nn.Linear and type(model.blocks[1].attention.value_gate) is nn.Linear
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert flops_per_token(model) == flops
    assert convert_to_fp8(make_model(width=512, num_heads=16)) == names, "gates (32, 16) are too small"


def test_a_layer_that_does_not_fit_stays_as_it_is():
    model = make_model(depth=1)
    model.blocks[0].attention.key = nn.Linear(128, 520, bias=False)
    model.blocks[0].attention.value = nn.Linear(512, 128)  # with a bias
    assert not {"blocks.0.attention.key", "blocks.0.attention.value"} & {*convert_to_fp8(model)}
    with pytest.raises(UserError, match=r"changes nothing: no matrix .* at least 128"):
        convert_to_fp8(make_model(width=96))


def test_without_gradients_a_converted_model_computes_what_it_did_before():
    model, idx = make_model(), torch.arange(64).view(2, 32)
    for p in model.parameters():
        nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        in_training = [model(idx).detach()]
        with torch.no_grad():
            expected = model(idx)
            convert_to_fp8(model)
            assert torch.equal(model(idx), expected)
        in_training.append(model(idx).detach())
    assert torch.equal(in_training[0], expected) and not torch.equal(in_training[1], expected)
    plain, converted = (decode_step(m, torch.float32) for m in (make_model(), model))
    assert type(plain) is type(converted), "text is written as without fp8"


# ------------------------------------------------------------------------------------------------------
# The setting


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"capability": (8, 6)}, r"8\.9 or higher .* this one has 8\.6"),
        ({"dtype": torch.float16}, "--dtype=bfloat16"),
        ({"max_seq_len": 2040}, "multiple of 16; 2040"),
        ({"resolved": {"compiled": True}}, "without --fp8"),
        ({"resolved": {"fp8": False}}, "without --fp8"),
        ({"fp8": False, "resolved": {"fp8": True}}, "with --fp8; give it again"),
    ],
)
def test_what_does_not_go_together_is_refused(monkeypatch, change, says):
    def check(fp8=True, dtype=torch.bfloat16, max_seq_len=2048, resolved=None, capability=(8, 9)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        check_fp8(fp8, torch.device("cuda"), dtype, max_seq_len, resolved or {})

    for fine in ({}, {"capability": (12, 0)}, {"resolved": {"fp8": True}}, {"fp8": False}):
        check(**fine)
    with pytest.raises(UserError, match=says):
        check(**change)


@pytest.mark.slow
def test_a_converted_mlp_compiles_to_one_graph_with_the_same_output_and_gradients():
    model = make_model(depth=1)
    nn.init.normal_(model.blocks[0].mlp.down.weight, std=0.02, generator=torch.Generator().manual_seed(1))
    convert_to_fp8(model)
    results, mlp = [], model.blocks[0].mlp
    for forward in (mlp, torch.compile(mlp, dynamic=False, fullgraph=True)):
        mlp.zero_grad()
        x = numbers(2, 32, 128).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = forward(x)
        y.backward(numbers(2, 32, 128, seed=2))
        results.append([y.detach(), x.grad, *(p.grad for p in mlp.parameters())])
    # Compiled code rounds less to bfloat16 between products, so a few values get another 8-bit number
    for plain, compiled in zip(*results, strict=True):
        assert (compiled - plain).float().norm() < 0.05 * plain.float().norm()
