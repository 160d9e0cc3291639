"""Charts as pictures, drawn by matplotlib: SVG for the page, PNG for report.md.

matplotlib is imported before the first picture, since that is slow.
"""

import io
import re

import numpy as np

from nanochat.run.report.charts import SPIKE, Chart

MOST_DOTS = 60  # points of a curve that are marked
LABELS = {"step": "step", "tokens": "tokens", "position": "tokens of context"}  # of the x axis
UNITS = {86_400: "days in steps", 3600: "hours in steps", 60: "minutes in steps", 1: "seconds in steps"}
SIZE = (380, 210)  # of a chart, in its own units; about as many pixels on a phone and on a desktop
COLORS = [f"#c0c0c{n}" for n in range(10)]  # stand for the page's --c0 to --c9, which dark mode changes
LINES, MARKS = 8, 9  # colors of axes and of marks
PAPER = [f"C{n}" for n in range(10)]  # matplotlib's own colors, for a picture file


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
        if len(chart.curves) > 1:
            axes.legend()
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
        look = {"color": color, "linewidth": 1.6, "linestyle": "-" if curve.color < 8 else "--"}
        look |= {"marker": "o", "markersize": 4} if len(x) <= (MOST_DOTS if curve.dots else 1) else {}
        axes.plot(x, curve.y, label=curve.name, **look)
    for kind, steps in chart.marks.items():
        marker, height = ("v", 0.97) if kind == SPIKE else ("|", 0.04)
        there = {"transform": axes.get_xaxis_transform(), "color": colors[MARKS]}
        axes.plot(steps, np.full(len(steps), height), marker, markersize=6, **there)
    axes.set_xlabel(name)
    _set_scales(chart, axes)


def _set_scales(chart: Chart, axes):
    """Limits without the outer 0.2 % of the values, and few, short numbers at the axes."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator

    low, high = np.quantile(chart.values(), [0.002, 0.998])
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
