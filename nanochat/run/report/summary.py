"""A run in words and numbers: at a glance, its settings, the command that repeats it, and report.md."""

import importlib.util
import io
import re
import shlex

import numpy as np

import configurator
from nanochat.run.report import charts
from nanochat.run.report.run_data import Run, number, text
from nanochat.terminal import duration, fenced, gib, short, table

# Settings that the command to repeat a run leaves out: it uses another folder
NOT_REPEATED = ("out_dir", "model_tag", "resume", "base_dir", "plan", "price_per_hour")
MOST_ROWS = 200  # of the table of evaluations


# ------------------------------------------------------------------------------------------------------
# At a glance


def lead(run: Run) -> str:
    """The run in one sentence."""
    depth, parameters = number(run.model.get("depth")), number(run.section("derived").get("parameters"))
    tokens, seconds = run.last("tokens"), run.last("train_time_s")
    world = number(run.config.get("world_size")) or 1
    device = text(run.config.get("device"))[:200]
    parts = [
        "A GPT",
        f" of depth {depth:.0f}" if depth else "",
        f" with {short(parameters)} parameters" if parameters else "",
        f", trained on {short(tokens)} tokens" if tokens else ", before its first step",
        f" in {duration(seconds)}" if seconds else "",
        f" on {device}" if device else "",
        f", {world:.0f} processes" if world > 1 else "",
    ]
    return "".join(parts) + "."


def time_left(run: Run) -> float | None:
    """Seconds of steps still to make, at the mean speed so far; None if that is unknown."""
    seconds, share = run.last("train_time_s"), run.share_done
    return seconds * (1 - share) / share if seconds and share else None


def at_a_glance(run: Run, price_per_hour: float | None = None) -> list[tuple]:
    """(name, value, unit, note) of the known results and costs of a run, the most important first."""
    return [*_results(run), *_amounts(run), *_costs(run, price_per_hour)]


def _results(run: Run):
    if run.evals:
        best, last = min(run.evals, key=lambda r: r["val_bpb"]), run.evals[-1]
        note = f"from {run.evals[0]['val_bpb']:.3f} at step {run.evals[0]['step']:,}"
        if best["val_bpb"] < last["val_bpb"]:
            note = f"best {best['val_bpb']:.4f} at step {best['step']:,}"
        yield "validation", f"{last['val_bpb']:.4f}", "bits per byte", note
    exact = [share for r in run.evals if (share := number(r.get("exact_match"))) is not None]
    if exact:
        note = f"of validation questions answered word for word; {100 * exact[0]:.1f} % at first"
        yield "exact match", f"{100 * exact[-1]:.1f}", "%", note
    for key, name in (("core", "CORE"), ("own_score", "own tasks")):
        scores = [score for r in run.tasks if (score := number(r.get(key))) is not None]
        if scores:
            yield name, f"{scores[-1]:.3f}", "", charts.CHANCE
    smoothed = charts.smooth(run.steps["loss"])
    if (good := ~np.isnan(run.steps["loss"])).any():
        yield "training loss", f"{smoothed[good][-1]:.4f}", "nats per token", "the end of the smoothed curve"
    if run.num_steps:
        skipped, spikes = run.last("skipped") or 0, int((run.steps["spike"] == 1).sum())
        yield "steps", f"{run.num_steps:,}", "", f"{spikes:,} spikes (6 sigma), {skipped:,.0f} skipped"


def _amounts(run: Run):
    derived, depth = run.section("derived"), number(run.model.get("depth"))
    if depth:
        parameters, width = number(derived.get("parameters")), number(run.model.get("width"))
        note = f"depth {depth:.0f}" + (f", width {width:.0f}" if width else "")
        yield ("parameters", short(parameters), "", note) if parameters else ("model", note, "", "")
    tokens, data = run.last("tokens"), number(derived.get("data_tokens"))
    if tokens:
        name = text(run.settings().get("data", {}).get("value"))[:60]
        note = f"{tokens / data:.2g} epochs of {name or 'the text'}" if data else name
        yield "tokens", short(tokens), "", note
    if flops := run.last("flops"):
        yield "FLOPs", f"{flops:.3g}", "", f"{flops / tokens:.3g} a token" if tokens else ""


def _costs(run: Run, price_per_hour):
    seconds, step_seconds = run.last("train_time_s"), _median(run, "step_time_s")
    if seconds:
        note = f"median step {1000 * step_seconds:.4g} ms" if step_seconds else ""
        yield "time in steps", duration(seconds), "", note
    if speed := _median(run, "tok_per_sec"):
        yield "tokens per second", f"{speed:,.0f}", "", "at the median step"
    if mfu := _median(run, "mfu"):
        yield "MFU", f"{100 * mfu:.1f}", "%", "model FLOPs, of the machine's peak"
    if memory := next((m for r in reversed(run.evals) if (m := number(r.get("peak_memory")))), None):
        yield "memory", gib(memory), "", "the most that a process held"
    if step_seconds and (waits := run.steps["data_wait_s"])[~np.isnan(waits)].size:
        share = 100 * np.nansum(waits) / np.nansum(run.steps["step_time_s"])
        yield "waiting for data", f"{share:.2g}", "%", "of the time in steps"
    price = price_per_hour or number(run.settings().get("price_per_hour", {}).get("value")) or 0
    if price > 0 and seconds:
        cost = price * seconds / 3600
        shown = f"{cost:,.2f}" if cost >= 1 else f"{cost:.2g}"
        yield "cost", shown, "", f"time in steps at {price:,.2f} an hour"


