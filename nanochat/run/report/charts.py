"""The charts of a report: curves of a run's records, thinned, and drawn by matplotlib as SVG or PNG."""

import importlib.util
import io
import re
from dataclasses import dataclass, field

import numpy as np

from nanochat.run.report.run_data import Run, number

BINS = 400  # points of a curve at most; each stands for a bin of steps
MAX_MARKS = 300
MOST_DOTS = 60  # points of a curve that are marked
CHANCE = "mean of centred scores: 0 = chance, 1 = all right"
KNOWN = {  # name in a record: title, unit; a name that is not here is its own title
    "loss": ("Training loss", "nats per token, smoothed"),
    "val_bpb": ("Validation", "bits per byte"),
    "grad_norm": ("Gradient norm", "before clipping, smoothed"),
    "lr_multiplier": ("Learning rate", "as a share of the full rate"),
    "tok_per_sec": ("Throughput", "tokens/s, smoothed"),
    "data_wait_s": ("Wait for data", "s a step, smoothed"),
    "own_score": ("Own tasks", CHANCE),
    "core": ("CORE", CHANCE),
    "exact_match": ("Exact match", "share of validation questions answered word for word"),
}
NO_CHART = {  # numbers of a record that are no curve worth seeing, or the same curve as another
    "step", "tokens", "flops", "train_time_s", "progress", "epoch", "targets", "step_time_s", "mfu",
    "smoothed_loss", "skipped", "spike", "peak_memory", "eval_time_s",
}  # fmt: skip
SPIKE, SKIPPED = "spike (6 sigma)", "skipped step (not finite)"  # kinds of marks
LABELS = {"step": "step", "tokens": "tokens", "position": "tokens of context"}  # of the x axis
UNITS = {86_400: "days in steps", 3600: "hours in steps", 60: "minutes in steps", 1: "seconds in steps"}
AXES = {"step": "steps", "tokens": "tokens", "train_time_s": "time"}  # what runs are compared by
SIZE = (380, 210)  # of a chart, in its own units; about as many pixels on a phone and on a desktop
COLORS = [f"#c0c0c{n}" for n in range(10)]  # stand for the page's --c0 to --c9, which dark mode changes
LINES, MARKS = 8, 9  # colors of axes and of marks
PAPER = ["tab:blue", "tab:red", "tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:cyan", "tab:gray"]


@dataclass
class Curve:
    """One line of a chart, arrays of equal length. low, high: the band around it. dots: mark its points, if
    they are few."""

    name: str
    x: np.ndarray
    y: np.ndarray
    color: int = 0
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    dots: bool = False


@dataclass
class Chart:
    """The content of a figure. axis: of AXES, or "position" (tokens of context, with a label for each x
    value). marks: {kind: x values}."""

    id: str
    title: str
    unit: str
    axis: str = "step"
    log: bool = False
    curves: list[Curve] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    marks: dict[str, np.ndarray] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------
# From records to curves


def charts_of(runs: list[Run], names: list[str]) -> list[Chart]:
    """The charts of one run, or of several runs in the same charts: of every number in their records.

    names: of the runs. The loss and the validation of several runs stand over steps, tokens and time. A chart
    without values is left out.
    """
    of_steps = dict.fromkeys(name for run in runs for name in run.steps)
    of_records = dict.fromkeys(name for run in runs for name in run.record_keys)
    made = []
    for key in dict.fromkeys([*KNOWN, *of_steps, *of_records]):
        if key in NO_CHART or key.startswith("val_bpb_"):  # these are curves of val_bpb's chart
            continue
        several = len(runs) > 1 and key in ("loss", "val_bpb")
        make = _step_chart if key in of_steps else _record_chart
        made += [make(runs, names, key, axis) for axis in (AXES if several else ["step"])]
    if len(runs) == 1:
        made.append(position_chart(runs[0]))
    return [chart for chart in made if any(np.isfinite(curve.y).any() for curve in chart.curves)]


def _chart(key: str, axis: str) -> Chart:
    title, unit = KNOWN.get(key, (key, ""))
    by = "" if axis == "step" else f"-{AXES[axis]}"
    return Chart(f"chart-{key}{by}", title, unit, axis)


def _step_chart(runs, names, key, axis) -> Chart:
    chart, alone = _chart(key, axis), len(runs) == 1
    for color, (run, name) in enumerate(zip(runs, names, strict=True)):
        if key in run.steps:
            ends = bin_ends(len(run.steps["step"]))
            x, values = run.steps[axis][ends], run.steps[key]
            y, low, high = step_curve(values, ends, smoothed=key != "lr_multiplier")
            band = {"low": low, "high": high} if alone else {}
            chart.curves.append(Curve(chart.title if alone else name, x, y, color, **band))
    chart.log = key not in ("loss", "lr_multiplier") and spans(chart)
    if alone and key in ("loss", "grad_norm"):
        chart.marks = marks(runs[0])
    return chart


