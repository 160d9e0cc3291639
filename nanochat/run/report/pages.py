"""report.html, the page of one run, and the page that compares runs."""

from dataclasses import replace
from pathlib import Path

from nanochat.run.report import charts, elements, summary
from nanochat.run.report.elements import card, code, e, figure, grid, table
from nanochat.run.report.run_data import Run, number, numbers_of, text
from nanochat.run.report.summary import plan_lines, shown_value
from nanochat.terminal import duration, short

MOST_RUNS = 24  # beside each other
MOST_SAMPLES = 30  # sets of samples on a page
MOST_COLUMNS = 5  # evaluations in the table of tasks
# What is best, and the parts of a run that must be the same: else its numbers cannot be compared
BEST = {
    "validation of": (min, ("val_data", "eval_tokens", "loss_on")),  # a further validation set
    "validation": (min, ("data", "eval_tokens", "loss_on")),
    "training loss": (min, ("data", "tokenizer", "loss_on")),
    "CORE": (max, ("core_bundle", "core_metric_max_per_task")),
    "own tasks": (max, ("data",)),
    "exact match": (max, ("data", "eval_questions")),
}


def run_page(run: Run, final: bool) -> str:
    """The whole page. final: if False, the run goes on, and the page reloads itself."""
    figures = {chart.id: figure(chart) for chart in charts.charts_of([run])}
    scores = [figures.pop(id) for id in ("chart-own_score", "chart-core") if id in figures]
    position = figures.pop("chart-position", "")
    plan = [line.partition(": ")[::2] for line in plan_lines(run)]
    sections = [
        ("curves", "Curves", grid([*figures.values()])),
        ("tasks", "Tasks", grid(scores) + "".join(_tasks(run, key) for key in summary.TASKS)),
        ("position", "Does it use its context?", _position(run, position)),
        ("samples", "What it writes", _samples(run)),
        ("settings", "Changed settings", _settings(run)),
        ("plan", "Plan", card(table(["what", "how much, and why"], plan))),
        ("environment", "Environment", _environment(run)),
        ("repeat", "Do it again", code(summary.command(run)) if run.settings() else ""),
    ]
    glance = elements.tiles(summary.at_a_glance(run))
    return elements.document(f"{run.name}: nanochat report", _header(run, final), sections, glance, not final)


def _header(run: Run, final: bool) -> str:
    """Name, state, and the run in one sentence."""
    finished = final and (run.is_complete or run.share_done is None)
    state = "finished" if finished else "stopped" if final else "running"
    made = f'<div class="top"><h1>{e(run.name)}</h1><span class="badge {state}">{state}</span></div>'
    made += f'<p class="lead">{e(summary.lead(run))}</p>'
    if finished:
        return made
    share, planned = run.share_done, run.num_iterations
    detail, bar = f"{run.num_steps:,}" + (f" of {planned:,}" if planned else "") + " steps", ""
    if share is not None:
        detail += f", {100 * share:.0f} %"
        bar = f'<progress value="{share:.4f}" aria-label="share done"></progress>'
    if not final and (left := summary.time_left(run)):
        detail += f", about {duration(left)} to go"
    return f"{made}<p>{bar} <small>{e(detail)}</small></p>"


def _tasks(run: Run, key: str) -> str:
    shown = [r for r in charts.chosen_of(run.tasks, MOST_COLUMNS) if numbers_of(r, key)]
    scores = [{name: f"{100 * score:.1f} %" for name, score in numbers_of(r, key).items()} for r in shown]
    names = dict.fromkeys(name for of in reversed(scores) for name in of)
    head = ["task", *(f"step {r['step']:,}" for r in shown)]
    rows = [[name, *(of.get(name, "") for of in scores)] for name in names]
    return card(table(head, rows, summary.TASKS[key], numbers=True))


def _position(run: Run, drawn: str) -> str:
    if not drawn:
        return ""
    by = summary.last_by_position(run)
    (first, worst), (last, best) = next(iter(by.items())), list(by.items())[-1]
    said = f"With {last} tokens of context the loss is {best:.3f} nats per token, with {first} "
    said += f"it is {worst:.3f}. A curve that falls to the right shows a model that uses what it has read."
    return f"<p>{e(said)}</p>{grid([drawn])}"


def _samples(run: Run) -> str:
    sets = []
    for i, record in enumerate(charts.chosen_of(run.samples, MOST_SAMPLES)[::-1]):
        tokens = number(record.get("tokens"))
        title = f"after {record['step']:,} steps" + (f", {short(tokens)} tokens" if tokens else "")
        sets.append(_sample_set(title, record["samples"], opened=i == 0))
    return "\n".join(sets)


def _sample_set(title: str, samples: list[str], opened: bool) -> str:
    texts = "".join(map(code, samples))
    shown = f'<summary>{e(title)}</summary><div class="samples">{texts}</div>'
    return f"<details{' open' * opened}>{shown}</details>"


