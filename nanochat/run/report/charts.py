"""Curves and charts as data: thinned, so that a page of 100,000 steps opens at once."""

import math
import re
from dataclasses import dataclass, field

import numpy as np

from nanochat.run.report.run_data import Run, number

BINS = 1000  # points of a curve at most; each stands for a bin of steps
BINS_OF_SEVERAL = 400  # the same where runs are compared, and for evaluations
MAX_MARKS = 300
AXES = {"step": "Steps", "tokens": "Tokens", "time": "Time"}  # what curves can be drawn against
X_COLUMNS = {"step": "step", "tokens": "tokens", "time": "train_time_s"}
CHANCE = "mean of centred scores: 0 = chance, 1 = all right"
STEP_CHARTS = (  # id, title, unit, column, factor, name of the curve and its color in a chart of one run
    ("loss", "Training loss", "nats per token, smoothed", "loss", 1.0, "loss", 0),
    ("grad", "Gradient norm", "before clipping, smoothed", "grad_norm", 1.0, "norm", 3),
    ("lr", "Learning rate", "as a share of the full rate", "lr_multiplier", 1.0, "factor", 2),
    ("speed", "Throughput", "tokens/s, smoothed", "tok_per_sec", 1.0, "tokens/s", 6),
    ("wait", "Wait for data", "ms a step, smoothed", "data_wait_s", 1000.0, "wait", 4),
)
RECORD_CHARTS = (  # id, title, unit, part of the run, key of its records, color
    ("bpb", "Validation", "bits per byte", "evals", "val_bpb", 1),
    ("own", "Own tasks", CHANCE, "tasks", "own_score", 5),
    ("core", "CORE", CHANCE, "tasks", "core", 0),
)


@dataclass
class Curve:
    """One line of a chart. group: the name of its x values. low, high: the band around the line."""

    name: str
    group: str
    y: list
    color: int = 0
    low: list | None = None
    high: list | None = None
    dots: bool = False


@dataclass
class Chart:
    """The content of a figure. kind: its x values, "axis" (those that the page's switch selects) or
    "position" (tokens of context, logarithmic). marks: (kind, index of an x value of the first curve)."""

    id: str
    title: str
    unit: str
    curves: list[Curve]
    kind: str = "axis"
    log: bool = False
    marks: list[tuple[str, int]] = field(default_factory=list)


def charts_of(runs: list[Run], names: list[str]) -> tuple[list[Chart], dict]:
    """(charts, {group: {axis: x values}}) of one run, or of several runs in the same charts.

    names: of the runs, for the curves of several runs, which have no bands. A chart without values is left
    out.
    """
    alone = len(runs) == 1
    ends = [bin_ends(len(run.steps["step"]), BINS if alone else BINS_OF_SEVERAL) for run in runs]
    x_of = {}
    for i, run in enumerate(runs):
        x_of[f"steps{i}"] = {axis: exact(run.steps[column][ends[i]]) for axis, column in X_COLUMNS.items()}
        for group in ("evals", "tasks"):
            records = chosen_of(getattr(run, group), BINS_OF_SEVERAL)
            columns = {axis: [number(r.get(name)) for r in records] for axis, name in X_COLUMNS.items()}
            x_of[f"{group}{i}"] = columns
    charts = [_step_chart(runs, names, ends, *chart) for chart in STEP_CHARTS]
    of_records = [_record_chart(runs, names, *chart) for chart in RECORD_CHARTS]
    charts = [charts[0], of_records[0], *charts[1:], *of_records[1:]]
    if alone:
        chart, x_of["position"] = position_chart(runs[0])
        charts.append(chart)
    return [c for c in charts if any(y is not None for curve in c.curves for y in curve.y)], x_of


def _step_chart(runs, names, ends, id, title, unit, column, factor, own_name, color) -> Chart:
    chart, alone = Chart(f"chart-{id}", title, unit, []), len(runs) == 1
    for i, run in enumerate(runs):
        name, shade = (own_name, color) if alone else (names[i], i)
        values = run.steps[column] * factor
        chart.curves.append(step_curve(values, ends[i], name, f"steps{i}", shade, id != "lr", band=alone))
    chart.log = id not in ("loss", "lr") and spans(chart)
    if alone and id in ("loss", "grad"):
        chart.marks = marks(runs[0], ends[0])
    return chart


