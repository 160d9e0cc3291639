"""How long each kind of work of a training step would have to take on this machine, beside what it took.

`could_ms` is what this machine can do: for matrix products the same products alone, one at a time, at their
real sizes; for attention the multiplications of the pairs that see each other, at the peak of a square
product; for all that moves numbers the time of a copy of as many bytes; for the rest, data and log nothing.
None: the trace does not tell.
"""

import functools
import math
import re
from pathlib import Path

import torch

from experiments.gpu_ceilings import seconds_of
from experiments.gpu_trace import Piece, pieces_of_step
from experiments.step_split import KINDS, add_up, kind_of_piece, read
from nanochat.gpt import GPT, GPTConfig

DTYPES = {"float": torch.float32, "c10::BFloat16": torch.bfloat16, "c10::Half": torch.float16}
PRODUCTS = {"aten::mm": torch.mm, "aten::bmm": torch.bmm, "aten::addmm": torch.addmm}
PRODUCTS |= {"aten::baddbmm": torch.baddbmm, "aten::addmm_": torch.addmm, "aten::baddbmm_": torch.baddbmm}
SIZES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4, "bool": 1}
# They hand memory on and move none of it
VIEWS = re.compile(
    r"aten::(_?to|as_strided|alias|chunk|contiguous|detach_?|empty|empty_like|empty_strided|expand|expand_as|"
    r"flatten|item|lift_fresh|linear|matmul|narrow|new_empty|permute|reshape|_reshape_alias|resolve_conj|"
    r"resolve_neg|result_type|select|slice|split|squeeze|t|transpose|unbind|unflatten|_unsafe_view|unsqueeze|"
    r"view|view_as|zeros|zeros_like|ones_like|set_|is_nonzero|_local_scalar_dense|numpy_T|mT)$"
)


def split(path: Path, model: GPT, tokens: int, device: torch.device, peak_flops: float) -> dict:
    """{"step_ms", "kinds": {kind: {"ms", "share", "could_ms"}}, "products": [...], "longest_ms"}.

    `products` are those of the blocks, by size: what, how many, ms, alone_ms. model: its shapes are enough.
    tokens: of the step, which is one micro-batch. peak_flops: of the run's dtype.
    """
    events, step = read(path)
    pieces, total = pieces_of_step(events, step), step["dur"] / 1000
    spent, longest = add_up(pieces, step)
    calls, leaves = calls_of_kinds(pieces)
    products = product_table(calls["products"], device)
    could = floors(calls, leaves, products, model, tokens, device, peak_flops)
    kinds = {
        kind: {"ms": ms, "share": ms / total, "could_ms": could.get(kind, 0.0)} for kind, ms in spent.items()
    }
    return {"step_ms": total, "kinds": kinds, "products": products, "longest_ms": longest}


def calls_of_kinds(pieces: list[Piece]) -> tuple[dict, dict]:
    """The operators of each kind: all as [event, milliseconds], and those that call no other that works."""
    found: dict = {kind: {} for kind in KINDS}
    for piece in pieces:
        of_kind = found[kind_of_piece(piece)]
        for event in piece.calls:  # a product runs until its kernel or helper has ended
            if event is piece.calls[-1] or event["name"] in PRODUCTS:
                of_kind.setdefault(id(event), [event, 0.0])[1] += (piece.end - piece.start) / 1000
    callers = {id(e) for piece in pieces if not VIEWS.match(piece.name) for e in piece.calls[:-1]}
    leaves = {kind: [e for e, _ in c.values() if id(e) not in callers] for kind, c in found.items()}
    return {kind: list(calls.values()) for kind, calls in found.items()}, leaves


# ------------------------------------------------------------------------------------------------------
# What it could be


def floors(
    calls: dict, leaves: dict, products: list, model: GPT, tokens: int, device, peak_flops: float
) -> dict:
    """Milliseconds that each kind would take at what the machine can do."""
    on_cpu = device.type == "cpu"
    counts = model.parameter_counts()
    of_muon, of_adamw = counts["matrices"], counts["total"] - counts["matrices"]
    moved = 4 * (5 * of_muon + 7 * of_adamw)  # bytes: weight and state read and written, gradient read
    forward = attention_flops(model.config, tokens) / peak_flops * 1000
    return {
        "products": alone_ms(products),
        "attention forward": forward,
        "attention backward": 2 * forward,  # four products of the scores' size where forward has two
        "head and loss": head_ms(model.config, tokens, device, calls["products"]),
        "norms and element-wise": moved_ms(leaves["norms and element-wise"], device) if on_cpu else None,
        "embedding": moved_ms(leaves["embedding"], device) if on_cpu else None,
        "optimizer": alone_ms(product_table(calls["optimizer"], device)) + copy_ms(moved, device),
        "clip": copy_ms(3 * 4 * counts["total"], device),  # the norm reads; the factor reads and writes
    }


