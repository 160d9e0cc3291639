"""The model: its counts against counts by hand, its first loss, and that no token sees a later one."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from experiments.autocast_rules import autocast_on
from nanochat import gpt
from nanochat.gpt import GPT, MLP, GPTConfig, gated
from nanochat.ops.operators import look_up

PATTERNS = ["L", "SL", "SSSL", "S"]


def make_model(
    depth=4, width=48, num_heads=3, vocab_size=67, max_seq_len=32, window_pattern="L", stir=0.2, spelled=False
):
    """A model as initialised, plus noise of deviation `stir`: the zero projections of a fresh one hide
    whatever its blocks do wrong."""
    model = GPT(GPTConfig(depth, width, num_heads, vocab_size, max_seq_len, window_pattern, spelled))
    generator = torch.Generator().manual_seed(0)
    model.init_weights(generator)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(stir * torch.randn(p.shape, generator=generator))
    return model


def random_tokens(model, B=2, T=None, seed=1):
    shape = (B, T or model.config.max_seq_len)
    return torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------------
# Counts


@pytest.mark.parametrize(
    "depth, width, num_heads, vocab_size", [(1, 16, 1, 10), (4, 48, 3, 67), (5, 64, 2, 8)]
)
def test_parameters_are_as_many_as_the_formula_says(depth, width, num_heads, vocab_size):
    model = make_model(depth, width, num_heads, vocab_size)
    C, V = width, vocab_size
    with_value_embedding = math.ceil(depth / 2)  # every second layer; the last of them has the head's rows
    by_hand = {
        "embedding": V * C,
        "value_embeddings": (with_value_embedding - 1) * V * C,
        "matrices": depth * (4 * C * C + 8 * C * C)
        + (depth + with_value_embedding) * C * num_heads
        + depth * C * C // math.gcd(C, 16),
        "head": V * C,
        "pieces": 0,
        "scalars": depth * (1 + C),
    }
    counts = model.parameter_counts()
    assert counts == by_hand | {"total": sum(by_hand.values())}
    assert counts["total"] == sum(p.numel() for p in model.parameters())


def counted_flops(model, B):
    idx = random_tokens(model, B)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = model(idx, idx)
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("window_pattern", PATTERNS)
def test_flops_are_those_that_the_flop_counter_sees_and_that_a_formula_gives(window_pattern):
    model = make_model(window_pattern=window_pattern)
    C, T, counts = model.config.width, model.config.max_seq_len, model.parameter_counts()
    windows = [{"L": T, "S": T // 4}[window_pattern[i % len(window_pattern)]] for i in range(3)] + [T]
    by_hand = 6 * (counts["matrices"] + counts["head"]) + 12 * C * sum(windows)
    assert model.flops_per_token() == by_hand

    # The counter sees the same where attention is plain matrix products, which are not halved for causality
    # either (it knows no fused kernel on CPU, and counts 2.5 instead of 2 forward passes for the backward
    # pass of CUDA's, which computes the scores again). Only a layer with a window of S differs: it
    # multiplies each block of S queries with 2 S keys, half of which the mask then hides.
    forward, backward = counted_flops(model, 3)
    hidden = 12 * C * sum(window for window in windows if window < T)
    assert forward + backward == 3 * T * (by_hand + hidden)
    head = 4 * 3 * T * counts["head"]  # its gradients are made with the loss, in the forward pass
    assert backward + head == 2 * (forward - head)


# ------------------------------------------------------------------------------------------------------
# Initialisation


@pytest.mark.parametrize("window_pattern", ["L", "SSSL"])
def test_the_first_loss_is_the_logarithm_of_the_vocabulary(window_pattern):
    model = make_model(4, 128, 2, vocab_size=4096, max_seq_len=64, window_pattern=window_pattern, stir=0)
    idx = random_tokens(model, B=4)
    loss = model(idx, idx.roll(-1, 1)).item()
    assert abs(loss - math.log(4096)) < 0.02 * math.log(4096)


def test_the_same_seed_gives_the_same_weights_whatever_memory_held_before():
    config = GPTConfig(2, 32, 2, 50, 16)
    with torch.device("meta"):
        on_meta = GPT(config)
    on_meta.to_empty(device="cpu")
    with torch.no_grad():
        for p in on_meta.parameters():
            p.fill_(math.nan)
    usual = GPT(config)
    for model in (on_meta, usual):
        model.init_weights(torch.Generator().manual_seed(3))
    for (name, p), q in zip(on_meta.named_parameters(), usual.named_parameters(), strict=True):
        assert torch.equal(p, q[1]), name
    idx = random_tokens(usual)
    assert torch.equal(on_meta(idx), usual(idx))
    other = GPT(config)
    other.init_weights(torch.Generator().manual_seed(4))
    assert not torch.equal(other.embedding.weight, usual.embedding.weight)


def test_a_fresh_block_adds_nothing_to_the_stream_but_every_matrix_soon_learns():
    model = make_model(stir=0)
    idx = random_tokens(model)
    before = model(idx)
    with torch.no_grad():  # what reads the stream cannot matter while what writes to it is zero
        for block in model.blocks:
            block.attention.query.weight.normal_()
            block.mlp.up.weight.normal_()
    assert torch.equal(model(idx), before)
    model(idx, idx).backward()
    for block in model.blocks:
        assert block.attention.out.weight.grad.abs().max() > 0
        assert block.mlp.down.weight.grad.abs().max() > 0


def test_every_parameter_gets_a_gradient_once_the_projections_are_not_zero():
    model = make_model(window_pattern="SL")
    idx = random_tokens(model)
    model(idx, idx.roll(-1, 1)).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 0, name


def test_the_state_dict_holds_parameters_alone():
    model = make_model()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


# ------------------------------------------------------------------------------------------------------
# Who sees whom


@pytest.mark.parametrize("window_pattern", PATTERNS)
def test_a_later_token_never_changes_an_earlier_logit(window_pattern):
    model = make_model(window_pattern=window_pattern)
    idx = random_tokens(model)
    with torch.no_grad():
        logits = model(idx)
        for t in range(0, 32, 5):
            changed = idx.clone()
            changed[0, t] = (idx[0, t] + 1) % 67
            difference = (model(changed) - logits).abs().amax(-1)  # (B, T)
            assert difference[0, :t].lt(1e-5).all()
            assert difference[0, t:].min() > 1e-4, "the last layer sees everything"
            assert difference[1].max() < 1e-5, "one row of a batch must not see another"


@pytest.mark.parametrize("window_pattern", PATTERNS)
def test_the_gradient_of_an_earlier_logit_does_not_reach_a_later_token(window_pattern, monkeypatch):
    model = make_model(window_pattern=window_pattern)
    embedded = []  # first the rows of the embedding
    monkeypatch.setattr(gpt, "look_up", lambda *args: embedded.append(look_up(*args)) or embedded[-1])
    logits = model(random_tokens(model))
    for t in (0, 7, 8, 20, 31):
        (gradient,) = torch.autograd.grad(logits[0, t].square().sum(), embedded[0], retain_graph=True)
        assert gradient[0, t + 1 :].eq(0).all() and gradient[1].eq(0).all()
        assert gradient[0, : t + 1].abs().amax(-1).min() > 0


@pytest.mark.parametrize("window_pattern", PATTERNS)
def test_a_prefix_has_the_logits_that_it_has_inside_of_the_row(window_pattern):
    model = make_model(window_pattern=window_pattern)
    idx = random_tokens(model)
    with torch.no_grad():
        logits = model(idx)
        for t in (1, 2, 7, 8, 9, 24, 31):
            torch.testing.assert_close(model(idx[:, :t]), logits[:, :t], rtol=1e-4, atol=1e-5)


def test_only_the_order_in_time_counts_not_the_position_in_the_row():
    model = make_model(depth=1)  # rotary angles are relative: a shift of the row turns q and k alike
    attend = model.blocks[0].attention
    x = torch.randn(1, 6, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        at_0, at_9, stretched = (
            attend(x, torch.zeros(1, 6, 48), (model.cos[places][:, None], model.sin[places][:, None]))
            for places in (slice(0, 6), slice(9, 15), slice(0, 12, 2))
        )
    torch.testing.assert_close(at_0, at_9, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(at_0, stretched, rtol=1e-2)


def test_windows_follow_the_pattern_and_the_last_layer_sees_everything():
    def windows(pattern, depth=5):
        return GPTConfig(depth, 32, 2, 50, 64, pattern).windows

    assert windows("L") == [64] * 5
    assert windows("SSL") == [16, 16, 64, 16, 64]
    assert windows("S") == [16, 16, 16, 16, 64]
    assert windows("SL", depth=1) == [64]
    assert GPTConfig(2, 32, 2, 50, 3, "SL").windows == [1, 3]


# ------------------------------------------------------------------------------------------------------
# Logits and losses


def test_loss_is_that_of_the_logits_for_every_reduction():
    model = make_model()
    idx = random_tokens(model)
    targets = idx.roll(-1, 1)
    targets[:, ::3] = -1
    with torch.no_grad():
        logits = model(idx)
        assert logits.shape == (2, 32, 67) and logits.dtype == torch.float32
        log_p = logits.double().log_softmax(-1)
        picked = -log_p.gather(-1, targets.clamp_min(0)[..., None])[..., 0] * (targets >= 0)
    mean = picked.sum() / (targets >= 0).sum()
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            none, total, of_mean = (model(idx, targets, reduction=r) for r in ("none", "sum", "mean"))
        assert [loss.requires_grad for loss in (none, total, of_mean)] == [gradients] * 3
        torch.testing.assert_close(none.double(), picked.flatten(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(total.double(), picked.sum(), rtol=1e-5, atol=0)
        torch.testing.assert_close(of_mean.double(), mean, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_stream_is_in_its_dtype_and_logits_and_loss_in_float32(dtype):
    model = make_model(window_pattern="SL")
    streams = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: streams.append(out.dtype))
    idx = random_tokens(model)
    exact = model(idx)
    with torch.amp.autocast("cpu", dtype):
        logits, loss = model(idx), model(idx, idx)
    assert streams[-1] == dtype
    assert logits.dtype == loss.dtype == torch.float32
    assert (logits - exact).abs().max() < 0.1 * exact.abs().max()


# ------------------------------------------------------------------------------------------------------
# What CUDA's autocast makes of it


def test_the_mlp_stays_in_16_bit_under_the_autocast_of_cuda():
    """pow, and so .square(), is on CUDA's list of what runs in float32: eager code would keep a float32 copy
    of (B, T, 4 C) in each layer for the backward pass."""
    dtypes = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape == (2, 8, 64):  # (B, T, 4 C)
                dtypes.add(result.dtype)
            return result

    with torch.device("meta"):
        mlp = MLP(GPTConfig(1, 16, 1, 10, 8))
    with autocast_on("cuda", torch.float16), torch.no_grad():
        up, down = (torch.empty(p.shape, device="cuda") for p in (mlp.up.weight, mlp.down.weight))
        weights = {"up.weight": up, "down.weight": down}
        x = torch.empty(2, 8, 16, device="cuda", dtype=torch.float16)
        with Watch():
            y = torch.func.functional_call(mlp, weights, (x,))
    assert y.dtype == torch.float16 and dtypes == {torch.float16}


def test_the_mlp_is_the_square_of_the_leaky_relu():
    mlp = MLP(GPTConfig(1, 16, 1, 10, 8))
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    h = mlp.up(x)
    expected = mlp.down(torch.where(h > 0, h, h / 2) ** 2)
    assert torch.equal(mlp(x), expected)


def test_a_gate_of_0_changes_nothing_and_each_group_of_channels_has_its_own():
    x, gates = torch.randn(2, 3, 8), torch.zeros(2, 3, 2)
    assert torch.equal(gated(x, gates), x)
    gates[..., 0], gates[0, 0, 1] = 50, -50
    expected = x.clone()
    expected[..., :4] *= 2
    expected[0, 0, 4:] = 0
    torch.testing.assert_close(gated(x, gates), expected)
