"""What a run's folder says about the run: metrics.jsonl in columns, and config.json.

A folder may come from a stranger and a run may be killed at any moment. So nothing is read through a link,
files and lines have a largest size, and a value of a wrong type counts as missing.
"""

import io
import json
import math
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.json

from nanochat import UserError
from nanochat.files import open_plain, user_path
from nanochat.run.metrics import EVALUATIONS

MAX_METRICS_BYTES, MAX_CONFIG_BYTES, MAX_LINE_BYTES = 2**29, 2**22, 2**20
BLOCK_BYTES = 2**22  # of metrics.jsonl that are parsed at once
MOST_WARNINGS, MOST_RECORDS = 20, 100_000  # of damage; of evaluations
MAX_TEXT = 4000  # characters of a sample or a value; the rest is cut
COLUMNS = [
    "loss", "lr_multiplier", "grad_norm", "step_time_s", "data_wait_s", "tok_per_sec", "mfu", "tokens",
    "flops", "train_time_s", "epoch", "skipped",
]  # fmt: skip
SCHEMA = pa.schema([("step", pa.int64()), *((name, pa.float64()) for name in COLUMNS), ("spike", pa.bool_())])


@dataclass
class Run:
    """A run as its folder tells it. Records of one kind are in the order of their steps.

    steps: {"step", each of COLUMNS, "spike"} -> float64 array of one value a training step; NaN = missing.
    evals, tasks: records with val_bpb; with own_score or core. samples: records with samples.
    """

    name: str
    folder: Path
    config: dict = field(default_factory=dict)
    steps: dict[str, np.ndarray] = field(default_factory=dict)
    evals: list[dict] = field(default_factory=list)
    tasks: list[dict] = field(default_factory=list)
    samples: list[dict] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Updates so far."""
        return int(self.steps["step"][-1]) + 1 if len(self.steps["step"]) else 0

    @property
    def num_iterations(self) -> int | None:
        """Updates that the run plans to make; None if its config.json does not say."""
        given = self.settings().get("num_iterations", {}).get("value")
        planned = number(self.section("derived").get("num_iterations")) or number(given)
        return int(planned) if planned and planned > 0 else None

    @property
    def is_complete(self) -> bool:
        """Whether it has made, and evaluated, all its steps."""
        return bool(self.num_iterations and self.evals and self.evals[-1]["step"] >= self.num_iterations)

    @property
    def goes_on(self) -> bool:
        """Whether it looks as if a process still trains: steps are missing, and one was written just now."""
        times = self.steps["step_time_s"][-100:]
        patience = 60 + 20 * float(np.nanmedian(times)) if (times >= 0).any() else 60
        written = (self.folder / "metrics.jsonl").stat().st_mtime
        return not self.is_complete and time.time() - written < patience

    def section(self, name: str) -> dict:
        """A part of config.json that has names and values; {} if it is missing."""
        value = self.config.get(name)
        return value if isinstance(value, dict) else {}

    def settings(self) -> dict[str, dict]:
        """{name: {"value", "source"}}; a name that is no identifier is left out."""
        found = self.section("settings")
        return {n: s for n, s in found.items() if re.fullmatch(r"[A-Za-z_]\w{0,63}", n) and _is_setting(s)}

    def last(self, column: str) -> float | None:
        """The last value of a column; None if it has none."""
        values = self.steps[column][~np.isnan(self.steps[column])]
        return float(values[-1]) if len(values) else None


def _is_setting(entry) -> bool:
    plain = (str, int, float, bool, type(None))
    return isinstance(entry, dict) and isinstance(entry.get("value", ()), plain)


def number(value) -> float | None:
    """A finite number as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
        return None
    return float(value)


def text(value) -> str:
    """A plain value as a text of bounded length. Control characters are replaced: they could hide some."""
    cut = str(value)[:MAX_TEXT] if isinstance(value, str | int | float) else ""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in cut)


def find_run(name: str, base_dir: Path) -> Path:
    """The folder of a run that is named by its folder, or by its tag under base_dir. Raises UserError."""
    given = user_path("run", name)
    if given.is_dir():
        return given
    places = [base_dir / place for place in ("mid_checkpoints", "base_checkpoints")]
    for place in places:
        if given.name == name and (place / name).is_dir():
            return place / name
    tags = sorted({folder.name for place in places for folder in place.glob("*") if folder.is_dir()})
    known = ", ".join(tags[:20]) or "none"
    raise UserError(
        f"there is no run {name}; give its folder, or its tag (under {base_dir} there are: {known})"
    )


def read_run(folder, say=lambda warning: None) -> Run:
    """Read a run's folder; `say` hears of what is damaged. Raises UserError if it is no run's folder, and
    OSError for a file that cannot be read."""
    folder, say = Path(folder), _at_most(MOST_WARNINGS, say)
    if not os.path.lexists(folder / "metrics.jsonl"):
        what = "has no metrics.jsonl" if folder.is_dir() else "is no folder"
        raise UserError(f"{folder} {what}; name the folder of a run, such as base_checkpoints/d4")
    run = Run(text(folder.resolve().name), folder, _read_config(folder / "config.json", say))
    columns, others = _read_metrics(folder / "metrics.jsonl", say)
    order = np.argsort(columns["step"], kind="stable")
    run.steps = {name: values[order] for name, values in columns.items()}
    for record in sorted(others, key=lambda r: r["step"]):
        if number(record.get("val_bpb")) is not None:
            run.evals.append(record)
        if any(number(record.get(name)) is not None for name in ("own_score", "core")):
            run.tasks.append(record)
        if isinstance(record.get("samples"), list):
            run.samples.append(record | {"samples": [text(s) for s in record["samples"][:32]]})
    return run


