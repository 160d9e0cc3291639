"""Where the time of one training step goes, by kind of work, and how long each kind would have to take.

Reads the trace that `profile=N` of base_train writes. The pieces of work are the kernels of a GPU, or on a
CPU the operators, each without the time of those that it calls. All kinds and `rest` together are the step.

`could_ms` is what this machine can do: for matrix products the same products alone, one at a time, at their
real sizes; for attention the multiplications of the pairs that see each other, at the peak of a square
product; for all that moves numbers the time of a copy of as many bytes. None: the trace does not tell.
"""

import functools
import gzip
import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import torch

from experiments.gpu_ceilings import seconds_of
from experiments.gpu_trace import LAUNCHES, WORK, Piece, kind_of, operators

KINDS = (
    "products", "attention forward", "attention backward", "head and loss", "norms and element-wise",
    "embedding", "optimizer", "clip", "data", "log", "rest",
)  # fmt: skip
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
# Python, dispatch and waiting: what runs there itself is no work on numbers
FRAMES = re.compile(r"^(step \d+|Torch-Compiled|CompiledFunction|## Call|TorchDynamo|autograd::engine)")


class Model(NamedTuple):
    """What the floors need to know of the run."""

    config: object  # GPTConfig
    tokens: int  # of a micro-batch
    micro_steps: int
    matrices: int  # parameters that Muon updates
    others: int  # that AdamW updates


# ------------------------------------------------------------------------------------------------------
# What the time was


def read(path: Path) -> tuple[list[dict], dict]:
    """The events of a trace, and the mark of its step. Raises ValueError if it has none."""
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    events = [event for event in events if event.get("ph") == "X"]
    for event in events:
        if event.get("cat") == "user_annotation" and re.match(r"step \d+$", event["name"]):
            return events, event
    raise ValueError(f"the trace {path} has no step")


def pieces_of_step(events: list[dict], step: dict) -> list[Piece]:
    """The pieces of work of the step, each with the calls that led to it."""
    first, last = step["ts"], step["ts"] + step["dur"]
    inside = [e for e in events if first <= e["ts"] <= last]
    work = [event for event in inside if event.get("cat") in WORK]
    frames = ("cpu_op", "user_annotation", *(LAUNCHES if work else ()))
    found = operators([e for e in inside if work or e["tid"] == step["tid"]], frames)
    if not work:
        return found
    calls = {p.calls[-1]["args"].get("correlation"): p.calls for p in found if p.calls[-1]["cat"] in LAUNCHES}
    return [
        Piece(e["name"], e["ts"], e["ts"] + e["dur"], e["ts"], (*calls[number], e))
        for e in work
        if (number := e["args"].get("correlation")) in calls
    ]


def kind_of_piece(piece: Piece, config) -> str:
    """One of KINDS."""
    names = [event["name"] for event in piece.calls]
    for name in names:
        if name in ("data", "log", "clip"):
            return name
        if name.startswith(("Optimizer.step#", "Optimizer.zero_grad#")):
            return "optimizer"
    kinds = [kind_of(name) for name in names]
    backward = any("ackward" in name for name in names)
    if any(name.startswith("nanochat::attention") for name in names):  # attention_blocks.py, its softmax too
        return f"attention {'backward' if backward else 'forward'}"
    if "loss" in kinds or any(has_vocabulary(event, config) for event in piece.calls):
        return "head and loss"
    own = kinds[-1]
    fused = own == "element-wise" and piece.name.startswith("cpp_")  # prepares for attention, or reads it
    if ("attention" in kinds and not fused) or "bmm" in piece.name:
        return f"attention {'backward' if backward else 'forward'}"
    if "embedding" in kinds or "EmbeddingBackward" in "".join(names):
        return "embedding"
    if own == "products" or names[-1] in ("aten::linear", "aten::matmul"):
        return "products"
    return "rest" if FRAMES.match(piece.name) else "norms and element-wise"


def has_vocabulary(event: dict, config) -> bool:
    """Whether one of an operator's inputs has a side of the vocabulary's size, and it is no embedding."""
    V, C = config.vocab_size, config.width
    if V in (C, 4 * C) or kind_of(event["name"]) == "embedding" or event["cat"] != "cpu_op":
        return False
    sizes = event.get("args", {}).get("Input Dims") or []
    frame = event["name"].startswith(("Compiled", "autograd::"))
    return not frame and any(V in size for size in sizes if size and not isinstance(size[0], list))