def _record_chart(runs, names, id, title, unit, group, key, color) -> Chart:
    chart = Chart(f"chart-{id}", title, unit, [])
    for i, run in enumerate(runs):
        y = [number(r.get(key)) for r in chosen_of(getattr(run, group), BINS_OF_SEVERAL)]
        own_name = title if title.isupper() else title.lower()
        name, shade = (own_name, color) if len(runs) == 1 else (names[i], i)
        chart.curves.append(Curve(name, f"{group}{i}", y, shade, dots=True))
    return chart


def bin_ends(length: int, most: int = BINS) -> np.ndarray:
    """The last index of each of at most `most` bins of equal size."""
    return np.linspace(0, length, min(length, most) + 1).astype(int)[1:] - 1


def step_curve(values, ends, name: str, group: str, color=0, smoothed=True, band=True) -> Curve:
    """A curve through the last value of each bin, smoothed or not, and the band of the bins' extremes."""
    y = (smooth(values) if smoothed else values)[ends]
    if not (band and smoothed and len(ends)):
        return Curve(name, group, exact(y), color)
    starts = np.concatenate([[0], ends[:-1] + 1])
    low, high = (extreme.reduceat(values, starts) for extreme in (np.fmin, np.fmax))  # which pass over NaN
    y = np.where(np.isnan(low), np.nan, y)
    return Curve(name, group, exact(y), color, exact(low), exact(high))


def smooth(values: np.ndarray) -> np.ndarray:
    """The moving mean, without NaN, over a 30th of the curve, but at most 101 values, or two bins of a very
    long curve."""
    half = max(min(len(values) // 60, 50), len(values) // BINS)
    if not half:
        return values
    window, good = np.ones(2 * half + 1), ~np.isnan(values)
    sums = np.convolve(np.where(good, values, 0.0), window, "same")
    counts = np.convolve(good.astype(float), window, "same").round()
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def exact(values) -> list:
    """Whole numbers as they are, others with six significant digits, None for NaN."""
    return [
        None if math.isnan(v) else int(v) if v.is_integer() else float(f"{v:.6g}") for v in map(float, values)
    ]


def spans(chart: Chart) -> bool:
    """Whether the values need a logarithmic scale: the largest is more than 50 times the smallest, without
    the outer 0.5 %."""
    values = [v for c in chart.curves for v in (*c.y, *(c.low or ()), *(c.high or ())) if v is not None]
    if not values or min(values) <= 0:
        return False
    low, high = np.quantile(values, [0.005, 0.995])
    return bool(high > 50 * low)


def chosen_of(records: list, most: int) -> list:
    """At most `most` records, evenly spaced, the first and the last included."""
    last = len(records) - 1
    chosen = sorted({round(i * last / max(most - 1, 1)) for i in range(most)}) if records else []
    return [records[i] for i in chosen]


def marks(run: Run, ends: np.ndarray) -> list[tuple[str, int]]:
    """(kind, bin) of spikes and skipped steps, at most MAX_MARKS of a kind."""
    skipped = np.diff(np.nan_to_num(run.steps["skipped"]), prepend=0.0) > 0
    found = []
    for kind, there in (("spike", run.steps["spike"] == 1), ("skipped", skipped)):
        bins = np.unique(np.searchsorted(ends, np.flatnonzero(there)))
        found += [(kind, i) for i in chosen_of(bins.tolist(), MAX_MARKS)]
    return found


def position_chart(run: Run) -> tuple[Chart, dict]:
    """(chart, x values) of the loss by position at up to three evaluations: an early one, one in the middle,
    the last."""
    chart = Chart("chart-position", "Loss by position", "nats per token", [], kind="position")
    found = [(r["step"], by) for r in run.evals if (by := loss_by_position(r))]
    found = [(step, by) for step, by in found if list(by) == list(found[-1][1])]
    chosen = chosen_of(found[1:] or found, 3)
    for color, (step, by) in zip((7, 4, 0)[3 - len(chosen) :], chosen, strict=True):
        name = f"after {step:,} steps"
        chart.curves.append(Curve(name, "position", exact(by.values()), color, dots=True))
    return chart, {"position": [_end_of(label) for label in found[-1][1]]} if found else {}


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
