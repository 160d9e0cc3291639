"""The model: its FLOPs, how it begins, that no token sees a later one, and what is said of a wrong dtype."""

import ast
import math
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from experiments.autocast_rules import autocast_on
from nanochat import UserError, gpt
from nanochat.gpt import GPT, MLP, GPTConfig
from nanochat.machine.precision import check_dtypes
from nanochat.plan.counts import flops_per_token, parameter_counts

PATTERNS = ["L", "SL", "SSSL", "S"]


def make_model(
    depth=4, width=48, num_heads=3, vocab_size=67, max_seq_len=32, window_pattern="L", stir=0.2, **more
):
    """A model as initialised, plus noise of deviation `stir`: the zero projections of a fresh one hide
    whatever its blocks do wrong."""
    sizes = depth, width, num_heads, vocab_size, max_seq_len
    model = GPT(
        GPTConfig(*sizes, window_pattern, **{"bigrams": 2, "value_tables": 2, "copying": True} | more)
    )
    generator = torch.Generator().manual_seed(0)
    model.init_weights(generator)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(stir * torch.randn(p.shape, generator=generator))
    return model


def random_tokens(model, B=2):
    shape = B, model.config.max_seq_len
    return torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("spelled", [False, True])
def test_each_parameter_is_counted_in_one_role(spelled):
    model = make_model(spelled=spelled)
    counts = parameter_counts(model)
    total = counts.pop("total")
    assert sum(counts.values()) == total == sum(p.numel() for p in model.parameters())
    for role in ("embedding", "value_embeddings", "head"):
        assert counts[role] == sum(p.numel() for p in getattr(model, role).parameters())


# ------------------------------------------------------------------------------------------------------
# Counts


def counted_flops(model, B):
    idx = random_tokens(model, B)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = model(idx, idx)
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("window_pattern", PATTERNS)
def test_flops_are_those_that_the_flop_counter_sees(window_pattern):
    """It sees plain matrix products, which are not halved for causality either. Only a layer with a window of
    S differs: it multiplies each block of S queries with 2 S keys, half of which the mask then hides."""
    model = make_model(window_pattern=window_pattern)
    C, T = model.config.width, model.config.max_seq_len
    forward, backward = counted_flops(model, 3)
    hidden = 12 * C * sum(window for window in model.config.windows if window < T)
    assert forward + backward == 3 * T * (flops_per_token(model) + hidden)
    head = 4 * 3 * T * model.head.weight.numel()  # its gradients are made with the loss, in the forward pass
    assert backward + head == 2 * (forward - head)


# ------------------------------------------------------------------------------------------------------
# Initialisation


def test_the_first_loss_is_the_logarithm_of_the_vocabulary():
    model = make_model(4, 128, 2, vocab_size=4096, max_seq_len=64, window_pattern="SSSL", stir=0)
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
    usual, other = GPT(config), GPT(config)
    for model, seed in ((on_meta, 3), (usual, 3), (other, 4)):
        model.init_weights(torch.Generator().manual_seed(seed))
    for (name, p), q in zip(on_meta.named_parameters(), usual.parameters(), strict=True):
        assert torch.equal(p, q), name
    idx = random_tokens(usual)
    assert torch.equal(on_meta(idx), usual(idx)) and not torch.equal(other(idx), usual(idx))


def test_windows_follow_the_pattern_and_the_last_layer_sees_everything():
    def windows(pattern, depth=5):
        return GPTConfig(depth, 32, 2, 50, 64, pattern).windows

    assert windows("L") == [64] * 5
    assert windows("SSL") == [16, 16, 64, 16, 64]
    assert windows("S") == [16, 16, 16, 16, 64]
    assert windows("SL", depth=1) == [64]
    assert GPTConfig(2, 32, 2, 50, 3, "SL").windows == [1, 3]


def test_a_fresh_block_adds_nothing_to_the_stream_but_what_writes_to_it_learns():
    model = make_model(stir=0)
    idx = random_tokens(model)
    before = model(idx)
    parts = [part for block in model.blocks for part in (block.attention, block.mlp)]
    with torch.no_grad():  # what reads the stream cannot matter while what writes to it is zero
        for p in (p for part in parts for p in part.parameters() if p.any()):
            p.normal_()
    assert torch.equal(model(idx), before)
    model(idx, idx).backward()
    assert all(any(p.grad.any() for p in part.parameters() if not p.any()) for part in parts)


def test_every_parameter_gets_a_gradient_and_is_all_that_a_checkpoint_holds():
    model = make_model(window_pattern="SL")
    idx = random_tokens(model)
    model(idx, idx.roll(-1, 1)).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 0, name
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


# ------------------------------------------------------------------------------------------------------
# Who sees whom


@pytest.mark.parametrize("window_pattern", PATTERNS)
def test_a_later_token_never_changes_an_earlier_logit(window_pattern):
    model = make_model(window_pattern=window_pattern)
    idx = random_tokens(model)
    with torch.no_grad():
        logits = model(idx)
        for t in (1, *range(0, 32, 5)):
            changed = idx.clone()
            changed[0, t] = (idx[0, t] + 1) % 67
            difference = (model(changed) - logits).abs().amax(-1)  # (B, T)
            assert difference[0, :t].lt(1e-5).all()
            assert difference[0, t:].min() > 1e-4, "the last layer sees everything"
            assert difference[1].max() < 1e-5, "one row of a batch must not see another"


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
        block.register_forward_hook(lambda module, args, out: streams.extend(part.dtype for part in out))
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
    of the hidden layer in each block for the backward pass."""
    dtypes = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape == (2, 8, mlp.up.out_features):
                dtypes.add(result.dtype)
            return result

    with torch.device("meta"):
        mlp = MLP(GPTConfig(1, 16, 1, 10, 8))
    with autocast_on("cuda", torch.float16), torch.no_grad():
        weights = {name: torch.empty(p.shape, device="cuda") for name, p in mlp.named_parameters()}
        x = torch.empty(2, 8, 16, device="cuda", dtype=torch.float16)
        with Watch():
            y = torch.func.functional_call(mlp, weights, (x,))
    assert y.dtype == torch.float16 and dtypes == {torch.float16}


# ------------------------------------------------------------------------------------------------------
# What a person may forget


def casts(tree) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call).endswith(".to(x.dtype)")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_forgotten_cast_to_the_streams_dtype_is_named(dtype, monkeypatch):
    check_dtypes(make_model(window_pattern="SL", spelled=True), dtype)
    source, named = Path(gpt.__file__).read_text(encoding="utf-8"), 0
    for i in range(len(casts(ast.parse(source)))):
        tree = ast.parse(source)
        call = casts(tree)[i]
        call.func.attr, call.args = "clone", []
        edited = types.ModuleType("edited")
        monkeypatch.setitem(sys.modules, "edited", edited)
        exec(compile(tree, "edited", "exec"), edited.__dict__)
        model = edited.GPT(edited.GPTConfig(4, 64, 2, 50, 12, "SL"))
        with pytest.raises(UserError, match=r"blocks\.\d.* computes in torch\.float32 .*\.to\(x\.dtype\)"):
            check_dtypes(model, dtype)
        check_dtypes(model, torch.float32)
        named += 1
    assert named
