"""Causal attention: which of the backends in attention_backends.py a model uses, decided once, at start.

There are three kinds of attention: a layer sees the whole row (full), a window, or, in either, only the
token's own document (documents). `choose` takes, for each kind that a run needs, the first backend that this
machine can run and that agrees with float64, forward and backward.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanochat.ops import attention_backends as backends
from nanochat.ops.attention_blocks import in_blocks

KINDS = ("full", "window", "documents")
# name: (function, the kinds of attention that it computes); the further down, the more devices can run it
BACKENDS = {
    "cudnn": (backends.cudnn, ("full",)),
    "flash": (backends.flash, ("full",)),
    "varlen": (backends.varlen, KINDS),
    "flex": (backends.flex, ("full", "window")),
    "blocks": (in_blocks, KINDS),  # for training on CPUs
    "sdpa": (backends.sdpa, ("full",)),  # PyTorch's own choice: xFormers' kernel on GPUs too old for flash
    "banded": (backends.masked, ("full", "window")),  # SDPA over blocks of the window's size
    "mask": (backends.masked, KINDS),  # SDPA under a mask of T x T
}
EVERYWHERE = {"full": "sdpa", "window": "banded", "documents": "mask"}  # these run on every device
# The largest relative error |a - b| / |b| against float64, forward and backward, for random q, k, v in the
# dtype. A wrong mask or layout makes 0.1 or more
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}
# Positions of a trial: at 4096 one float64 tensor of scores takes 256 MiB; on a CPU two blocks are enough
LONGEST_PROBE = {"cuda": 4096, "cpu": 160}


@dataclass(frozen=True)
class Attention:
    """Causal softmax attention, by one backend for each kind."""

    full: str = EVERYWHERE["full"]
    window: str = EVERYWHERE["window"]
    documents: str = EVERYWHERE["documents"]
    flash: str = ""  # the version of FlashAttention: FA3 or FA4; "" = PyTorch's own
    reason: str = ""  # for the plan

    def __call__(self, q, k, v, window: int, visible=None):
        """Attention of the last Tq of Tk positions.

        q (B, H, Tq, D), k and v (B, H, Tk, D) of one dtype, Tq <= Tk. Each position sees the last `window`
        positions, itself included, if they are `visible`: (B, 1, 1 or Tq, Tk) bool, or (N + 1,) int32, where
        each document begins in the B * T positions; None: all. Returns (B, H, Tq, D). Scores are divided by
        sqrt(D). The kernels compute the softmax and the sums in float32.
        """
        T = q.size(2)
        kind = "full" if visible is None and window >= T else "window" if visible is None else "documents"
        name = getattr(self, kind)
        if visible is not None and visible.dtype == torch.bool:
            name = "blocks" if name == "blocks" and torch.is_grad_enabled() else "mask"
        if k.size(2) != T:
            name = "mask"  # tokens that continue a cache
        function, _ = BACKENDS[name]
        return function(q, k, v, window, visible)

    @property
    def resolved(self) -> dict[str, str]:
        """The backends, for the checkpoint: a resumed run computes the same bits with them."""
        return {kind: getattr(self, kind) for kind in (*KINDS, "flash")}

    def boundaries(self, inputs, bos_id: int):
        """The documents in inputs (B, T), in the form that this attention takes: the document's
        number at each position (B, T) int64, or (N + 1,) int32, where each begins in the B * T positions.

        A document begins with its row and at each <|bos|>; several <|bos|> in a row, as in padding, begin
        one. `inputs` are on the CPU, because the number of documents decides the size of the result.
        """
        begins = inputs == bos_id
        begins[:, 1:] &= inputs[:, :-1] != bos_id
        begins[:, 0] = True
        if self.documents != "varlen":
            return begins.cumsum(1)
        first = begins.flatten().nonzero().flatten()
        # Few sizes, so that few graphs are compiled: a power of two, filled up with the end
        size = max(64, 1 << (len(first) - 1).bit_length())
        documents = torch.full((size + 1,), inputs.numel(), dtype=torch.int32)
        documents[: len(first)] = first
        return documents


attention = Attention()  # the default of a model; right for every device and length


def visible_from(documents):
    """What `Attention` takes as `visible`, from what `boundaries` returned; once for all layers."""
    if documents is None or documents.ndim == 1:
        return documents
    return documents[:, None, :, None] == documents[:, None, None, :]  # (B, 1, T, T)


def same_document(visible, B: int, T: int):
    """Whether the token before is of the same document: (B, T) bool, False where a row begins."""
    if visible.dtype == torch.bool:  # (B, 1, T, T)
        return F.pad(visible[:, 0].diagonal(-1, -2, -1), (1, 0))
    begins = visible.long()
    same = torch.ones(B * T + 1, dtype=torch.bool, device=visible.device)
    return same.index_fill(0, begins, False)[:-1].view(B, T)


def previous_token(x, visible=None):
    """x (B, T, ...) shifted right by one position; zeros where a row, or a document of `visible`, begins."""
    more = x.ndim - 2
    before = F.pad(x[:, :-1], (*more * [0, 0], 1, 0))
    if visible is None:
        return before
    same = same_document(visible, *x.shape[:2])
    return before * same.view(*same.shape, *more * [1]).to(x.dtype)


def previous_ids(ids, new: int, visible=None):
    """The token before each of the last `new` tokens of ids (B, L), and the second before it: (B, new) each.

    It is 0 where a row or document begins, and where ids has -1.
    """
    before = previous_token(ids, visible)
    return [x[:, -new:].clamp_min(0) for x in (before, previous_token(before, visible))]


def shift_keys(k, visible=None):
    """k (B, H, T, D) shifted by one position, as `previous_token` does."""
    return previous_token(k.transpose(1, 2), visible).transpose(1, 2)  # transposed as it lies in memory


def use(model, chosen: Attention):
    """Let every layer of a model compute attention by these backends: the modules that have an `attend`."""
    for module in model.modules():
        if hasattr(module, "attend"):
            module.attend = chosen


# ------------------------------------------------------------------------------------------------------
# The choice


def choose(config, machine, dtype, compiled: bool, documents: bool, resolved: dict) -> Attention:
    """The backends for a model's configuration on this machine, the same on every process.

    documents: whether a token sees its own document only. resolved: what the resumed run resolved at its
    first start ({}: a new run); its backends stay if they can run here.
    """
    device, before = machine.device, resolved.get("attention", {})
    kinds = {"full": config.max_seq_len}
    if min(config.windows) < config.max_seq_len:
        kinds["window"] = min(config.windows)
    if documents:
        kinds["documents"] = min(config.windows)
    version, passed_over = _flash_version(device, dtype, before.get("flash"))
    found, notes = {}, []
    for kind, window in kinds.items():
        names = [before[kind]] if kind in before else []
        names += candidates(kind, device, dtype, config.max_seq_len, version)
        name, failed = _first_that_runs(names, kind, window, config, device, dtype, compiled)
        passed_over += failed
        # If machines differ, the backend furthest down runs on all of them
        found[kind] = max(machine.all_gather(name), key=[before.get(kind), *BACKENDS].index)
        if found[kind] == "flex":  # here, since compiled code cannot make it
            backends.make_block_mask(config.max_seq_len, window, device)
        note = f"{found[kind]} {version if found[kind] in ('flash', 'varlen') else ''}".strip()
        note += {"full": " for full layers", "window": " for windows", "documents": " for documents"}[kind]
        if kind in before:
            other = "" if found[kind] == before[kind] else f"not {before[kind]} "
            note += f", {other}as at the run's first start"
        notes.append(note)
    reason = ", ".join(notes) + f"; {_where(device)}"
    if passed_over:
        reason += f"; not: {', '.join(dict.fromkeys(passed_over))}"
    return Attention(**found, flash=version, reason=reason)


def _first_that_runs(names, kind: str, window: int, config, device, dtype, compiled: bool):
    """The first backend that runs and is right, and why the ones before it are not used."""
    failed = []
    for name in names:
        why = cannot_run(name, kind, device, dtype, compiled)
        if not why and name != EVERYWHERE[kind]:
            why = _probe(name, kind, config, device, dtype, window)
        if not why:
            break
        failed.append(f"{name} ({why})")
    return name, failed


def candidates(kind: str, device, dtype, T: int, flash_version: str = "") -> list[str]:
    """The backends for a kind of attention on a device, in rows of T, best first."""
    if device.type == "cpu":
        # Where it was faster (docs/benchmarks.md), in eager and in compiled code: `blocks` is never compiled
        faster = dtype == torch.bfloat16 or (dtype == torch.float32 and (kind != "full" or 256 <= T <= 512))
        return ["blocks"] * faster + [EVERYWHERE[kind]]
    if device.type != "cuda":
        return [EVERYWHERE[kind]]
    if kind == "full":
        # On Hopper and Blackwell PyTorch prefers cuDNN too (check_prefer_cudnn_attention in sdp_utils.cpp):
        # FlashAttention 2 was written for Ampere
        first = ["cudnn", "flash"] if _capability(device)[0] in (9, 10) and not flash_version else []
        return [*dict.fromkeys([*first, "flash", "cudnn", "sdpa"])]
    return ["varlen", "flex", "banded"] if kind == "window" else ["varlen", "mask"]


def _capability(device) -> tuple[int, int]:
    """NVIDIA's compute capability; (0, 0) for other GPUs, whose numbers mean other things."""
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


