"""report.md and its plot: a run's plan, its losses and speed, and what its model writes."""

import os
from pathlib import Path

from nanochat.metrics import read_metrics


def write_report(out_dir, title: str, plan: list[str], samples: list[str], final: bool, say=print):
    """Write `<out_dir>/report.md` and loss.png from metrics.jsonl; each file appears whole or not at all.

    plan: the lines that the run printed at its start. samples: texts by the model. final: False adds that the
    run is still going on. An OSError, such as a full disk, does not end training: it goes to `say`.
    """
    try:
        _write(Path(out_dir), title, plan, samples, final)
    except OSError as error:
        say(f"warning: no report in {out_dir} ({error.strerror or error}); the next evaluation tries again")


def _write(out_dir: Path, title, plan, samples, final):
    """write_report without the handling of errors."""
    records = read_metrics(out_dir / "metrics.jsonl")
    steps = [r for r in records if r.get("loss") is not None]
    evals = [r for r in records if r.get("val_bpb") is not None]
    if steps:
        _plot(out_dir / "loss.png", steps, evals)
    parts = [f"# {title}", "" if final else "The run is still going on.", _summary(steps, evals)]
    parts += ["![Training loss and validation bits per byte](loss.png)" if steps else ""]
    parts += ["## Plan", "\n".join(f"- {line}" for line in plan)]
    if evals:
        rows = [f"| {r['step']:,} | {r['tokens']:,} | {r['val_bpb']:.4f} |" for r in evals]
        parts += ["## Validation", "\n".join(["| step | tokens | bits per byte |", "|--:|--:|--:|", *rows])]
    if samples:
        fence = "````"
        parts += ["## Samples", *(f"{fence}text\n{s.replace(fence, '` ` ` `')}\n{fence}" for s in samples)]
    temporary = out_dir / "report.md.tmp"
    temporary.unlink(missing_ok=True)  # a link would lead the next line elsewhere
    temporary.write_text(
        "\n\n".join(part for part in parts if part) + "\n", encoding="utf-8", errors="replace"
    )
    os.replace(temporary, out_dir / "report.md")


def _summary(steps, evals) -> str:
    """A table of what the run did; speed is that of the step whose time is the median."""
    if not steps:
        return "No step has been made."
    times = sorted(r["step_time_s"] for r in steps)
    median = times[len(times) // 2]
    typical = min(steps, key=lambda r: abs(r["step_time_s"] - median))
    waits = sorted(r["data_wait_s"] for r in steps)
    tail = [r["loss"] for r in steps[-max(1, len(steps) // 20) :]]
    spikes = ", ".join(str(r["step"]) for r in steps if r.get("spike")) or "none"
    rows = [
        ("steps", f"{steps[-1]['step'] + 1:,}"),
        ("tokens trained on", f"{steps[-1]['tokens']:,}"),
        ("loss, mean of the last 5 % of steps", f"{sum(tail) / len(tail):.4f} nats per token"),
        *([("validation", f"{evals[-1]['val_bpb']:.4f} bits per byte")] if evals else []),
        ("time in steps", f"{sum(times):.0f} s"),
        ("median step", f"{1000 * median:.0f} ms, {typical['tok_per_sec']:,.0f} tokens/s"),
        ("median wait for data", f"{1000 * waits[len(waits) // 2]:.2f} ms a step"),
        ("model FLOPs utilisation", f"{100 * typical['mfu']:.1f} %"),
        ("FLOPs", f"{steps[-1]['flops']:.3g}"),
        ("skipped steps (not finite)", f"{steps[-1].get('skipped', 0)}"),
        ("loss spikes (6 sigma), at steps", spikes),
    ]
    return "\n".join(["| | |", "|:--|--:|", *(f"| {name} | {value} |" for name, value in rows)])


def _plot(path: Path, steps, evals):
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a slow import, so only before a plot
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.subplots()
    x, loss = [r["step"] for r in steps], [r["loss"] for r in steps]
    smooth, mean = [], loss[0]
    for value in loss:
        mean = 0.95 * mean + 0.05 * value
        smooth.append(mean)
    left.plot(x, loss, color="tab:blue", alpha=0.25, linewidth=0.8)
    left.plot(x, smooth, color="tab:blue", label="training loss (nats per token)")
    left.set(xlabel="step", ylabel="loss, nats per token")
    if evals:
        right = left.twinx()
        right.plot([r["step"] for r in evals], [r["val_bpb"] for r in evals], "o-", color="tab:red")
        right.set_ylabel("validation bits per byte", color="tab:red")
    left.legend(loc="upper right")
    left.grid(alpha=0.3)
    temporary = path.with_suffix(".tmp.png")
    temporary.unlink(missing_ok=True)
    figure.savefig(temporary, dpi=110)
    os.replace(temporary, path)
