"""The kernels for CUDA: by Triton's interpreter and compiled for GPUs that are not here; the operators around
them, and which of them a run uses."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import nanochat.ops.loss  # noqa: F401  it registers operators
from nanochat.ops import kernels, mlp
from nanochat.ops.elementwise import EPS, SLOPE
from nanochat.ops.kernels import distance

PROJECT = Path(__file__).parent.parent.parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not here")
CONFIG = SimpleNamespace(width=16, vocab_size=300)
MACHINE = SimpleNamespace(device=SimpleNamespace(type="cuda"), all_gather=lambda names: [names])
BF16_ROUNDING = 2**-8  # the largest relative error of rounding to bfloat16; the interpreter's is twice that


@needs_triton
def test_the_kernels_agree_with_float64_in_tritons_interpreter():
    program = [sys.executable, "-W", "ignore", Path(__file__).parent / "interpreted_kernels.py"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rounding = {"float32": 1e-6, "float16": 2**-11, "bfloat16": 2 * BF16_ROUNDING}
    for dtype, errors in list(found.items())[:4]:
        assert max(errors["loss"], errors["without_gradient"]) < 1e-6
        assert errors["gradient"] < rounding[dtype.partition(",")[0]]
        assert errors["unscored"] == 0 and not errors["changed_without_gradient"]
    for errors in list(found.values())[4:]:
        assert errors["z"] < BF16_ROUNDING and errors["signs"] == 0  # rounding of float32 may differ
        assert errors["du"] < 2 * BF16_ROUNDING and errors["at_zero"] == 0


@needs_triton
@pytest.mark.slow
def test_compiled_for_a100_h100_and_b200_nothing_is_spilled_but_a_little_of_a_row_of_logits():
    from experiments import kernel_code

    for kernel, target, took in kernel_code.rows():
        assert took["stack"] <= (160 if kernel.startswith("losses") else 16), (kernel, target)
        assert took["shared"] <= 227 * 1024, (kernel, target)  # what a program may have on an H100


# ------------------------------------------------------------------------------------------------------
# The MLP


def activation(u):
    return F.leaky_relu(u, SLOPE) ** 2


def test_a_packed_activation_is_within_a_unit_of_its_last_place_without_bias_and_has_the_slope():
    u = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    z = mlp.packed_activation(u)
    exact = u.double().requires_grad_()
    expected = activation(exact)
    (slope,) = torch.autograd.grad(expected.sum(), exact)
    error = z.double() / expected.detach() - 1
    assert error.abs().max() < 2 * BF16_ROUNDING
    assert max(error[u < 0].mean().abs(), error[u > 0].mean().abs()) < 1e-4
    torch.testing.assert_close(mlp.slope_of_activation(z).double(), slope, rtol=2 * BF16_ROUNDING, atol=0)


def test_zero_has_no_slope_and_what_is_not_a_number_stays_so():
    u = torch.tensor([0.0, -0.0, 1e-30, -1e-30, torch.nan, torch.inf])
    z = mlp.packed_activation(u)
    assert z[:2].eq(0).all() and z[4].isnan() and z[5].isinf()
    assert mlp.slope_of_activation(z)[:4].abs().max() < 1e-19


def problem(B=3, T=7, C=16):
    """x (B, T, C) in bfloat16, weights in float32, and a gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, T, C, generator=generator).bfloat16().requires_grad_()
    up, down = (torch.randn(*s, generator=generator) / 4 for s in ((4 * C, C), (C, 4 * C)))
    return x, up.requires_grad_(), down.requires_grad_(), torch.randn(B, T, C, generator=generator).bfloat16()