def _where(device) -> str:
    if device.type == "cpu":
        return "the fastest on a CPU for this dtype and row length (docs/benchmarks.md)"
    if device.type != "cuda":
        return f"{device.type} has one kernel for all"
    major, minor = _capability(device)
    return f"compute capability {major}.{minor}, each equal to float64 in a forward and backward pass"


def _flash_version(device, dtype, before: str | None) -> tuple[str, list[str]]:
    """Activate FlashAttention 3 or 4 if its package is there: (version or "", what failed and why)."""
    major = _capability(device)[0] if device.type == "cuda" and dtype != torch.float32 else 0
    versions = {9: ["FA3", "FA4"], 10: ["FA4"]}.get(major, [])
    if before is not None:
        versions = [before] if before in versions else []
    failed = []
    for version in versions:
        if not (why := backends.activate_flash(version)):
            return version, failed
        if version == before or not why.startswith("ModuleNotFoundError"):
            failed.append(f"{version} ({why})")
    backends.activate_flash("")
    return "", failed


def cannot_run(name: str, kind: str, device, dtype, compiled: bool) -> str:
    """Why a backend cannot be tried on a device; "" if it can."""
    if kind not in BACKENDS.get(name, ((), ()))[1]:
        return f"does not compute {kind} attention"
    if name in EVERYWHERE.values():
        return ""
    if name == "blocks":
        return "" if device.type == "cpu" else "needs a CPU"
    if device.type != "cuda":
        return "needs CUDA"
    if name in ("cudnn", "flash", "varlen") and dtype == torch.float32:
        return "needs 16 bit"
    if name in ("cudnn", "flash", "varlen") and not torch.version.hip and _capability(device)[0] < 8:
        return "needs compute capability 8.0"
    if name == "flex" and not compiled:
        return "needs compiled code"
    return ""


