"""What base_eval takes from a checkpoint's run, its settings, and what it writes, the page of results."""

import os
from pathlib import Path

from nanochat import UserError, checkpoint
from nanochat.checkpoint.files import read_json, to_json
from nanochat.checkpoint.folder import STEP
from nanochat.checkpoint.schema import check, either, fields, nothing, text, truth, whole
from nanochat.evals.bundle import Task
from nanochat.files import user_path

# Settings of a run that an evaluation takes over: what they are without a config.json, and their form in it
SETTINGS = {
    "data": ("embedded", text),
    "val_data": (None, either(nothing, text)),
    "text_field": ("text", text),
    "eval_tokens": (-1, whole(-1)),
    "sample_prompts": ("auto", text),
    "dtype": ("auto", text),
    "seed": (42, whole()),
}
_VALUES = {name: fields({"value": form}, required=["value"]) for name, (_, form) in SETTINGS.items()}
RESOLVED = fields({"resolved": fields({"compiled": truth, "device_batch_size": whole(1)})})


def settings_of_run(found: checkpoint.Checkpoint) -> dict:
    """{name: value} of SETTINGS in the run that wrote a checkpoint, and what that run resolved at its start:
    compiled, device_batch_size. Of a run of mid_train the text is not taken: it trained on conversations, so
    the text is the default. Raises Damaged if the checkpoint's files hold something impossible."""
    check(found.path / "state.json", found.state, RESOLVED)
    values = {name: default for name, (default, _) in SETTINGS.items()}
    values |= {"compiled": False, "device_batch_size": 8} | found.state.get("resolved", {})
    if "config.json" in found.files:
        _, config = read_json(found.path / "config.json")
        names = ("dtype", "seed") if "loss_on" in found.state["identity"] else tuple(SETTINGS)
        form = fields({"settings": fields({name: _VALUES[name] for name in names})})
        check(found.path / "config.json", config, form)
        saved = config.get("settings", {})
        values |= {name: saved[name]["value"] for name in names if name in saved}
    return values


def results_folder(found: checkpoint.Checkpoint, out_dir: str | None) -> Path:
    """The folder that the setting out_dir means. None is that of the checkpoint's run, or the checkpoint's
    own if it was copied out of a run."""
    if out_dir is not None:
        return user_path("out_dir", out_dir)
    return found.path.parent if STEP.fullmatch(found.path.name) else found.path


def write_results(folder: Path, step: int, results: dict, page: str, say=print):
    """Write base_eval_NNNNNN.json and .md. If the folder cannot be written, `say` gets the reason."""
    stem = f"base_eval_{step:06d}"
    try:
        os.makedirs(folder, exist_ok=True)
        checkpoint.write_whole(folder / f"{stem}.json", to_json(results))
        checkpoint.write_whole(folder / f"{stem}.md", page.encode(errors="backslashreplace"))
    except (OSError, UserError) as error:
        say(f"the results are not written: {error}")
    else:
        say(f"results: {folder / stem}.md and .json")


def page(title: str, facts: dict[str, str], results: dict, own: list[Task], public: list[Task]) -> str:
    """The results as Markdown that is readable on a terminal too.

    facts: what was evaluated and how, {name: text}. results: the fields of metrics.jsonl's evaluations, those
    that are there. own, public: the tasks that were evaluated.
    """
    parts = [f"# {title}", _table([["", ""], *map(list, facts.items())], left=2)]
    if "val_bpb" in results:
        parts += [f"## Bits per byte: {results['val_bpb']:.6f}"]
    if by_position := results.get("loss_by_position"):
        rows = [[tokens, f"{nats:.4f}"] for tokens, nats in by_position.items()]
        parts += [_table([["tokens of context", "nats per token"], *rows])]
    if "own_score" in results:
        accuracies = results["own_tasks"]
        parts += [f"## Tasks from the validation text: {results['own_score']:.4f}", _tasks(own, accuracies)]
    if "core" in results:
        accuracies = {}
        for task in public:
            guessing = task.baseline / 100
            accuracies[task.label] = guessing + (1 - guessing) * results["core_tasks"][task.label]
        parts += [f"## CORE: {results['core']:.4f}", _tasks(public, accuracies)]
    if samples := results.get("samples"):
        fence = "````"
        parts += ["## Samples", *(f"{fence}text\n{s.replace(fence, '` ` ` `')}\n{fence}" for s in samples)]
    return "\n\n".join(parts) + "\n"


def _tasks(tasks: list[Task], accuracies: dict[str, float]) -> str:
    rows = [["task", "accuracy", "by guessing", "centred", "questions"]]
    for task in tasks:
        accuracy, guessing = accuracies[task.label], task.baseline / 100
        numbers = accuracy, guessing, (accuracy - guessing) / (1 - guessing)
        rows.append([task.label, *(f"{number:.3f}" for number in numbers), f"{len(task.examples):,}"])
    return _table(rows)


def _table(rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table with aligned columns; the first `left` of them begin at the left."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = [f":{'-' * (w - 1)}" if i < left else f"{'-' * (w - 1)}:" for i, w in enumerate(widths)]
    lines = []
    for row in [rows[0], rule, *rows[1:]]:
        pairs = enumerate(zip(row, widths, strict=True))
        cells = (cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in pairs)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
