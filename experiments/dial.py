"""The rules of the dial as a picture: `python -m experiments.dial` writes docs/dial.png. Nothing is trained.

Against the tokens of a run on public text: batch, steps, factor of the rates, and weight decay times rate, by
the functions of nanochat/plan/scaling.py that base_train calls. They depend on the tokens and not on the
depth, which has a mark where its own horizon is. The dashed line is the batch rule without its rounding to a
power of two rows, with the vocabulary of our runs. A cross stands for each batch of a series at d4, a circle
for the lowest point of a parabola through its three best in the logarithm (docs/ablations.md, "The batch").
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import configurator
from nanochat.plan import scaling
from nanochat.plan.counts import scaling_parameters

out = "docs/dial.png"  # the file to write

configurator.configure(globals())

DEFAULTS = configurator.defaults(Path(configurator.__file__).parent / "scripts" / "base_train.py")
DEPTHS = (4, 8, 12, 20, 32)  # to mark
TOKENS = [10 ** (5.5 + i / 40) for i in range(241)]  # 0.3 M to 300 B
ABOVE = {"textcoords": "offset points", "ha": "center", "arrowprops": {"arrowstyle": "-"}}
VOCABULARY = 4096  # of the runs below
# Tokens of the run: {tokens a step: bits per byte}, all at d4
TRAINED = {
    2_048_000: {2048: 0.9813, 4096: 0.9732, 8192: 0.9815},
    4_915_200: {2048: 0.8407, 4096: 0.8316, 8192: 0.8281, 32768: 0.8611},
}


def config_of(depth: int, vocab_size: int = 32768) -> scaling.GPTConfig:
    sizes = (DEFAULTS[name] for name in ("head_dim", "max_seq_len"))
    return scaling.model_config(depth, scaling.WIDEST, *sizes, vocab_size, "L")


def lowest_point(series: dict[int, float]) -> float:
    """The tokens a step at which a parabola through the three best, in their logarithm, is lowest."""
    best = sorted(series, key=series.get)[:3]
    a, b, _ = np.polyfit(np.log(best), [series[tokens] for tokens in best], 2)
    return float(np.exp(-b / (2 * a)))


def rules(tokens: float) -> dict[str, float]:
    """What the dial gives a run of so many tokens."""
    config = config_of(12)
    ratio = tokens / scaling_parameters(config)
    horizon = scaling.derive_horizon(config, -1, -1, ratio, -1)
    found = scaling.scaled_rates(DEFAULTS, config.width, horizon)
    rate = found.rates["matrix_lr"]
    return {
        "tokens a step": horizon.total_batch_size,
        "steps": horizon.num_iterations,
        "factor of the rates": rate / DEFAULTS["matrix_lr"],
        "Muon's rate x weight decay": rate * found.weight_decay,
    }


def plot():
    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = list(figure.subplots(2, 2).flat)
    found = [rules(tokens) for tokens in TOKENS]
    own = [DEFAULTS["target_param_data_ratio"] * scaling_parameters(config_of(d)) for d in DEPTHS]
    for axes, name in zip(panels, found[0], strict=True):
        axes.plot(TOKENS, [one[name] for one in found])
        for depth, tokens in zip(DEPTHS, own, strict=True):
            axes.annotate(f"d{depth}", (tokens, rules(tokens)[name]), xytext=(0, 12), **ABOVE)
        axes.set(xscale="log", yscale="log", xlabel="tokens of the run", title=name)
        axes.grid(alpha=0.3)
    d12_tokens = scaling.REFERENCE_RATIO * scaling_parameters(config_of(12, VOCABULARY))
    smooth = [scaling.unrounded_batch(tokens, d12_tokens) for tokens in TOKENS]
    panels[0].plot(TOKENS, smooth, "k--", linewidth=1)
    for tokens, series in TRAINED.items():
        panels[0].plot([tokens] * len(series), list(series), "kx", markersize=4)
        panels[0].plot(tokens, lowest_point(series), "ko", fillstyle="none", markersize=10)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    plot()
