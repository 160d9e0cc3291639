"""Products of matrices, with what compiled code would otherwise do in kernels of their own beside them.

A product adds to a tensor where that is summed next, and where the "head" kernel is in use (kernels.py) it
writes the gradient of a weight in float32.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanochat.ops import kernels, operators


def is_plain(linear: nn.Module) -> bool:
    """Whether a layer is a product with its weight alone: no bias, not fp8, no class of your own."""
    return type(linear) is nn.Linear and linear.bias is None


def products(x, *groups: tuple[nn.Linear, ...]):
    """x (..., C) through each nn.Linear (C to rows of its own) of the groups: a list of (..., rows).

    Compiled, a group is one product: a GPU is slow at small ones, and at sizes that are no multiple of 8.
    """
    linears = [linear for group in groups for linear in group]
    if not (torch.compiler.is_compiling() and all(map(is_plain, linears))):
        return [linear(x) for linear in linears]
    weights = [torch.cat([linear.weight for linear in group]) for group in groups]
    padding, found = [-len(weight) % 8 for weight in weights], []
    padded = [F.pad(weight, (0, 0, 0, rows)) for weight, rows in zip(weights, padding, strict=True)]
    for group, result, rows in zip(groups, _multiply(x, None, *padded), padding, strict=True):
        sizes = [linear.weight.size(0) for linear in group]
        found += result.split([*sizes, rows], -1)[:-1]
    return found


def product(x, linear: nn.Linear, added_to):
    """added_to + linear(x). Compiled, the product itself adds."""
    if not (torch.compiler.is_compiling() and is_plain(linear)):
        return added_to + linear(x)
    (result,) = _multiply(x, added_to, linear.weight)
    return result


def gradient_of_weight(dy, x):
    """dy.T @ x, (rows, C), of dy (N, rows) and x (N, C): in float32, or float64 if x is."""
    if "head" in kernels.IN_USE:
        return torch.ops.nanochat.weight_gradient(dy, x)
    return (dy.T @ x).to(torch.promote_types(x.dtype, torch.float32))


def _multiply(x, total, weight, second=None):
    x = x.to(operators.compute_dtype(x))
    total = None if total is None else total.to(x.dtype).flatten(0, -2)
    results = _Products.apply(x.flatten(0, -2), total, weight, second)
    return [y.view(*x.shape[:-1], -1) for y in results]


class _Products(torch.autograd.Function):
    """x (N, C) @ weight.T, plus total (N, rows) or None, and the same with a second weight or None, without
    total. Both products for the gradient of x add to one tensor.

    Not *weights: torch 2.13 cannot compile that for a model without gradients.
    """

    @staticmethod
    def forward(ctx, x, total, weight, second):
        weights = [w.to(x.dtype) for w in (weight, second) if w is not None]
        ctx.save_for_backward(x, *weights)
        if total is None:
            return tuple(x @ weight.T for weight in weights)
        total = total.clone()  # compiled code writes it there at once
        torch.ops.nanochat.add_product_(total, x, weights[0].T)
        return (total,)

    @staticmethod
    def backward(ctx, *dys):
        x, *weights = ctx.saved_tensors
        dx = dys[0] @ weights[0]
        for dy, weight in zip(dys[1:], weights[1:], strict=True):
            torch.ops.nanochat.add_product_(dx, dy, weight)
        of_weights = [gradient_of_weight(dy, x) for dy in dys]
        of_weights += [None] * (2 - len(dys))
        return dx, dys[0] if ctx.needs_input_grad[1] else None, *of_weights


def _add_product(total, a, b):
    """total (M, N) += a (M, K) @ b (K, N), whose dtype may be smaller."""
    total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _add_product_on_cuda(total, a, b):
    """The product adds where its tiles are written, in float32; a sum of its own takes a pass over total."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def _weight_gradient(dy, x):
    dtype = torch.promote_types(x.dtype, torch.float32)
    return dy.T.to(dtype) @ x.to(dtype)


def _weight_gradient_on_cuda(dy, x):
    """A product adds up in float32, so that it is written and no other kernel has to cast it."""
    return torch.mm(dy.T, x, out_dtype=torch.float32) if x.dtype.itemsize == 2 else dy.T @ x


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
