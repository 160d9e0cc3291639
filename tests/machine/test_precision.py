"""Which dtype is chosen on which device, and when gradients are scaled."""

import pytest
import test_gpt
import torch

from nanochat import UserError
from nanochat.machine import precision
from nanochat.optim import MuonAdamW, parameter_groups

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")
RATES = {"embedding_lr": 0.1, "unembedding_lr": 0.01, "matrix_lr": 0.02, "scalar_lr": 0.3}


@pytest.mark.parametrize(
    "capability, expected", [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((10, 0), torch.bfloat16)]
)
def test_auto_on_cuda_is_bfloat16_from_compute_capability_8_and_float16_before(
    capability, expected, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    dtype, reason = precision.resolve_dtype("auto", CUDA)
    assert dtype == expected
    assert "{}.{}".format(*capability) in reason


@pytest.mark.parametrize(
    ("instructions", "native"),
    [
        (["avx512_f", "avx512_bf16"], ["bfloat16"]),
        (["amx_tile", "amx_bf16", "avx512_fp16"], ["bfloat16", "float16"]),
        (["neon", "fp16_arith", "bf16", "i8mm"], ["bfloat16", "float16"]),
        (["avx2", "avx512_f", "avx512_vnni", "f16c"], []),  # f16c converts and does not multiply
    ],
)
def test_a_cpu_computes_in_bfloat16_where_its_instructions_do_and_says_what_would_be_slow(
    monkeypatch, instructions, native
):
    known = dict.fromkeys(torch.cpu.get_capabilities(), False) | dict.fromkeys(instructions, True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    dtype, reason = precision.resolve_dtype("auto", CPU)
    assert dtype == (torch.bfloat16 if "bfloat16" in native else torch.float32)
    assert ("without" in reason) == ("bfloat16" not in native)
    for name in ("bfloat16", "float16", "float32"):
        dtype, reason = precision.resolve_dtype(name, CPU)
        assert dtype == getattr(torch, name) and reason.startswith("as asked for")
        assert ("slow" in reason) == (name not in [*native, "float32"]), reason


def test_mps_computes_in_float32_unless_asked(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: True)
    assert precision.resolve_dtype("auto", MPS)[0] == torch.float32
    for name in ("bfloat16", "float16", "float32"):
        assert precision.resolve_dtype(name, MPS) == (getattr(torch, name), "as asked for")


def test_a_dtype_the_device_cannot_compute_in_is_refused_with_those_it_can(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: major < 14)
    for device, what in ((CUDA, "CUDA compute capability 7.5, bfloat16 needs 8.0"), (MPS, "needs macOS 14")):
        with pytest.raises(UserError, match=f"{what}.*; use --dtype=float16 or --dtype=float32$"):
            precision.resolve_dtype("bfloat16", device)
        for name in ("float16", "float32"):
            assert precision.resolve_dtype(name, device)[0] == getattr(torch, name)


def test_float32_is_float32_and_where_torch_was_told_to_round_its_products_the_reason_says_so():
    assert "precision" not in precision.resolve_dtype("float32", CPU)[1]
    fine = torch.eye(64) * (1 + 2**-20)  # TF32 and bfloat16 would make it 1
    with precision.autocast(CPU, precision.resolve_dtype("float32", CPU)[0]):
        assert torch.equal((fine @ torch.eye(64)), fine)
    torch.set_float32_matmul_precision("high")
    try:
        assert "float32_matmul_precision is high" in precision.resolve_dtype("float32", CPU)[1]
        assert "float32_matmul_precision" not in precision.resolve_dtype("float16", CPU)[1]
    finally:
        torch.set_float32_matmul_precision("highest")


def train_one_step(scaler, dtype):
    """The gradients of a step, by name."""
    model = test_gpt.make_model(2, 32, 2, 61, 16, stir=0)
    optimizer = MuonAdamW(parameter_groups(model, RATES, weight_decay=0.1), torch.bfloat16)
    idx = torch.randint(61, (4, 16), generator=torch.Generator().manual_seed(0))
    with precision.autocast(CPU, dtype):
        loss = model(idx, idx.roll(-1, 1))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    scaler.step(optimizer)
    scaler.update()
    return gradients


def test_the_scaler_works_in_float16_alone_and_passes_everything_through_otherwise():
    gradients = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        scaler = precision.make_scaler(CPU, dtype)
        assert scaler.is_enabled() == (dtype == torch.float16)
        gradients[dtype] = train_one_step(scaler, dtype)
    for dtype in (torch.float16, torch.bfloat16):  # unscaled, they are the gradients of float32, roughly
        for name, exact in gradients[torch.float32].items():
            if exact.ndim == 2:  # the scalars' are sums that nearly cancel
                assert (gradients[dtype][name] - exact).norm() <= 0.05 * exact.norm(), name
