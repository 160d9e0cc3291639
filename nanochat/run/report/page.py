"""One self-contained HTML page: style, script and data are inside, and nothing is loaded from anywhere.

The page may hold what a model wrote or a stranger's folder says. All text is escaped, and the page's own
policy (Content-Security-Policy) lets nothing run but its one script, by checksum.
"""

import base64
import hashlib
import json
import os
import time
from datetime import datetime, timezone
from html import escape
from importlib.resources import files
from pathlib import Path

from nanochat.files import open_plain
from nanochat.run.report import svg
from nanochat.run.report.curves import AXES, Chart
from nanochat.run.report.run_data import text

RELOAD_S = 30  # of a page of a run that goes on, in a browser without JavaScript
TABLE_ROWS = 12  # of the table under a chart


def document(title: str, body: str, charts: list[Chart], x_of: dict, running: bool) -> str:
    """The whole page. x_of: {group: {axis: x values}} of the charts' curves."""
    style, script = _own_file("page.css"), _own_file("numbers.js") + _own_file("page.js")
    policy = f"default-src 'none'; style-src {_checksum(style)}; script-src {_checksum(script)}; "
    policy += "img-src data:; base-uri 'none'; form-action 'none'"
    reload = f'<noscript><meta http-equiv="refresh" content="{RELOAD_S}"></noscript>\n' if running else ""
    data = {"x": x_of, "axes": AXES, "running": running, "written": int(time.time())}
    data["charts"] = [_chart_data(chart) for chart in charts]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n{reload}<style>{style}</style>\n</head>\n<body>\n"
        f'<a class="skip" href="#main">Skip to the report</a>\n<div class="page">\n{body}\n</div>\n'
        f'<script type="application/json" id="page-data">{json_in_html(data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _own_file(name: str) -> str:
    return files("nanochat.run.report").joinpath(name).read_text(encoding="utf-8")


def _checksum(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def json_in_html(data) -> str:
    """JSON that no HTML parser can take for a tag or the end of a script."""
    written = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _chart_data(chart: Chart) -> dict:
    curves = [{k: v for k, v in vars(c).items() if v is not None} for c in chart.curves]
    return {"id": chart.id, "kind": chart.kind, "log": chart.log, "marks": chart.marks, "curves": curves}


def write_page(path: Path, content: str):
    """Replace the file at once. A link there is replaced and not followed. Raises OSError."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(open_plain(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
        file.write(content.encode("utf-8", errors="replace"))
    os.replace(temporary, path)


# ------------------------------------------------------------------------------------------------------
# Pieces of a page


def e(value) -> str:
    """A value as escaped, bounded text."""
    return escape(text(value))


def footer() -> str:
    """When the page was written."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return (
        f'<footer>Written by nanochat, <span id="written">{now}</span>. One file; it loads nothing.</footer>'
    )


def section(id: str, title: str, *content: str) -> str:
    """A part of the page with a heading; empty if it has no content."""
    inside = "\n".join(part for part in content if part)
    return (
        f'<section id="{id}" aria-labelledby="h-{id}">\n<h2 id="h-{id}">{e(title)}</h2>\n{inside}\n</section>'
        if inside
        else ""
    )


def navigation(sections: list[str]) -> str:
    """Links to the sections of a page."""
    links = []
    for part in filter(None, sections):
        id, title = part.split('"', 2)[1], part.split('">', 2)[2].split("</h2>")[0]
        links.append(f'<li><a href="#{id}">{title}</a></li>')
    return f'<nav aria-label="Sections"><ul>{"".join(links)}</ul></nav>'


def table(head: list[str], rows: list[list], caption="", numbers_from=1, best: dict | None = None) -> str:
    """A table whose first column heads its rows; columns from `numbers_from` on are aligned as numbers.

    best: {column: index of the row that is printed bold}.
    """

    def cls(i, row=None):
        names = ["number"] * (i >= numbers_from) + ["best"] * (row is not None and (best or {}).get(i) == row)
        return f' class="{" ".join(names)}"' if names else ""

    top = "".join(f'<th scope="col"{cls(i)}>{e(name)}</th>' for i, name in enumerate(head))
    body = ""
    for n, row in enumerate(rows):
        cells = "".join(f"<td{cls(i, n)}>{e(cell)}</td>" for i, cell in enumerate(row) if i)
        body += f'<tr><th scope="row">{e(row[0])}</th>{cells}</tr>\n'
    title = f"<caption>{e(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{e(caption or head[0])}"><table>{title}'
        f"<thead><tr>{top}</tr></thead>\n<tbody>\n{body}</tbody></table></div>"
    )


