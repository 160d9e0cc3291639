"""Curves and charts as data: thinned, so that a page of 100,000 steps opens at once."""

import math
import re
from dataclasses import dataclass, field

import numpy as np

from nanochat.run.report.run_data import Run, number

BINS = 1000  # points of a curve at most; each stands for the minimum, maximum and mean of its bin
MAX_MARKS = 300
AXES = {"step": "Steps", "tokens": "Tokens", "time": "Time"}  # what curves can be drawn against


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
    """What one figure shows. kind "axis": against what the page's switch says; "position": against tokens of
    context, on a logarithmic scale. marks: (kind, index in the group of the first curve)."""

    id: str
    title: str
    unit: str
    curves: list[Curve]
    kind: str = "axis"
    log: bool = False
    marks: list[tuple[str, int]] = field(default_factory=list)
    note: str = ""


def bins(length: int, most: int = BINS) -> np.ndarray:
    """Where each of at most `most` bins of equal size begins."""
    return np.unique(np.linspace(0, length, min(length, most), endpoint=False).astype(int))


def thin(values: np.ndarray, starts: np.ndarray) -> tuple[list, list, list]:
    """(minimum, maximum, mean) of each bin; None for a bin without numbers."""
    if not len(starts):
        return [], [], []
    good = ~np.isnan(values)
    count = np.add.reduceat(good, starts, dtype=np.int64)
    low = np.minimum.reduceat(np.where(good, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(good, values, -np.inf), starts)
    mean = np.add.reduceat(np.where(good, values, 0.0), starts) / np.maximum(count, 1)
    return tuple(rounded(np.where(count > 0, v, np.nan)) for v in (low, high, mean))


def rounded(values) -> list:
    """Six significant digits; None for NaN."""
    return [None if math.isnan(v) else float(f"{v:.6g}") for v in map(float, values)]


def smooth(values: np.ndarray) -> np.ndarray:
    """The mean of each value and its neighbours, a 30th of the curve but at most 101 values; without NaN."""
    half = min(len(values) // 60, 50)
    good = ~np.isnan(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(good, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(good)])
    middle = np.arange(len(values))
    first, end = np.maximum(middle - half, 0), np.minimum(middle + half + 1, len(values))
    count = counts[end] - counts[first]
    return np.where(count > 0, (sums[end] - sums[first]) / np.maximum(count, 1), np.nan)


def interpolated(run: Run, records: list[dict], name: str, column: str) -> list:
    """A record's own number, else the training steps' `column` at its step."""
    known, steps = run.steps[column], run.steps["step"]
    good = ~np.isnan(known)
    found = []
    for record in records:
        value = number(record.get(name))
        if value is None and record["step"] == 0:
            value = 0.0
        elif value is None and good.any():  # training record k is update k, an evaluation at k follows it
            value = float(np.interp(record["step"] - 1, steps[good], known[good]))
        found.append(math.nan if value is None else value)
    return rounded(found)


def chosen_of(records: list, most: int) -> list:
    """At most `most` of them, evenly spaced, the first and the last among them."""
    last = len(records) - 1
    chosen = sorted({round(i * last / max(most - 1, 1)) for i in range(most)}) if records else []
    return [records[i] for i in chosen]


def x_of_records(run: Run, records: list[dict]) -> dict[str, list]:
    """Where evaluations stand on each axis."""
    return {
        "step": [r["step"] for r in records],
        "tokens": interpolated(run, records, "tokens", "tokens"),
        "time": interpolated(run, records, "train_time_s", "train_time_s"),
    }


def x_of_steps(run: Run, starts: np.ndarray) -> dict[str, list]:
    """Where bins of training steps stand on each axis."""
    columns = {"step": "step", "tokens": "tokens", "time": "train_time_s"}
    return {axis: thin(run.steps[column], starts)[2] for axis, column in columns.items()}


def curve_of(
    values: np.ndarray, starts, name: str, group: str, color: int = 0, band=True, smoothed=True
) -> Curve:
    """A curve of the bins' means, smoothed or not, and the band of their extremes."""
    low, high, _ = thin(values, starts)
    _, _, mean = thin(smooth(values) if smoothed else values, starts)
    mean = [None if at_bottom is None else m for m, at_bottom in zip(mean, low, strict=True)]
    return Curve(name, group, mean, color, low if band else None, high if band else None)


def marks(run: Run, starts: np.ndarray) -> list[tuple[str, int]]:
    """Spikes and skipped steps, with the bin that each is in; at most MAX_MARKS of a kind."""
    skipped = np.diff(np.nan_to_num(run.steps["skipped"]), prepend=0.0) > 0
    if len(skipped):
        skipped[0] = run.steps["skipped"][0] > 0 and run.steps["step"][0] == 0
    found = []
    for kind, there in (("spike", run.steps["spike"] == 1), ("skipped", skipped)):
        where = np.flatnonzero(there)
        where = where[bins(len(where), MAX_MARKS)] if len(where) else where
        found += [(kind, int(i)) for i in np.unique(np.searchsorted(starts, where, side="right") - 1)]
    return found


def position_end(label: str) -> float | None:
    """The last position of a bucket such as "17-64"."""
    found = re.fullmatch(r"[0-9]{1,12}-([0-9]{1,12})", label)
    return float(found[1]) if found else None


def loss_by_position(record: dict) -> dict[str, float]:
    """{bucket: nats} of an evaluation, in the order of positions; {} if it has none."""
    found = record.get("loss_by_position")
    found = found if isinstance(found, dict) else {}
    good = {k: number(v) for k, v in found.items() if position_end(k) and number(v) is not None}
    return dict(sorted(good.items(), key=lambda item: position_end(item[0]))[:32])
