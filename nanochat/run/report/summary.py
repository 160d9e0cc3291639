"""A run in words and numbers: at a glance, its settings, the command that repeats it, and report.md."""

import importlib.util
import re
import shlex
import time

import numpy as np

import configurator
from nanochat.run.report import charts
from nanochat.run.report.run_data import Run, number, numbers_of, text
from nanochat.terminal import counted, duration, fenced, gib, short, table

# Settings that the command to repeat a run leaves out: it uses another folder
NOT_REPEATED = ("out_dir", "model_tag", "resume", "base_dir", "plan", "price_per_hour")
RECENT_S = 180 * 86_400  # seconds; what is older has a year in the list of runs
MOST_ROWS = 200  # of the table of evaluations
TASKS = {  # name in a record: what its numbers are
    "own_tasks": "Our own tasks: share of right answers, not centred",
    "core_tasks": "CORE's tasks: centred scores, 0 % = chance",
}


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


def at_a_glance(run: Run) -> list[tuple]:
    """(name, value, unit, note) of the known results and costs of a run, the most important first."""
    return [*_results(run), *_amounts(run), *_costs(run)]


def _results(run: Run):
    for key in run.validation_keys:
        bits = run.scores(key)
        (first, first_step), (last, _), (best, best_step) = bits[0], bits[-1], min(bits)
        note = f"from {first:.3f} at step {first_step:,}"
        if best < last:
            note = f"best {best:.4f} at step {best_step:,}"
        yield f"validation{set_name(key)}", f"{last:.4f}", "bits per byte", note
    if exact := [share for share, _ in run.scores("exact_match")]:
        note = f"of validation questions answered word for word; {100 * exact[0]:.1f} % at first"
        yield "exact match", f"{100 * exact[-1]:.1f}", "%", note
    for key, name in (("core", "CORE"), ("own_score", "own tasks")):
        if scores := run.scores(key):
            yield name, f"{scores[-1][0]:.3f}", "", charts.CHANCE
    losses = run.steps["loss"]
    if len(last := np.flatnonzero(~np.isnan(losses))[-1:]):
        note = f"mean of the last {counted(charts.window(len(losses)) + 1, 'step', 'steps')}"
        yield "training loss", f"{charts.smooth(losses, last)[0]:.4f}", "nats per token", note
    if run.num_steps:
        skipped, spikes = run.last("skipped") or 0, int((run.steps["spike"] == 1).sum())
        note = f"{counted(spikes, 'spike', 'spikes')} (6 sigma), {skipped:,.0f} skipped"
        yield "steps", f"{run.num_steps:,}", "", note


def set_name(key: str) -> str:
    """What to add to the name of a number of a validation set; "" for the first one, val_bpb."""
    return key.removeprefix("val_bpb").replace("_", " of ", 1)


def _amounts(run: Run):
    derived, depth = run.section("derived"), number(run.model.get("depth"))
    if depth:
        parameters, width = number(derived.get("parameters")), number(run.model.get("width"))
        note = f"depth {depth:.0f}" + (f", width {width:.0f}" if width else "")
        yield ("parameters", _count(parameters), "", note) if parameters else ("model", note, "", "")
    tokens, data = run.last("tokens"), number(derived.get("data_tokens"))
    if tokens:
        name = text(run.settings().get("data", {}).get("value"))[:60]
        note = f"{tokens / data:.2g} epochs of {name or 'the text'}" if data else name
        yield "tokens", _count(tokens), "", note
    if flops := run.last("flops"):
        yield "FLOPs", f"{flops:.3g}", "", f"{flops / tokens:.3g} a token" if tokens else ""


def _count(number: float) -> str:
    """A count as it is, unless it is too long for a tile."""
    return f"{number:,.0f}" if number < 1e8 else short(number)


def _costs(run: Run):
    seconds, step_seconds = run.last("train_time_s"), run.median("step_time_s")
    if seconds:
        note = f"median step {1000 * step_seconds:.4g} ms" if step_seconds else ""
        yield "time in steps", duration(seconds), "", note
    if speed := run.median("tok_per_sec"):
        yield "tokens per second", f"{speed:,.0f}", "", "at the median step"
    if mfu := run.median("mfu"):
        yield "MFU", f"{100 * mfu:.1f}", "%", "model FLOPs, of the machine's peak"
    if memory := next((m for r in reversed(run.evals) if (m := number(r.get("peak_memory")))), None):
        yield "memory", gib(memory), "", "the most that a process held"
    if step_seconds and run.median("data_wait_s") is not None:
        share = 100 * np.nansum(run.steps["data_wait_s"]) / np.nansum(run.steps["step_time_s"])
        yield "waiting for data", f"{share:.2g}", "%", "of the time in steps"
    if run.price_per_hour > 0 and seconds:
        cost = run.price_per_hour * seconds / 3600
        shown = f"{cost:,.2f}" if cost >= 1 else f"{cost:.2g}"
        yield "cost", shown, "", f"time in steps at {run.price_per_hour:,.2f} an hour"


