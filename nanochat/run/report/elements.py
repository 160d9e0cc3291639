"""An HTML page and its pieces. Style and pictures are inside; the page loads nothing.

It may show text that a model wrote or that comes from a stranger's folder. All text is escaped, and the
page's Content-Security-Policy allows no script, and only its own style sheet, by checksum.
"""

import base64
import hashlib
import math
from datetime import datetime, timezone
from html import escape
from importlib.resources import files

from nanochat.run.report.charts import SPIKE, Chart, chosen_of
from nanochat.run.report.drawing import LABELS, svg
from nanochat.run.report.run_data import text

RELOAD_S = 30  # seconds between two reloads of a running run's page
TABLE_ROWS = 12  # of the table under a chart


def document(title: str, head: str, sections: list[tuple], glance="", running=False) -> str:
    """The whole page. sections: (id, title, content) each; one without content is left out.

    glance: HTML above the sections. running: the page reloads itself.
    """
    style = files("nanochat.run.report").joinpath("page.css").read_text(encoding="utf-8")
    checksum = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{checksum}'; img-src data:; base-uri 'none'; "
    policy += "form-action 'none'"
    reload = f'<meta http-equiv="refresh" content="{RELOAD_S}">\n' if running else ""
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
        f"<footer>Written by nanochat, {now}. One file; it loads nothing.</footer>\n"
        "</div>\n</body>\n</html>\n"
    )


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


def figure(chart: Chart) -> str:
    """A chart with its legend and its values as a table."""
    alone = [curve.name for curve in chart.curves] == [chart.title]
    legend = [(f"c{curve.color % 8}", curve.name) for curve in chart.curves if not alone]
    legend += [(f"c9 {'spike' if kind == SPIKE else 'skipped'}", kind) for kind in chart.marks]
    legend = "".join(f'<li><i class="swatch {look}"></i>{e(name)}</li>' for look, name in legend)
    unit = e(chart.unit) + (", logarithmic" if chart.log else "")
    return (
        f'<figure class="chart" id="{chart.id}"><figcaption><h3>{e(chart.title)}</h3> <small>{unit}</small>'
        f'</figcaption>\n<ul class="legend">{legend}</ul>\n{svg(chart)}\n{_values(chart)}</figure>'
    )


def _values(chart: Chart) -> str:
    """At most TABLE_ROWS points of the curves, where all of them have one."""
    points = [dict(zip(curve.x.tolist(), curve.y.tolist(), strict=True)) for curve in chart.curves]
    common = chosen_of(sorted(set.intersection(*map(set, points))), TABLE_ROWS)
    names = [chart.labels[int(x)] if chart.labels else f"{x:,.0f}" for x in common]
    rows = [[name, *(_cell(of[x]) for of in points)] for name, x in zip(names, common, strict=True)]
    head = [LABELS.get(chart.axis, "seconds in steps"), *(curve.name for curve in chart.curves)]
    shown = table(head, rows, numbers=True)
    return f'<details class="table"><summary>Values</summary>{shown}</details>' if rows else ""


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.5g}"