def _probe(name: str, kind: str, config, device, dtype, window: int) -> str:
    """Run a backend once, forward and backward, at the model's row length, at most LONGEST_PROBE. Returns
    what is wrong, or ""."""
    T = min(config.max_seq_len, LONGEST_PROBE.get(device.type, 4096))
    short = max(1, window * T // config.max_seq_len)
    found = _largest_errors(name, (kind,), (1, 2, T, config.head_dim), short, device, dtype)
    if isinstance(found, str):
        return found
    return f"differs from float64 by {max(found):.2g}" if max(found) > TOLERANCE[dtype] else ""


# ------------------------------------------------------------------------------------------------------
# Is it right?


def check_backends(device, dtype, shape=(2, 2, 512, 64), compiled: bool = True) -> dict[str, dict | str]:
    """Every backend against float64: {name: {"ok", "forward_error", "backward_error"} or why it cannot run}.

    An error is the largest |a - b| / |b| over the kinds that the backend computes, on random q, k, v
    (B, H, T, D) = shape, with a window of a quarter of T. FlashAttention 3 and 4 have names of their own.
    """
    device, results = torch.device(device), {}
    for label, name, why in every_backend(device, dtype, compiled):
        found = why or _largest_errors(name, BACKENDS[name][1], shape, shape[2] // 4, device, dtype)
        if not isinstance(found, str):
            ok = max(found) <= TOLERANCE[dtype]
            found = {"ok": ok, "forward_error": found[0], "backward_error": found[1]}
        results[label] = found
    return results


def every_backend(device, dtype, compiled: bool):
    """Yield (label, name, why it cannot run on the device, or "") of every backend. With FlashAttention 3 and
    4, which are active until the next backend is asked for, flash and varlen come again: "flash FA3"."""
    for version in ("", "FA3", "FA4"):
        why = backends.activate_flash(version) if device.type == "cuda" else "needs CUDA" if version else ""
        for name in ("flash", "varlen") if version else BACKENDS:
            kind = BACKENDS[name][1][0]
            yield f"{name} {version}".strip(), name, why or cannot_run(name, kind, device, dtype, compiled)
    backends.activate_flash("")


def _largest_errors(name: str, kinds, shape, window: int, device, dtype) -> tuple[float, ...] | str:
    """The largest `errors` over kinds of attention, forward and backward; or the exception in a line."""
    try:
        found = [errors(name, kind, shape, window, device, dtype) for kind in kinds]
    except Exception as error:  # whatever a kernel or a compiler raises: then the next backend is tried
        return backends.error_in_a_line(error)
    return tuple(map(max, zip(*found, strict=True)))


def errors(name: str, kind: str, shape, window: int, device, dtype) -> tuple[float, float]:
    """|a - b| / |b| from float64, forward and backward, for random q, k, v (B, H, T, D) = shape."""
    B, H, T, D = shape
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(4, B, T, H, D, generator=generator).to(dtype)  # q, k, v and the gradient of y
    q, k, v, weights = numbers.to(device).transpose(2, 3)  # strided as a model's are
    window = T if kind == "full" else window
    visible = documents = None
    if kind == "documents":
        inputs = torch.randint(2 + T // 5, (B, T), generator=generator)  # a document begins at each 0
        documents = Attention(documents="mask").boundaries(inputs, 0).to(device)
        visible = visible_from(Attention(documents=name).boundaries(inputs, 0).to(device))
    function = function_of(name, T, window, device)
    found = _forward_and_backward(function, q, k, v, window, visible, weights)
    qkv, weights = (x.double() for x in (q, k, v)), weights.double()
    expected = _forward_and_backward(_in_float64, *qkv, window, documents, weights)
    pairs = [(a.to(b), b) for a, b in zip(found, expected, strict=True)]
    forward, *backward = [((a - b).norm() / b.norm()).item() for a, b in pairs]
    return forward, max(backward)


def function_of(name: str, T: int, window: int, device):
    """A backend's function as a model calls it in rows of T: flex has its mask, and is compiled."""
    function, _ = BACKENDS[name]
    if name == "flex":
        backends.make_block_mask(T, window, device)
        function = torch.compile(function, dynamic=False)
    return function


def _forward_and_backward(function, q, k, v, window, visible, weights):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    y = function(q, k, v, window, visible)
    # The gradient of y is `weights`. Given to `grad` itself, it would load sympy, which takes half a second
    return y.detach(), *torch.autograd.grad((y * weights).sum(), (q, k, v))


def _in_float64(q, k, v, window, documents):
    """Attention by its definition; documents (B, T) or None."""
    distance = torch.arange(q.size(2), device=q.device)
    distance = distance[:, None] - distance
    sees = (distance >= 0) & (distance < window)
    if documents is not None:
        sees = sees & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = (q @ k.transpose(-2, -1) / q.size(-1) ** 0.5).masked_fill(~sees, -torch.inf)
    return scores.softmax(-1) @ v
