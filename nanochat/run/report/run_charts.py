"""The charts of one run, and the scores that they and the tables show."""

import numpy as np

from nanochat.run.report import curves
from nanochat.run.report.curves import Chart, Curve
from nanochat.run.report.run_data import Run, number, text


def run_charts(run: Run) -> tuple[list[Chart], dict]:
    """(charts, x values of their curves) of one run; a chart without values is left out."""
    starts = curves.bins(len(run.steps["step"]))
    evals, tasks = (curves.chosen_of(records, curves.BINS) for records in (run.evals, run.tasks))
    x_of = {"steps": curves.x_of_steps(run, starts), "evals": curves.x_of_records(run, evals)}
    x_of["tasks"] = curves.x_of_records(run, tasks)
    found = curves.marks(run, starts)
    bpb = Curve("validation", "evals", curves.rounded([r["val_bpb"] for r in evals]), 1, dots=True)

    def of_steps(id, title, unit, column, name, color, factor=1.0, band=True, marks=()):
        values = run.steps[column] * factor
        curve = curves.curve_of(values, starts, name, "steps", color, band, smoothed="smoothed" in name)
        return Chart(f"chart-{id}", title, unit, [curve], log=spans(values), marks=list(marks))

    charts = [
        of_steps("loss", "Training loss", "nats per token", "loss", "loss, smoothed", 0, marks=found),
        Chart("chart-bpb", "Validation", "bits per byte", [bpb]),
        of_steps("grad", "Gradient norm", "before clipping", "grad_norm", "norm, smoothed", 3, marks=found),
        of_steps(
            "lr", "Learning rate", "as a share of the full rate", "lr_multiplier", "factor", 2, band=False
        ),
        of_steps("speed", "Throughput", "tokens/s", "tok_per_sec", "tokens/s, smoothed", 6),
        of_steps("wait", "Wait for data", "ms a step", "data_wait_s", "wait", 4, 1000.0),
        Chart("chart-tasks", "Task scores", "0 = chance, 1 = all right", _score_curves(tasks)),
    ]
    charts[0].log = charts[3].log = False
    position, x_of["position"] = position_chart(run)
    charts = [c for c in [*charts, position] if any(y is not None for curve in c.curves for y in curve.y)]
    return charts, x_of


def spans(values: np.ndarray) -> bool:
    """Whether values cover so many sizes that only a logarithmic scale shows them."""
    good = values[~np.isnan(values)]
    if len(good) < 2 or (good <= 0).any():
        return False
    low, high = np.quantile(good, [0.005, 0.995])
    return bool(high > 50 * low)


def _score_curves(tasks: list[dict]) -> list[Curve]:
    made = []
    for key, name, color in (("own_score", "own tasks", 5), ("core", "CORE", 0)):
        scores = [number(r.get(key)) for r in tasks]
        if any(score is not None for score in scores):
            made.append(Curve(name, "tasks", scores, color, dots=True))
    return made


def position_chart(run: Run) -> tuple[Chart, dict]:
    """The loss by position at three evaluations at most: an early one, one in the middle, the last."""
    chart = Chart("chart-position", "Loss by position", "nats per token", [], kind="position")
    found = [(r["step"], by) for r in run.evals if (by := curves.loss_by_position(r))]
    if not found:
        return chart, {}
    found = [entry for entry in found if list(entry[1]) == list(found[-1][1])]
    chosen = sorted({min(1, len(found) - 1), len(found) // 2, len(found) - 1})
    for color, i in (
        zip((7, 4, 0), chosen, strict=False) if len(chosen) == 3 else zip((7, 0), chosen, strict=False)
    ):
        step, by = found[i]
        chart.curves.append(
            Curve(f"after {step:,} steps", "position", curves.rounded(by.values()), color, dots=True)
        )
    return chart, {"position": [curves.position_end(label) for label in found[-1][1]]}


def task_scores(record: dict) -> dict[str, float]:
    """{task: score} of a record; accuracies of our own tasks and centred scores of CORE's."""
    named = {}
    for key, prefix in (("own_tasks", ""), ("core_tasks", "CORE: ")):
        scores = record.get(key) if isinstance(record.get(key), dict) else {}
        named |= {prefix + text(k)[:80]: number(v) for k, v in list(scores.items())[:64]}
    return {name: score for name, score in named.items() if score is not None}
