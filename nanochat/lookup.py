"""Rows of an embedding table, compiled or not with the same gradient."""

import torch

from nanochat.operators import register, register_autograd


def look_up(table, idx):
    """Rows of the weight (V, C) of an nn.Embedding or nn.Linear: idx (B, T) int64 -> (B, T, C) in its dtype.

    On a CPU compiled code would add up the gradient of a row in the order in which its threads come, so no
    two runs would be the same. PyTorch's own operator has one order, and is no slower (docs/benchmarks.md).
    """
    if torch.compiler.is_compiling() and table.weight.device.type == "cpu":
        return torch.ops.nanochat.rows_of_table(table.weight, idx)
    return table(idx) if isinstance(table, torch.nn.Embedding) else torch.embedding(table.weight, idx)


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
