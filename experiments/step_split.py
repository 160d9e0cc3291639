"""Where the time of training steps goes, by kind of work.

Reads the Chrome trace that `profile=N` of base_train writes, or sides.py. The pieces of work are the kernels,
copies and fills of a GPU, or on a CPU the operators, each without the time of those that it calls. All kinds
and `rest` together are the step.
"""

import gzip
import json
import re
from pathlib import Path
from typing import NamedTuple

from nanochat.terminal import table

KINDS = (
    "products", "products of the head", "products of gates", "attention forward", "attention backward",
    "loss", "activation", "element-wise forward", "element-wise backward", "embedding", "casts",
    "additions and copies", "optimizer", "clip", "data", "log", "rest",
)  # fmt: skip
MOST_OF_A_GATE = 64  # rows or columns of the smallest matrix in a product of gates; a head has more
# Python, dispatch and waiting: what runs there itself is no work on numbers
BETWEEN = re.compile(
    r"^(step \d+|profiled|Torch-Compiled|CompiledFunction|## Call|TorchDynamo|autograd::engine)"
)

# The first pattern that is found in a kernel's name decides. Names of attention kernels hold the words of
# matrix products too ("cutlass"), so they come first. Inductor names its kernels after all operators that it
# fused, also after those that only read the result: a triton_poi kernel with "attention" in its name is
# element-wise. tests/experiments/test_step_split.py has names as they are.
NAMES = [
    (
        "additions and copies",
        r"^(Memcpy|Memset)|direct_copy_kernel|CatArrayBatchedCopy|CUDAFunctor_add<|FillFunctor"
        r"|^aten::(copy_|cat|clone|zero_|fill_)$",
    ),
    ("optimizer", r"multi_tensor_apply_kernel"),
    ("attention", r"^triton_tem_fused_\w*flex_attention|convert_dq_to_16bits|compute_dot_do_o"),
    ("products", r"^triton_(tem|mm|bmm)"),
    ("loss", r"^cpp_fused.*(log_softmax|nll_loss|tanh)|^nanochat::head|^HeadAndLoss|^aten::tanh"),
    ("attention", r"^cpp_fused.*softmax"),
    ("embedding", r"^cpp_fused\w*embedding|^aten::(embedding|index_select)|^EmbeddingBackward"),
    ("element-wise", r"^cpp_"),
    ("loss", r"^triton_.*(softmax|nll_loss|tanh|_exp_)"),  # exp of logits: loss.py
    ("activation", r"^triton_.*relu"),
    ("casts", r"^triton_poi_fused__to_copy(_t|_transpose|_view)*_\d+$"),
    ("element-wise", r"^triton_"),
    ("attention", r"flash|fmha|sdpa|attention|_mha_"),
    (
        "products",
        r"gemm|gemv|nvjet|cutlass|xmma|splitk|cublas|_scaled_mm|aten::(mm|addmm|bmm|baddbmm)_?$|mkldnn",
    ),
    ("loss", r"softmax|loss|cross_entropy|tanh"),
]
PATTERNS = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in NAMES]
WORK = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of a GPU's events
LAUNCHES = {"cuda_runtime", "cuda_driver"}
FRAMES = {"cpu_op", "user_annotation"}  # operators and marks of the CPU


class Piece(NamedTuple):
    """One kernel or copy, or a time in which an operator of a CPU runs itself; times in microseconds."""

    name: str
    start: float
    end: float
    calls: tuple  # the events that led to it, the outermost first, its own last


def time_split(path: Path, steps: int = 1, head=(0, 0), most: int = 8) -> dict:
    """Milliseconds of one of `steps` profiled steps by kind of work, and the `most` longest kernels.

    On a GPU `rest` is when nothing ran. head: tokens of a micro-batch and of the vocabulary, which tell the
    products of the head from others, if the trace has shapes. Raises ValueError if the file has no step.
    """
    events, mark = read(path)
    pieces = pieces_of_step(events, mark)
    spent, rows = dict.fromkeys(KINDS, 0.0), {}
    for piece in pieces:
        ms, kind = (piece.end - piece.start) / 1000 / steps, kind_of_piece(piece, head)
        spent[kind] += ms
        row = rows.setdefault((piece.name.split(" [")[0], kind), {"ms": 0.0, "launches": 0.0})
        row["ms"] += ms
        row["launches"] += 1 / steps
    step_ms = mark["dur"] / steps / 1000
    spent["rest"] += step_ms - sum(spent.values())
    rows = [row | {"kind": kind, "name": name} for (name, kind), row in rows.items()]
    return {
        "step_ms": step_ms,
        "ms": spent,
        "share": {kind: ms / step_ms for kind, ms in spent.items()},
        "kernels": len(pieces) / steps,
        "longest": sorted(rows, key=lambda row: -row["ms"])[:most],
    }


