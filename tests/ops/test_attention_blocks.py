"""Attention of a CPU in blocks of queries, against one masked softmax in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import FakeMachine, check_same_gradients

from nanochat.gpt import GPTConfig
from nanochat.ops import attention as choices
from nanochat.ops import attention_blocks as blocks
from nanochat.ops.attention import Attention

CPU = torch.device("cpu")


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 3 to 5 queries, of some rows at a time; short rows have several."""
    monkeypatch.setattr(blocks, "BLOCK", (3, 5))
    monkeypatch.setattr(blocks, "SCORES", 150)
    blocks.tiles.cache_clear()
    yield monkeypatch
    blocks.tiles.cache_clear()


def inputs(B, T, H=2, D=4):
    """q, k, v and a gradient of y: float64, (B, H, T, D), strided as a model's are; documents (B, T)."""
    generator = torch.Generator().manual_seed(100 * B + T)
    numbers = torch.randn(4, B, T, H, D, generator=generator, dtype=torch.float64)
    begins = torch.rand(B, T, generator=generator) < 0.2
    return *numbers.transpose(2, 3), begins.cumsum(1)


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 30), st.integers(1, 33), st.booleans(), st.booleans())
def check_any_shape(B, T, window, with_documents, long):
    q, k, v, dy, documents = inputs(B, T)
    documents = documents if with_documents else None
    blocks.LONG = 0 if long else 1024
    visible = choices.visible_from(documents)
    found = choices._forward_and_backward(blocks.in_blocks, q, k, v, window, visible, dy)
    expected = choices._forward_and_backward(choices._in_float64, q, k, v, window, documents, dy)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(blocks.in_blocks(q, k, v, window, visible), found[0])


def test_blocks_are_one_masked_softmax_forward_and_backward_for_any_shape_window_and_documents(small_blocks):
    small_blocks.setattr(blocks, "LONG", 1024)  # set back at the end
    check_any_shape()


@pytest.mark.parametrize("window", [1, 100, 300, 512])
def test_blocks_of_their_real_size_are_equal_to_float64_in_every_dtype(window):
    for dtype, close in ((torch.bfloat16, 1e-2), (torch.float32, 1e-5)):
        kind = "full" if window == 512 else "window"
        assert max(choices.errors("blocks", kind, (2, 2, 512, 16), window, CPU, dtype)) < close


def test_a_long_row_keeps_nothing_of_its_square():
    q, k, v, *_ = (x.float() for x in inputs(1, 1500, H=1))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        blocks.in_blocks(q.requires_grad_(), k, v, 1500)
    assert max(kept) <= q.numel()


@pytest.mark.parametrize("with_documents", [False, True])
def test_a_model_has_the_same_gradients_in_blocks_as_by_sdpa(small_blocks, with_documents):
    check_same_gradients("blocks", "blocks", "blocks", with_documents=with_documents)


def test_tokens_behind_a_cache_and_masks_without_gradients_do_not_go_by_blocks(monkeypatch):
    def fail(*args):
        raise AssertionError("by blocks")

    chosen = Attention("blocks", "blocks", "blocks")
    monkeypatch.setitem(choices.BACKENDS, "blocks", (fail, choices.KINDS))
    q, k, v, _, documents = inputs(2, 6)
    visible = choices.visible_from(documents)
    with torch.no_grad():
        chosen(q, k, v, 6, visible)
        chosen(q[:, :, 5:], k, v, 6)
    with pytest.raises(AssertionError, match="by blocks"):
        chosen(q, k, v, 6, visible)


@pytest.mark.parametrize(
    ("dtype", "T", "expected"),
    [
        (torch.bfloat16, 64, ("blocks", "blocks", "blocks")),
        (torch.bfloat16, 2048, ("blocks", "blocks", "blocks")),
        (torch.float32, 512, ("blocks", "blocks", "blocks")),
        (torch.float32, 1024, ("sdpa", "blocks", "blocks")),
        (torch.float16, 512, ("sdpa", "banded", "mask")),
    ],
)
def test_a_cpu_takes_blocks_where_they_are_faster(dtype, T, expected):
    config = GPTConfig(2, 64, 2, 20, T, "SL")
    chosen = choices.choose(config, FakeMachine("cpu"), dtype, compiled=True, documents=True, resolved={})
    assert (chosen.full, chosen.window, chosen.documents) == expected
    assert f"{expected[0]} for full layers" in chosen.reason and "not:" not in chosen.reason
