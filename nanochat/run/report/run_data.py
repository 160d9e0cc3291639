"""Reads a run's folder: metrics.jsonl into columns, and config.json.

The folder may come from a stranger, and its run may have been killed at any moment. So no link is followed,
damaged lines are skipped, and a value of a wrong type counts as missing.
"""

import json
import math
import os
import re
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nanochat import UserError
from nanochat.files import open_plain, user_path
from nanochat.run.metrics import records_in

MAX_CONFIG_BYTES = 2**22
MAX_TEXT = 4000  # characters of a sample or a value; the rest is cut
MAX_COLUMNS = 64
PLACES = ("base_checkpoints", "mid_checkpoints")  # of runs, under base_dir
COLUMNS = (  # of training records, which are there in any case; what else has numbers follows
    "step", "loss", "tokens", "train_time_s", "step_time_s", "data_wait_s", "tok_per_sec", "mfu", "flops",
    "skipped", "spike",
)  # fmt: skip


@dataclass
class Run:
    """What a run's folder holds. Records of one kind are in the order of their steps.

    steps: {name of a number in training records: (steps,) float64}; NaN = missing.
    records: the others; evals, tasks, samples: those with val_bpb; with own_score or core; with samples.
    progress: of the last record that has it, in [0, 1]. written: when the last record was, in Unix time.
    """

    name: str
    folder: Path
    config: dict = field(default_factory=dict)
    steps: dict[str, np.ndarray] = field(default_factory=dict)
    records: list[dict] = field(default_factory=list)
    evals: list[dict] = field(default_factory=list)
    tasks: list[dict] = field(default_factory=list)
    samples: list[dict] = field(default_factory=list)
    progress: float | None = None
    written: float = 0.0
    price_per_hour: float = 0.0  # of the machine, as the setting says; 0 or less: unknown

    @property
    def kind(self) -> str:
        """base or mid: only mid_train has the setting loss_on."""
        return "mid" if "loss_on" in self.settings() else "base"

    @property
    def num_steps(self) -> int:
        """Updates so far."""
        return int(self.steps["step"][-1]) + 1 if len(self.steps["step"]) else 0

    @property
    def num_iterations(self) -> int | None:
        """Updates that the run plans to make; None if that is unknown or a number of minutes decides."""
        derived = self.section("derived")
        given = self.settings().get("num_iterations", {}).get("value")
        planned = number(derived.get("num_iterations")) or number(given) or 0
        return int(planned) if planned > 0 and not (number(derived.get("minutes")) or 0) > 0 else None

    @property
    def share_done(self) -> float | None:
        """How much of the run is done, in [0, 1]; None if that is unknown."""
        planned = self.num_iterations
        return min(1.0, self.num_steps / planned) if planned else self.progress

    @property
    def is_complete(self) -> bool:
        """Whether it has made all its steps and the last evaluation."""
        evaluated = self.evals and self.evals[-1]["step"] >= self.num_steps
        return bool(evaluated and (self.share_done or 0.0) >= 1)

    @property
    def state(self) -> str:
        """finished, running (a step was written just now) or stopped."""
        times = self.steps["step_time_s"][-100:]
        patience = 60 + 20 * float(np.nanmedian(times)) if (times >= 0).any() else 60
        if self.is_complete:
            return "finished"
        return "running" if time.time() - self.written < patience else "stopped"

    @property
    def record_keys(self) -> list[str]:
        """The names of the numbers in the records that are not of a training step."""
        found = dict.fromkeys(k for r in self.records for k, v in r.items() if number(v) is not None)
        return [name for name in found if is_name(name)][:MAX_COLUMNS]

    @property
    def validation_keys(self) -> list[str]:
        """val_bpb, and val_bpb_NAME of each further validation set."""
        return [name for name in self.record_keys if re.match("val_bpb(_|$)", name)]

    @property
    def model(self) -> dict:
        model = self.section("identity").get("model")
        return model if isinstance(model, dict) else {}

    def section(self, name: str) -> dict:
        """A part of config.json that has names and values; {} if it is missing."""
        value = self.config.get(name)
        return value if isinstance(value, dict) else {}

    def settings(self) -> dict[str, dict]:
        """{name: {"value", "source"}}; only names that are identifiers, and values that are plain."""
        plain = str | int | float | None
        given = [(n, s) for n, s in self.section("settings").items() if re.fullmatch(r"[A-Za-z_]\w{0,63}", n)]
        return {n: s for n, s in given if isinstance(s, dict) and isinstance(s.get("value", ()), plain)}

    def scores(self, name: str) -> list[tuple[float, int]]:
        """(value, step) of each record that is not of a training step and has this number."""
        return [(value, r["step"]) for r in self.records if (value := number(r.get(name))) is not None]

    def last(self, column: str) -> float | None:
        """The last value of a column; None if it has none."""
        values = self.steps[column][~np.isnan(self.steps[column])]
        return float(values[-1]) if len(values) else None

    def median(self, column: str) -> float | None:
        """The median of a column; None if it has no value."""
        values = self.steps[column][~np.isnan(self.steps[column])]
        return float(np.median(values)) if len(values) else None


