"""report.md and its plot: a run's plan, its losses, scores and speed, and what its model writes."""

import os
from pathlib import Path

import numpy as np

from nanochat.run.report import curves
from nanochat.run.report.page import write_page
from nanochat.run.report.recipe import plan_lines
from nanochat.run.report.run_charts import task_scores
from nanochat.run.report.run_data import Run, number

FENCE = "````"
MOST_ROWS = 200  # of the table of evaluations


def write_markdown(run: Run, final: bool):
    """Write `report.md` and, once there is a step, `loss.png` into the run's folder. Raises OSError."""
    if run.num_steps:
        _plot(run.folder / "loss.png", run)
    write_page(run.folder / "report.md", markdown(run, final))


def markdown(run: Run, final: bool) -> str:
    """The text of report.md."""
    parts = [f"# {run.name}", "" if final else "The run is still going on.", _summary(run)]
    parts += ["![Training loss and validation bits per byte](loss.png)" if run.num_steps else ""]
    parts += ["## Plan", "\n".join(f"- {_line(line)}" for line in plan_lines(run))]
    if run.evals:
        shown = curves.chosen_of(run.evals, MOST_ROWS)
        tokens = curves.interpolated(run, shown, "tokens", "tokens")
        rows = [
            [f"{r['step']:,}", f"{t or 0:,.0f}", f"{r['val_bpb']:.4f}"]
            for r, t in zip(shown, tokens, strict=True)
        ]
        parts += ["## Validation", _table(["step", "tokens", "bits per byte"], rows)]
    if by := next((by for r in reversed(run.evals) if (by := curves.loss_by_position(r))), {}):
        rows = [[label, f"{loss:.4f}"] for label, loss in by.items()]
        parts += ["## Loss by position", _table(["tokens of context", "nats per token"], rows)]
    if scores := task_scores(run.tasks[-1]) if run.tasks else {}:
        rows = [[_line(name), f"{100 * score:.1f} %"] for name, score in scores.items()]
        parts += [f"## Tasks, at step {run.tasks[-1]['step']:,}", _table(["task", "score"], rows)]
    if run.samples:
        texts = [sample.replace(FENCE, "` ` ` `") for sample in run.samples[-1]["samples"]]
        parts += ["## Samples", *(f"{FENCE}text\n{sample}\n{FENCE}" for sample in texts)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _line(words: str) -> str:
    """A text on one line that Markdown takes for no tag and no column."""
    return " ".join(words.split()).replace("<", "&lt;").replace("|", "\\|")


def _table(head: list[str], rows: list[list[str]]) -> str:
    """A table of numbers whose first column is text, unless it holds steps."""
    marks = "--:" if head[0] == "step" else ":--"
    lines = [head, *rows]
    made = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([made[0], f"|{marks}{'|--:' * (len(head) - 1)}|", *made[1:]])


def _summary(run: Run) -> str:
    """A table of what the run did; speed is that of the step whose time is the median."""
    steps = {name: values[~np.isnan(run.steps["loss"])] for name, values in run.steps.items()}
    if not len(steps["loss"]):
        return "No step has been made."
    times, waits = steps["step_time_s"], steps["data_wait_s"]
    typical = int(np.argmin(np.abs(times - np.sort(times)[len(times) // 2])))
    spikes = steps["step"][steps["spike"] == 1].astype(int).tolist()
    tail = steps["loss"][-max(1, len(times) // 20) :]
    rows = [
        ("steps", f"{run.num_steps:,}"),
        ("tokens trained on", f"{steps['tokens'][-1]:,.0f}"),
        ("loss, mean of the last 5 % of steps", f"{tail.mean():.4f} nats per token"),
        *([("validation", f"{run.evals[-1]['val_bpb']:.4f} bits per byte")] if run.evals else []),
        *(
            (name, f"{score:.4f} (0 = chance, 1 = all right)")
            for key, name in (("own_score", "own tasks"), ("core", "CORE"))
            if run.tasks and (score := number(run.tasks[-1].get(key))) is not None
        ),
        ("time in steps", f"{np.nansum(times):.0f} s"),
        ("median step", f"{1000 * times[typical]:.0f} ms, {steps['tok_per_sec'][typical]:,.0f} tokens/s"),
        ("median wait for data", f"{1000 * np.median(waits):.2f} ms a step"),
        ("model FLOPs utilisation", f"{100 * steps['mfu'][typical]:.1f} %"),
        ("FLOPs", f"{steps['flops'][-1]:.3g}"),
        ("skipped steps (not finite)", f"{np.nan_to_num(steps['skipped'][-1]):.0f}"),
        ("loss spikes (6 sigma), at steps", ", ".join(map(str, spikes[:100])) or "none"),
    ]
    return "\n".join(["| | |", "|:--|--:|", *(f"| {name} | {value} |" for name, value in rows)])


def _plot(path: Path, run: Run):
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a slow import, so only before a plot
    from matplotlib.figure import Figure

    starts = curves.bins(len(run.steps["step"]))
    x = curves.x_of_steps(run, starts)["step"]
    curve = curves.curve_of(run.steps["loss"], starts, "", "")
    low, high, smooth = (np.array(values, dtype=float) for values in (curve.low, curve.high, curve.y))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.subplots()
    left.fill_between(x, low, high, color="tab:blue", alpha=0.25, linewidth=0.8)
    left.plot(x, smooth, color="tab:blue", label="training loss (nats per token)")
    left.set(xlabel="step", ylabel="loss, nats per token")
    if run.evals:
        right = left.twinx()
        right.plot([r["step"] for r in run.evals], [r["val_bpb"] for r in run.evals], "o-", color="tab:red")
        right.set_ylabel("validation bits per byte", color="tab:red")
    left.legend(loc="upper right")
    left.grid(alpha=0.3)
    temporary = path.with_suffix(".tmp.png")
    temporary.unlink(missing_ok=True)  # a link would lead the next line elsewhere
    figure.savefig(temporary, dpi=110)
    os.replace(temporary, path)
