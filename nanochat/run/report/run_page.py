"""report.html: the page of one run."""

from nanochat.run.report import curves, page
from nanochat.run.report.glance import at_a_glance, sentence, time_left
from nanochat.run.report.page import e
from nanochat.run.report.recipe import (
    changed_settings,
    command,
    defaults_of,
    plan_lines,
    script_of,
    shown_value,
)
from nanochat.run.report.run_charts import run_charts, task_scores
from nanochat.run.report.run_data import Run
from nanochat.run.report.svg import compact, duration

MOST_SAMPLES = 30  # sets of samples on a page
MOST_COLUMNS = 5  # evaluations in the table of tasks


def run_page(run: Run, final: bool, price_per_hour: float | None = None) -> str:
    """The whole page. final: False means that the run goes on, and the page reloads itself."""
    charts, x_of = run_charts(run)
    drawn = {chart.id: page.figure(chart, x_of) for chart in charts}
    main = [drawn[c.id] for c in charts if c.id not in ("chart-tasks", "chart-position")]
    sections = [
        page.section("curves", "Curves", '<div id="controls" class="controls" hidden></div>', _grid(main)),
        page.section("tasks", "Tasks", _tasks(run, drawn.get("chart-tasks", ""))),
        page.section("position", "Does it use its context?", _position(run, drawn.get("chart-position", ""))),
        page.section("samples", "What it writes", _samples(run)),
        page.section("settings", "Changed settings", _settings(run)),
        page.section("plan", "Plan", _plan(run)),
        page.section("environment", "Environment", _environment(run)),
        page.section("repeat", "Do it again", _repeat(run)),
    ]
    head = [*_header(run, final), page.navigation(sections)]
    glance = page.tiles(at_a_glance(run, price_per_hour))
    body = [
        f"<header>{''.join(head)}</header>",
        f'<main id="main">\n{glance}',
        *sections,
        "</main>",
        page.footer(),
    ]
    return page.document(
        f"{run.name}: nanochat report", "\n".join(filter(None, body)), charts, x_of, not final
    )


def _grid(figures: list[str]) -> str:
    return f'<div class="charts">\n{chr(10).join(figures)}\n</div>' if figures else ""


def _header(run: Run, final: bool):
    """Name, state, and the run in one sentence."""
    planned, made = run.num_iterations, run.num_steps
    finished = final and (run.is_complete or planned is None)
    state = "finished" if finished else "stopped" if final else "running"
    of = f" of {planned:,}" if planned else ""
    detail = "" if finished else f"{made:,}{of} steps"
    bar = f'<progress value="{made}" max="{planned}">{detail}</progress>' if planned and not finished else ""
    left = time_left(run)
    detail += f", about {duration(left)} to go" if left and not final else ""
    badge = f'<span class="badge {state}">{state}</span>'
    yield f'<div class="top"><h1>{e(run.name)}</h1>{badge}</div>'
    yield f'<p class="lead">{e(sentence(run))}</p>'
    if bar or detail:
        yield f"<p>{bar} <small>{e(detail)}</small></p>"


# ------------------------------------------------------------------------------------------------------
# Tables and texts


def _tasks(run: Run, drawn: str) -> str:
    shown = [r for r in curves.chosen_of(run.tasks, MOST_COLUMNS) if task_scores(r)]
    if not shown:
        return _grid([drawn] if drawn else [])
    names = dict.fromkeys(name for r in reversed(shown) for name in task_scores(r))
    head = ["task", *(f"step {r['step']:,}" for r in shown)]
    rows = [[name, *(_percent(task_scores(r).get(name)) for r in shown)] for name in names]
    note = "Accuracy of our own tasks; CORE's are centred, so that chance is 0 %."
    return f'<div class="two">{drawn}<div class="card">{page.table(head, rows, note)}</div></div>'


def _percent(score) -> str:
    return "" if score is None else f"{100 * score:.1f} %"


def _position(run: Run, drawn: str) -> str:
    if not drawn:
        return ""
    by = next(by for r in reversed(run.evals) if (by := curves.loss_by_position(r)))
    (first, worst), (last, best) = next(iter(by.items())), list(by.items())[-1]
    said = f"With {last} tokens of context the loss is {best:.3f} nats per token, with {first} "
    said += f"it is {worst:.3f}. A curve that falls to the right shows a model that uses what it has read."
    rows = [[label, f"{loss:.4f}"] for label, loss in by.items()]
    side = page.table(["tokens of context", "nats per token"], rows, "Last evaluation")
    return f'<p>{e(said)}</p><div class="two">{drawn}<div class="card">{side}</div></div>'


def _samples(run: Run) -> str:
    shown = curves.chosen_of(run.samples, MOST_SAMPLES)[::-1]
    if not shown:
        return ""
    sets = []
    tokens = curves.interpolated(run, shown, "tokens", "tokens")
    for i, (record, seen) in enumerate(zip(shown, tokens, strict=True)):
        title = f"after {record['step']:,} steps" + (f", {compact(seen)} tokens" if seen else "")
        texts = "".join(f"<pre><code>{e(sample)}</code></pre>" for sample in record["samples"])
        sets.append(
            f'<details class="sample-set" data-step="{record["step"]}"{" open" if i == 0 else ""}>'
            f'<summary>{title}</summary><div class="samples">{texts}</div></details>'
        )
    slider = (
        '<div id="travel" class="travel" hidden><label for="travel-input">Through time</label>'
        '<input id="travel-input" type="range" min="0" max="1" value="0"><output></output></div>'
    )
    return slider + "\n".join(sets)


def _settings(run: Run) -> str:
    if not run.settings():
        return ""
    defaults = defaults_of(script_of(run))
    rows = [
        [
            name,
            shown_value(s["value"]),
            shown_value(defaults[name]) if name in defaults else "",
            s.get("source", ""),
        ]
        for name, s in changed_settings(run, defaults).items()
    ]
    changed = (
        page.table(["setting", "value", "default", "given by"], rows, numbers_from=9)
        if rows
        else "<p>None.</p>"
    )
    every = [[name, shown_value(s["value"]), s.get("source", "")] for name, s in run.settings().items()]
    all_of_them = page.table(["setting", "value", "given by"], every, numbers_from=9)
    return f'<div class="card">{changed}<details><summary>All settings</summary>{all_of_them}</details></div>'


def _plan(run: Run) -> str:
    rows = [line.partition(": ") for line in plan_lines(run)]
    filled = page.table(["what", "how much, and why"], [[name, why] for name, _, why in rows], numbers_from=9)
    return f'<div class="card">{filled}</div>' if rows else ""


def _environment(run: Run) -> str:
    versions = run.section("versions")
    rows = [["device", run.config.get("device")], ["processes", run.config.get("world_size")]]
    rows += [[name, version] for name, version in list(versions.items())[:20]]
    rows += [["git commit", run.config.get("git_commit")], ["data", run.section("identity").get("data")]]
    rows += [
        ["tokenizer", run.section("identity").get("tokenizer")],
        ["seed", run.section("identity").get("seed")],
    ]
    rows = [row for row in rows if isinstance(row[1], str | int) and row[1] != ""]
    filled = page.table(["what", "which"], rows, numbers_from=9)
    return f'<div class="card">{filled}</div>' if rows else ""


def _repeat(run: Run) -> str:
    return f'<div class="command"><pre><code>{e(command(run))}</code></pre></div>' if run.settings() else ""