def _record_chart(runs, names, key, axis) -> Chart:
    chart, alone = _chart(key, axis), len(runs) == 1
    for run, name in zip(runs, names, strict=True):
        for each in run.validation_keys if key == "val_bpb" else [key]:
            pairs = [(number(r.get(axis)), number(r.get(each))) for r in run.records]
            pairs = [pair for pair in pairs if None not in pair]
            x, y = np.array(chosen_of(pairs, BINS), dtype=float).reshape(-1, 2).T
            of_set = each.removeprefix(key)[1:]  # a further validation set
            called = of_set or chart.title if alone else f"{name} {of_set}".rstrip()
            if len(y):
                chart.curves.append(Curve(called, x, y, len(chart.curves), dots=True))
    return chart


def bin_ends(length: int, most: int = BINS) -> np.ndarray:
    """The last index of each of at most `most` bins of equal size."""
    return np.linspace(0, length, min(length, most) + 1).astype(int)[1:] - 1


def step_curve(values: np.ndarray, ends: np.ndarray, smoothed=True):
    """(y, low, high) of each bin: its last value, smoothed or not, and its extremes; NaN if it has none."""
    y = (smooth(values) if smoothed else values)[ends]
    if not len(ends):
        return y, y, y
    starts = np.concatenate([[0], ends[:-1] + 1])
    low, high = (extreme.reduceat(values, starts) for extreme in (np.fmin, np.fmax))  # which pass over NaN
    return np.where(np.isnan(low), np.nan, y), low, high