def split(path: Path, model: Model, device: torch.device, peak_flops: float) -> dict:
    """{"step_ms", "kinds": {kind: {"ms", "share", "could_ms"}}, "products": [...], "longest_ms"}.

    `products` are those of the blocks, by size: what, how many, ms, alone_ms. peak_flops: of the run's dtype.
    """
    events, step = read(path)
    pieces = pieces_of_step(events, step)
    spent, names, of_kind = dict.fromkeys(KINDS, 0.0), {}, {kind: {} for kind in KINDS}
    for piece in pieces:
        kind, name = kind_of_piece(piece, model.config), piece.name.split(" [")[0]
        spent[kind] += (piece.end - piece.start) / 1000
        names[name] = names.get(name, 0.0) + (piece.end - piece.start) / 1000
        for event in piece.calls:  # each operator once, with the kind of its own time
            if event is piece.calls[-1] or kind_of(event["name"]) == "products":
                of_kind[kind].setdefault(id(event), (event, []))[1].append((piece.end - piece.start) / 1000)
    callers = {id(e) for p in pieces if not VIEWS.match(p.name) for e in p.calls[:-1]}
    leaves = {kind: [e for e, _ in calls.values() if id(e) not in callers] for kind, calls in of_kind.items()}
    total = step["dur"] / 1000
    spent["rest"] += total - sum(spent.values())
    products = product_table(of_kind["products"].values(), device)
    could = floors(of_kind, leaves, products, model, device, peak_flops)
    kinds = {
        kind: {"ms": ms, "share": ms / total, "could_ms": could.get(kind, 0.0)} for kind, ms in spent.items()
    }
    longest = sorted(names, key=lambda name: -names[name])[:8]
    return {
        "step_ms": total,
        "kinds": kinds,
        "products": products,
        "longest_ms": {name[:90]: names[name] for name in longest},
    }


# ------------------------------------------------------------------------------------------------------
# What it could be


def floors(of_kind: dict, leaves: dict, products: list, model: Model, device, peak_flops: float) -> dict:
    """Milliseconds that each kind would take at what the machine can do."""
    on_cpu = device.type == "cpu"
    of_muon = product_table(of_kind["optimizer"].values(), device)
    numbers = 4 * (5 * model.matrices + 7 * model.others)  # weight and state read and written, gradient read
    forward = model.micro_steps * attention_flops(model) / peak_flops * 1000
    return {
        "products": alone_ms(products),
        "attention forward": forward,
        "attention backward": 2.5 * forward,  # five products of the scores' size where forward has two
        "head and loss": model.micro_steps * head_ms(model, device, of_kind["products"].values()),
        "norms and element-wise": moved_ms(leaves["norms and element-wise"], device) if on_cpu else None,
        "embedding": moved_ms(leaves["embedding"], device) if on_cpu else None,
        "optimizer": alone_ms(of_muon) + copy_ms(numbers, device),
        "clip": copy_ms(3 * 4 * (model.matrices + model.others), device),  # read; read and write
    }


def alone_ms(products: list[dict]) -> float:
    return sum(row["count"] * row["alone_ms"] for row in products)


def attention_flops(model: Model) -> float:
    """Of the two products in forward, for the pairs of a query and a key that it sees, of a micro-batch."""
    T, C = model.config.max_seq_len, model.config.width
    seen = sum(T * window - window * (window - 1) // 2 for window in model.config.windows)
    return 4 * C * seen * (model.tokens / T)


def product_table(calls, device: torch.device) -> list[dict]:
    """The products among operators, by size: their time in the step and alone."""
    rows: dict = {}
    for event, times in calls:
        if event["name"] in PRODUCTS and (operands := operands_of(event)):
            row = rows.setdefault((event["name"], operands), {"count": 0, "ms": 0.0})
            row["count"] += 1
            row["ms"] += sum(times)
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


def head_ms(model: Model, device: torch.device, calls) -> float:
    """The head's three products alone, in the dtype of the blocks' products."""
    found = (operands_of(event) for event, _ in calls if event["name"] in PRODUCTS)
    dtypes = [operands[-1][2] for operands in found if operands]
    dtype = max(dtypes, key=dtypes.count, default=torch.float32)
    N, C, V = model.tokens, model.config.width, model.config.vocab_size
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
    if size < 2**12:
        return 0.0
    power = min(30 if device.type == "cuda" else 28, int(math.log2(size)))
    return measured_copy_ms(power, device) * size / 2**power


@functools.cache
def measured_copy_ms(power: int, device: torch.device) -> float:
    source = torch.ones(2**power // 8, device=device)
    target = torch.empty_like(source)
    return 1000 * seconds_of(lambda: target.copy_(source), device, of=min)