def number(value) -> float | None:
    """A number that matplotlib can draw as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e100 < value < 1e100:
        return None
    return float(value)


def numbers_of(record: dict, key: str) -> dict[str, float]:
    """{name: number} of an object in a record, of bounded length; {} if it has none."""
    found = record.get(key)
    pairs = list(found.items())[:64] if isinstance(found, dict) else []
    return {text(name)[:80]: float(value) for name, value in pairs if number(value) is not None}


def text(value) -> str:
    """A plain value as a text of bounded length. Control characters are replaced: they could hide text."""
    cut = str(value)[:MAX_TEXT] if isinstance(value, str) or number(value) is not None else ""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in cut)


def is_name(name: str) -> bool:
    """Whether a key of a record may be shown as the name of a number."""
    return re.fullmatch(r"[A-Za-z_][\w./-]{0,63}", name) is not None


def runs_in(base_dir: Path) -> list[Path]:
    """The folders of all runs under base_dir."""
    return [path.parent for place in PLACES for path in sorted((base_dir / place).glob("*/metrics.jsonl"))]


def find_runs(name: str, base_dir: Path) -> list[Path]:
    """The folders of the runs that a name means: a folder, or a tag under base_dir, which a base run and a
    mid run may share; base_checkpoints/TAG is one of them. A folder that is no run's, such as one that a run
    refused at its start has left, does not count beside others. Raises UserError if there is none."""
    given = user_path("run", name)
    if (given / "metrics.jsonl").exists():
        return [given]
    places = [given, *(base_dir / place / given for place in ("", *PLACES))]
    if found := [folder for folder in places if folder.is_dir()]:
        return [folder for folder in found if (folder / "metrics.jsonl").exists()] or found[:1]
    tags = ", ".join(dict.fromkeys(folder.name for folder in runs_in(base_dir))) or "none"
    raise UserError(
        f"there is no run {name}; give its folder, or its tag (under {base_dir} there are: {tags})"
    )


def read_run(folder, say=lambda warning: None) -> Run:
    """Read a run's folder; `say` gets warnings about damage. Raises UserError if it is no run's folder, and
    OSError for a file that cannot be read."""
    folder = Path(folder)
    try:
        file = os.fdopen(open_plain(folder / "metrics.jsonl", os.O_RDONLY), "rb")
    except (FileNotFoundError, NotADirectoryError) as error:
        what = "has no metrics.jsonl" if folder.is_dir() else "is no folder"
        raise UserError(f"{folder} {what}; name the folder of a run, such as base_checkpoints/d4") from error
    run = Run(text(folder.resolve().name), folder, _read_config(folder / "config.json", say))
    run.price_per_hour = number(run.settings().get("price_per_hour", {}).get("value")) or 0.0
    columns = {name: array("d") for name in COLUMNS}
    with file:
        run.written = os.fstat(file.fileno()).st_mtime
        for record in records_in(file, lambda warning: say(f"{warning} in {folder}")):
            progress = number(record.get("progress"))
            run.progress = run.progress if progress is None else min(max(progress, 0.0), 1.0)
            if "loss" in record:
                _add(record, columns)
            else:
                run.records.append(record)
    order = np.argsort(columns["step"], kind="stable")
    run.steps = {name: np.array(column)[order] for name, column in columns.items()}
    run.records.sort(key=lambda r: r["step"])
    for record in run.records:
        if number(record.get("val_bpb")) is not None:
            run.evals.append(record)
        if any(number(record.get(name)) is not None for name in ("own_score", "core")):
            run.tasks.append(record)
        if isinstance(record.get("samples"), list):
            run.samples.append(record | {"samples": [text(s) for s in record["samples"][:32]]})
    return run


def _add(record: dict, columns: dict[str, array]):
    """Add a training record's numbers to the columns, which stay equally long. A new name begins a column."""
    length = len(columns["step"])
    for name, value in record.items():
        value = float(value) if isinstance(value, bool) else number(value)
        if name not in columns and value is not None and len(columns) < MAX_COLUMNS and is_name(name):
            columns[name] = array("d", [math.nan]) * length
        if name in columns:
            columns[name].append(math.nan if value is None else value)
    for column in columns.values():
        if len(column) == length:
            column.append(math.nan)


def _read_config(path: Path, say) -> dict:
    if not os.path.lexists(path):
        return {}
    try:
        with os.fdopen(open_plain(path, os.O_RDONLY), "rb") as file:
            config = json.loads(file.read(MAX_CONFIG_BYTES))
        if isinstance(config, dict):
            return config
        reason = "it is no JSON object"
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is damaged or too long"
    say(f"warning: {path} is left out ({reason})")
    return {}
