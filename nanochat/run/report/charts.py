"""The charts of a report: which there are, and their curves, thinned."""

import re
from dataclasses import dataclass, field

import numpy as np

from nanochat.run.report.run_data import Run, number, numbers_of

BINS = 400  # points of a curve at most; each stands for a bin of steps
MAX_MARKS = 300
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
AXES = {"step": "", "tokens": "-tokens", "train_time_s": "-time"}  # what runs are compared by: end of the id


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

    def values(self) -> np.ndarray:
        """All finite y values, those of the bands included."""
        parts = [part for c in self.curves for part in (c.y, c.low, c.high) if part is not None]
        values = np.concatenate(parts)
        return values[np.isfinite(values)]


def charts_of(runs: list[Run]) -> list[Chart]:
    """The charts of one run, or of several runs in the same charts: of every number in their records.

    The loss and the validation of several runs stand over steps, tokens and time. A chart without values is
    left out.
    """
    of_steps = dict.fromkeys(name for run in runs for name in run.steps)
    of_records = dict.fromkeys(name for run in runs for name in run.record_keys)
    made = []
    for key in dict.fromkeys([*KNOWN, *of_steps, *of_records]):
        if key in NO_CHART or key.startswith("val_bpb_"):  # these are curves of val_bpb's chart
            continue
        several = len(runs) > 1 and key in ("loss", "val_bpb")
        title, unit = KNOWN.get(key, (key, ""))
        for axis, suffix in AXES.items() if several else [("step", "")]:
            made.append(Chart(f"chart-{key}{suffix}", title, unit, axis))
            (_add_steps if key in of_steps else _add_records)(made[-1], runs, key)
    if len(runs) == 1:
        made.append(position_chart(runs[0]))
    return [chart for chart in made if any(np.isfinite(curve.y).any() for curve in chart.curves)]


def _add_steps(chart: Chart, runs: list[Run], key: str):
    """Add the curves of a number of training records."""
    alone = len(runs) == 1
    for color, run in enumerate(runs):
        if key in run.steps:
            ends = bin_ends(len(run.steps["step"]))
            x, values = run.steps[chart.axis][ends], run.steps[key]
            y, low, high = step_curve(values, ends, smoothed=key != "lr_multiplier")
            band = {"low": low, "high": high} if alone else {}
            chart.curves.append(Curve(chart.title if alone else run.name, x, y, color, **band))
    chart.log = key not in ("loss", "lr_multiplier") and spans(chart)
    if alone and key in ("loss", "grad_norm"):
        chart.marks = marks(runs[0])


def _add_records(chart: Chart, runs: list[Run], key: str):
    """Add the curves of a number of other records."""
    for run in runs:
        for each in run.validation_keys if key == "val_bpb" else [key]:
            pairs = [(number(r.get(chart.axis)), number(r.get(each))) for r in run.records]
            pairs = [pair for pair in pairs if None not in pair]
            x, y = np.array(chosen_of(pairs, BINS), dtype=float).reshape(-1, 2).T
            of_set = each.removeprefix(key)[1:]  # a further validation set
            called = of_set or chart.title if len(runs) == 1 else f"{run.name} {of_set}".rstrip()
            if len(y):
                chart.curves.append(Curve(called, x, y, len(chart.curves), dots=True))


def bin_ends(length: int, most: int = BINS) -> np.ndarray:
    """The last index of each of at most `most` bins of equal size."""
    return np.linspace(0, length, min(length, most) + 1).astype(int)[1:] - 1


def step_curve(values: np.ndarray, ends: np.ndarray, smoothed=True):
    """(y, low, high) of each bin: its last value, smoothed or not, and its extremes; NaN if it has none."""
    y = smooth(values, ends) if smoothed else values[ends]
    if not len(ends):
        return y, y, y
    starts = np.concatenate([[0], ends[:-1] + 1])
    low, high = (extreme.reduceat(values, starts) for extreme in (np.fmin, np.fmax))  # which pass over NaN
    return np.where(np.isnan(low), np.nan, y), low, high


def window(length: int) -> int:
    """How many neighbours on each side a smoothed value has: a 60th of the curve, but at most 50, or a bin of
    a very long curve."""
    return max(min(length // 60, 50), length // BINS)


def smooth(values: np.ndarray, at=None) -> np.ndarray:
    """The moving mean, without NaN, at these indices (None: at all)."""
    half, at = window(len(values)), range(len(values)) if at is None else at
    parts = (values[max(0, i - half) : i + half + 1] for i in at)
    parts = (part[~np.isnan(part)] for part in parts)
    return np.array([part.mean() if len(part) else np.nan for part in parts])


def spans(chart: Chart) -> bool:
    """Whether the values need a logarithmic scale: the largest is more than 50 times the smallest, without
    the outer 0.5 %."""
    values = chart.values()
    if not len(values) or values.min() <= 0:
        return False
    low, high = np.quantile(values, [0.005, 0.995])
    return bool(high > 50 * low)


def chosen_of(records: list, most: int) -> list:
    """At most `most` records, evenly spaced, the first and the last included."""
    chosen = np.linspace(0, len(records) - 1, min(len(records), most)).round().astype(int)
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
    """{bucket, such as "17-64": nats} of an evaluation, in the order of positions; {} if it has none."""
    found = numbers_of(record, "loss_by_position")
    return {bucket: nats for bucket, nats in found.items() if re.fullmatch("[0-9]+-[0-9]+", bucket)}
