"""Rows of tables; and how to make operators of PyTorch from functions, which compiled code calls as they are.

torch.library.custom_op does the same, but its first call in eager mode loads torch's compiler, which takes
two seconds.
"""

import torch
import torch.distributed as dist
import torch.nn as nn

LIBRARY = torch.library.Library("nanochat", "DEF")
BIGRAM_HASH = 40_503  # spreads pairs of tokens over the rows that they share: odd, near 2^16 / golden ratio


def register(name: str, types: str, function, shapes, kernel=None):
    """Make torch.ops.nanochat.<name> of a function, for tensors on a CPU, and of a kernel for those on CUDA.

    types: its arguments and results, as "(Tensor x) -> Tensor"; an argument that it writes to is a
    Tensor(a!). shapes: a function of the same arguments that returns empty results.
    """
    LIBRARY.define(name + types, tags=torch.Tag.pt2_compliant_tag)
    LIBRARY.impl(name, function, "CPU")
    LIBRARY.impl(name, shapes, "Meta")
    if kernel:
        LIBRARY.impl(name, kernel, "CUDA")


def register_autograd(name: str, keep, gradients):
    """Give an operator its backward pass: setup_context and backward of torch.library.register_autograd.

    Not a torch.autograd.Function: torch.compile would look inside.
    """
    torch.library.register_autograd(f"nanochat::{name}", gradients, setup_context=keep, lib=LIBRARY)


def compute_dtype(x) -> torch.dtype:
    """Autocast's dtype on the device of x, without autocast that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def embedding(vocab_size: int, width: int) -> nn.Embedding:
    """A table (V, C) for `init_weights` to fill. nn.Embedding() would fill it first, and on the meta device
    torch loads its whole compiler for that, which takes a second or two."""
    return nn.Embedding.from_pretrained(torch.empty(vocab_size, width), freeze=False)


def bigram_rows(before, idx, rows: int):
    """Which of so many rows each pair of tokens has: before and idx (...) int64, the token before and itself.

    Several pairs share a row (hashed n-gram embeddings, arXiv 1709.03933).
    """
    return (before * BIGRAM_HASH + idx) % rows


def look_up(weight, idx):
    """Rows of a table: weight (V, C), idx (B, T) int64 -> (B, T, C) in the dtype of weight.

    If weight.grad is there already (MuonAdamW keeps it), the backward pass adds to the rows in it that idx
    names. Otherwise it writes a gradient of its own, mostly zeros, that autograd adds to the earlier ones; so
    it does in several processes, where DDP waits for it. Eager code on CUDA and MPS is PyTorch's own.
    """
    on_cpu = weight.device.type == "cpu"
    if not (on_cpu or torch.compiler.is_compiling()):
        return torch.embedding(weight, idx)
    total = weight.grad if weight.is_leaf and not dist.is_initialized() else None
    return _Rows.apply(weight, idx, total, on_cpu)


class _Rows(torch.autograd.Function):
    """look_up, with total = weight.grad or None."""

    @staticmethod
    def forward(ctx, weight, idx, total, on_cpu):
        ctx.save_for_backward(idx)
        ctx.rows, ctx.total, ctx.on_cpu = weight.size(0), total, on_cpu
        if not torch.compiler.is_compiling():
            return torch.embedding(weight, idx)
        return weight[idx]  # compiled code would keep an embedding's rows; these it reads again

    @staticmethod
    def backward(ctx, dy):
        (idx,) = ctx.saved_tensors
        total = dy.new_zeros(ctx.rows, dy.size(-1)) if ctx.total is None else ctx.total
        if ctx.on_cpu:
            torch.ops.nanochat.add_rows_(total, idx, dy)
        else:
            total.index_put_((idx,), dy, accumulate=True)
        return total if ctx.total is None else None, None, None, None


def _add_rows(total, idx, rows):
    """total (V, C) += rows (..., C), each at its idx (...).

    On a CPU compiled code of its own would add a row's gradients in whatever order its threads arrive, so no
    two runs would be the same. PyTorch's operator has one order.
    """
    total.index_add_(0, idx.flatten(), rows.flatten(0, -2))


register(
    "add_rows_", "(Tensor(a!) total, Tensor idx, Tensor rows) -> ()", _add_rows, lambda total, idx, rows: None
)
