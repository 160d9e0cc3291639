"""Where the time of profiled steps goes, by kind of work: reads the Chrome trace that torch.profiler writes.

On a GPU the pieces of work are its kernels, copies and fills. On a CPU, where the tests run, they are the
operators, each without the time of those that it calls.
"""

import json
import re
from bisect import bisect_right
from typing import NamedTuple

# The first pattern that is found in a kernel's name decides. Names of attention kernels hold the words of
# matrix products too ("cutlass"), so they come first. Inductor names its kernels after all operators that it
# fused, also after those that only read the result: a triton_poi kernel with "attention" in its name is
# element-wise. tests/test_gpu_speed.py has names as they are.
KINDS = [
    ("copies", r"^(Memcpy|Memset)|direct_copy_kernel|CatArrayBatchedCopy|^aten::(copy_|cat|clone)$"),
    ("attention", r"^triton_tem_fused_\w*flex_attention"),
    ("products", r"^triton_(tem|mm|bmm)"),
    ("loss", r"^cpp_fused.*(log_softmax|nll_loss|tanh)|^nanochat::head|^HeadAndLoss|^aten::tanh"),
    ("attention", r"^cpp_fused.*softmax"),
    ("embedding", r"^cpp_fused\w*embedding|^aten::(embedding|index_select)|^EmbeddingBackward"),
    ("element-wise", r"^cpp_"),
    ("loss", r"^triton_.*(softmax|nll_loss|tanh)"),
    ("element-wise", r"^triton_"),
    ("attention", r"flash|fmha|sdpa|attention|_mha_"),
    (
        "products",
        r"gemm|gemv|nvjet|cutlass|xmma|splitk|cublas|_scaled_mm|aten::(mm|addmm|bmm|baddbmm)_?$|mkldnn",
    ),
    ("loss", r"softmax|nll_loss|cross_entropy|tanh"),
]
PATTERNS = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in KINDS]
WORK = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of a GPU's events
LAUNCHES = {"cuda_runtime", "cuda_driver"}


class Piece(NamedTuple):
    """One kernel, copy, or operator of a CPU; times in microseconds."""

    name: str
    start: float
    end: float
    launched: float  # when the CPU gave it to the GPU
    calls: tuple = ()  # of a CPU: the events that it runs in, the outermost first, its own last


def kind_of(name: str) -> str:
    """products, attention, loss, embedding, copies, or element-wise for all else: norms, rotary, casts."""
    return next((kind for kind, pattern in PATTERNS if pattern.search(name)), "element-wise")


def time_split(path, steps: int) -> dict:
    """Milliseconds of a step by kind of work, from a trace of gpu_step.py; `idle`: nothing ran.

    What was launched in the phases `optimizer` and `clip` counts there, whatever its kind. Raises ValueError
    if the trace has no profiled steps.
    """
    with open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    spans = {name: intervals(events, name) for name in ("profiled steps", "optimizer", "clip")}
    if not spans["profiled steps"]:
        raise ValueError("the trace has no profiled steps")
    first, last = spans["profiled steps"][-1]
    found = [piece for piece in pieces(events) if first <= piece.launched <= last]
    spent = dict.fromkeys(
        ["products", "attention", "element-wise", "embedding", "loss", "optimizer", "clip", "copies"], 0.0
    )
    names: dict[str, float] = {}
    for piece in found:
        where = next((phase for phase in ("optimizer", "clip") if within(spans[phase], piece.launched)), None)
        spent[where or kind_of(piece.name)] += piece.end - piece.start
        names[piece.name] = names.get(piece.name, 0.0) + piece.end - piece.start
    total = last - first
    spent["idle"] = total - covered(found)
    longest = sorted(names, key=lambda name: -names[name])[:8]
    return {
        "step_ms": total / steps / 1000,
        "ms": {kind: spent[kind] / steps / 1000 for kind in spent},
        "share": {kind: spent[kind] / total for kind in spent},
        "kernels": len(found) / steps,
        "longest_ms": {name[:60]: names[name] / steps / 1000 for name in longest},
    }


def intervals(events: list[dict], name: str) -> list[tuple[float, float]]:
    """(start, end) of the marks of that name on the CPU, in order of time."""
    marks = [e for e in events if e.get("name") == name and e.get("cat") == "user_annotation"]
    return sorted((e["ts"], e["ts"] + e["dur"]) for e in marks)


def within(spans: list[tuple[float, float]], time: float) -> bool:
    """Whether a time lies in one of the intervals, which are in order and do not overlap."""
    place = bisect_right(spans, (time, float("inf"))) - 1
    return place >= 0 and time <= spans[place][1]


def pieces(events: list[dict]) -> list[Piece]:
    """The pieces of work: of the GPU if the trace has any, else of the CPU."""
    work = [event for event in events if event.get("cat") in WORK]
    if not work:
        return operators(events)
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    return [
        Piece(e["name"], e["ts"], e["ts"] + e["dur"], launches.get(e["args"].get("correlation"), e["ts"]))
        for e in work
    ]


def operators(events: list[dict], categories=("cpu_op",)) -> list[Piece]:
    """The times in which an operator of a CPU's trace runs itself, not one that it calls."""
    by_thread: dict = {}
    for event in events:
        if event.get("cat") in categories:
            by_thread.setdefault(event["tid"], []).append(event)
    found = []

    def ran(calls: list[dict], start: float, end: float):
        if end > start:
            found.append(Piece(calls[-1]["name"], start, end, start, tuple(calls)))

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


def covered(found: list[Piece]) -> float:
    """Microseconds in which at least one piece runs."""
    total, reached = 0.0, float("-inf")
    for _, start, end, *_ in sorted(found, key=lambda piece: piece.start):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
