"""Embedding tables, and their rows: compiled or not with the same gradient."""

import torch
import torch.nn as nn

from nanochat.ops.operators import register, register_autograd


def embedding(vocab_size: int, width: int) -> nn.Embedding:
    """A table for `init_weights` to fill. nn.Embedding() would fill it first, and on the meta device torch
    loads its whole compiler for that, which takes a second or two."""
    return nn.Embedding.from_pretrained(torch.empty(vocab_size, width), freeze=False)


def look_up(weight, idx):
    """Rows of a table: weight (V, C), idx (B, T) int64 -> (B, T, C) in the dtype of weight.

    On a CPU compiled code would add up the gradient of a row in the order in which its threads come, so no
    two runs would be the same. PyTorch's own operator has one order, and is no slower (docs/benchmarks.md).
    """
    if torch.compiler.is_compiling() and weight.device.type == "cpu":
        return torch.ops.nanochat.rows_of_table(weight, idx)
    return torch.embedding(weight, idx)


register(
    "rows_of_table",
    "(Tensor table, Tensor idx) -> Tensor",
    torch.embedding,
    lambda table, idx: table.new_empty(*idx.shape, table.size(1)),
)
register(
    "rows_of_table_backward",
    "(Tensor gradient, Tensor idx, int rows) -> Tensor",
    lambda gradient, idx, rows: torch.ops.aten.embedding_dense_backward(gradient, idx, rows, -1, False),
    lambda gradient, idx, rows: gradient.new_empty(rows, gradient.size(-1)),
)


def _keep(ctx, inputs, output):
    table, idx = inputs
    ctx.rows = table.size(0)
    ctx.save_for_backward(idx)


def _gradients(ctx, gradient):
    (idx,) = ctx.saved_tensors
    return torch.ops.nanochat.rows_of_table_backward(gradient, idx, ctx.rows), None


register_autograd("rows_of_table", _keep, _gradients)
