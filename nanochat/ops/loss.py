"""The head and the softcapped cross-entropy as one operator, which never holds all logits.

A plain loss computes the logits of all tokens, (N, V), and keeps them for the backward pass. With a large
vocabulary they are most of a step's memory. Here a chunk of rows goes the whole way while its logits are in
the cache: product, softcap, softmax, loss, and at once the gradients of x and of the head's weight. The
backward pass only multiplies these two by the gradient of the loss.
"""

import functools

import torch
import torch.nn.functional as F

from nanochat.ops import kernels, operators, products  # noqa: F401  products registers add_product_

SOFTCAP = 15.0  # logits are squashed into (-15, 15), so that no token's probability runs away
# The gradient of a logit is about as small as a probability, and float16 keeps one digit of 1e-6. So it is
# multiplied by UP in float16: its largest value, 1/4 (see chunk_losses), becomes 256. The gradient of the
# weight is a sum over the rows of a chunk; x is divided by DOWN before, so that it stays in float16's range.
UP, DOWN, MOST_FLOAT16_ROWS = 1024, 32, 2048
# The most logits of a chunk (a chunk has at least 512 rows): in float32 4 MiB on a CPU, elsewhere half a GiB
CHUNK_LOGITS = {"cpu": 2**20, "cuda": 2**27, "mps": 2**27}
# Logits that are read and written once need no float32 memory beside them: 1 GiB in 16 bit. Of a vocabulary
# of 32,768 these are 16,384 rows. The product that gives x's gradient then has 384 tiles of 128 x 256 at a
# width of 768, 2.9 for each of an H100's 132 SMs; of 4,096 rows it has 96, and a quarter of the SMs waits.
ONE_PASS_LOGITS = 2**29
# Where a compiled model's chunks are compiled too. On a CPU, in the cache, they would be no faster.
COMPILED_ON = {"cuda"}


def softcap(logits):
    """(..., V) of any dtype -> (..., V) float32 in (-SOFTCAP, SOFTCAP); the tanh of Gemma 2, arXiv
    2408.00118."""
    return SOFTCAP * torch.tanh(logits.float() / SOFTCAP)


def softcapped_cross_entropy(x, weight, targets, reduction="mean"):
    """Cross-entropy of softcap(x @ weight.T), in nats, float32.

    x (N, C), weight (V, C), targets (N,) int64; a target of -1 is not scored. The products are in autocast's
    dtype, without autocast in that of x. `reduction` is that of F.cross_entropy. "none" with gradients keeps
    all logits, since the gradient of each loss is known only in the backward pass; else a chunk's are kept.
    """
    x = x.to(operators.compute_dtype(x))
    compiled = torch.compiler.is_compiling()
    wanted = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, weight)]
    if reduction == "none":
        if any(wanted):
            logits = softcap(F.linear(x, weight.to(x.dtype)))
            return F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
        return (head_losses if compiled else losses_in_chunks)(x, weight, targets, compiled)
    if any(wanted):
        total, *_ = (head_and_loss if compiled else HeadAndLoss.apply)(x, weight, targets, *wanted, compiled)
    else:
        total = (head_losses if compiled else losses_in_chunks)(x, weight, targets, compiled).sum()
    return total if reduction == "sum" else total / (targets != -1).sum()


# ------------------------------------------------------------------------------------------------------
# One chunk


