"""Charts as SVG, for readers without JavaScript and for paper. page.js draws the same again when it zooms.

Colours come from the page's style sheet, by class: c0 to c7 for curves, grid, axis, mark.
"""

import math
from html import escape

from nanochat.run.report.curves import Chart

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 8, 34
MOST_POINTS = 300  # of a curve


def compact(value: float) -> str:
    """Four digits and a unit of size: 2.458 M, 0.0001234, 512."""
    for unit, name in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= unit:
            return (
                f"{value / (1e3 if name == ' k' else unit):.4g}{name}"
                if abs(value) < 1e16
                else f"{value:.3g}"
            )
    return f"{value:,.0f}" if value == int(value) else f"{value:.4g}"


def duration(seconds: float) -> str:
    """45.2 s, 7 min 12 s, 3 h 05 min, 2 d 4 h."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    for limit, large, name, small, rest in ((3600, 60, "min", 1, "s"), (86400, 3600, "h", 60, "min")):
        if seconds < limit:
            return f"{int(seconds // large)} {name} {int(seconds % large // small):02d} {rest}"
    return f"{int(seconds // 86400):,} d {int(seconds % 86400 // 3600)} h"


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """About `most` round numbers from low to high."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    raw = span / most
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, first + 2 * most + 2) if i * step <= high + 1e-9 * step]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, at most six; with 2 and 5 times them if there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    skip = max(1, math.ceil((last - first) / 6))
    tens = [10.0**e for e in range(first, last + 1, skip)]
    ticks = [t for t in tens if low <= t <= high]
    return ticks if len(ticks) > 2 else [t * m for t in tens for m in (1, 2, 5) if low <= t * m <= high]


def value_range(chart: Chart) -> tuple[float, float]:
    """Lowest and highest value to show: all but the outermost 0.2 % of a long curve, and a margin."""
    values = sorted(
        v for c in chart.curves for part in (c.y, c.low, c.high) for v in part or [] if v is not None
    )
    if chart.log:
        values = [v for v in values if v > 0]
    if not values:
        return (0.1, 1.0) if chart.log else (0.0, 1.0)
    cut = int(0.002 * len(values))
    low, high = values[cut], values[-1 - cut]
    if chart.log:
        return low / 1.2, high * 1.2
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def draw(chart: Chart, x_of: dict[str, dict[str, list]], description: str) -> str:
    """The chart against steps (or positions), as an <svg> element with a text alternative."""
    axis = "position" if chart.kind == "position" else "step"
    xs = [x_of[c.group][axis] for c in chart.curves]
    found = [x for values in xs for x in values if x is not None]
    x_low, x_high = (min(found), max(found)) if found else (0, 1)
    to_x = _scale(x_low, x_high, LEFT, WIDTH - RIGHT, log=axis == "position")
    y_low, y_high = value_range(chart)
    to_y = _scale(y_low, y_high, HEIGHT - BOTTOM, TOP, chart.log)
    parts = [*_frame(chart, axis, x_low, x_high, y_low, y_high, to_x, to_y, found)]
    clip = f"clip-{chart.id}"
    inside = f'<rect x="{LEFT - 5}" y="0" width="{WIDTH}" height="{HEIGHT - BOTTOM}"/>'
    parts.append(f'<clipPath id="{clip}">{inside}</clipPath><g clip-path="url(#{clip})">')
    for curve, values in zip(chart.curves, xs, strict=True):
        parts += _curve(curve, values, to_x, to_y)
    parts += _marks(chart, xs, to_x)
    label = escape(description)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" class="plot">'
        + "".join(parts)
        + "</g></svg>"
    )


def _scale(low, high, start, end, log):
    """A function from values to pixels."""
    if log:
        low, high = math.log(max(low, 1e-300)), math.log(max(high, 1e-300))
    span = (high - low) or 1.0
    read = (lambda v: math.log(max(v, 1e-300))) if log else (lambda v: v)
    return lambda v: start + (read(v) - low) / span * (end - start)


def _frame(chart, axis, x_low, x_high, y_low, y_high, to_x, to_y, found):
    """Grid lines, axis and their numbers."""
    for y in log_ticks(y_low, y_high) if chart.log else nice_ticks(y_low, y_high, 5):
        at = to_y(y)
        yield f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{compact(float(f"{y:.6g}"))}</text>'
    ticks = sorted(set(found)) if axis == "position" else nice_ticks(x_low, x_high, 5)
    for x in ticks:
        yield f'<text x="{to_x(x):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{compact(x)}</text>'
    yield f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>'
    name = "tokens of context" if axis == "position" else "step"
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 3}" text-anchor="middle">{name}</text>'


def _curve(curve, xs, to_x, to_y):
    """The band, the line and the dots of one curve."""
    size = max(1, math.ceil(len(xs) / MOST_POINTS))
    groups = [range(i, min(i + size, len(xs))) for i in range(0, len(xs), size)]
    groups = [[i for i in g if curve.y[i] is not None and xs[i] is not None] for g in groups]
    groups = [g for g in groups if g]
    points = [(to_x(xs[g[0]]), to_y(sum(curve.y[i] for i in g) / len(g))) for g in groups]
    if curve.low:
        ends = [(min(curve.low[i] for i in g), max(curve.high[i] for i in g)) for g in groups]
        ends = [(to_y(low), to_y(high)) for low, high in ends]
        there = [(x, high) for (x, _), (_, high) in zip(points, ends, strict=True)]
        back = [(x, low) for (x, _), (low, _) in zip(points, ends, strict=True)][::-1]
        yield f'<path class="band c{curve.color % 8}" d="{_path(there + back)}"/>'
    yield f'<path class="line c{curve.color % 8}" d="{_path(points)}"/>'
    if curve.dots or len(points) == 1:
        for x, y in points:
            yield f'<circle class="dot c{curve.color % 8}" cx="{x:.1f}" cy="{_bounded(y):.1f}" r="3"/>'


def _marks(chart, xs, to_x):
    """Spikes as triangles at the top, skipped steps as bars at the bottom."""
    for kind, i in chart.marks:
        if xs[0][i] is None:
            continue
        x = to_x(xs[0][i])
        bottom = HEIGHT - BOTTOM
        shape = f"M{x - 4:.1f} 1h8l-4 7z" if kind == "spike" else f"M{x:.1f} {bottom}v-12"
        yield f'<path class="mark {kind}" d="{shape}"/>'


def _path(points) -> str:
    return "M" + "L".join(f"{x:.1f} {_bounded(y):.1f}" for x, y in points) if points else ""


def _bounded(y: float) -> float:
    return min(max(y, -1e4), 1e4)
