"""fp8: the large products of the blocks in 8 bits, forward and backward. Off unless `--fp8` is given.

A linear layer has three products: its output, the gradient of its input and the gradient of its weight. On
GPUs that multiply fp8 numbers, these run at twice bfloat16's peak. float8_e4m3fn (3 bits of mantissa, largest
number 448) holds inputs and weights. float8_e5m2 (2 bits, largest 57344) holds gradients, whose sizes differ
more (arXiv 2209.05433). A tensor is first multiplied by one float32 number, its scale, so that its largest
value becomes the largest of the format.

Everything else stays as it is: weights are float32 parameters of the same names, and so are their gradients,
the optimizer's state and the checkpoints. fp8 is for training alone: without gradients the products run in
the compute dtype, so every evaluation and every sample is of the model that a checkpoint gives anyone.

The gates stay in bfloat16 because they are too small to gain, and so do attention and the head, whose errors
would go straight into the loss (arXiv 2412.19437, section 3.3, keeps the same parts out). The FLOPs are
counted as before, and MFU is still a share of the 16-bit peak.

fp8 has not run on a GPU: the checks on one H200 on 2026-11-26 did not reach it. On a CPU torch computes the
same products slowly (tests/ops/test_fp8.py).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanochat import UserError
from nanochat.ops import operators
from nanochat.ops.products import is_plain

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # cuBLAS takes fp8 matrices whose sizes are multiples of it
SMALLEST = 128  # with fewer inputs or outputs the casts may take longer than fp8 saves; not measured
FP8_CAPABILITY = (8, 9)  # the lowest CUDA compute capability on which torch._scaled_mm runs
TINY = 2.0**-100  # taken as the largest value of a tensor of zeros, so that its scale is finite


def check_fp8(fp8: bool, device: torch.device, dtype: torch.dtype, max_seq_len: int, resolved: dict):
    """Raise UserError if `--fp8` is given and this run cannot use it, or if a resumed run changes it.

    resolved: what the resumed run resolved at its first start ({}: a new run).
    """
    if resolved and fp8 != resolved.get("fp8", False):
        began, give = ("with", "give it again") if not fp8 else ("without", "leave it out")
        raise UserError(f"this run began {began} --fp8; {give}, or start a new run with --resume=never")
    if not fp8:
        return
    if missing := missing_for_fp8(device):
        raise UserError(
            "--fp8 needs an NVIDIA GPU of compute capability 8.9 or higher (L4, L40S, RTX 4090, H100 and "
            f"later), and {missing}; leave it out"
        )
    if dtype != torch.bfloat16:
        raise UserError("--fp8 needs --dtype=bfloat16, in which everything else is computed")
    if max_seq_len % MULTIPLE:
        raise UserError(f"--fp8 needs a --max_seq_len that is a multiple of {MULTIPLE}; {max_seq_len} is not")


def missing_for_fp8(device: torch.device) -> str:
    """What a device lacks to multiply in fp8: the end of a sentence, empty if it can."""
    if device.type != "cuda":
        return f"this run is on {device.type}"
    if torch.version.hip:  # AMD has other float8 formats, which are not tried here
        return "this is an AMD GPU"
    major, minor = torch.cuda.get_device_capability(device)
    return f"this one has {major}.{minor}" if (major, minor) < FP8_CAPABILITY else ""


def convert_to_fp8(model: nn.Module) -> list[str]:
    """Let the large linear layers of `model.blocks` multiply in fp8 while they train; returns their names.

    Their parameters stay the same objects, so this may happen before or after the optimizer is made. Raises
    UserError if no layer fits.
    """
    names = []
    for name, module in model.blocks.named_modules(prefix="blocks"):
        if not is_plain(module):
            continue
        sizes = module.weight.shape
        if min(sizes) >= SMALLEST and not any(size % MULTIPLE for size in sizes):
            module.__class__ = Float8Linear
            names.append(name)
    if not names:
        raise UserError(
            f"--fp8 changes nothing: no matrix of this model has two sizes that are multiples of {MULTIPLE} "
            f"and at least {SMALLEST}; leave it out, or give a larger --depth or --aspect_ratio"
        )
    return names


class Float8Linear(nn.Linear):
    """nn.Linear without a bias. With gradients its products are in fp8, without them it is nn.Linear.

    x (..., C) with a multiple of 16 rows in all -> (..., N) in the dtype of x, or of autocast as nn.Linear.
    """

    def forward(self, x):
        if not torch.is_grad_enabled():
            return F.linear(x, self.weight)
        x = x.to(operators.compute_dtype(x))  # CUDA's autocast computes norms in float32
        return _Products.apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


class _Products(torch.autograd.Function):
    """The three products of a linear layer: x (M, K), weight (N, K) -> (M, N), all in fp8.

    `torch._scaled_mm` wants its first factor stored row by row and its second one column by column. It
    multiplies the result by both scales. `use_fast_accum` adds up with fewer bits: good enough for outputs,
    not for gradients.
    """

    @staticmethod
    def forward(ctx, x, weight):
        (x8, x_scale), (weight8, weight_scale) = quantize(x, E4M3), quantize(weight, E4M3)
        ctx.save_for_backward(x8, x_scale, weight8, weight_scale)
        return torch._scaled_mm(
            x8, weight8.t(), x_scale, weight_scale, out_dtype=x.dtype, use_fast_accum=True
        )

    @staticmethod
    def backward(ctx, grad):
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        grad8, grad_scale = quantize(grad, E5M2)
        grad_x = torch._scaled_mm(grad8, by_columns(weight8), grad_scale, weight_scale, out_dtype=grad.dtype)
        grad_weight = torch._scaled_mm(  # in float32, the dtype of the parameter: nothing is rounded twice
            grad8.t().contiguous(), by_columns(x8), grad_scale, x_scale, out_dtype=torch.float32
        )
        return grad_x, grad_weight


def quantize(x, dtype):
    """x / scale in `dtype`, stored row by row, and the scale: a 0-dim float32 tensor that maps the largest
    value of x to the largest number of `dtype`.

    If a value is not finite, the result has NaN, so that a bad gradient is still found. Rounding of the
    division can take a value past the largest number by 2**-23 of it, which rounds to that number again.
    """
    scale = x.abs().amax().float().clamp(min=TINY) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype).contiguous(), scale


def by_columns(x):
    """The same matrix, stored column by column."""
    return x.t().contiguous().t()
