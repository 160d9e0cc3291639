"""An HTML page and its pieces. Style, script and data are inside; the page loads nothing.

It may show text that a model wrote or that comes from a stranger's folder. All text is escaped, and the
page's Content-Security-Policy allows only its own script, by checksum.
"""

import base64
import hashlib
import json
import time
from datetime import datetime, timezone
from html import escape
from importlib.resources import files

from nanochat.run.report.charts import AXES, Chart, chosen_of
from nanochat.run.report.run_data import text

RELOAD_S = 30  # seconds between two reloads of a running run's page, in a browser without JavaScript
TABLE_ROWS = 12  # of the table under a chart


def document(
    title: str, head: str, sections: list[tuple], charts: list[Chart], x_of: dict, glance="", running=False
) -> str:
    """The whole page. sections: (id, title, content) each; one without content is left out.

    glance: HTML above the sections. x_of: {group: {axis: x values}} of the charts' curves.
    """
    style, script = _own_file("page.css"), _own_file("numbers.js") + _own_file("page.js")
    policy = f"default-src 'none'; style-src {_checksum(style)}; script-src {_checksum(script)}; "
    policy += "img-src data:; base-uri 'none'; form-action 'none'"
    reload = f'<noscript><meta http-equiv="refresh" content="{RELOAD_S}"></noscript>\n' if running else ""
    data = {"x": x_of, "axes": AXES, "running": running, "written": int(time.time())}
    data["charts"] = [_chart_data(chart) for chart in charts]
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    shown = [section for section in sections if section[2]]
    links = "".join(f'<li><a href="#{id}">{heading}</a></li>' for id, heading, _ in shown)
    main = "\n".join(
        f'<section id="{id}" aria-labelledby="h-{id}">\n<h2 id="h-{id}">{heading}</h2>\n{content}\n</section>'
        for id, heading, content in shown
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n{reload}<style>{style}</style>\n</head>\n<body>\n"
        f'<a class="skip" href="#main">Skip to the report</a>\n<div class="page">\n<header>{head}'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n'
        f'<main id="main">\n{glance}{main}\n</main>\n'
        f'<footer>Written by nanochat, <span id="written">{now}</span>. One file; it loads nothing.</footer>'
        f'\n</div>\n<script type="application/json" id="page-data">{json_in_html(data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _own_file(name: str) -> str:
    return files("nanochat.run.report").joinpath(name).read_text(encoding="utf-8")


def _checksum(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def json_in_html(data) -> str:
    """JSON in which no HTML parser sees a tag or the end of the script."""
    written = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _chart_data(chart: Chart) -> dict:
    curves = [{k: v for k, v in vars(c).items() if v is not None} for c in chart.curves]
    return {"id": chart.id, "kind": chart.kind, "log": chart.log, "marks": chart.marks, "curves": curves}


def e(value) -> str:
    """A value as escaped text of bounded length."""
    return escape(text(value))


def card(*content: str) -> str:
    inside = "".join(content)
    return f'<div class="card">{inside}</div>' if inside else ""


def grid(figures: list[str]) -> str:
    return f'<div class="charts">\n{chr(10).join(figures)}\n</div>' if figures else ""


def code(sample: str) -> str:
    return f"<pre><code>{e(sample)}</code></pre>"


def table(head: list[str], rows: list[list], caption="", numbers=False, best=()) -> str:
    """A table whose first column heads its rows; "" if it has no rows.

    numbers: the other columns are aligned as numbers. best: (row, column) of the cells that are bold.
    """
    if not rows:
        return ""
    number = ' class="number"' if numbers else ""
    top = "".join(f'<th scope="col"{number if i else ""}>{e(name)}</th>' for i, name in enumerate(head))
    body = ""
    for n, row in enumerate(rows):
        cells = [f"<b>{e(cell)}</b>" if (n, i) in best else e(cell) for i, cell in enumerate(row)]
        body += f'<tr><th scope="row">{cells[0]}</th>'
        body += "".join(f"<td{number}>{cell}</td>" for cell in cells[1:]) + "</tr>\n"
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
    """A chart, which page.js draws, with its legend and its values as a table."""
    legend = [
        f'<li><i class="swatch c{c.color % 8}"></i>{e(c.name)}<b class="value"></b></li>'
        for c in chart.curves
    ]
    for kind, label in (("spike", "spike (6 sigma)"), ("skipped", "skipped step (not finite)")):
        if any(mark == kind for mark, _ in chart.marks):
            legend.append(f'<li><i class="swatch {kind}"></i>{label}</li>')
    unit = e(chart.unit) + (", logarithmic" if chart.log else "")
    return (
        f'<figure class="chart" id="{chart.id}"><figcaption><h3>{e(chart.title)}</h3> '
        f'<small>{unit}</small><span class="where"></span></figcaption>\n'
        f'<ul class="legend">{"".join(legend)}</ul>\n<svg class="plot" aria-label="{e(chart.title)}, {unit}">'
        f'</svg>\n<details class="table"><summary>Values</summary>{_values(chart, x_of)}</details></figure>'
    )


def _values(chart: Chart, x_of: dict) -> str:
    """At most TABLE_ROWS points of each curve; curves with the same x values share a table."""
    axis, head = ("position", "tokens of context") if chart.kind == "position" else ("step", "step")
    made = []
    for group in dict.fromkeys(curve.group for curve in chart.curves):
        curves = [curve for curve in chart.curves if curve.group == group]
        points = chosen_of(list(zip(x_of[group][axis], *(c.y for c in curves), strict=True)), TABLE_ROWS)
        rows = [[f"{x:,.0f}", *map(_cell, ys)] for x, *ys in points]
        made.append(table([head, *(c.name for c in curves)], rows, numbers=True))
    return "".join(made)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.5g}"