def tiles(entries: list[tuple]) -> str:
    """Numbers at a glance: (name, value, unit, note) each. The first one stands out."""
    made = []
    for i, (name, value, unit, note) in enumerate(entries):
        kind = "tile main" if i == 0 else "tile"
        note, unit = (", ".join(filter(None, (unit, note))), "") if len(unit) > 4 else (note, unit)
        small = f" <small>{e(unit)}</small>" if unit else ""
        below = f'<dd class="note">{e(note)}</dd>' if note else ""
        made.append(
            f'<div class="{kind}"><dt>{e(name)}</dt><dd class="value">{e(value)}{small}</dd>{below}</div>'
        )
    return f'<dl class="tiles">\n{chr(10).join(made)}\n</dl>'


def figure(chart: Chart, x_of: dict) -> str:
    """A chart with its legend, its text alternative and its values as a table."""
    legend = []
    for curve in chart.curves:
        last = next((v for v in reversed(curve.y) if v is not None), None)
        shown = "" if last is None else svg.compact(last)
        kind = f"c{curve.color % 8}"
        legend.append(f'<li><i class="swatch {kind}"></i>{e(curve.name)}<b class="value">{shown}</b></li>')
    for kind, label in (("spike", "spike (6 sigma)"), ("skipped", "skipped step (not finite)")):
        if any(mark == kind for mark, _ in chart.marks):
            legend.append(f'<li><i class="swatch {kind}"></i>{label}</li>')
    unit = e(chart.unit) + (", logarithmic" if chart.log else "")
    note = f'<p class="note">{e(chart.note)}</p>' if chart.note else ""
    return (
        f'<figure class="chart" id="{chart.id}"><figcaption><h3>{e(chart.title)}</h3> '
        f'<small>{unit}</small><span class="where"></span></figcaption>\n'
        f'<ul class="legend">{"".join(legend)}</ul>\n'
        f"{svg.draw(chart, x_of, _description(chart, x_of))}\n{note}"
        f'<details class="table"><summary>Values</summary>{_values(chart, x_of)}</details></figure>'
    )


def _points(chart, x_of, curve) -> list[tuple]:
    axis = "position" if chart.kind == "position" else "step"
    return [(x, y) for x, y in zip(x_of[curve.group][axis], curve.y, strict=True) if None not in (x, y)]


def _at(chart, x) -> str:
    return f"up to {x:,.0f} tokens of context" if chart.kind == "position" else f"step {x:,.0f}"


def _description(chart, x_of) -> str:
    """The chart in words, for who cannot see it."""
    said = []
    for curve in chart.curves[:12]:
        points = _points(chart, x_of, curve)
        if points:
            (x0, y0), (x1, y1) = points[0], points[-1]
            lowest, highest = min(y for _, y in points), max(y for _, y in points)
            said.append(
                f"{text(curve.name)} goes from {svg.compact(y0)} at {_at(chart, x0)} to {svg.compact(y1)} at "
                f"{_at(chart, x1)}, between {svg.compact(lowest)} and {svg.compact(highest)}"
            )
    return f"{chart.title}, {chart.unit}: {'; '.join(said) or 'no values yet'}."


def _values(chart, x_of) -> str:
    """At most TABLE_ROWS points of each curve; curves that share their x values share a table."""
    made = []
    for group in dict.fromkeys(curve.group for curve in chart.curves):
        curves = [curve for curve in chart.curves if curve.group == group]
        axis = "position" if chart.kind == "position" else "step"
        xs = x_of[group][axis]
        last = max(len(xs) - 1, 0)
        chosen = sorted({round(i * last / (TABLE_ROWS - 1)) for i in range(TABLE_ROWS)}) if xs else []
        rows = [[f"{xs[i]:,.0f}", *(_cell(c.y[i]) for c in curves)] for i in chosen if xs[i] is not None]
        made.append(
            table(["tokens of context" if axis == "position" else "step", *(c.name for c in curves)], rows)
        )
    return "".join(made)


def _cell(value) -> str:
    return "" if value is None else svg.compact(value)
