"""How fast attention is on a CPU, forward and backward: blocks of queries beside SDPA, in turns.

python -m experiments.attention_speed
python -m experiments.attention_speed --dtype=float32
"""

import statistics
import time
from typing import Literal

import torch

import configurator
from nanochat.ops import attention, attention_backends, attention_blocks

dtype: Literal["bfloat16", "float32"] = "bfloat16"
rounds = 5  # of both ways, in turns [1..1000]

SHAPES = [  # B, H, T, D, kind
    (4, 3, 512, 64, "full"),  # runs/laptop.py at width 192
    (8, 4, 512, 64, "full"),
    (4, 6, 512, 128, "full"),
    (8, 4, 128, 64, "full"),
    (4, 4, 1024, 64, "full"),
    (1, 6, 2048, 128, "full"),
    (4, 3, 512, 64, "window"),
    (1, 6, 2048, 128, "window"),
    (8, 4, 512, 64, "documents"),
    (1, 6, 2048, 128, "documents"),
]


def milliseconds(function, q, k, v, window, visible, dy, backward: bool) -> float:
    started = time.perf_counter()
    with torch.set_grad_enabled(backward):
        y = function(q, k, v, window, visible)
    if backward:
        torch.autograd.grad(y, (q, k, v), dy)
    return 1e3 * (time.perf_counter() - started)


def compare(B: int, H: int, T: int, D: int, kind: str) -> str:
    """One row of the table: medians over the rounds, and their ratio, with and without the backward pass."""
    numbers = torch.randn(4, B, T, H, D).to(getattr(torch, dtype)).transpose(2, 3)
    q, k, v = (x.detach().requires_grad_() for x in numbers[:3])
    window = T // 4 if kind == "window" else T
    visible = None
    if kind == "documents":
        visible = attention.visible_from((torch.rand(B, T) < 0.01).cumsum(1))  # of 100 tokens
    cells = []
    for backward in (True, False):
        found = {attention_backends.masked: [], attention_blocks.in_blocks: []}
        for function in [*found] * (rounds + 1):
            times = [milliseconds(function, q, k, v, window, visible, numbers[3], backward) for _ in range(3)]
            found[function].append(min(times))
        sdpa, blocks = (statistics.median(times[1:]) for times in found.values())  # the first round warms up
        cells += [f"{sdpa:.1f}", f"{blocks:.1f}", f"{sdpa / blocks:.2f}"]
    return " | ".join([f"| {B} x {H} x {T} x {D}", kind, *cells]) + " |"


def main():
    configurator.configure(globals())
    print("| shape | kind | SDPA, ms | blocks, ms | ratio | SDPA, forward alone | blocks | ratio |")
    print("|:--|:--|--:|--:|--:|--:|--:|--:|")
    for shape in SHAPES:
        print(compare(*shape), flush=True)


if __name__ == "__main__":
    main()
