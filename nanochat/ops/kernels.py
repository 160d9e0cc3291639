"""Which of the kernels written by hand are in use; `choose` decides once, at start.

- "loss": the losses of a chunk of logits, and their gradient, with one read of the logits (loss.py)
- "head": gradients of weights come from their products in float32, and the head's add up there (products.py)
- "mlp": the products of the MLP with its norm and its activation (mlp.py)

By default none is in use, as on a CPU: then loss.py and gpt.py compute the same in their plain way.
"""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanochat.ops.attention_backends import error_in_a_line
from nanochat.ops.elementwise import SLOPE

IN_USE = set()  # names
# The largest relative error |a - b| / |b| against float64; what is written is rounded to the dtype
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
FASTER = 0.97  # a kernel is used if it takes at most this share of the plain way's time: clocks are noisy
CHECKED_ROWS, TIMED_ROWS = 256, 4096


@dataclass(frozen=True)
class Kernels:
    """The names of the kernels to use, which a checkpoint keeps: a resumed run computes the same bits."""

    names: tuple[str, ...] = ()
    reason: str = ""  # for the plan


def use(names):
    """From now on these kernels are in use. Compile nothing that reads IN_USE before."""
    IN_USE.clear()
    IN_USE.update(names)


def choose(config, machine, dtype: torch.dtype, resolved: dict) -> Kernels:
    """The kernels for a model's configuration on this machine, the same on every process.

    A kernel is used if it agrees with float64 and is faster than the plain way. resolved: what the resumed
    run resolved at its first start ({}: a new run). What it used stays if it is right here; nothing is added.
    """
    device = machine.device
    before = resolved.get("kernels", ()) if resolved else None  # older checkpoints are of runs without any
    if device.type != "cuda":
        return Kernels(reason="for CUDA only")
    shares, reasons = {}, {}
    for name, probe in PROBES.items():
        if before is not None and name not in before:
            continue
        share, why = _try(name, probe, config, device, dtype, timed=before is None)
        if why:
            reasons[name] = why
        else:
            shares[name] = share
    everywhere = set.intersection(*(set(names) for names in machine.all_gather(list(shares))))
    reasons |= {name: "not on every process" for name in shares if name not in everywhere}
    names = tuple(name for name in shares if name in everywhere)
    times = {name: f" ({share:.2f} x the time)" if share else "" for name, share in shares.items()}
    reason = ", ".join(name + times[name] for name in names) or "none"
    if before is not None:
        reason += ", as at the run's first start"
    if reasons:
        reason += "; not: " + ", ".join(f"{name} ({why})" for name, why in reasons.items())
    return Kernels(names, reason)


def _try(name: str, probe, config, device, dtype, timed: bool) -> tuple[float, str]:
    """(share of the plain way's time, or 0 if not `timed`, and why the kernel is not used, or "")."""
    if why := cannot_run(name, device, dtype):
        return 0.0, why
    try:
        generator = torch.Generator(device).manual_seed(0)

        def numbers(*shape):
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        error, by_kernel, plainly = probe(config, numbers, dtype)
        if error > TOLERANCE[dtype]:
            return 0.0, f"differs from float64 by {error:.2g}"
        if not timed:
            return 0.0, ""
        share = milliseconds(by_kernel) / milliseconds(plainly)
    except Exception as error:  # whatever Triton, a driver, or cuBLAS raises: then the plain way stays
        return 0.0, error_in_a_line(error)
    return share, "" if share <= FASTER else f"{share:.2f} x the time of the plain way"


def cannot_run(name: str, device, dtype: torch.dtype) -> str:
    """Why a kernel cannot be tried on a CUDA device; "" if it can."""
    if name != "mlp":
        return ""
    if dtype != torch.bfloat16:
        return "needs bfloat16"
    if torch.version.hip or torch.cuda.get_device_capability(device)[0] < 9:
        return "needs compute capability 9.0"  # its tiles travel by TMA
    return ""


