"""Triton kernels for CUDA: the loss of rows of logits, and the products of the MLP with its activation.

The operators in loss.py and mlp.py import this module at their first call on CUDA. Their implementations for
a CPU say what each kernel computes. Tests run the kernels under TRITON_INTERPRET=1, and
experiments/kernel_code.py compiles them for GPUs that are not there.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(1.4426950408889634)  # GPUs have exp2
ON_CHIP = 2**15  # logits of a row that stay in registers: 32 in each of 1024 threads


@triton.jit
def _sigmoid_and_exponential(z, CAP: tl.constexpr):
    """s = sigmoid(2 z / CAP) and exp(CAP tanh(z / CAP)), in which tanh is 2 s - 1; float32."""
    s = 1 / (1 + tl.exp2(z.to(tl.float32) * (-2 / CAP * LOG2E)))
    return s, tl.exp2((s - 0.5) * (2 * CAP * LOG2E))


@triton.jit
def softcapped_losses_kernel(
    logits, targets, losses, scale,
    V: tl.constexpr, CAP: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """losses (rows,) float32 of logits (rows, V); with GRADIENT, the logits become their gradient.

    A program takes a row. Its first BLOCK logits are read once and stay on chip. Those of a larger
    vocabulary, in blocks of REST, are read again for the gradient, from the L2 cache.
    """
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    z = logits + row.to(tl.int64) * V
    target = tl.load(targets + row)
    s_target, e_target = _sigmoid_and_exponential(tl.load(z + target, mask=target >= 0, other=0.0), CAP)
    s, e = _sigmoid_and_exponential(tl.load(z + columns, mask=columns < V, other=0.0), CAP)
    d = e * s * (1 - s)
    total = tl.sum(tl.where(columns < V, e, 0.0))
    for start in range(BLOCK, V, REST):
        more = start + tl.arange(0, REST)
        _, e_more = _sigmoid_and_exponential(tl.load(z + more, mask=more < V, other=0.0), CAP)
        total += tl.sum(tl.where(more < V, e_more, 0.0))
    tl.store(losses + row, tl.where(target >= 0, tl.log(total / e_target), 0.0))
    if GRADIENT:
        factor = tl.where(target >= 0, scale, 0.0)
        tl.store(z + columns, (d * (factor / total)).to(logits.dtype.element_ty), mask=columns < V)
        for start in range(BLOCK, V, REST):
            more = start + tl.arange(0, REST)
            s_more, e_more = _sigmoid_and_exponential(tl.load(z + more, mask=more < V, other=0.0), CAP)
            d_more = e_more * s_more * (1 - s_more) * (factor / total)
            tl.store(z + more, d_more.to(logits.dtype.element_ty), mask=more < V)
        # The target's own is written last. To ask of each logit whether it is the target would cost more.
        # It was read before the sum, at which all threads wait, so before any logit was overwritten.
        tl.debug_barrier()
        d_target = (e_target / total - 1) * s_target * (1 - s_target) * factor
        tl.store(z + target, d_target.to(logits.dtype.element_ty), mask=target >= 0)


def softcapped_losses_(logits, targets, gradient: bool, scale: float, cap: float):
    """loss.chunk_losses_in_one_pass of contiguous logits, with a softcap of `cap`."""
    rows, V = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(ON_CHIP, triton.next_power_of_2(V))
    softcapped_losses_kernel[(rows,)](
        logits, targets, losses, scale,
        V=V, CAP=cap, GRADIENT=gradient, BLOCK=block, REST=ON_CHIP // 4, num_warps=max(4, block // 1024),
    )  # fmt: skip
    return losses


# ------------------------------------------------------------------------------------------------------
# Products with the activation of the MLP


@triton.jit
def _packed_activation(u, SLOPE: tl.constexpr):
    """mlp.packed_activation: u float32 -> bfloat16 with u's sign in the last bit."""
    positive = u >= 0  # not of NaN, so that its bits stay
    h = tl.where(positive, u, SLOPE * u)
    bits = (h * h).to(tl.int32, bitcast=True)
    bits = tl.where(positive, (bits + 0x10000) >> 17 << 1, bits >> 17 << 1 | 1)
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _slope_of_activation(z, SLOPE: tl.constexpr):
    """mlp.slope_of_activation: dz/du, float32, from z alone."""
    negative = (z.to(tl.int16, bitcast=True) & 1) == 1
    return tl.sqrt(z.to(tl.float32)) * tl.where(negative, -2 * SLOPE, 2.0)


