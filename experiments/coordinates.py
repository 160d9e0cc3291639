"""Do the learning rates fit every width? A coordinate check, as of muP (arXiv 2203.03466).

    python -m experiments.coordinates                          # the table of docs/scale.md: minutes
    python -m experiments.coordinates --steps=10 --widest=512

If the rates suit every width, the first steps change logits and residual stream by as much in a wide model as
in a narrow one. So models of one depth train for a few steps with the rates that scaling.scaled_rates gives
them, each on fresh rows of bytes. The change is measured on other rows of the text, as its root mean square
(RMS), and a line is fitted to log(change) against log(width). Its slope is 0 where the rates fit; a slope of
0.5 doubles the change where the width is four times as large.
"""

import math
from pathlib import Path

import numpy as np
import torch

import configurator
from experiments.measurements import T, byte_rows
from nanochat import optim, terminal
from nanochat.gpt import GPT, GPTConfig
from nanochat.gradients import clip_grad_norm_
from nanochat.machine.runtime import materialize
from nanochat.ops.elementwise import norm
from nanochat.plan import scaling

steps = 5  # optimizer steps before the change is measured (after one, some are still 0) [2..1000]
seeds = 3  # models of a width to take the mean of; above width 256 fewer, down to one [1..100]
widest = 1024  # the largest width; the smallest is 128 [256..8192]

DEPTH, HEAD_DIM, ROWS, NARROWEST = 4, 64, 8, 128
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


def dial_rates(width: int) -> dict[str, float]:
    """The rates that a run of that width gets: the head's goes as 1 / width."""
    return scaling.scaled_rates(DEFAULTS, width, HORIZON).rates


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
    hooks.append(
        last.register_forward_hook(lambda block, inputs, pair: seen.__setitem__("stream", sum(pair)))
    )
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
        "readers": mean_of("query", "key", "value", "up"),
        "writers": mean_of("out", "down"),
        "x_before_scale": sum(map(rms, scales)) / len(scales),
        "gates": mean_of("value_gate", "head_gate", "x_before_gate"),
    }


# ------------------------------------------------------------------------------------------------------
# All widths


def widths_up_to(widest: int) -> list[int]:
    """128, 256, 512 and so on."""
    return [NARROWEST * 2**i for i in range(int(math.log2(widest / NARROWEST)) + 1)]


def measure(widths: list[int], steps: int, seeds: int, rates_of=dial_rates) -> dict[str, dict[int, float]]:
    """{name of MEASURED: {width: RMS of the change, mean over the seeds}}; rates_of(width) are the rates."""
    found: dict[str, dict[int, float]] = {name: {} for name in MEASURED}
    for width in widths:
        models = max(1, min(seeds, seeds * 384 // width))  # the parts of a wide model average out
        runs = [changes(width, rates_of(width), steps, seed) for seed in range(models)]
        for name in MEASURED:
            found[name][width] = sum(run[name] for run in runs) / models
    return found


def slope(sizes: dict[int, float]) -> float:
    """The exponent a of size ~ width**a, by least squares on the logarithms. sizes: {width: size}."""
    return float(np.polyfit(np.log(list(sizes)), np.log(list(sizes.values())), 1)[0])


def table(found: dict[str, dict[int, float]]) -> str:
    """found: what `measure` returns."""
    rows = [["change of", *found["logits"], "slope"]]
    for name, words in MEASURED.items():
        sizes = found[name]
        rows.append([words, *(f"{size:.3g}" for size in sizes.values()), f"{slope(sizes):+.2f}"])
    return terminal.table(rows)


if __name__ == "__main__":
    configurator.configure(globals())
    print(table(measure(widths_up_to(widest), steps, seeds)))
