"""Norms, rotary positions, gates and leaky ReLU squared.

Compiled code computes such a formula in one pass over memory. Eager code makes a pass for each operation; on
a CPU these passes are a fifth of a step. So on a CPU the formulas here take fewer operations, and backward
passes written by hand need only the result.
"""

import torch
import torch.nn.functional as F

from nanochat.ops.attention import previous_token, same_document

EPS = torch.finfo(torch.float32).eps  # added under the root of a norm, as F.rms_norm does
SLOPE = 0.5  # slope of the leaky ReLU below 0


def norm(x, dtype: torch.dtype | None = None):
    """RMSNorm of x (..., C) over its last dimension, without weights, in a dtype (None: that of x)."""
    if torch.compiler.is_compiling():
        return _CompiledNorm.apply(x, dtype or x.dtype)
    n = _Norm.apply(x) if _by_hand(x) else F.rms_norm(x, (x.size(-1),))
    return n.to(dtype or x.dtype)


def stream_and_norm(x):
    """(x, norm(x)). Compiled code computes x again from norm(x): then one kernel makes both."""
    return _StreamAndNorm.apply(x) if torch.compiler.is_compiling() else (x, norm(x))


def rotary_tables(length: int, head_dim: int, base: float, device: torch.device):
    """(cos, cos) and (-sin, sin) of the angles of `length` positions, (length, 1, head_dim) float32 (RoPE).

    Halves (a, b) of a query or key become (a, b) * (cos, cos) + (b, a) * (-sin, sin).
    """
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)


def norm_and_rotate(x, cos, sin, scale: float, shifted: bool = False, visible=None):
    """RMSNorm of x (B, T, H, D) times scale, then the rotary embedding. A rotation does not change the RMS.

    cos = (cos, cos) and sin = (-sin, sin), each (T, 1, D) in x's dtype, or (B, T, 1, D) if each row has
    positions of its own. shifted: then by one position, with zeros where a row, or a document of `visible`,
    begins. Position t then has the key of t - 1, so one layer copies what followed a token (induction): a
    query finds what followed a token like its own. With unshifted keys that takes two layers, and most of a
    short run to learn (docs/ablations.md).
    """
    if torch.compiler.is_compiling():
        divided = shifted and visible is not None
        same = same_document(visible, *x.shape[:2])[:, :, None, None] if divided else None
        return _NormRotateShift.apply(x, cos, sin, scale, shifted, same)
    if _by_hand(x):
        y = _NormAndRotate.apply(x, cos, sin, scale)
    else:
        y = norm(x * cos + _swap_halves(x) * sin) * scale
    return previous_token(y, visible) if shifted else y


def gated(x, gates):
    """2 sigmoid(gates) * x: x (B, T, C) or (B, T, G, C / G), gates (B, T, G). Gates of 0 keep x."""
    return (2 * torch.sigmoid(gates).unsqueeze(-1) * x.view(*gates.shape, -1)).view_as(x)


def scaled(x, scales):
    """[scale * x for each of the scales (n,)]. Compiled, their gradients are first summed over a position's
    channels, in the kernel that reads them anyway."""
    if torch.compiler.is_compiling():
        scales = scales.expand(*x.shape[:-1], len(scales)).split(1, -1)
    return [scale * x for scale in scales]


def squared_leaky_relu(x):
    """x^2 where x is positive, else (x / 2)^2. It may overwrite x."""
    if _by_hand(x):
        return _SquaredLeakyReLU.apply(x)
    h = F.leaky_relu_(x, SLOPE)  # in place: else the backward pass would keep x, too
    return h * h  # not h.square(): CUDA's autocast computes pow in float32 and keeps a copy


def _by_hand(x) -> bool:
    """On a CPU, not compiled. In float16 the products of the backward passes could overflow."""
    suits = x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32)
    return suits and not torch.compiler.is_compiling()


# In the classes below r (..., 1) is 1 / RMS, in float32 or better, and y the result. With n = x * r the
# gradient of x is r * (dn - n * mean(dn * n)).


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        r = _inverse_rms(x)
        y = _times(x, r)
        ctx.save_for_backward(y, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        return _gradient(dy, *ctx.saved_tensors)


class _NormAndRotate(torch.autograd.Function):
    """A rotation does not change the sum of dn * n either, so the backward pass needs only y."""

    @staticmethod
    def forward(ctx, x, cos, sin, scale):
        r = _inverse_rms(x).mul_(scale)
        n = _times(x, r)
        y = torch.mul(n, cos).addcmul_(_swap_halves(n), sin)
        ctx.save_for_backward(y, r, cos, sin)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, dy):
        y, r, cos, sin = ctx.saved_tensors
        dx = _gradient(dy, y, r, ctx.scale)
        return torch.mul(dx, cos).addcmul_(_swap_halves(dx), sin, value=-1), None, None, None


