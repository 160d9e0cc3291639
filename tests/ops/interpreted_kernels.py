"""The Triton kernels by Triton's interpreter, on a CPU, against float64: errors as a line of JSON.

test_kernels.py runs it as a program, since TRITON_INTERPRET counts when Triton is imported. The interpreter
has no products of bfloat16, so those get float32, and it cuts bfloat16 results off instead of rounding them.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
import triton

from nanochat.ops import mlp, triton_kernels
from nanochat.ops.elementwise import SLOPE
from nanochat.ops.kernels import distance

CAP = 15.0


def losses(V: int, dtype: torch.dtype, scale: float, on_chip: int) -> dict:
    generator = torch.Generator().manual_seed(0)
    logits = (10 * torch.randn(7, V, generator=generator)).to(dtype)
    targets = torch.randint(V, (7,), generator=generator)
    targets[[2, 6]] = -1
    targets[3] = V - 1
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(CAP * torch.tanh(exact / CAP), targets, ignore_index=-1, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    triton_kernels.ON_CHIP = on_chip  # of a row; the rest is read twice
    read, written = logits.clone(), logits.clone()
    found = triton_kernels.softcapped_losses_(written, targets, True, scale, CAP)
    return {
        "loss": distance(found, expected.detach()),
        "without_gradient": distance(
            triton_kernels.softcapped_losses_(read, targets, False, 1.0, CAP), expected
        ),
        "changed_without_gradient": not torch.equal(read, logits),
        "gradient": distance(written.double() * 4 / scale, gradient),
        "unscored": found[targets == -1].abs().sum().item() + written[targets == -1].abs().sum().item(),
    }


def products(N: int, C: int, F_: int) -> dict:
    blocks = {"BLOCK_N": 32, "BLOCK_F": 64, "BLOCK_K": 16, "GROUP": 2}
    triton_kernels.product_kernel.configs = [triton.Config(blocks, pre_hook=triton_kernels._set_blocks)]
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(shape, generator=generator)

    x, up, down, dy = numbers(N, C), numbers(F_, C), numbers(C, F_), numbers(N, C)
    x[3] = 0
    r = 1 + numbers(N).abs()
    z = triton_kernels.up_activated(x, up, r, SLOPE)
    du = triton_kernels.down_activated_backward(dy, down, z, r, SLOPE)
    plain = torch.ops.nanochat.up_activated(x, up, r)
    return {
        "z": distance(z, plain.double()),
        "signs": (z.view(torch.int16) & 1).ne(plain.view(torch.int16) & 1).sum().item(),
        "du": distance(du, r[:, None] * (dy.double() @ down.double()) * mlp.slope_of_activation(z)),
        "at_zero": z[3].abs().sum().item() + du[3].abs().sum().item(),
    }


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "float32": losses(1000, torch.float32, 4.0, 2**15),
                "float32, 256 on chip": losses(1000, torch.float32, 4.0, 256),
                "bfloat16": losses(513, torch.bfloat16, 4.0, 2**15),
                "float16": losses(300, torch.float16, 1024.0, 128),
                "products": products(70, 40, 96),
                "one tile": products(5, 8, 16),
            }
        )
    )
