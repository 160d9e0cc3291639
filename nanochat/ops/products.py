"""Products of matrices, with what compiled code would otherwise do in kernels of their own beside them.

Where the "head" kernel is in use (kernels.py), cuBLAS writes the gradients of weights in float32.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanochat.ops import kernels, operators


def products(x, *linears: nn.Linear):
    """x (..., C) through each of several nn.Linear (C to rows of its own): a list of (..., rows).

    Compiled, it is one product: a GPU is slow at small ones, and at sizes that are no multiple of 8.
    """
    if not torch.compiler.is_compiling() or any(type(linear) is not nn.Linear for linear in linears):
        return [linear(x) for linear in linears]  # eager, or fp8
    weights = [linear.weight for linear in linears]
    sizes = [weight.size(0) for weight in weights]
    padding = -sum(sizes) % 8
    rows = F.pad(torch.cat(weights), (0, 0, 0, padding))
    return _product(x, rows).split([*sizes, padding], -1)[: len(linears)]


def product(x, linear: nn.Linear, added_to=None):
    """linear(x), or added_to + linear(x). Compiled, the product itself adds."""
    if torch.compiler.is_compiling() and type(linear) is nn.Linear:
        return _product(x, linear.weight, added_to)
    return linear(x) if added_to is None else added_to + linear(x)


def _product(x, weight, added_to=None):
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    total = None if added_to is None else added_to.to(x.dtype).flatten(0, -2)
    return _Product.apply(x.flatten(0, -2), weight, total).view(*x.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """x (N, C) @ weight.T, with (N, rows) added to it or None. The gradient of the weight is in float32."""

    @staticmethod
    def forward(ctx, x, weight, total):
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        if total is None:
            return x @ weight.T
        total = total.clone()  # compiled code writes it there at once
        torch.ops.nanochat.add_product_(total, x, weight.T)
        return total

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return dy @ weight, torch.ops.nanochat.weight_gradient(dy, x), dy if ctx.needs_input_grad[2] else None


def _add_product(total, a, b):
    """total (V, C) += a (V, rows) @ b (rows, C), of 16 bit."""
    total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _add_product_on_cuda(total, a, b):
    """The product adds where its tiles are written, in float32; a sum of its own takes a pass over total."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def _weight_gradient(dy, x):
    """dy (N, rows), x (N, C) -> dy.T @ x, (rows, C), in float32 (in float64 if x is)."""
    return (dy.T @ x).to(torch.promote_types(x.dtype, torch.float32))


def _weight_gradient_on_cuda(dy, x):
    """A product adds up in float32. So it is written, and no other kernel has to cast it."""
    if x.dtype.itemsize > 2 or "head" not in kernels.IN_USE:
        return _weight_gradient(dy, x)
    return torch.mm(dy.T, x, out_dtype=torch.float32)


operators.register(
    "add_product_",
    "(Tensor(a!) total, Tensor a, Tensor b) -> ()",
    _add_product,
    lambda total, a, b: None,
    kernel=_add_product_on_cuda,
)
operators.register(
    "weight_gradient",
    "(Tensor dy, Tensor x) -> Tensor",
    _weight_gradient,
    lambda dy, x: x.new_empty(dy.size(1), x.size(1), dtype=torch.promote_types(x.dtype, torch.float32)),
    kernel=_weight_gradient_on_cuda,
)
