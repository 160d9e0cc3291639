"""Do the learning rates fit every width? A coordinate check, as of muP (arXiv 2203.03466).

    python -m experiments.coordinates                          # table and picture of docs/scale.md: 3 minutes
    python -m experiments.coordinates --steps=10 --widest=512 --picture=none

If the rates suit every width, the first steps change logits and residual stream by as much in a wide model as
in a narrow one. So models of one depth train for a few steps, each on fresh rows of bytes. Then the change on
other rows of the text is measured, the root mean square (RMS) of it, and a line is fitted to
log(change) against log(width). Its slope is 0 where the rates fit; a slope of 0.5 doubles the change where
the width is four times as large. The rules are the dial's (scaling.scaled_rates), and to compare with them
the rule before it. Muon and its rate are the same in both.
"""

import math
from pathlib import Path

import torch

import configurator
from experiments.measurements import T, byte_rows
from nanochat import optim
from nanochat.gpt import GPT, GPTConfig
from nanochat.gradients import clip_grad_norm_
from nanochat.machine.runtime import materialize
from nanochat.ops.elementwise import norm
from nanochat.plan import scaling

steps = 5  # optimizer steps before the change is measured (after one, some are still 0) [2..1000]
seeds = 3  # models of a width to take the mean of; above width 256 fewer, down to one [1..100]
widest = 1024  # the largest width; the smallest is 128 [256..8192]
picture: str | None = "docs/coordinates.png"  # the file to draw (none = no picture)

DEPTH, HEAD_DIM, ROWS = 4, 64, 8
NARROWEST, OLD_WIDEST = 128, 512  # the second of the rule before: a wide model takes most of the time
DEFAULTS = configurator.defaults(Path(configurator.__file__).parent / "scripts" / "base_train.py")
# A run whose rates at width 768 are those of the settings: the batch and the tokens of the reference model.
# It has 100 steps, so its warm-up has 10.
HORIZON = scaling.Horizon(100, scaling.REFERENCE_BATCH, 100 * scaling.REFERENCE_BATCH, "", "")
WARMUP = scaling.warmup_steps(DEFAULTS, HORIZON)

# What is measured, with its name in the table. `x` is the input before training: so each row but the first
# two is what the updates of these weights do alone.
MEASURED = {
    "logits": "logits, all updates together",
    "stream": "stream at the end, all updates together",
    "head": "head alone: logits from (W' - W) x",
    "embedding": "embedding alone: its normed rows",
    "value_embeddings": "value embeddings alone: their rows",
    "readers": "query, key, value, up: (W' - W) x",
    "writers": "out, down: (W' - W) x",
    "x_before_scale": "scales of the token before: the weights",
    "gates": "gates of all kinds: (W' - W) x",
}
READERS, WRITERS = ("query", "key", "value", "up"), ("out", "down")
GATES = ("value_gate", "head_gate", "x_before_gate")

# ------------------------------------------------------------------------------------------------------
# Rates


def dial_rates(width: int) -> dict[str, float]:
    """The rates of the dial: the head's goes as 1 / width."""
    return scaling.scaled_rates(DEFAULTS, width, HORIZON).rates


def old_rates(width: int) -> dict[str, float]:
    """The rule before: AdamW's rates for embeddings and head go as 1 / sqrt(width)."""
    factor = (width / scaling.REFERENCE_WIDTH) ** -0.5
    changed = {name: DEFAULTS[name] * factor for name in ("embedding_lr", "unembedding_lr")}
    return dial_rates(width) | changed


RULES = {"dial": dial_rates, "old": old_rates}

# ------------------------------------------------------------------------------------------------------
# One model