def alone_ms(products: list[dict]) -> float:
    """Of all products of a table, each by itself."""
    return sum(row["count"] * row["alone_ms"] for row in products)


def attention_flops(config: GPTConfig, tokens: int) -> float:
    """Of the two products in the forward pass of all layers, for the pairs that see each other."""
    T = config.max_seq_len
    seen = sum(T * window - window * (window - 1) // 2 for window in config.windows)  # in a row
    return 4 * config.width * seen * (tokens / T)


def product_table(calls, device: torch.device) -> list[dict]:
    """The products among operators, by size: their time in the step and alone."""
    rows: dict = {}
    for event, ms in calls:
        if event["name"] in PRODUCTS and (operands := operands_of(event)):
            row = rows.setdefault((event["name"], operands), {"count": 0, "ms": 0.0})
            row["count"] += 1
            row["ms"] += ms
    table = []
    for (name, operands), row in rows.items():
        sizes = [size for size, _, _ in operands][-2:]
        what = " @ ".join(" x ".join(map(str, size)) for size in sizes)
        alone = product_ms(name, operands, device)
        table.append({"what": what, "dtype": str(operands[-1][2])[6:]} | row | {"alone_ms": alone})
    return sorted(table, key=lambda row: -row["ms"])


def operands_of(event: dict) -> tuple | None:
    """(size, strides, dtype) of the tensors that a product multiplies, and of what is added to them."""
    values = event["args"]
    number = 3 if "add" in event["name"] else 2
    triples = zip(values["Input Dims"], values["Input Strides"], values["Input type"], strict=True)
    found = [(tuple(d), tuple(s), DTYPES.get(t)) for d, s, t in list(triples)[:number]]
    return tuple(found) if all(size and dtype for size, _, dtype in found) else None


@functools.cache
def product_ms(name: str, operands: tuple, device: torch.device) -> float:
    """Of the product alone, on tensors of these sizes and strides."""
    tensors = []
    for size, strides, dtype in operands:
        room = 1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
        tensors.append(torch.randn(room, device=device).to(dtype).as_strided(size, strides))
    return 1000 * seconds_of(lambda: PRODUCTS[name](*tensors), device, of=min)


def head_ms(config: GPTConfig, tokens: int, device: torch.device, calls) -> float:
    """The head's three products alone, in the dtype of the blocks' products."""
    found = (operands_of(event) for event, _ in calls if event["name"] in PRODUCTS)
    dtypes = [operands[-1][2] for operands in found if operands]
    dtype = max(dtypes, key=dtypes.count, default=torch.float32)
    N, C, V = tokens, config.width, config.vocab_size
    x, weight, logits = ((N, C), (C, 1), dtype), ((V, C), (C, 1), dtype), ((N, V), (V, 1), dtype)
    turned = ((C, V), (1, C), dtype), ((V, N), (1, V), dtype)
    pairs = (x, turned[0]), (logits, weight), (turned[1], x)
    return sum(product_ms("aten::mm", pair, device) for pair in pairs)


def moved_ms(events: list[dict], device: torch.device) -> float:
    """Copies of as many bytes as each operator reads and writes. A fused kernel's name says it; another
    operator is taken to write as much as its largest input."""
    return sum(copy_ms(bytes_of(event), device) for event in events)


def bytes_of(event: dict) -> int:
    if said := re.search(r" \[(\d+) bytes\]$", event["name"]):
        return int(said[1])
    if VIEWS.match(event["name"]) or not event["name"].startswith("aten::"):
        return 0
    values = event["args"]
    keys = ("Input Dims", "Input Strides", "Input type")
    sizes = [
        SIZES.get(kind, 0) * math.prod(n for n, stride in zip(size, strides, strict=True) if stride)
        for size, strides, kind in zip(*(values.get(key, []) for key in keys), strict=True)
        if size and not isinstance(size[0], list)
    ]
    return sum(sizes) + max(sizes, default=0)


def copy_ms(size: int, device: torch.device) -> float:
    """Of a copy that reads and writes `size` bytes together; between two measured sizes in proportion."""
    if size < 2**12:  # the call would be all that is measured
        return 0.0
    power = min(30 if device.type == "cuda" else 28, int(math.log2(size)))
    return measured_copy_ms(power, device) * size / 2**power


@functools.cache
def measured_copy_ms(power: int, device: torch.device) -> float:
    """Of a copy that reads and writes 2**power bytes together."""
    source = torch.ones(2**power // 8, device=device)
    target = torch.empty_like(source)
    return 1000 * seconds_of(lambda: target.copy_(source), device, of=min)