def _cast(x, dtype):
    """x in a dtype. With torch 2.11 compiled code gives a result no gradient if `to` had nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


class _CompiledNorm(torch.autograd.Function):
    """_Norm in float32, for compiled code. Its result is kept anyway, for a product; x is not."""

    @staticmethod
    def forward(ctx, x, dtype):
        y, r = _compiled_norm(x, dtype)
        ctx.dtype = x.dtype
        ctx.save_for_backward(y, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        return _cast(_compiled_gradient(dy, *ctx.saved_tensors), ctx.dtype), None


class _StreamAndNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        n, r = _compiled_norm(x, x.dtype)
        ctx.save_for_backward(n, r)
        return _cast(_cast(n, torch.float32) / r, x.dtype), n

    @staticmethod
    def backward(ctx, dx, dn):
        return _cast(dx.float() + _compiled_gradient(dn, *ctx.saved_tensors), dx.dtype)


def _compiled_norm(x, dtype):
    """norm(x) in a dtype and r, both computed in float32."""
    x = x.float()
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return _cast(x * r, dtype), r


def _compiled_gradient(dn, n, r):
    """The gradient of x, float32, from that of n = norm(x)."""
    dn, n = dn.float(), n.float()
    return r * (dn - n * (dn * n).mean(-1, keepdim=True))


class _NormRotateShift(torch.autograd.Function):
    """For compiled code: one pass forward and one backward, of which each reads and writes everything once.

    So the forward pass shifts what it reads, and the backward pass, too: PyTorch's compiler writes a result
    of a sum over D only in the place where it was computed.
    """

    @staticmethod
    def forward(ctx, x, cos, sin, scale, shifted, same):
        ctx.scale, ctx.shifted = scale, shifted
        n = _before(x) if shifted else x
        n = n.float() if same is None else n.float() * same
        r = scale * torch.rsqrt(n.square().mean(-1, keepdim=True) + EPS)
        n = n * r
        table = (_before(cos), _before(sin)) if shifted else (cos, sin)
        y = _cast(n * table[0] + _swap_halves(n) * table[1], x.dtype)
        ctx.save_for_backward(y, r, cos, sin, same)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, r, cos, sin, same = ctx.saved_tensors
        if same is not None:
            dy = dy * same
        if ctx.shifted:
            dy, y, r = _after(dy), _after(y), _after(r)
        # Both rotated back before the sum: nothing that follows from it is needed in another place
        dn, n = (part.float() * cos - _swap_halves(part.float()) * sin for part in (dy, y))
        dx = r * (dn - n * ((dn * n).mean(-1, keepdim=True) / ctx.scale**2))
        return _cast(dx, y.dtype), None, None, None, None, None


def _before(x):
    """x (..., T, H, D) shifted right by one position."""
    return F.pad(x[..., :-1, :, :], (0, 0, 0, 0, 1, 0))


def _after(x):
    """x (..., T, H, D) shifted left by one position."""
    return F.pad(x[..., 1:, :, :], (0, 0, 0, 0, 0, 1))


class _SquaredLeakyReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        h = F.leaky_relu(x, SLOPE)
        ctx.save_for_backward(h)
        return h * h

    @staticmethod
    def backward(ctx, dy):
        (h,) = ctx.saved_tensors  # its sign is that of x
        dh = torch.addcmul(h.new_zeros(()), h, dy, value=2)  # one pass for 2 * h * dy
        return torch.ops.aten.leaky_relu_backward(dh, h, SLOPE, True)


def _inverse_rms(x):
    dtype = torch.promote_types(x.dtype, torch.float32)
    total = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype).square_()
    return total.div_(x.size(-1)).add_(EPS).rsqrt()


def _times(x, r):
    """x * r in x's dtype. A bfloat16 x is multiplied with r as the sum of two bfloat16 numbers, so that
    nothing of its size is made in float32."""
    if x.dtype == r.dtype:
        return x * r
    high = r.to(x.dtype)
    low = (r - high).to(x.dtype)
    return torch.mul(x, low).addcmul_(x, high)


def _gradient(dy, y, r, scale: float = 1.0):
    """The gradient of x, from that of y = x * r, where r is scale / RMS."""
    mean = (dy * y).sum(-1, keepdim=True, dtype=r.dtype).div_(y.size(-1) * scale**2)
    return _times(dy, r).addcmul_(y, mean.mul_(r).neg_().to(y.dtype))


def _swap_halves(x):
    if torch.compiler.is_compiling():
        return x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return x.roll(x.size(-1) // 2, -1)
