"""What the answers of docs/faq.md say of figures and dtypes holds on any machine."""

import threading

import pytest
import torch

from experiments import faq_measurements as asked
from experiments.autocast_rules import autocast_on


def test_scaler_step_divides_for_torchs_optimizers_and_for_ours():
    for figure in asked.without_unscale().values():
        assert figure["before"] == pytest.approx(1024 * figure["after"], rel=1e-3)
        assert figure["update apart"] == 0


def test_the_first_operator_that_overflows_is_named_and_so_is_one_of_the_backward_pass():
    large = torch.full((2,), 300.0, dtype=torch.float16)
    with asked.FirstBad() as operator:
        (large + large, large * large, large * large - large * large)
    assert operator.found == "mul, inf in float16"
    assert "nan" in asked.anomaly(torch.zeros(2, requires_grad=True).square().sum().sqrt())


def test_a_region_without_autocast_needs_its_inputs_lifted():
    figures = asked.float32_region()
    low, lifted = figures["under autocast"], figures["enabled=False"]
    assert low[0] == torch.bfloat16 and lifted[0] == torch.float32 and lifted[1] < 1e-3 * low[1]
    assert figures["enabled=False, input left in bfloat16"] != "no error"


@pytest.mark.slow  # 300 steps
def test_mixed_precision_learns_like_float32_and_bfloat16_weights_learn_less():
    figures = asked.default_dtype()
    assert figures["under autocast, the default and a new tensor"] == (torch.float32, torch.float32)
    start, full, mixed, low = list(figures.values())[1:]
    assert abs(mixed - full) < 0.02 * (start - full) and low - full > 0.05 * (start - full)


def test_what_lasts_is_float32_and_what_is_kept_for_the_backward_pass_shrinks():
    figures = asked.dtypes_and_bytes(rows=1)
    for name in ("parameters", "gradients", "optimizer state"):
        assert figures[name][1] == {torch.float32}
    kept = [figures[f"kept for the backward pass, {dtype}"] for dtype in ("bfloat16", "float32")]
    assert kept[0] < 0.7 * kept[1]


def test_a_scaler_changes_no_bit_of_a_bfloat16_gradient():
    figures = asked.scaler_with_bfloat16()
    assert figures["equal in every bit"] == 1
    assert figures["scaled norm"] == pytest.approx(65536 * figures["norm"], rel=1e-5)


def test_autocast_is_the_state_of_a_thread_and_casts_nothing_for_a_custom_function():
    x, seen = torch.ones(2, 2), []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append((x.dtype, (x @ x).dtype))
            return x.clone()

    class Cast(Function):
        forward = staticmethod(
            torch.amp.custom_fwd(Function.forward, device_type="cpu", cast_inputs=torch.float32)
        )

    with torch.autocast("cpu", torch.bfloat16):
        for run in (Function.apply, Cast.apply):
            run(x)
            run(x.bfloat16())
        thread = threading.Thread(target=lambda: seen.append((x @ x).dtype))
        thread.start()
        thread.join()
    F32, BF16 = torch.float32, torch.bfloat16
    assert seen == [(F32, BF16), (BF16, BF16), (F32, F32), (F32, F32), F32]


def test_autocast_to_float32_does_nothing_on_a_cpu_and_lifts_products_on_cuda():
    with pytest.warns(UserWarning, match="autocast"), torch.autocast("cpu", torch.float32):
        x = torch.ones(2, 2, dtype=torch.bfloat16)
        assert (x @ x).dtype == torch.bfloat16
    with autocast_on("cuda", torch.float32):
        x = torch.ones(2, 2, dtype=torch.bfloat16, device="cuda")
        assert (x @ x).dtype == torch.float32


def test_a_gradient_has_its_parameters_dtype_unless_torch_is_told_otherwise():
    weight = torch.ones(2, dtype=torch.float16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        (weight * 2).sum().backward()
    assert weight.grad.dtype == torch.float16
    weight.grad = None
    with pytest.raises(RuntimeError, match="dtype"):
        weight.grad = torch.ones(2)
    weight.grad_dtype = torch.float32
    weight.float().sum().backward()
    assert weight.grad.dtype == torch.float32


def test_float32_probabilities_meet_bfloat16_values_under_autocast_only():
    probabilities, values = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert (probabilities @ values).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="dtype"):
        probabilities @ values


def test_with_qk_norm_longer_rows_hardly_change_scores_and_rounding_in_float16():
    figures = asked.long_rows(lengths=(256, 1024))
    short, long = figures["256 positions"], figures["1024 positions"]
    assert short["score"] < long["score"] < min(2 * short["score"], figures["no score above"])
    assert long["fused"] < 1.5 * short["fused"] < 0.01 and long["sum"] < torch.finfo(torch.float16).max
