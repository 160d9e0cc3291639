"""Where the time of training steps goes, by kind of work.

Reads the trace that `profile=N` of base_train writes, or gpu_step.py. The pieces of work are the kernels of a
GPU, or on a CPU the operators, each without the time of those that it calls. All kinds and `rest` together
are the step. step_floors.py says how long each kind would have to take.
"""

import gzip
import json
import re
from pathlib import Path

from experiments.gpu_trace import Piece, kind_of, pieces_of_step

KINDS = (
    "products", "attention forward", "attention backward", "head and loss", "norms and element-wise",
    "embedding", "optimizer", "clip", "data", "log", "rest",
)  # fmt: skip
# Python, dispatch and waiting: what runs there itself is no work on numbers
BETWEEN = re.compile(
    r"^(step \d+|profiled|Torch-Compiled|CompiledFunction|## Call|TorchDynamo|autograd::engine)"
)


def read(path: Path) -> tuple[list[dict], dict]:
    """The events of a trace, and the mark around its step or steps. Raises ValueError if it has none."""
    raw = Path(path).read_bytes()
    events = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)["traceEvents"]
    events = [event for event in events if event.get("ph") == "X"]
    for event in events:
        if event.get("cat") == "user_annotation" and re.match(r"(step \d+|profiled steps)$", event["name"]):
            return events, event
    raise ValueError(f"the trace {path} has no step")


def kind_of_piece(piece: Piece) -> str:
    """One of KINDS."""
    names = [event["name"] for event in piece.calls]
    for name in names:
        if name in ("data", "log", "clip"):
            return name
        if name.startswith(("Optimizer.step#", "Optimizer.zero_grad#")):
            return "optimizer"
    kinds = [kind_of(name) for name in names]
    if "attention" in kinds:
        return f"attention {way(names)}"
    if "loss" in kinds:
        return "head and loss"
    if "bmm" in piece.name:
        return f"attention {way(names)}"
    if "embedding" in kinds or "EmbeddingBackward" in "".join(names):
        return "embedding"
    if kinds[-1] == "products" or names[-1] in ("aten::linear", "aten::matmul"):
        return "products"
    return "rest" if BETWEEN.match(piece.name) else "norms and element-wise"


def way(names: list[str]) -> str:
    """Of which pass. "Backward" does not tell: a registered operator has it in its forward pass, too."""
    return "backward" if any(name.startswith("autograd::engine") for name in names) else "forward"


def add_up(pieces: list[Piece], step: dict) -> tuple[dict, dict]:
    """Milliseconds of the pieces by kind, with what is left of the step as `rest`; and those of the eight
    names that took longest."""
    spent, names = dict.fromkeys(KINDS, 0.0), {}
    for piece in pieces:
        ms, name = (piece.end - piece.start) / 1000, piece.name.split(" [")[0][:90]
        spent[kind_of_piece(piece)] += ms
        names[name] = names.get(name, 0.0) + ms
    spent["rest"] += step["dur"] / 1000 - sum(spent.values())
    longest = sorted(names, key=lambda name: -names[name])[:8]
    return spent, {name: names[name] for name in longest}


def time_split(path, steps: int) -> dict:
    """Milliseconds of one of `steps` profiled steps by kind of work, without what they could be.

    On a GPU `rest` is when nothing ran.
    """
    events, mark = read(path)
    pieces = pieces_of_step(events, mark)
    spent, longest = add_up(pieces, mark)
    return {
        "step_ms": mark["dur"] / steps / 1000,
        "ms": {kind: ms / steps for kind, ms in spent.items()},
        "share": {kind: 1000 * ms / mark["dur"] for kind, ms in spent.items()},
        "kernels": len(pieces) / steps,
        "longest_ms": {name: ms / steps for name, ms in longest.items()},
    }