def chunk_rows(
    tokens: int, vocab_size: int, device_type: str, dtype: torch.dtype, in_one_pass: bool = False
) -> int:
    """Tokens whose logits are in memory at a time, nearly the same number for all chunks.

    in_one_pass: whether their losses are computed so (see `_in_one_pass`).
    """
    # Each chunk adds to the whole gradient of the weight: below 512 rows that costs more than the cache gives
    most = max(512, (ONE_PASS_LOGITS if in_one_pass else CHUNK_LOGITS[device_type]) // vocab_size)
    most = min(most, MOST_FLOAT16_ROWS) if dtype == torch.float16 else most
    chunks = max(1, -(-tokens // most))
    return max(1, -(-tokens // chunks))


def chunk_losses(logits, targets, gradient: bool = False, scale: float = 1.0, *, memory):
    """Losses (rows,) float32 of logits (rows, V). With `gradient`, the logits are overwritten by the gradient
    of the losses' sum, times scale / 4.

    tanh(z) is 2 sigmoid(2 z) - 1, and a constant added to all logits changes no probability. So
    2 * SOFTCAP * sigmoid(2 * logits / SOFTCAP) has the cross-entropy of softcap(logits), and on a CPU torch
    computes sigmoid several times as fast as tanh. Its derivative is 4 s (1 - s); the 4 is left to others.
    Rows that are not scored have a loss of 0 and a gradient like any other, which the caller drops.
    memory: two float32 tensors (rows, V) to work in. New memory for each chunk would cost as much time as the
    arithmetic, because the system clears it page by page.
    """
    s, p = (piece[: logits.size(0)] for piece in memory)
    s.copy_(logits).mul_(2 / SOFTCAP).sigmoid_()
    torch.mul(s, 2 * SOFTCAP, out=p)
    torch.softmax(p, dim=-1, out=p)
    target = targets.clamp_min(0).unsqueeze(1)
    losses = p.gather(1, target).log_().neg_().squeeze(1).masked_fill_(targets == -1, 0.0)
    if gradient:
        p.scatter_add_(1, target, torch.full(target.shape, -1.0, device=p.device))
        torch.ops.aten.sigmoid_backward.grad_input(p, s, grad_input=s)
        logits.copy_(s if scale == 1 else s.mul_(scale))
    return losses


def chunk_losses_in_one_pass(logits, targets, gradient: bool = False, scale: float = 1.0):
    """The same, in the form that suits a GPU: nothing is indexed. A row that is not scored has a gradient of
    zeros.

    Compiled by torch 2.11 for a CPU, an indexed logit was read after its gradient had been written over it.
    The softcap keeps exponentials between e^-15 and e^15, so no maximum is subtracted first.
    """
    s = torch.sigmoid(logits.float() * (2 / SOFTCAP))
    exponentials = torch.exp(2 * SOFTCAP * (s - 0.5))
    total = exponentials.sum(-1, keepdim=True)
    is_target = torch.arange(logits.size(1), device=logits.device) == targets.unsqueeze(1)
    of_target = 2 * SOFTCAP * (torch.where(is_target, s, 0.0).sum(-1, keepdim=True) - 0.5)
    losses = torch.where(targets == -1, 0.0, (total.log() - of_target).squeeze(1))
    if gradient:
        factor = torch.where(targets == -1, 0.0, scale).unsqueeze(1)
        logits.copy_((exponentials / total - is_target.float()) * s * (1 - s) * factor)
    return losses


operators.register(
    "softcapped_losses_",
    "(Tensor(a!) logits, Tensor targets, bool gradient, float scale) -> Tensor",
    chunk_losses_in_one_pass,
    lambda logits, *_: logits.new_empty(logits.size(0), dtype=torch.float32),
    kernel=lambda *inputs: operators.triton_kernels().softcapped_losses_(*inputs, SOFTCAP),
)


@functools.cache
def compiled_chunk_losses():
    """chunk_losses_in_one_pass, compiled: for the first number of rows, and for any other one once more."""
    return torch.compile(chunk_losses_in_one_pass)


def head_gradients(gradient, x, weight, dx, dw, product, down: float):
    """From the gradient of a chunk's logits: write that of x to dx (rows, C), and add that of the weight,
    divided by `down`, to dw (V, C) float32. `product` (V, C) in the dtype of x is memory for the sum, if the
    "head" kernel is not in use. A gradient without rows is not wanted."""
    if dx.size(0):
        torch.mm(gradient, weight, out=dx)
    if dw.size(0):
        x = x if down == 1 else x / down
        if "head" in kernels.IN_USE:
            torch.ops.nanochat.add_product_(dw, gradient.T, x)
        else:
            dw += torch.mm(gradient.T, x, out=product)


# ------------------------------------------------------------------------------------------------------
# All chunks


def _in_one_pass(device_type: str, compiled: bool) -> bool:
    """Whether a kernel, or compiled code, reads and writes the logits once."""
    return "loss" in kernels.IN_USE or (compiled and device_type in COMPILED_ON)


def _chunks(x, weight, targets, gradient: bool, scale: float, compiled: bool):
    """Yield for each chunk: its rows, their losses, and their logits (with `gradient`, the gradient of the
    logits), which the next chunk overwrites."""
    in_one_pass = _in_one_pass(x.device.type, compiled)
    rows = chunk_rows(x.size(0), weight.size(0), x.device.type, x.dtype, in_one_pass)
    memory = x.new_empty(rows, weight.size(0))
    if "loss" in kernels.IN_USE:
        losses_of = torch.ops.nanochat.softcapped_losses_
    elif in_one_pass:
        losses_of = compiled_chunk_losses()
    else:
        in_float32 = memory if x.dtype == torch.float32 else torch.empty_like(memory, dtype=torch.float32)
        losses_of = functools.partial(chunk_losses, memory=(in_float32, torch.empty_like(in_float32)))
    for i in range(0, x.size(0), rows):
        piece = slice(i, i + rows)
        logits = torch.mm(x[piece], weight.T, out=memory[: x.size(0) - i])
        yield piece, losses_of(logits, targets[piece], gradient, scale), logits


def losses_in_chunks(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, compiled: bool
) -> torch.Tensor:
    """The loss of each target, (N,) float32, for a loss without gradients."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        all_losses = x.new_empty(x.size(0), dtype=torch.float32)
        for piece, losses, _ in _chunks(x, weight.to(x.dtype), targets, False, 1, compiled):
            all_losses[piece] = losses
        return all_losses


def gradients_in_chunks(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, of_x: bool, of_weight: bool, compiled: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum of the losses, float32, and its two gradients, each divided by its unit (_multiply_gradients).

    The gradient of x is (N, C) in the dtype of x, that of the weight (V, C) float32 (float64 if x is); empty
    if not wanted.
    """
    scale, down = _scales(x.device.type, x.dtype)
    dx, dw = _memory_for_gradients(x, weight, of_x, of_weight)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        total, low, unscored = torch.zeros((), device=x.device), weight.to(x.dtype), (targets == -1)[:, None]
        mask = not _in_one_pass(x.device.type, compiled)  # else the gradients of these rows are zeros
        scored = x.masked_fill(unscored, 0) if mask else x  # zeros add nothing to the weight's gradient
        dw.zero_()
        product = None if "head" in kernels.IN_USE else torch.empty_like(dw, dtype=x.dtype)
        for piece, losses, gradient in _chunks(x, low, targets, True, scale, compiled):
            total += losses.sum()
            head_gradients(gradient, scored[piece], low, dx[piece], dw, product, down)
        return total, dx.masked_fill_(unscored, 0) if mask and of_x else dx, dw


def _memory_for_gradients(x, weight, of_x: bool, of_weight: bool):
    dx = torch.empty_like(x) if of_x else x.new_empty(0)
    shape, dtype = weight.shape if of_weight else (0,), torch.promote_types(x.dtype, torch.float32)
    return dx, torch.empty(shape, dtype=dtype, device=weight.device)


def _scales(device_type: str, dtype: torch.dtype) -> tuple[float, float]:
    """What the gradient of a chunk's logits is multiplied by, and what x is divided by for the weight's."""
    if dtype == torch.float16:
        return UP, DOWN
    return (1.0, 1.0) if device_type == "cpu" else (4.0, 1.0)  # the 4 takes a pass, except on a GPU


def _keep_gradients(ctx, inputs, output):
    x, weight, _, *ctx.wanted, _ = inputs
    ctx.dtypes = x.dtype, weight.dtype
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _multiply_gradients(ctx, of_total, *_):
    """In float32: a 0-dim factor takes the dtype of the tensor it meets, and in float16 1e-9 would be 0."""
    scale, down = _scales(of_total.device.type, ctx.dtypes[0])
    units = 4 / scale, 4 / scale * down  # what is missing in the gradients of x and of the weight
    found = zip(ctx.saved_tensors, units, ctx.dtypes, ctx.wanted, strict=True)
    wide = torch.promote_types(ctx.dtypes[0], torch.float32)
    gradients = [
        (kept.to(wide) * (of_total * unit)).to(dtype) if wanted else None
        for kept, unit, dtype, wanted in found
    ]
    return *gradients, None, None, None, None


class HeadAndLoss(torch.autograd.Function):
    """gradients_in_chunks with its backward pass, in eager mode."""

    forward, setup_context = staticmethod(gradients_in_chunks), staticmethod(_keep_gradients)
    backward = staticmethod(_multiply_gradients)


# The same as operators of PyTorch, for torch.compile. If it looked inside, it would move the gradients into
# the backward pass and keep all logits for that.
head_losses = torch.library.custom_op("nanochat::head_losses", losses_in_chunks, mutates_args=())
head_and_loss = torch.library.custom_op("nanochat::head_and_loss", gradients_in_chunks, mutates_args=())
head_and_loss.register_autograd(_multiply_gradients, setup_context=_keep_gradients)


@head_losses.register_fake
def _(x, weight, targets, compiled):
    return x.new_empty(x.size(0), dtype=torch.float32)


@head_and_loss.register_fake
def _(x, weight, targets, of_x, of_weight, compiled):
    return x.new_empty((), dtype=torch.float32), *_memory_for_gradients(x, weight, of_x, of_weight)
