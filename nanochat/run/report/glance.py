"""A run at a glance: what it is, what it has reached and what that took."""

import math
import statistics

import numpy as np

from nanochat.run.report.run_data import Run, number, text
from nanochat.run.report.svg import compact, duration


def time_left(run: Run) -> float | None:
    """Seconds of steps still to make, at the median speed of the last ones."""
    times = run.steps["step_time_s"][-200:]
    times = times[~np.isnan(times)]
    left = (run.num_iterations or 0) - run.num_steps
    return left * float(np.median(times)) if len(times) and left > 0 else None


def sentence(run: Run) -> str:
    """The run in one sentence."""
    depth = run.section("identity").get("model", {})
    depth = number(depth.get("depth")) if isinstance(depth, dict) else None
    parameters = number(run.section("derived").get("parameters"))
    model = "A GPT" + (f" of depth {depth:.0f}" if depth else "")
    model += f" with {compact(parameters)} parameters" if parameters else ""
    tokens, seconds = run.last("tokens"), run.last("train_time_s")
    done = f", trained on {compact(tokens)} tokens" if tokens else ", before its first step"
    done += f" in {duration(seconds)}" if seconds else ""
    world = number(run.config.get("world_size"))
    device = run.config.get("device")
    where = f" on {text(device)[:200]}" if isinstance(device, str) else ""
    return model + done + where + (f", {world:.0f} processes" if world and world > 1 else "") + "."


def at_a_glance(run: Run, price_per_hour: float | None = None) -> list[tuple]:
    """(name, value, unit, note) of what a run did, the most telling first; what is unknown is left out."""
    return [*_results(run), *_amounts(run), *_costs(run, price_per_hour)]


def _results(run: Run):
    steps = run.steps
    if run.evals:
        best = min(run.evals, key=lambda r: r["val_bpb"])
        note = f"from {run.evals[0]['val_bpb']:.3f} at step {run.evals[0]['step']:,}"
        if best["val_bpb"] < run.evals[-1]["val_bpb"]:
            note = f"best {best['val_bpb']:.4f} at step {best['step']:,}"
        yield "validation", f"{run.evals[-1]['val_bpb']:.4f}", "bits per byte", note
    exact = [number(r.get("exact_match")) for r in run.evals if number(r.get("exact_match")) is not None]
    if exact:
        note = f"of validation questions answered word for word; {100 * exact[0]:.1f} % at first"
        yield "exact match", f"{100 * exact[-1]:.1f}", "%", note
    for key, name, note in (
        ("core", "CORE", "22 tasks; 0 = chance, 1 = all right"),
        ("own_score", "own tasks", "mean over tasks; 0 = chance, 1 = all right"),
    ):
        scores = [number(r.get(key)) for r in run.tasks if number(r.get(key)) is not None]
        if scores:
            yield name, f"{scores[-1]:.3f}", "", note
    loss = steps["loss"][~np.isnan(steps["loss"])]
    if len(loss):
        tail = loss[-max(1, len(loss) // 20) :]
        yield "training loss", f"{tail.mean():.4f}", "nats per token", "mean of the last 5 % of steps"
    if run.num_steps:
        skipped, spikes = run.last("skipped") or 0, int((steps["spike"] == 1).sum())
        yield "steps", f"{run.num_steps:,}", "", f"{spikes:,} spikes, {skipped:,.0f} skipped"


def _amounts(run: Run):
    derived, settings = run.section("derived"), run.settings()
    model = run.section("identity").get("model")
    model = model if isinstance(model, dict) else {}
    depth, width = number(model.get("depth")), number(model.get("width"))
    if depth:
        parameters = number(derived.get("parameters"))
        value = compact(parameters) if parameters else f"depth {depth:.0f}"
        note = f"depth {depth:.0f}, width {width:.0f}" if width else f"depth {depth:.0f}"
        yield "parameters" if parameters else "model", value, "", note
    tokens, data = run.last("tokens"), number(derived.get("data_tokens"))
    if tokens:
        name = text(settings.get("data", {}).get("value") or "")[:60]
        note = f"{tokens / data:.2g} epochs of {name or 'the text'}" if data else name
        yield "tokens", compact(tokens), "", note
    if flops := run.last("flops"):
        yield "FLOPs", f"{flops:.3g}", "", f"{flops / tokens:.3g} a token" if tokens else ""


def _costs(run: Run, price_per_hour):
    seconds, times = run.last("train_time_s"), run.steps["step_time_s"]
    times = times[~np.isnan(times)]
    if not len(times):
        return
    middle = int(np.nanargmin(np.abs(run.steps["step_time_s"] - statistics.median(times.tolist()))))
    typical = {name: float(values[middle]) for name, values in run.steps.items()}
    if seconds:
        yield (
            "time in steps",
            duration(seconds),
            "",
            f"median step {compact(1000 * typical['step_time_s'])} ms",
        )
    if not math.isnan(typical["tok_per_sec"]):
        yield "tokens per second", compact(round(typical["tok_per_sec"])), "", "at the median step"
    if not math.isnan(typical["mfu"]):
        yield "MFU", f"{100 * typical['mfu']:.1f}", "%", "model FLOPs, of the machine's peak"
    if memory := next((m for r in reversed(run.evals) if (m := number(r.get("peak_memory")))), None):
        yield "memory", f"{memory / 2**30:.2f}", "GiB", "the most that a process held"
    waits = run.steps["data_wait_s"][~np.isnan(run.steps["data_wait_s"])]
    if len(waits):
        share = 100 * waits.sum() / max(times.sum(), 1e-9)
        yield "waiting for data", f"{share:.2g}", "%", "of the time in steps"
    price = price_per_hour or number(run.settings().get("price_per_hour", {}).get("value"))
    if price and price > 0 and seconds:
        cost = price * seconds / 3600
        yield (
            "cost",
            f"{cost:,.2f}" if cost >= 1 else f"{cost:.2g}",
            "",
            f"time in steps at {price:,.2f} an hour",
        )