def _set_blocks(arguments: dict):
    """Give the descriptors the blocks of the configuration that is tried."""
    n, f, k = (arguments[name] for name in ("BLOCK_N", "BLOCK_F", "BLOCK_K"))
    arguments["a"].block_shape = [n, k]
    arguments["b"].block_shape = [f, k] if arguments["FORWARD"] else [k, f]
    arguments["z"].block_shape = arguments["out"].block_shape = [n, f]


# BLOCK_N, BLOCK_F, warps, stages. Of the smaller tiles an SM runs two at a time, and one computes while the
# other one begins or ends; with few channels that is much of a tile's time.
TILES = [(128, 256, 8, 3), (128, 256, 8, 4), (128, 128, 4, 3), (128, 128, 8, 3)]
CONFIGS = [
    triton.Config(
        {"BLOCK_N": n, "BLOCK_F": f, "BLOCK_K": 64, "GROUP": 8},
        num_warps=warps,
        num_stages=stages,
        pre_hook=_set_blocks,
    )
    for n, f, warps, stages in TILES
]


@triton.autotune(CONFIGS, key=["F", "K", "FORWARD"])
@triton.jit
def product_kernel(
    a, b, z, out, r, N, F, K: tl.constexpr,
    SLOPE: tl.constexpr, FORWARD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """FORWARD: out (N, F) = activation of r (N,) * a (N, K) @ b (F, K).T; z is not read.
    Else: out (N, F) = r * a (N, K) @ b (K, F), times the activation's slope from z (N, F).

    r is float32, the others are descriptors of bfloat16 matrices. What lies outside of a matrix reads as 0
    and is not written.
    """
    # Tiles in groups of GROUP rows of tiles, so that the tiles that run side by side read the same blocks of
    # a and b from the L2 cache
    tiles_n, tiles_f = tl.cdiv(N, BLOCK_N), tl.cdiv(F, BLOCK_F)
    tile = tl.program_id(0)
    first = tile // (GROUP * tiles_f) * GROUP
    height = min(tiles_n - first, GROUP)
    i = (first + tile % (GROUP * tiles_f) % height) * BLOCK_N
    j = tile % (GROUP * tiles_f) // height * BLOCK_F
    total = tl.zeros((BLOCK_N, BLOCK_F), tl.float32)
    for k in range(0, K, BLOCK_K):
        if FORWARD:
            total = tl.dot(a.load([i, k]), b.load([j, k]).T, total)
        else:
            total = tl.dot(a.load([i, k]), b.load([k, j]), total)
    rows = i + tl.arange(0, BLOCK_N)
    total *= tl.load(r + rows, mask=rows < N, other=0.0)[:, None]
    if FORWARD:
        out.store([i, j], _packed_activation(total, SLOPE))
    else:
        out.store([i, j], (total * _slope_of_activation(z.load([i, j]), SLOPE)).to(tl.bfloat16))


def _product(a, b, z, out, r, forward: bool, slope: float):
    descriptors = [TensorDescriptor.from_tensor(matrix, [1, 1]) for matrix in (a, b, z, out)]
    (N, K), F = a.shape, out.size(1)

    def tiles(blocks: dict):
        return (triton.cdiv(N, blocks["BLOCK_N"]) * triton.cdiv(F, blocks["BLOCK_F"]),)

    product_kernel[tiles](*descriptors, r.contiguous(), N, F, K=K, SLOPE=slope, FORWARD=forward)
    return out


def up_activated(x, weight, r, slope: float):
    """See mlp.up_activated. All strides of rows are multiples of 16 bytes."""
    z = x.new_empty(x.size(0), weight.size(0), dtype=torch.bfloat16)
    return _product(x.contiguous(), weight.contiguous(), z, z, r, True, slope)


def down_activated_backward(dy, weight, z, r, slope: float):
    """See mlp.down_activated_backward. All strides of rows are multiples of 16 bytes."""
    return _product(dy.contiguous(), weight.contiguous(), z, torch.empty_like(z), r, False, slope)