def _at_most(most: int, say):
    """`say`, which falls silent after so many warnings."""
    said = []

    def limited(warning: str):
        said.append(warning)
        if len(said) <= most:
            say(warning if len(said) < most else f"{warning}; further warnings are left out")

    return limited


def _read_config(path: Path, say) -> dict:
    if not os.path.lexists(path):
        return {}
    try:
        with os.fdopen(open_plain(path, os.O_RDONLY), "rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
        config = json.loads(data) if len(data) <= MAX_CONFIG_BYTES else None
        if isinstance(config, dict):
            return config
        reason = "it is too long, or no JSON object"
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is damaged"
    say(f"warning: {path} is left out ({reason})")
    return {}


def _read_metrics(path: Path, say) -> tuple[dict[str, np.ndarray], list[dict]]:
    """(columns of the training steps, all other records) of a metrics.jsonl."""
    parts, others, line_number, size, rest = [], [], 1, 0, b""
    with os.fdopen(open_plain(path, os.O_RDONLY), "rb") as file:
        while block := file.read(BLOCK_BYTES):
            size += len(block)
            *lines, rest = (rest + block).split(b"\n")  # after the last newline: not a whole record
            parts.append(_parse(lines, others, lambda i, n=line_number: say(_damaged(path, n + i))))
            line_number += len(lines)
            if len(rest) > BLOCK_BYTES or size >= MAX_METRICS_BYTES or len(others) > MOST_RECORDS:
                say(f"warning: {path} is too long; what follows line {line_number - 1:,} is left out")
                break
    parts = parts or [_parse_steps([])]
    return {name: np.concatenate([part[name] for part in parts]) for name in SCHEMA.names}, others


def _damaged(path, line_number: int) -> str:
    return f"warning: {path}, line {line_number}, is damaged and skipped"


def _parse(lines: list[bytes], others: list[dict], damaged) -> dict[str, np.ndarray]:
    """The training steps among these lines, in columns. Adds other records to `others`; `damaged` is called
    with the index of each bad line."""
    is_step = [
        b'"loss":' in line
        and len(line) < 9999
        and not any(b'"%b":' % k.encode() in line for k in EVALUATIONS)
        for line in lines
    ]
    try:  # all at once: many times as fast as a line at a time
        whole = _parse_steps([line for line, step in zip(lines, is_step, strict=True) if step])
    except (pa.ArrowException, ValueError):
        is_step, whole = [False] * len(lines), _parse_steps([])
    rows = []
    for i, line in enumerate(lines):
        if not is_step[i] and not _parse_line(line, rows, others):
            damaged(i)
    values = [[_or_nan(row.get(name)) for name in SCHEMA.names] for row in rows]
    table = np.array(values, dtype=np.float64).reshape(-1, len(SCHEMA.names)).T
    return {n: np.concatenate([whole[n], column]) for n, column in zip(SCHEMA.names, table, strict=True)}


def _parse_steps(lines: list[bytes]) -> dict[str, np.ndarray]:
    """Columns of whole training records. Raises ArrowException or ValueError if any line is not one."""
    data = b"\n".join([*lines, b""])
    options = pa.json.ParseOptions(explicit_schema=SCHEMA, unexpected_field_behavior="ignore")
    reading = pa.json.ReadOptions(use_threads=False, block_size=len(data) + 1)
    if not lines:
        return {name: np.empty(0) for name in SCHEMA.names}
    table = pa.json.read_json(io.BytesIO(data), reading, options)
    if table.num_rows != len(lines) or table["step"].null_count:
        raise ValueError("not one whole record a line")
    return {name: _clean(table[name].cast(pa.float64()).to_numpy()) for name in SCHEMA.names}


def _clean(values: np.ndarray) -> np.ndarray:
    """Infinity and numbers beyond all measure as NaN."""
    return np.where(np.abs(values) < 1e300, values, np.nan)


def _parse_line(line: bytes, rows: list[dict], others: list[dict]) -> bool:
    """Put one record where it belongs; False if it is not a record."""
    try:
        record = json.loads(line) if len(line) <= MAX_LINE_BYTES else None
    except (ValueError, RecursionError):
        return False
    if not isinstance(record, dict) or type(record.get("step")) is not int or not 0 <= record["step"] < 2**53:
        return False
    if "loss" in record:
        rows.append(record)
    elif any(name in record for name in EVALUATIONS):
        others.append(record)
    else:
        return False
    return True


def _or_nan(value) -> float:
    value = float(value) if isinstance(value, bool) else number(value)
    return math.nan if value is None else value
