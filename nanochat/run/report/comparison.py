"""The page that lays runs over each other: curves in one chart, settings that differ, final numbers."""

from pathlib import Path

import numpy as np

from nanochat.run.report import curves, page
from nanochat.run.report.curves import Chart, Curve
from nanochat.run.report.glance import at_a_glance
from nanochat.run.report.page import e
from nanochat.run.report.recipe import shown_value
from nanochat.run.report.run_charts import spans
from nanochat.run.report.run_data import Run, number, text

MOST_RUNS = 24
BINS = 400  # points of a run's curve
CHARTS = (  # id, title, unit, column, factor
    ("loss", "Training loss", "nats per token, smoothed", "loss", 1.0),
    ("grad", "Gradient norm", "before clipping, smoothed", "grad_norm", 1.0),
    ("lr", "Learning rate", "as a share of the full rate", "lr_multiplier", 1.0),
    ("speed", "Throughput", "tokens/s, smoothed", "tok_per_sec", 1.0),
    ("wait", "Wait for data", "ms a step", "data_wait_s", 1000.0),
)
LESS_IS_BETTER = ("validation", "training loss")


def comparison_page(runs: list[Run], price_per_hour: float | None = None) -> str:
    """The whole page, for two runs or more."""
    names = unique_names(runs)
    charts, x_of = comparison_charts(runs, names)
    figures = "\n".join(page.figure(chart, x_of) for chart in charts)
    drawn = f'<div id="controls" class="controls" hidden></div><div class="charts">\n{figures}\n</div>'
    sections = [
        page.section("numbers", "Numbers", _numbers(runs, names, price_per_hour)),
        page.section("curves", "Curves", drawn if charts else ""),
        page.section("settings", "What differs", _differences(runs, names)),
        page.section("samples", "What they write", _samples(runs, names)),
    ]
    lead = f"{len(runs)} runs beside each other: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}."
    head = f'<h1>Comparison of runs</h1><p class="lead">{e(lead)}</p>{page.navigation(sections)}'
    parts = [f"<header>{head}</header>", '<main id="main">', *sections, "</main>", page.footer()]
    body = "\n".join(filter(None, parts))
    return page.document("Comparison of runs: nanochat report", body, charts, x_of, running=False)


def unique_names(runs: list[Run]) -> list[str]:
    """The runs' names; with as many parent folders as it takes to tell them apart."""
    paths = [Path(run.folder).resolve().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = [text("/".join(parts[-depth:]))[:120] for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({i})" for i, run in enumerate(runs, start=1)]


def comparison_charts(runs: list[Run], names: list[str]) -> tuple[list[Chart], dict]:
    """(charts with a curve of each run, x values of the curves)."""
    x_of, starts = {}, [curves.bins(len(run.steps["step"]), BINS) for run in runs]
    evals = [curves.chosen_of(run.evals, BINS) for run in runs]
    tasks = [curves.chosen_of(run.tasks, BINS) for run in runs]
    for i, run in enumerate(runs):
        x_of[f"steps{i}"] = curves.x_of_steps(run, starts[i])
        x_of[f"evals{i}"] = curves.x_of_records(run, evals[i])
        x_of[f"tasks{i}"] = curves.x_of_records(run, tasks[i])
    charts = []
    for id, title, unit, column, factor in CHARTS:
        look = {"band": False, "smoothed": "smoothed" in unit}
        made = [
            curves.curve_of(run.steps[column] * factor, starts[i], names[i], f"steps{i}", i, **look)
            for i, run in enumerate(runs)
        ]
        together = np.concatenate([run.steps[column] for run in runs])
        log = id in ("grad", "wait") and spans(together)
        charts.append(Chart(f"chart-{id}", title, unit, made, log=log))
    bpb = [[r["val_bpb"] for r in records] for records in evals]
    charts.insert(1, Chart("chart-bpb", "Validation", "bits per byte", _dotted(bpb, names, "evals")))
    for id, key, title in (("core", "core", "CORE"), ("own", "own_score", "Own tasks")):
        scores = [[number(r.get(key)) for r in records] for records in tasks]
        charts.append(
            Chart(f"chart-{id}", title, "0 = chance, 1 = all right", _dotted(scores, names, "tasks"))
        )
    return [c for c in charts if any(y is not None for curve in c.curves for y in curve.y)], x_of


def _dotted(values: list[list], names: list[str], group: str) -> list[Curve]:
    return [Curve(names[i], f"{group}{i}", ys, i, dots=True) for i, ys in enumerate(values)]


def _numbers(runs, names, price_per_hour) -> str:
    """A table of what each run has at a glance, the best values bold."""
    found = [
        {name: (value, unit) for name, value, unit, _ in at_a_glance(run, price_per_hour)} for run in runs
    ]
    columns = list(dict.fromkeys(name for numbers in found for name in numbers))
    head = ["run", *(_with_unit(name, found) for name in columns)]
    rows = [[names[i], *(numbers.get(c, ("", ""))[0] for c in columns)] for i, numbers in enumerate(found)]
    best = {}
    for column, name in enumerate(columns, start=1):
        if name in LESS_IS_BETTER or name in ("CORE", "own tasks"):
            known = [(float(row[column]), i) for i, row in enumerate(rows) if row[column]]
            best[column] = (min if name in LESS_IS_BETTER else max)(known)[1]
    return f'<div class="card">{page.table(head, rows, "Bold: the best of them", best=best)}</div>'


def _with_unit(name: str, found: list[dict]) -> str:
    unit = next((numbers[name][1] for numbers in found if name in numbers), "")
    return f"{name}, {unit}" if unit else name


def _differences(runs, names) -> str:
    """Settings and surroundings that are not the same in all runs."""
    rows = []
    for name in dict.fromkeys(name for run in runs for name in run.settings()):
        values = [run.settings().get(name) for run in runs]
        rows.append([name, *("(missing)" if v is None else shown_value(v["value"]) for v in values)])
    around = ("device", "world_size", "git_commit")
    for name in around:
        rows.append([name.replace("_", " "), *(text(run.config.get(name, "")) for run in runs)])
    for part in ("versions", "identity"):
        for name in dict.fromkeys(name for run in runs for name in run.section(part)):
            values = [run.section(part).get(name, "") for run in runs]
            if name != "model" and not (part == "identity" and name in ("seed", "total_batch_size")):
                rows.append([text(name), *(text(value) for value in values)])
    rows = [row for row in rows if len(set(row[1:])) > 1][:200]
    if not rows:
        return "<p>Nothing: settings, text, tokenizer, versions and machine are the same.</p>"
    return f'<div class="card">{page.table(["what", *names], rows, numbers_from=99)}</div>'


def _samples(runs, names) -> str:
    """The last samples of each run."""
    made = []
    for run, name in zip(runs, names, strict=True):
        if run.samples:
            texts = "".join(
                f"<pre><code>{e(sample)}</code></pre>" for sample in run.samples[-1]["samples"][:4]
            )
            title = f"{e(name)}, after {run.samples[-1]['step']:,} steps"
            made.append(f'<details><summary>{title}</summary><div class="samples">{texts}</div></details>')
    return "\n".join(made)