def _median(run: Run, column: str) -> float | None:
    values = run.steps[column][~np.isnan(run.steps[column])]
    return float(np.median(values)) if len(values) else None


def task_scores(record: dict) -> dict[str, float]:
    """{task: score} of a record; accuracies of our own tasks and centred scores of CORE's."""
    named = {}
    for key, prefix in (("own_tasks", ""), ("core_tasks", "CORE: ")):
        scores = record.get(key) if isinstance(record.get(key), dict) else {}
        named |= {prefix + text(k)[:80]: number(v) for k, v in list(scores.items())[:64]}
    return {name: score for name, score in named.items() if score is not None}


# ------------------------------------------------------------------------------------------------------
# How the run was made


def shown_value(value) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else text(value)


def changed_settings(run: Run, defaults: dict) -> dict[str, dict]:
    """{name: {"value", "source"}} of the settings that somebody changed to something else."""

    def same(name, value):
        return name in defaults and type(defaults[name]) is type(value) and defaults[name] == value

    entries = run.settings().items()
    return {n: s for n, s in entries if s.get("source") != "default" and not same(n, s["value"])}


def script_of(run: Run) -> str:
    """The script that made the run: only mid_train has the setting loss_on."""
    return "scripts.mid_train" if "loss_on" in run.settings() else "scripts.base_train"


def defaults_of(script: str) -> dict:
    """{setting: default} of today's script; {} if it cannot be read."""
    try:
        return configurator.defaults(importlib.util.find_spec(script).origin)
    except (AttributeError, ImportError, OSError, ValueError):
        return {}


def plan_lines(run: Run) -> list[str]:
    """The lines of the plan that config.json holds."""
    plan = run.config.get("plan")
    return [text(line) for line in plan[:100]] if isinstance(plan, list) else []


def command(run: Run) -> str:
    """The command that makes the same run in another folder; every argument is quoted for a shell."""
    given = {n: s["value"] for n, s in run.settings().items() if s.get("source") != "default"}
    flags = [f"--{n}={shown_value(v)}" for n, v in given.items() if n not in NOT_REPEATED]
    flags.append(f"--model_tag={re.sub(r'[^A-Za-z0-9_.-]', '-', run.name)[:60].lstrip('-')}-again")
    world = number(run.config.get("world_size")) or 1
    start = f"torchrun --standalone --nproc_per_node={world:.0f} -m" if world > 1 else "python -m"
    return f"{start} {script_of(run)} " + " ".join(shlex.quote(flag) for flag in flags)


# ------------------------------------------------------------------------------------------------------
# report.md and its plot


def markdown(run: Run, final: bool) -> str:
    """The text of report.md."""
    facts = [[name, f"{value} {unit}".strip(), _line(note)] for name, value, unit, note in at_a_glance(run)]
    parts = [f"# {_line(run.name)}", "" if final else "The run is still going on.", _line(lead(run))]
    parts += [table([["", "", ""], *facts]) if facts else ""]
    parts += ["![Training loss and validation bits per byte](loss.png)" if run.num_steps else ""]
    parts += ["## Plan", "\n".join(f"- {_line(line)}" for line in plan_lines(run))]
    if run.evals:
        shown = [
            (r["step"], number(r.get("tokens")), r["val_bpb"]) for r in charts.chosen_of(run.evals, MOST_ROWS)
        ]
        rows = [[f"{step:,}", f"{tokens or 0:,.0f}", f"{bpb:.4f}"] for step, tokens, bpb in shown]
        parts += ["## Validation", table([["step", "tokens", "bits per byte"], *rows])]
    if by := last_by_position(run):
        rows = [[label, f"{loss:.4f}"] for label, loss in by.items()]
        parts += ["## Loss by position", table([["tokens of context", "nats per token"], *rows])]
    if scores := task_scores(run.tasks[-1]) if run.tasks else {}:
        rows = [[_line(name), f"{100 * score:.1f} %"] for name, score in scores.items()]
        parts += [f"## Tasks, at step {run.tasks[-1]['step']:,}", table([["task", "score"], *rows])]
    if run.samples:
        parts += ["## Samples", *map(fenced, run.samples[-1]["samples"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def last_by_position(run: Run) -> dict[str, float]:
    """{bucket: nats} of the last evaluation that has it."""
    return next((by for r in reversed(run.evals) if (by := charts.loss_by_position(r))), {})


def _line(words: str) -> str:
    """A text on one line in which Markdown sees no tag."""
    return " ".join(words.split()).replace("<", "&lt;")


def loss_png(run: Run) -> bytes:
    """A plot of the training loss and of the validation's bits per byte; b"" before the first step, and
    without matplotlib."""
    if not run.num_steps:
        return b""
    try:
        from matplotlib.figure import Figure  # a slow import, so only before a plot
    except ImportError:
        return b""

    ends = charts.bin_ends(len(run.steps["step"]))
    curve = charts.step_curve(run.steps["loss"], ends, "", "")
    low, high, loss = (np.array(values, dtype=float) for values in (curve.low, curve.high, curve.y))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    left, x = figure.subplots(), run.steps["step"][ends]
    left.fill_between(x, low, high, color="tab:blue", alpha=0.25, linewidth=0.8)
    left.plot(x, loss, color="tab:blue", label="training loss (nats per token)")
    left.set(xlabel="step", ylabel="loss, nats per token")
    if run.evals:
        right = left.twinx()
        right.plot([r["step"] for r in run.evals], [r["val_bpb"] for r in run.evals], "o-", color="tab:red")
        right.set_ylabel("validation bits per byte", color="tab:red")
    left.legend(loc="upper right")
    left.grid(alpha=0.3)
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=110)
    return written.getvalue()
