"""Make operators of PyTorch from functions: compiled code calls them as they are. `look_up` is the first one.

torch.library.custom_op does the same, but its first call in eager mode loads torch's compiler, which takes
two seconds.
"""

import torch
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

    On a CPU compiled code would sum the gradient of a row in whatever order its threads arrive, so no two
    runs would be the same. PyTorch's own operator has one order, and is no slower (docs/benchmarks.md).
    """
    if not torch.compiler.is_compiling():
        return torch.embedding(weight, idx)
    if weight.device.type == "cpu":
        return torch.ops.nanochat.rows_of_table(weight, idx)
    return weight[idx]  # unlike an embedding's rows, these are not kept: the backward pass reads them again


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
