"""The rules of the dial as pictures: `python -m experiments.dial` writes docs/dial.png and docs/widths.png.
Nothing is trained.

Against the tokens of a run on public text: batch, steps, factor of the rates, and weight decay times rate, by
the functions of nanochat/plan/scaling.py that base_train calls. They depend on the tokens and not on the
depth, which has a mark where its own horizon is. The dashed line is the batch rule without its rounding to a
power of two rows, with the vocabulary of our runs. A cross stands for each batch of a series at d4, a circle
for the lowest point of a parabola through its three best in the logarithm (docs/ablations.md, "The batch
rule").

The second picture has bits per byte against the width, for runs of equal FLOPs (docs/ablations.md, "The
width"), and the width that the rule takes against the FLOPs. A circle there stands for the lowest point of a
parabola as above, in the color of its series.
"""

from pathlib import Path

import numpy as np

import configurator
from nanochat import UserError
from nanochat.plan import scaling
from nanochat.plan.counts import scaling_parameters

folder = "docs"  # where the pictures are written

settings = configurator.configure(globals())

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
# Depth, text, FLOPs of the run: {width: bits per byte}
WIDTHS = {
    (4, "code", 5e12): {64: 1.1325, 96: 1.1375, 128: 1.1729, 192: 1.2646},
    (4, "code", 2.2e13): {96: 0.9627, 128: 0.9674, 192: 1.0080, 256: 1.0573, 320: 1.1287},
    (4, "code", 1.1e14): {96: 0.8528, 128: 0.8297, 192: 0.8313, 256: 0.8556},
    (6, "code", 2.2e13): {96: 0.9753, 128: 0.9849, 192: 1.0429, 320: 1.1894},
    (4, "prose", 2.2e13): {96: 1.6613, 128: 1.5973, 192: 1.5853, 256: 1.6395},
}


def config_of(depth: int, vocab_size: int = 32768) -> scaling.GPTConfig:
    sizes = (DEFAULTS[name] for name in ("head_dim", "max_seq_len"))
    return scaling.model_config(depth, scaling.WIDEST, *sizes, vocab_size, "L")


def lowest_point(series: dict[int, float]) -> float:
    """The key (tokens a step, width) at which a parabola through the three best, in its logarithm, is
    lowest."""
    best = sorted(series, key=series.get)[:3]
    a, b, _ = np.polyfit(np.log(best), [series[key] for key in best], 2)
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


def width_of(depth: int, flops: float) -> int:
    """The width that the dial gives a run of so many FLOPs, the vocabulary and rows being those of WIDTHS."""
    sizes = {"depth": depth, "aspect_ratio": -1, "head_dim": 64, "max_seq_len": 512}
    ratio = scaling.aspect_ratio_for(sizes, VOCABULARY, flops)
    return scaling.model_config(depth, ratio, 64, 512, VOCABULARY, "L").width


def new_figure(height: float):
    from matplotlib.figure import Figure

    return Figure(figsize=(10, height), layout="constrained")


def plot_widths(path: Path):
    figure = new_figure(4)
    measured, rule = figure.subplots(1, 2)
    for (depth, text, flops), series in WIDTHS.items():
        (line,) = measured.plot(
            list(series), list(series.values()), "o-", label=f"d{depth}, {text}, {flops:.2g} FLOPs"
        )
        rule.plot(flops, lowest_point(series), "o", fillstyle="none", color=line.get_color(), markersize=10)
    measured.set(xscale="log", xlabel="width", ylabel="bits per byte")
    measured.set_xticks([64, 96, 128, 192, 256, 320], [64, 96, 128, 192, 256, 320])
    measured.minorticks_off()
    measured.set_ylim(top=2.2)
    measured.legend(loc="upper left")
    flops = [10 ** (12 + i / 100) for i in range(301)]
    for depth, style in ((4, "k-"), (6, "k--")):
        rule.plot(
            flops, [width_of(depth, one) for one in flops], style, linewidth=1, label=f"the rule, d{depth}"
        )
    rule.set(xscale="log", xlabel="FLOPs of the run", ylabel="width")
    rule.legend()
    for axes in (measured, rule):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def plot(path: Path):
    figure = new_figure(7)
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
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    if not Path(folder).is_dir():
        raise UserError(f"--folder={folder} is no folder; make it, or name another one")
    for name, draw in {"dial.png": plot, "widths.png": plot_widths}.items():
        draw(Path(folder) / name)
        print(Path(folder) / name)
