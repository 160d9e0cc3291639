"""The MLP with its norm: two products with an activation in between. On GPUs only the activation z is kept.

With u = norm(x) @ up.T, z is the square of leaky ReLU of u, and y = z @ down.T. Apart, the activation takes a
kernel that reads u and writes z, and in the backward pass one that reads u and dz and writes du. Here one
product writes z, and another one writes du. For that it needs z and the sign of u, which takes the place of
the last bit of z: a bfloat16 number has 8 significant bits, z has 7 and the sign. The plain way rounds u to 8
bits, the square doubles that error, and z is rounded once more, which is no less in all.

norm(x) is x times r, the row's 1 / RMS, so u = r * (x @ up.T), and no normed copy of x is written. In the
backward pass r * du is written. With d = r * du @ up and n = norm(x), x has the gradient d - n * mean(d * n).
"""

import torch
import torch.nn as nn

from nanochat.ops import kernels, operators
from nanochat.ops.elementwise import EPS, SLOPE, norm, squared_leaky_relu
from nanochat.ops.products import gradient_of_weight, is_plain


def packed_activation(u):
    """The square of leaky ReLU of u, float32 -> bfloat16 of the same shape, whose last bit is 1 where u < 0.

    It is the nearest such number: even where u is not negative, else odd, so that no sign has a bias.
    """
    positive = u >= 0
    bits = torch.where(positive, u, SLOPE * u).square().view(torch.int32)
    bits = torch.where(positive, (bits + 0x10000) >> 17 << 1, bits >> 17 << 1 | 1)
    return bits.to(torch.int16).view(torch.bfloat16)


def slope_of_activation(z):
    """dz/du of a packed activation, bfloat16 -> float32: 2 u = 2 sqrt(z), below 0 2 SLOPE^2 u."""
    return z.float().sqrt() * torch.where(z.view(torch.int16) & 1 == 1, -2 * SLOPE, 2.0)


def _up_activated(x, weight, r):
    return packed_activation(r[:, None] * (x.float() @ weight.float().T))


def _down_activated_backward(dy, weight, z, r):
    return (r[:, None] * (dy.float() @ weight.float()) * slope_of_activation(z)).to(z.dtype)


# x, dy (N, C), weight (F, C) or (C, F), and z (N, F) are bfloat16, r (N,) is float32
operators.register(
    "up_activated",  # z = packed_activation(r * (x @ weight.T))
    "(Tensor x, Tensor weight, Tensor r) -> Tensor",
    _up_activated,
    lambda x, weight, r: x.new_empty(x.size(0), weight.size(0)),
    kernel=lambda *inputs: operators.triton_kernels().up_activated(*inputs, SLOPE),
)
operators.register(
    "down_activated_backward",  # r * du = r * (dy @ weight) * dz/du, (N, F)
    "(Tensor dy, Tensor weight, Tensor z, Tensor r) -> Tensor",
    _down_activated_backward,
    lambda dy, weight, z, r: torch.empty_like(z),
    kernel=lambda *inputs: operators.triton_kernels().down_activated_backward(*inputs, SLOPE),
)


class _MLP(torch.autograd.Function):
    """x (N, C) bfloat16, up (F, C), down (C, F) -> y (N, C)."""

    @staticmethod
    def forward(ctx, x, up, down):
        up, down = up.to(x.dtype), down.to(x.dtype)
        r = torch.rsqrt(x.float().square().mean(-1) + EPS)
        z = torch.ops.nanochat.up_activated(x, up, r)
        ctx.save_for_backward(x, up, down, z, r)
        return z @ down.T

    @staticmethod
    def backward(ctx, dy):
        x, up, down, z, r = ctx.saved_tensors
        r_du = torch.ops.nanochat.down_activated_backward(dy, down, z, r)
        d, n = (r_du @ up).float(), x.float() * r[:, None]
        dx = d - n * (d * n).mean(-1, keepdim=True)
        return dx.to(x.dtype), gradient_of_weight(r_du, x), gradient_of_weight(dy, z)


def mlp(x, up, down):
    """down(square of leaky ReLU of up(norm(x))): x (B, T, C), weights up (F, C) and down (C, F), of any dtype
    -> (B, T, C) bfloat16. For bfloat16 only, because of the packed activation."""
    x = x.to(torch.bfloat16)
    with torch.autocast(x.device.type, enabled=False):
        return _MLP.apply(x.flatten(0, 1), up, down).view_as(x)


def feed_forward(x, up: nn.Module, down: nn.Module):
    """down(square of leaky ReLU of up(norm(x))), x (B, T, C) -> (B, T, C): by the kernels where they are in
    use."""
    suits = x.dtype == torch.bfloat16 and x.size(1) > 1 and is_plain(up) and is_plain(down)
    if "mlp" in kernels.IN_USE and suits:
        return mlp(x, up.weight, down.weight)
    return down(squared_leaky_relu(up(norm(x))))
