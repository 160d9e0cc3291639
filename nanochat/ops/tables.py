"""Tables: rows for tokens, and rows that pairs and triples of tokens share."""

import torch
import torch.distributed as dist
import torch.nn as nn

from nanochat.ops.attention import previous_ids
from nanochat.ops.operators import register

HASH = 40_503, 1_000_003  # spread pairs and triples over the rows that they share: odd, and without a pattern


def embedding(vocab_size: int, width: int) -> nn.Embedding:
    """A table (V, C) for `init_weights` to fill. nn.Embedding() would fill it first, and on the meta device
    torch loads its whole compiler for that, which takes a second or two."""
    return nn.Embedding.from_pretrained(torch.empty(vocab_size, width), freeze=False)


def look_up(weight, idx):
    """Rows of a table: weight (V, C), idx (B, T) int64 -> (B, T, C) in the dtype of weight.

    If weight.grad is there already (MuonAdamW keeps it), the backward pass adds to the rows in it that idx
    names, and marks them in weight.used, (V,) bool, if there is one. Otherwise it writes a gradient of its
    own, mostly zeros, that autograd adds to the earlier ones; so it does in several processes, where DDP
    waits for it. Eager code on CUDA and MPS is PyTorch's own.
    """
    on_cpu = weight.device.type == "cpu"
    if not (on_cpu or torch.compiler.is_compiling()):
        return torch.embedding(weight, idx)
    total = weight.grad if weight.is_leaf and not dist.is_initialized() else None
    used = None if total is None else getattr(weight, "used", None)
    return _Rows.apply(weight, idx, total, used, on_cpu)


class _Rows(torch.autograd.Function):
    """look_up, with total = weight.grad or None, and used = weight.used or None."""

    @staticmethod
    def forward(ctx, weight, idx, total, used, on_cpu):
        ctx.save_for_backward(idx)
        ctx.rows, ctx.total, ctx.used, ctx.on_cpu = weight.size(0), total, used, on_cpu
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
        if ctx.used is not None:
            ctx.used[idx] = True
        return total if ctx.total is None else None, None, None, None, None


def _add_rows(total, idx, rows):
    """total (V, C) += rows (..., C), each at its idx (...).

    On a CPU compiled code of its own would add a row's gradients in whatever order its threads arrive, so no
    two runs would be the same. PyTorch's operator has one order.
    """
    total.index_add_(0, idx.flatten(), rows.flatten(0, -2))


register(
    "add_rows_", "(Tensor(a!) total, Tensor idx, Tensor rows) -> ()", _add_rows, lambda total, idx, rows: None
)


class NgramEmbedding(nn.Module):
    """Rows that pairs of tokens share, and rows that triples share (hashed n-grams, arXiv 1709.03933).

    With `values`, pairs have a second row, which the model adds to a value embedding.
    """

    def __init__(self, rows: int, width: int, values: bool = False):
        super().__init__()
        self.pairs, self.triples = embedding(rows, width), embedding(rows, width)
        self.values = embedding(rows, width) if values else None

    def forward(self, x, ids, visible=None):
        """x (B, T, C) + the rows of pairs and triples, and which row of `values` a pair has, (B, T) or None.

        ids: the tokens so far, (B, L) int64, of which the last T are those of x.
        """
        T = x.size(1)
        before, second = previous_ids(ids, T, visible)
        number = before * HASH[0] + ids[:, -T:]
        pair, triple = (n % len(self.pairs.weight) for n in (number, second * HASH[1] + number))
        x = x + (look_up(self.pairs.weight, pair) + look_up(self.triples.weight, triple))
        return x, None if self.values is None else pair