def _settings(run: Run) -> str:
    if not run.settings():
        return ""
    defaults = summary.defaults_of(summary.script_of(run))
    rows = [
        [n, shown_value(s["value"]), shown_value(defaults[n]) if n in defaults else "", s.get("source", "")]
        for n, s in summary.changed_settings(run, defaults).items()
    ]
    changed = table(["setting", "value", "default", "given by"], rows) or "<p>None.</p>"
    every = [[name, shown_value(s["value"]), s.get("source", "")] for name, s in run.settings().items()]
    every = table(["setting", "value", "given by"], every)
    return card(changed, f"<details><summary>All settings</summary>{every}</details>")


def _environment(run: Run) -> str:
    identity = run.section("identity")
    rows = [["device", run.config.get("device")], ["processes", run.config.get("world_size")]]
    rows += list(run.section("versions").items())[:20]
    rows += [["git commit", run.config.get("git_commit")]]
    rows += [[name, identity.get(name)] for name in ("data", "tokenizer", "seed")]
    return card(table(["what", "which"], [row for row in rows if text(row[1])]))


# ------------------------------------------------------------------------------------------------------
# Several runs


def comparison_page(runs: list[Run]) -> str:
    """The whole page, for two runs or more."""
    names = unique_names(runs)
    runs = [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    sections = [
        ("numbers", "Numbers", _numbers(runs)),
        ("curves", "Curves", grid([*map(figure, charts.charts_of(runs))])),
        ("settings", "What differs", _differences(runs)),
        ("samples", "What they write", _last_samples(runs)),
    ]
    lead = f"{len(runs)} runs beside each other: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}."
    head = f'<h1>Comparison of runs</h1><p class="lead">{e(lead)}</p>'
    return elements.document("Comparison of runs: nanochat report", head, sections)


def unique_names(runs: list[Run]) -> list[str]:
    """The runs' names: the folder's, with the kind where two runs share it, else with as many parent folders
    as make all of them different."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.name} ({run.kind})" for run in runs]
    paths = [Path(run.folder).resolve().parts for run in runs]
    for depth in range(2, max(map(len, paths)) + 1):
        if len(set(names)) < len(names):
            names = [text("/".join(parts[-depth:]))[:120] for parts in paths]
    return names if len(set(names)) == len(names) else [f"{n} ({i})" for i, n in enumerate(names, start=1)]


def _numbers(runs) -> str:
    """A table of `at_a_glance` of each run; the best values are bold where they can be compared."""
    found = []
    for run in runs:
        entries = summary.at_a_glance(run)
        found.append({"kind": run.kind})
        found[-1] |= {f"{name}, {unit}" if unit else name: value for name, value, unit, _ in entries}
    columns = list(dict.fromkeys(column for cells in found for column in cells))
    rows = [[run.name, *(cells.get(c, "") for c in columns)] for run, cells in zip(runs, found, strict=True)]
    best, apart = set(), []
    for i, column in enumerate(columns, start=1):
        known = next((name for name in BEST if column.startswith(name)), None)
        here = [(n, float(row[i])) for n, row in enumerate(rows) if known and row[i]]
        if len(here) > 1:
            choose, parts = BEST[known]
            if differ := [p for p in parts if len({_part_of(runs[n], p) for n, _ in here}) > 1]:
                apart.append(f"{column.partition(',')[0]} ({', '.join(differ)})")
            else:
                winner = choose(value for _, value in here)
                best |= {(n, i) for n, value in here if value == winner}
    note = "Bold: the best of them. " if best else ""
    note += f"Not comparable, because the runs differ: {', '.join(apart)}" if apart else ""
    return card(table(["run", *columns], rows, note, numbers=True, best=best))


def _part_of(run: Run, name: str) -> str:
    """A part of the run's identity, else a setting."""
    value = run.section("identity").get(name, run.settings().get(name, {}).get("value"))
    return text(value)


def _differences(runs) -> str:
    """A table of the settings, versions and machines that differ between the runs."""
    rows, settings = [], dict.fromkeys(name for run in runs for name in run.settings())
    if len({run.kind for run in runs}) > 1:  # each script has settings of its own
        settings = [name for name in settings if all(name in run.settings() for run in runs)]
    for name in settings:
        values = [run.settings().get(name) for run in runs]
        rows.append([name, *("(missing)" if v is None else shown_value(v["value"]) for v in values)])
    for name in ("device", "world_size", "git_commit"):
        rows.append([name.replace("_", " "), *(text(run.config.get(name)) for run in runs)])
    for part, left_out in (("versions", ()), ("identity", ("model", "seed", "total_batch_size"))):
        for name in dict.fromkeys(name for run in runs for name in run.section(part) if name not in left_out):
            rows.append([name, *(text(run.section(part).get(name)) for run in runs)])
    rows = [row for row in rows if len(set(row[1:])) > 1][:200]
    nothing = "<p>Nothing: settings, text, tokenizer, versions and machine are the same.</p>"
    return card(table(["what", *(run.name for run in runs)], rows)) or nothing


def _last_samples(runs) -> str:
    last = {run.name: run.samples[-1] for run in runs if run.samples}
    return "\n".join(
        _sample_set(f"{name}, after {record['step']:,} steps", record["samples"][:4], opened=False)
        for name, record in last.items()
    )
