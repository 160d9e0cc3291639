"""The picture of docs/model.md, one block of the model: `python -m experiments.model_picture`."""

from itertools import pairwise

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

import configurator

out = "docs/model.png"  # the file to write

configurator.configure(globals())

PLAIN, OURS, FIXED = "#dce6f2", "#ffe0b8", "#eeeeee"  # a plain GPT's part; what this model adds; no weights
# name: (x and y of the middle, width, text, colour)
BOXES = {
    "ids": (1.5, 0.5, 1.6, "token ids", FIXED),
    "embedding": (1.5, 1.5, 2.7, "token + n-gram rows\n+ sub-word rows", OURS),
    "x0": (1.5, 2.5, 2.7, "x0 = norm\nx = scale · x0", FIXED),
    "copying": (5.2, 2.5, 3.8, "copying: + factor · row of what\nfollowed (in the last block, too)", OURS),
    "smear": (4.6, 3.5, 3.6, "+ gate · x of the token before\n(in the last block + scale · x0)", OURS),
    "qkv": (4.6, 4.7, 3.6, "norm, query, key, value", PLAIN),
    "qk": (4.6, 5.7, 3.6, "QK norm, rotary (RoPE);\nkeys shifted by one position", OURS),
    "attention": (4.6, 6.7, 3.6, "attention", PLAIN),
    "gate": (4.6, 7.6, 3.6, "gate of each head", OURS),
    "out": (4.6, 8.5, 3.6, "out (zero at the start)", PLAIN),
    "values": (8.6, 5.7, 3.0, "+ gate · value embedding\n(every second layer)", OURS),
    "mlp": (4.6, 9.9, 3.6, "norm, up, leaky ReLU²,\ndown (zero at the start)", PLAIN),
    "head": (8.6, 11.3, 3.0, "norm, head", PLAIN),
    "logits": (8.6, 12.3, 3.0, "softcap: 15 tanh(x / 15)", OURS),
}
CHAIN = ["qkv", "qk", "attention", "gate", "out"]
ARROWS = [("ids", "embedding"), ("embedding", "x0"), *pairwise(CHAIN), ("head", "logits")]
STREAM = 1.5  # x of the residual stream


def arrow(axes, start, end):
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "#444444", "lw": 1.2})


def draw():
    figure, axes = plt.subplots(figsize=(6.4, 7.4))
    for x, y, width, text, colour in BOXES.values():
        box = plt.Rectangle((x - width / 2, y - 0.34), width, 0.68, fc=colour, ec="#666666", lw=0.8, zorder=2)
        axes.add_patch(box)
        axes.text(x, y, text, ha="center", va="center", fontsize=8, zorder=3)
    for a, b in ARROWS:
        arrow(axes, (BOXES[a][0], BOXES[a][1] + 0.34), (BOXES[b][0], BOXES[b][1] - 0.34))
    axes.plot([STREAM, STREAM], [2.84, 11.3], color="#444444", lw=1.2)
    arrow(axes, (STREAM, 11.3), (BOXES["head"][0] - 1.5, 11.3))
    for into, back in (("smear", "smear"), ("qkv", "out"), ("mlp", "mlp")):  # from the stream, and back to it
        y, z = BOXES[into][1] - 0.12, BOXES[back][1] + 0.12
        arrow(axes, (STREAM, y), (2.8, y))
        arrow(axes, (2.8, z), (STREAM, z))
    arrow(axes, (7.1, 5.7), (6.4, 6.6))
    arrow(axes, (3.3, 2.5), (2.85, 2.5))
    axes.text(
        STREAM - 0.15, 7, "residual stream x, (B, T, C)", rotation=90, ha="right", va="center", fontsize=8
    )
    axes.add_patch(plt.Rectangle((0.6, 2.95), 9.7, 7.5, fill=False, ec="#999999", ls="--"))
    axes.text(10.2, 10.15, "one of `depth` blocks", ha="right", fontsize=8, color="#666666")
    axes.text(10.2, 0.4, "blue: as in a plain GPT\norange: added here", ha="right", fontsize=8)
    axes.set(xlim=(0, 10.4), ylim=(0, 12.8))
    axes.axis("off")
    figure.savefig(out, dpi=90, bbox_inches="tight", metadata={"Software": None})


if __name__ == "__main__":
    draw()