def window(length: int) -> int:
    """How many neighbours on each side a smoothed value has: a 60th of the curve, but at most 50, or a bin of
    a very long curve."""
    return max(min(length // 60, 50), length // BINS)


def smooth(values: np.ndarray) -> np.ndarray:
    """The moving mean, without NaN."""
    half, n, good = window(len(values)), np.arange(len(values)), ~np.isnan(values)
    first, end = np.maximum(n - half, 0), np.minimum(n + half + 1, len(values))
    sums, counts = (np.cumsum(np.append(0.0, each)) for each in (np.where(good, values, 0.0), good))
    counts = counts[end] - counts[first]
    return np.where(counts > 0, (sums[end] - sums[first]) / np.maximum(counts, 1), np.nan)


def spans(chart: Chart) -> bool:
    """Whether the values need a logarithmic scale: the largest is more than 50 times the smallest, without
    the outer 0.5 %."""
    values = _values(chart)
    if not len(values) or values.min() <= 0:
        return False
    low, high = np.quantile(values, [0.005, 0.995])
    return bool(high > 50 * low)


def _values(chart: Chart) -> np.ndarray:
    parts = [part for c in chart.curves for part in (c.y, c.low, c.high) if part is not None]
    values = np.concatenate(parts) if parts else np.array([])
    return values[np.isfinite(values)]


def chosen_of(records: list, most: int) -> list:
    """At most `most` records, evenly spaced, the first and the last included."""
    last = len(records) - 1
    chosen = sorted({round(i * last / max(most - 1, 1)) for i in range(most)}) if records else []
    return [records[i] for i in chosen]


def marks(run: Run) -> dict[str, np.ndarray]:
    """{kind: steps} of spikes and of skipped steps, at most MAX_MARKS of a kind."""
    skipped = np.diff(np.nan_to_num(run.steps["skipped"]), prepend=0.0) > 0
    kinds = {SPIKE: run.steps["spike"] == 1, SKIPPED: skipped}
    found = {kind: chosen_of(run.steps["step"][there].tolist(), MAX_MARKS) for kind, there in kinds.items()}
    return {kind: steps for kind, steps in found.items() if steps}


def position_chart(run: Run) -> Chart:
    """The loss by position at up to three evaluations: an early one, one in the middle, the last."""
    chart = Chart("chart-position", "Loss by position", "nats per token", "position")
    found = [(r["step"], by) for r in run.evals if (by := loss_by_position(r))]
    found = [(step, by) for step, by in found if list(by) == list(found[-1][1])]
    chosen = chosen_of(found[1:] or found, 3)
    for color, (step, by) in zip((7, 4, 0)[3 - len(chosen) :], chosen, strict=True):
        chart.labels = list(by)
        x, y = np.arange(len(by)), np.array([*by.values()])
        chart.curves.append(Curve(f"after {step:,} steps", x, y, color, dots=True))
    return chart


def loss_by_position(record: dict) -> dict[str, float]:
    """{bucket: nats} of an evaluation, in the order of positions; {} if it has none."""
    found = record.get("loss_by_position")
    found = found if isinstance(found, dict) else {}
    good = {k: number(v) for k, v in found.items() if _end_of(k) and number(v) is not None}
    return dict(sorted(good.items(), key=lambda item: _end_of(item[0]))[:32])


def _end_of(label: str) -> int | None:
    """The last position of a bucket such as "17-64"."""
    found = re.fullmatch(r"[0-9]{1,12}-([0-9]{1,12})", label)
    return int(found[1]) if found else None


# ------------------------------------------------------------------------------------------------------
# From curves to pictures


def can_draw() -> bool:
    """Whether matplotlib is installed. It is imported before the first picture, since that is slow."""
    return importlib.util.find_spec("matplotlib") is not None


def svg(chart: Chart) -> str:
    """The chart as an element of an HTML page, whose style sheet gives its colors and fonts."""
    import matplotlib
    from matplotlib.figure import Figure

    width, height = SIZE
    lines = {"axes.edgecolor": COLORS[LINES], "grid.color": COLORS[LINES], "xtick.color": COLORS[LINES]}
    look = {"svg.fonttype": "none", "font.size": 11, "ytick.color": COLORS[LINES], "axes.axisbelow": True}
    with matplotlib.rc_context(look | lines), io.StringIO() as file:
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)  # so that a unit is a point
        draw(chart, figure.add_axes((52 / width, 34 / height, 1 - 64 / width, 1 - 42 / height)), COLORS)
        figure.savefig(file, format="svg", transparent=True)
        drawn = file.getvalue()
    drawn = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", drawn[drawn.index("<g ") :], flags=re.S)
    drawn = re.sub(r'style="([^"]*)"', _attributes, drawn.replace(" xlink:href", " href"))
    drawn = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(?<=\.\d)\d+", "", path[0]).replace("\n", " "), drawn)
    drawn = re.sub(r">\s+<", "><", re.sub(r'<g id="[^"]*"', "<g", drawn))
    drawn = re.sub(r"#c0c0c(\d)", r"var(--c\1)", drawn)
    label = f'role="img" aria-label="{chart.title}, {chart.unit}"'
    return f'<svg class="plot" viewBox="0 0 {width} {height}" {label}>{drawn}'


def _attributes(style: re.Match) -> str:
    """An inline style, which the page's policy forbids, as attributes. Fonts are left to the style sheet."""
    pairs = [pair.split(": ", 1) for pair in style[1].split("; ")]
    return " ".join(f'{name}="{value}"' for name, value in pairs if not name.startswith("font"))


def png(charts: list[Chart]) -> bytes:
    """Charts beside each other, as a picture file."""
    from matplotlib.figure import Figure

    figure, written, share = Figure(figsize=(5 * len(charts), 3.4)), io.BytesIO(), 1 / len(charts)
    for i, chart in enumerate(charts):
        axes = figure.add_axes(((i + 0.12) * share, 0.14, 0.84 * share, 0.76))
        axes.set_title(f"{chart.title}, {chart.unit}", fontsize=10)
        draw(chart, axes, PAPER)
    figure.savefig(written, format="png", dpi=110)
    return written.getvalue()


def draw(chart: Chart, axes, colors: list[str]):
    """Draw a chart into matplotlib's axes."""
    unit, name = 1, LABELS.get(chart.axis)
    if name is None:
        longest = max(curve.x.max(initial=0) for curve in chart.curves)
        unit, name = next((unit, name) for unit, name in UNITS.items() if longest >= 2 * unit or unit == 1)
    for curve in chart.curves:
        color, x = colors[curve.color % 8], curve.x / unit
        if curve.low is not None:
            axes.fill_between(x, curve.low, curve.high, color=color, alpha=0.25, linewidth=0.6)
        dots = {"marker": "o", "markersize": 4} if len(x) <= (MOST_DOTS if curve.dots else 1) else {}
        axes.plot(x, curve.y, color=color, linewidth=1.6, linestyle="-" if curve.color < 8 else "--", **dots)
    for kind, steps in chart.marks.items():
        marker, height = ("v", 0.97) if kind == SPIKE else ("|", 0.04)
        there = {"transform": axes.get_xaxis_transform(), "color": colors[MARKS % len(colors)]}
        axes.plot(steps, np.full(len(steps), height), marker, markersize=6, **there)
    axes.set_xlabel(name)
    _set_scales(chart, axes)


def _set_scales(chart: Chart, axes):
    """Limits without the outer 0.2 % of the values, and few, short numbers at the axes."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator

    low, high = np.quantile(_values(chart), [0.002, 0.998])
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    if chart.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=6))
        axes.minorticks_off()
    axes.set_ylim(*((low / 1.2, high * 1.2) if chart.log else (low - margin, high + margin)))
    large, small = EngFormatter(sep=""), FuncFormatter(lambda value, _: f"{value:,.4g}")
    axes.yaxis.set_major_formatter(large if high >= 10_000 else small)
    if chart.labels:
        axes.set_xticks(range(len(chart.labels)), chart.labels)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(large if axes.get_xlim()[1] >= 10_000 else small)
    axes.grid(axis="y")
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