@pytest.mark.parametrize("way", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_the_mlp_and_its_gradients_are_as_near_to_float64_as_those_of_the_plain_way(way):
    *inputs, dy = problem()

    def plain(x, up, down):
        return F.linear(activation(F.linear(F.rms_norm(x, (x.size(-1),), eps=EPS), up)), down)

    exact = [tensor.detach().bfloat16().double().requires_grad_() for tensor in inputs]
    y = plain(*exact)
    expected = y.detach(), *torch.autograd.grad(y, exact, dy.double())
    ours = torch.compile(mlp.mlp, fullgraph=True, dynamic=False) if way == "compiled" else mlp.mlp
    errors = []
    for function in (ours, plain):
        with torch.autocast("cpu", torch.bfloat16):
            y = function(*inputs)
        found = y, *torch.autograd.grad(y, inputs, dy)
        assert [tensor.dtype for tensor in found] == [torch.bfloat16] * 2 + [torch.float32] * 2
        errors.append([distance(tensor.detach(), e) for tensor, e in zip(found, expected, strict=True)])
    for a, b in zip(*errors, strict=True):
        assert a < 1e-2 and a < 1.3 * b


@pytest.mark.parametrize("biases", [(True, False), (False, True)])
def test_an_mlp_with_a_bias_is_the_plain_one(biases, monkeypatch):
    x, up, down, _ = problem()
    layers = [nn.Linear(*w.shape[::-1], bias) for w, bias in zip((up, down), biases, strict=True)]
    with torch.autocast("cpu", torch.bfloat16):
        expected = mlp.feed_forward(x, *layers)
        monkeypatch.setattr(kernels, "IN_USE", {"mlp"})
        assert torch.equal(mlp.feed_forward(x, *layers), expected)


def test_the_mlp_keeps_one_tensor_of_the_size_of_its_hidden_layer():
    *inputs, _ = problem(B=2, T=64)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        mlp.mlp(*inputs)
    assert sum(numel >= 2 * 64 * 64 for numel in kept) == 1


def test_the_operators_have_the_shapes_that_they_announce():
    x, up, down, dy = (tensor.detach().bfloat16() for tensor in problem())
    x, dy = x.flatten(0, 1), dy.flatten(0, 1)
    r = torch.rand(len(x))
    z = torch.ops.nanochat.up_activated(x, up, r)
    logits, targets = torch.randn(5, 33), torch.tensor([0, 32, -1, 4, 5])
    for operator, arguments in {
        "up_activated": (x, up, r),
        "down_activated_backward": (dy, down, z, r),
        "softcapped_losses_": (logits, targets, True, 1.0),
        "add_product_": (torch.ones(16, 16), x.T, dy),
    }.items():
        names = ("test_schema", "test_faketensor")
        torch.library.opcheck(getattr(torch.ops.nanochat, operator).default, arguments, test_utils=names)


# ------------------------------------------------------------------------------------------------------
# The choice


@pytest.fixture
def probes(monkeypatch):
    """probes(name=(error, milliseconds of the kernel, of the plain way)): these are the kernels now."""

    def replace(**kernels_):
        def probe(error, by_kernel, plainly):
            return lambda config, numbers, dtype: (error, by_kernel, plainly)

        monkeypatch.setattr(kernels, "PROBES", {name: probe(*values) for name, values in kernels_.items()})
        monkeypatch.setattr(kernels, "cannot_run", lambda *_: "")
        monkeypatch.setattr(kernels, "milliseconds", lambda time: time)
        monkeypatch.setattr(torch, "Generator", lambda device: SimpleNamespace(manual_seed=lambda seed: None))

    return replace


def chosen(resolved=None, machine=MACHINE):
    return kernels.choose(CONFIG, machine, torch.bfloat16, resolved or {})


def test_a_kernel_is_used_if_it_is_right_and_faster_else_the_plan_says_why_not(probes):
    probes(loss=(1e-3, 1.0, 2.0), head=(1e-3, 2.0, 2.0), mlp=(0.5, 1.0, 2.0))
    found = chosen()
    assert found.names == ("loss",)
    used, _, passed_over = found.reason.partition("not:")
    assert "loss" in used and "head (1.00" in passed_over and "mlp (differs" in passed_over


def test_a_resumed_run_uses_what_it_used_if_that_is_right_here_whatever_its_time(probes):
    probes(loss=(1e-3, 2.0, 1.0), head=(1e-3, 1.0, 2.0), mlp=(0.5, 1.0, 2.0))
    assert chosen({"kernels": ["loss", "mlp"]}).names == ("loss",)
    assert chosen({"attention": {}}).names == ()  # a checkpoint from before there were kernels


def test_all_processes_use_the_kernels_that_run_on_each_of_them(probes):
    probes(loss=(1e-3, 1.0, 2.0), mlp=(1e-3, 1.0, 2.0))
    machine = SimpleNamespace(device=MACHINE.device, all_gather=lambda names: [names, ["mlp"]])
    found = chosen(machine=machine)
    assert found.names == ("mlp",) and "loss (not on every process)" in found.reason


@pytest.mark.parametrize("name", ["loss", "head", "mlp"])
def test_a_probe_finds_what_the_operators_compute_right(name, monkeypatch):
    monkeypatch.setattr(kernels, "cannot_run", lambda *_: "")
    cpu = torch.device("cpu")
    assert kernels._try(name, kernels.PROBES[name], CONFIG, cpu, torch.bfloat16, timed=False) == (0.0, "")
    monkeypatch.setitem(kernels.TOLERANCE, torch.bfloat16, 1e-9)  # less than rounding
    assert "differs" in kernels._try(name, kernels.PROBES[name], CONFIG, cpu, torch.bfloat16, False)[1]


def test_what_a_kernel_raises_is_its_reason():
    def probe(config, numbers, dtype):
        raise RuntimeError("out of shared memory\nat some place")

    found = kernels._try("loss", probe, CONFIG, torch.device("cpu"), torch.bfloat16, timed=False)
    assert found == (0.0, "RuntimeError: out of shared memory")
