"""Triton kernels for CUDA: the loss of rows of logits, and the products of the MLP with its activation.

Only kernels.py imports this module, where CUDA and Triton are; tests import it under TRITON_INTERPRET=1, and
experiments/kernel_code.py compiles it for GPUs that are not there. Each kernel's operator has a plain
implementation for a CPU that says what it computes: loss.py, mlp.py.
"""

import torch
import triton
import triton.language as tl

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

    A program takes a row. Its first BLOCK logits are read once and stay on chip. Those of a larger vocabulary,
    in blocks of REST, are read again for the gradient, from the L2 cache.
    """
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    z = logits + row.to(tl.int64) * V
    target = tl.load(targets + row)
    s_target, e_target = _sigmoid_and_exponential(tl.load(z + target, mask=target >= 0, other=0.0), CAP)
    s, e = _sigmoid_and_exponential(tl.load(z + columns, mask=columns < V, other=0.0), CAP)
    d = e * (s - s * s)
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
            d_more = e_more * (s_more - s_more * s_more) * (factor / total)
            tl.store(z + more, d_more.to(logits.dtype.element_ty), mask=more < V)
        # The target's own comes last, after a barrier: to ask of each logit whether it is the target costs more
        tl.debug_barrier()
        d_target = (e_target / total - 1) * (s_target - s_target * s_target) * factor
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
