"""The pieces of work in a Chrome trace that torch.profiler writes, and what their names say.

On a GPU the pieces are its kernels, copies and fills. On a CPU, where the tests run, they are the operators,
each without the time of those that it calls.
"""

import re
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
    ("loss", r"^triton_.*(softmax|nll_loss|tanh|_exp_)"),  # exp of logits: loss.py
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
FRAMES = {"cpu_op", "user_annotation"}  # operators and marks of the CPU


class Piece(NamedTuple):
    """One kernel or copy, or a time in which an operator of a CPU runs itself; times in microseconds."""

    name: str
    start: float
    end: float
    calls: tuple  # the events that led to it, the outermost first, its own last


def kind_of(name: str) -> str:
    """products, attention, loss, embedding, copies, or element-wise for all else: norms, rotary, casts."""
    return next((kind for kind, pattern in PATTERNS if pattern.search(name)), "element-wise")


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