def tables(found: dict) -> str:
    """A `time_split` as Markdown: its kinds of work, then its longest kernels."""
    kinds = [(kind, ms) for kind, ms in found["ms"].items() if ms]
    kinds = [[kind, f"{ms:.1f}", f"{ms / found['step_ms']:.1%}"] for kind, ms in kinds]
    kernels = [
        [f"`{row['name']}`", row["kind"], *(f"{row[name]:.2f}" for name in ("ms", "launches"))]
        for row in found["longest"]
    ]
    head = f"A step of {found['step_ms']:.1f} ms, {found['kernels']:,.0f} kernels or operators:"
    all_kinds = table([["kind", "ms", "share"], *kinds])
    return f"{head}\n\n{all_kinds}\n\n{table([['kernel', 'kind', 'ms', 'launches'], *kernels], left=2)}\n"


def read(path: Path) -> tuple[list[dict], dict]:
    """The events of a trace, and the mark around its step or steps. Raises ValueError if it has none."""
    raw = Path(path).read_bytes()
    events = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)["traceEvents"]
    events = [event for event in events if event.get("ph") == "X"]
    for event in events:
        if event.get("cat") == "user_annotation" and re.match(r"(step \d+|profiled steps)$", event["name"]):
            return events, event
    raise ValueError(f"the trace {path} has no step")


# ------------------------------------------------------------------------------------------------------
# The kind of a piece


def kind_of(name: str) -> str:
    """products, attention, loss, activation, casts, embedding, additions and copies, or element-wise for all
    else: norms, rotary."""
    return next((kind for kind, pattern in PATTERNS if pattern.search(name)), "element-wise")


def kind_of_piece(piece: Piece, head: tuple[int, int]) -> str:
    """One of KINDS."""
    names = [event["name"] for event in piece.calls]
    for name in names:
        if name in ("data", "log", "clip"):
            return name
        if name.startswith(("Optimizer.step#", "Optimizer.zero_grad#")):
            return "optimizer"
    kinds = [kind_of(name) for name in names]
    is_product = kinds[-1] == "products" or names[-1] in ("aten::linear", "aten::matmul")
    if "attention" in kinds:
        return f"attention {way(names)}"
    if "loss" in kinds:
        return "products of the head" if is_product else "loss"
    if "bmm" in piece.name:
        return f"attention {way(names)}"
    if is_product:
        return kind_of_product(piece, head)
    if "embedding" in kinds or "EmbeddingBackward" in "".join(names):
        return "embedding"
    if BETWEEN.match(piece.name):
        return "rest"
    return f"element-wise {way(names)}" if kinds[-1] == "element-wise" else kinds[-1]


def kind_of_product(piece: Piece, head: tuple[int, int]) -> str:
    """By its sizes, which a trace with shapes has in the event of the operator."""
    sizes: tuple = ()
    for event in piece.calls:
        name, shapes = event["name"], event.get("args", {}).get("Input Dims", [])
        first = 1 if "addmm" in name else 0
        matrices = [shape for shape in shapes[first : first + 2] if len(shape) == 2]
        if kind_of(name) == "products" and len(matrices) == 2:
            sizes = *matrices[0], matrices[1][1]
    if sizes and all(sizes.count(size) >= head.count(size) for size in head):
        return "products of the head"
    return "products of gates" if sizes and min(sizes) <= MOST_OF_A_GATE else "products"


def way(names: list[str]) -> str:
    """Of which pass. "Backward" does not tell: a registered operator has it in its forward pass, too."""
    return "backward" if any(name.startswith("autograd::engine") for name in names) else "forward"


# ------------------------------------------------------------------------------------------------------
# The pieces of a step


def pieces_of_step(events: list[dict], step: dict) -> list[Piece]:
    """The pieces of work that began or were launched while the mark `step` lasted, each with its calls."""
    first, last = step["ts"], step["ts"] + step["dur"]
    inside = [event for event in events if first <= event["ts"] <= last]
    work = [event for event in events if event.get("cat") in WORK]
    if not work:
        return operators([e for e in inside if e["tid"] == step["tid"] and e.get("cat") in FRAMES])
    found = operators([event for event in inside if event.get("cat") in (*FRAMES, *LAUNCHES)])
    launches = [piece.calls for piece in found if piece.calls[-1]["cat"] in LAUNCHES]
    calls = {of_launch[-1]["args"].get("correlation"): of_launch for of_launch in launches}
    return [
        Piece(e["name"], e["ts"], e["ts"] + e["dur"], (*calls[number], e))
        for e in work
        if (number := e["args"].get("correlation")) in calls
    ]


def operators(events: list[dict]) -> list[Piece]:
    """The times in which an event of a CPU's trace runs itself, not one that it calls."""
    by_thread: dict = {}
    for event in events:
        by_thread.setdefault(event["tid"], []).append(event)
    found = []

    def ran(calls: list[dict], start: float, end: float):
        if end > start:
            found.append(Piece(calls[-1]["name"], start, end, tuple(calls)))

    for of_thread in by_thread.values():
        calls: list[dict] = []  # the operators that run, the innermost last
        reached = 0.0
        for event in [*sorted(of_thread, key=lambda e: (e["ts"], -e["dur"])), None]:
            until = event["ts"] if event else float("inf")
            while calls and (end := calls[-1]["ts"] + calls[-1]["dur"]) <= until:
                ran(calls, reached, end)
                calls.pop()
                reached = max(reached, end)
            if event and calls:
                ran(calls, reached, until)
            if event:
                calls.append(event)
                reached = until
    return found