def milliseconds(function, calls: int = 10) -> float:
    """The fastest of several calls on the current CUDA device, after three to warm up."""
    for _ in range(3):
        function()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    return min(begin.elapsed_time(end) for begin, end in itertools.pairwise(events))


# ------------------------------------------------------------------------------------------------------
# The probes. Each returns the largest error, and two functions to time: the kernel, and the plain way or
# library calls that read and write as much as it does. numbers(*shape) gives random numbers in the dtype.


def distance(found, expected) -> float:
    """|found - expected| / |expected|, in float64."""
    return ((found.double() - expected).norm() / expected.norm()).item()


def _loss(config, numbers, dtype):
    from nanochat.ops.loss import SOFTCAP

    logits, rows = 5 * numbers(TIMED_ROWS, config.vocab_size), CHECKED_ROWS
    targets = torch.arange(-1, len(logits) - 1, device=logits.device) % config.vocab_size
    targets[0] = -1
    exact = logits[:rows].double().requires_grad_()
    losses = F.cross_entropy(
        SOFTCAP * torch.tanh(exact / SOFTCAP), targets[:rows], ignore_index=-1, reduction="none"
    )
    (gradient,) = torch.autograd.grad(losses.sum(), exact)
    written = logits[:rows].clone()
    found = torch.ops.nanochat.softcapped_losses_(written, targets[:rows], True, 4.0)

    def plainly():  # two kernels: one reads for the sums, one reads and writes the gradient
        logits.sum(-1, dtype=torch.float32)
        logits.mul_(0.5)

    def by_kernel():
        torch.ops.nanochat.softcapped_losses_(logits, targets, True, 4.0)

    return max(distance(found, losses.detach()), distance(written, gradient)), by_kernel, plainly


def _head(config, numbers, dtype):
    import nanochat.ops.products  # noqa: F401  it registers the operators

    gradient, x = numbers(TIMED_ROWS, config.vocab_size), numbers(TIMED_ROWS, config.width)
    dw, rows = torch.ones(config.vocab_size, config.width, device=x.device), slice(0, CHECKED_ROWS)
    torch.ops.nanochat.add_product_(dw, gradient[rows].T, x[rows])
    written = torch.ops.nanochat.weight_gradient(gradient[rows], x[rows])
    exact = gradient[rows].double().T @ x[rows].double()
    error = max(distance(dw, 1 + exact), distance(written, exact))
    product = torch.empty_like(dw, dtype=dtype)

    def plainly():
        dw.add_(torch.mm(gradient.T, x, out=product))

    def by_kernel():
        torch.ops.nanochat.add_product_(dw, gradient.T, x)

    return error, by_kernel, plainly


def _mlp(config, numbers, dtype):
    import nanochat.ops.mlp  # noqa: F401  it registers the operators

    C, N, rows = config.width, 4 * TIMED_ROWS, slice(0, CHECKED_ROWS)
    x, up, down, dy = numbers(N, C), numbers(4 * C, C), numbers(C, 4 * C), numbers(N, C)
    r = numbers(N).float().abs()
    u = (r[rows, None].double() * (x[rows].double() @ up.double().T)).requires_grad_()
    expected = F.leaky_relu(u, SLOPE) ** 2
    (du,) = torch.autograd.grad(expected, u, dy[rows].double() @ down.double())
    z = torch.ops.nanochat.up_activated(x, up, r)
    found = torch.ops.nanochat.down_activated_backward(dy, down, z, r)

    def plainly():  # the activation reads u and writes z; its backward pass reads dz and u and writes du
        u = x @ up.T
        torch.mul(dy @ down, u * u)

    def by_kernel():
        torch.ops.nanochat.up_activated(x, up, r)
        torch.ops.nanochat.down_activated_backward(dy, down, z, r)

    du = r[rows, None].double() * du
    return max(distance(z[rows], expected.detach()), distance(found[rows], du)), by_kernel, plainly


PROBES = {"loss": _loss, "head": _head, "mlp": _mlp}