def new_model(width: int, seed: int) -> GPT:
    with torch.device("meta"):
        model = GPT(GPTConfig(DEPTH, width, width // HEAD_DIM, 256, T))
    return materialize(model, torch.device("cpu"), seed)


def train(model: GPT, rates: dict[str, float], steps: int, seed: int):
    """The first steps of a run: its optimizer, clipping and warm-up, on bytes of text."""
    decay = scaling.scaled_rates(DEFAULTS, model.config.width, HORIZON).weight_decay
    optimizer = optim.MuonAdamW(optim.parameter_groups(model, rates, decay))
    for step in range(steps):
        model(*byte_rows(ROWS, 1000 * seed + step + 1)).backward()
        clip_grad_norm_(model, optimizer, DEFAULTS["grad_clip"])
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * min(1.0, (step + 1) / WARMUP)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def seen_inside(model: GPT, idx: torch.Tensor) -> dict[str, torch.Tensor]:
    """The input of every linear layer, (B, T, C) under its name, and as "stream" that of the last norm."""
    seen, hooks = {}, []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            keep = lambda module, inputs, name=name: seen.__setitem__(name, inputs[0])  # noqa: E731
            hooks.append(module.register_forward_pre_hook(keep))
    last = model.blocks[-1]
    hooks.append(last.register_forward_hook(lambda block, inputs, x: seen.__setitem__("stream", x)))
    model(idx)
    for hook in hooks:
        hook.remove()
    return seen


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


@torch.no_grad()
def changes(width: int, rates: dict[str, float], steps: int, seed: int) -> dict[str, float]:
    """RMS of the change that `steps` steps make, for each name of MEASURED. Logits are those before softcap;
    where several weights are of one kind, the mean over them."""
    model = new_model(width, seed)
    before = {name: p.clone() for name, p in model.named_parameters()}
    idx, _ = byte_rows(ROWS, 1000 * seed)
    inputs = seen_inside(model, idx)
    with torch.enable_grad():
        train(model, rates, steps, seed)
    after, inputs_after = dict(model.named_parameters()), seen_inside(model, idx)
    moved = {name: p - before[name] for name, p in after.items()}

    def mean_of(*kinds: str) -> float:
        """Of the linear layers so named: RMS of (W' - W) x."""
        names = [name for name in inputs if name.rpartition(".")[2] in kinds]
        return sum(rms(inputs[name] @ moved[f"{name}.weight"].T) for name in names) / len(names)

    tables = [p[idx] for name, p in moved.items() if name.startswith("value_embeddings.")]
    scales = [p for name, p in moved.items() if name.endswith("x_before_scale")]
    logits = inputs["head"] @ before["head.weight"].T
    return {
        "logits": rms(inputs_after["head"] @ after["head.weight"].T - logits),
        "stream": rms(inputs_after["stream"] - inputs["stream"]),
        "head": mean_of("head"),
        "embedding": rms(norm(after["embedding.weight"][idx]) - norm(before["embedding.weight"][idx])),
        "value_embeddings": sum(map(rms, tables)) / len(tables),
        "readers": mean_of(*READERS),
        "writers": mean_of(*WRITERS),
        "x_before_scale": sum(map(rms, scales)) / len(scales),
        "gates": mean_of(*GATES),
    }


# ------------------------------------------------------------------------------------------------------
# All widths


def widths_up_to(widest: int) -> list[int]:
    """128, 256, 512 and so on."""
    return [NARROWEST * 2**i for i in range(int(math.log2(widest / NARROWEST)) + 1)]


def measure(rule: str, widths: list[int], steps: int, seeds: int) -> dict[str, dict[int, float]]:
    """{name of MEASURED: {width: RMS of the change, mean over the seeds}} with the rates of a rule."""
    found: dict[str, dict[int, float]] = {name: {} for name in MEASURED}
    for width in widths:
        models = max(1, min(seeds, seeds * 384 // width))  # the parts of a wide model average out
        runs = [changes(width, RULES[rule](width), steps, seed) for seed in range(models)]
        for name in MEASURED:
            found[name][width] = sum(run[name] for run in runs) / models
    return found


def slope(sizes: dict[int, float]) -> float:
    """The exponent a of size ~ width**a, by least squares on the logarithms. sizes: {width: size}."""
    x = [math.log(width) for width in sizes]
    y = [math.log(size) for size in sizes.values()]
    middle = sum(x) / len(x)
    return sum((a - middle) * b for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)


def table(found: dict[str, dict]) -> str:
    """found: {rule: what `measure` returns}."""
    widths = list(found["dial"]["logits"])
    head = f"| change of | {' | '.join(map(str, widths))} | slope | slope with the old rule |"
    lines = [head, "|:--|" + "--:|" * (len(widths) + 2)]
    for name, words in MEASURED.items():
        sizes, old = found["dial"][name], found["old"][name]
        cells = " | ".join(f"{size:.3g}" for size in sizes.values())
        lines.append(f"| {words} | {cells} | {slope(sizes):+.2f} | {slope(old):+.2f} |")
    return "\n".join(lines)


def plot(found: dict[str, dict], path: Path):
    """Each change against width, divided by that at the smallest width; one panel for each rule. Raises
    OSError if it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    titles = {"dial": "the dial: head ~ width^-1", "old": "before: head, embeddings ~ width^-1/2"}
    for axes, (rule, title) in zip(panels, titles.items(), strict=True):
        for name, words in MEASURED.items():
            widths, sizes = zip(*found[rule][name].items(), strict=True)
            axes.plot(widths, [size / sizes[0] for size in sizes], "o-", label=words, markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        ticks = list(found["dial"]["logits"])
        axes.set_xticks(ticks, map(str, ticks))
        axes.set_yticks([0.5, 1, 2], ["1/2", "1", "2"])
        axes.set(xlabel="width", title=title)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"change, against that at width {ticks[0]}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=110)


def main():
    found = {
        "dial": measure("dial", widths_up_to(widest), steps, seeds),
        "old": measure("old", widths_up_to(min(widest, OLD_WIDEST)), steps, seeds),
    }
    print(table(found))
    if picture:
        plot(found, Path(picture))


if __name__ == "__main__":
    configurator.configure(globals())
    main()