# ------------------------------------------------------------------------------------------------------
# How the run was made


def shown_value(value) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else text(value)


def changed_settings(run: Run, defaults: dict) -> dict[str, dict]:
    """{name: {"value", "source"}} of the settings that somebody changed to something else."""
    given = {n: s for n, s in run.settings().items() if s.get("source") != "default"}
    return {n: s for n, s in given.items() if n not in defaults or repr(defaults[n]) != repr(s["value"])}


def script_of(run: Run) -> str:
    return f"scripts.{run.kind}_train"


def defaults_of(script: str) -> dict:
    """{setting: default} of today's script; {} if it cannot be read."""
    try:
        return configurator.defaults(importlib.util.find_spec(script).origin)
    except (AttributeError, ImportError, OSError, SyntaxError, ValueError):  # somebody may be editing it
        return {}


def plan_lines(run: Run) -> list[str]:
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
# report.md


def markdown(run: Run, final: bool) -> str:
    """The text of report.md."""
    glance = at_a_glance(run)
    facts = [[name, f"{value} {unit}".strip(), _line(note)] for name, value, unit, note in glance]
    parts = [f"# {_line(run.name)}", "" if final else "The run is still going on.", _line(lead(run))]
    parts += [table([["", "", ""], *facts]) if facts else ""]
    parts += ["![Training loss and validation bits per byte](loss.png)" if run.num_steps else ""]
    parts += ["## Plan", "\n".join(f"- {_line(line)}" for line in plan_lines(run))]
    if run.evals:
        rows = [["step", "tokens", *(f"bits per byte{set_name(key)}" for key in run.validation_keys)]]
        for r in charts.chosen_of(run.evals, MOST_ROWS):
            bits = ("" if (v := number(r.get(key))) is None else f"{v:.4f}" for key in run.validation_keys)
            rows.append([f"{r['step']:,}", f"{number(r.get('tokens')) or 0:,.0f}", *bits])
        parts += ["## Validation", table(rows)]
    if by := last_by_position(run):
        rows = [[label, f"{loss:.4f}"] for label, loss in by.items()]
        parts += ["## Loss by position", table([["tokens of context", "nats per token"], *rows])]
    for key, what in TASKS.items():
        if scores := numbers_of(run.tasks[-1], key) if run.tasks else {}:
            rows = [[_line(name), f"{100 * score:.1f} %"] for name, score in scores.items()]
            parts += [f"## {what}, at step {run.tasks[-1]['step']:,}", table([["task", "score"], *rows])]
    if run.samples:
        parts += ["## Samples", *map(fenced, run.samples[-1]["samples"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def last_by_position(run: Run) -> dict[str, float]:
    """{bucket: nats} of the last evaluation that has it."""
    return next((by for r in reversed(run.evals) if (by := charts.loss_by_position(r))), {})


def _line(words: str) -> str:
    """A text on one line in which Markdown sees no tag."""
    return " ".join(words.split()).replace("<", "&lt;")


# ------------------------------------------------------------------------------------------------------
# The list of runs


def table_of_runs(runs: list[Run]) -> str:
    """The runs, one a line of at most 80 characters, the one that was written last first."""
    rows = [["run", "kind", "steps", "bits per byte", "last step", "state"]]
    for run in sorted(runs, key=lambda run: -run.written):
        planned, bits = run.num_iterations, f"{run.evals[-1]['val_bpb']:.4f}" if run.evals else ""
        steps = f"{run.num_steps:,}" + (f" of {planned:,}" if planned and not run.is_complete else "")
        shown = "%b %d %H:%M" if abs(time.time() - run.written) < RECENT_S else "%b %d  %Y"  # as ls does
        when = time.strftime(shown, time.localtime(run.written))
        rows.append([run.name, run.kind, steps, bits, when, run.state])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0] = room = max(3, min(widths[0], 80 - sum(widths[1:]) - 2 * len(widths[1:])))
    lines = []
    for name, *others in rows:
        row = [name if len(name) <= room else name[: room - 3] + "...", *others]
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(row, "<<>><<", widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
