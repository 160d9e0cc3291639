"""An evaluation set that is made from a data set's own validation text, so it needs no network.

    tasks = open_own_tasks(dataset, dataset.tokenizer_folder(base_dir), say)   # made at the first use

It is a bundle in the format of CORE's, which bundle.py reads, in a folder beside the data set's tokenizers.
The same text and the same version of Python give the same bytes. own_items.py says what is asked.
"""

import contextlib
import csv
import io
import json
import os
import tempfile
from pathlib import Path

import yaml

from nanochat import UserError
from nanochat.data.dataset import Dataset, writing
from nanochat.data.parquet import iterate_documents
from nanochat.evals.bundle import Task, open_bundle
from nanochat.evals.cloze_questions import TaskKind, make_items
from nanochat.files import special_kind

VERSION = 1  # of the questions; with a higher number every set is made again
FINGERPRINT = "fingerprint.txt"  # that of the bundle when it was made; empty if there are no tasks


def open_own_tasks(dataset: Dataset, folder: Path, say=print) -> list[Task]:
    """The tasks made from the validation text of a data set; [] if the text has too few questions.

    folder: Dataset.tokenizer_folder. The set is made there at the first use, and again if it is damaged. If
    the folder cannot be written, `say` gets the reason, and there are no tasks: a run can do without them.
    """
    place = Path(folder) / f"own_tasks-{VERSION}"
    tasks = _read(place)
    if tasks is None:
        items = make_items(iterate_documents(dataset.val_shards))
        try:
            with writing(place):
                _write(place, items)
        except UserError as error:
            say(f"the tasks from the validation text are left out: {error}")
        tasks = _read(place)
    return tasks or []


def _read(place: Path) -> list[Task] | None:
    """The tasks in a folder that `_write` made; None if it is missing or damaged."""
    try:
        if special_kind(place / FINGERPRINT):
            return None
        with open(place / FINGERPRINT, encoding="ascii") as file:
            fingerprint = file.read(100)
        if not fingerprint:
            return []
        bundle, _ = open_bundle(place, place)
        return bundle.tasks if bundle.fingerprint == fingerprint else None
    except (OSError, ValueError):
        return None


def _write(place: Path, items: dict[TaskKind, list[dict]]) -> None:
    """Write the bundle into a temporary folder and rename that to `place`. Raises OSError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=place.parent, prefix=f".{place.name}.", ignore_cleanup_errors=True
    ) as name:
        new, old = Path(name, "new"), Path(name, "old")
        for file, content in _files(items).items():
            (new / file).parent.mkdir(parents=True, exist_ok=True)
            (new / file).write_bytes(content.encode())
        fingerprint = open_bundle(new, new)[0].fingerprint if items else ""
        (new / FINGERPRINT).write_text(fingerprint, encoding="ascii")
        if _read(place) is None:  # damaged: it goes with the temporary folder
            with contextlib.suppress(FileNotFoundError):
                os.rename(place, old)
        try:
            os.rename(new, place)
        except OSError:  # another process was faster
            if _read(place) is None:
                raise


def _files(items: dict[TaskKind, list[dict]]) -> dict[str, str]:
    """The contents of the bundle's files, by name."""
    baselines = io.StringIO(newline="")
    table = csv.writer(baselines, lineterminator="\n")
    table.writerow(["Eval Task", "Task Type", "#shots", "#datapoints", "Random baseline"])
    entries, files = [], {}
    for kind, questions in items.items():
        uri = f"own/{kind.label}.jsonl"
        entries.append(
            {
                "label": kind.label,
                "dataset_uri": uri,
                "num_fewshot": [0],
                "icl_task_type": kind.task_type,
                "continuation_delimiter": "",
            }
        )
        table.writerow([kind.label, kind.task_type, 0, len(questions), f"{kind.random_baseline:.4f}"])
        files[f"eval_data/{uri}"] = "".join(json.dumps(question) + "\n" for question in questions)
    core = yaml.safe_dump({"icl_tasks": entries}, sort_keys=False)
    return {"core.yaml": core, "eval_meta_data.csv": baselines.getvalue(), **files}
