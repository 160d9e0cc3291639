"""The tasks that a run evaluates: cloze questions made from its own validation text, and CORE's.

    own, public = open_tasks(dataset, dataset.tokenizer_folder(base_dir), None, base_dir, 500)
    fields = score_tasks(model, tokenizer, own, public, dtype, machine)     # what metrics.jsonl has for tasks

The cloze questions are kept in a file beside the data set's tokenizers, so the next start need not make them.
"""

import contextlib
import dataclasses
import gzip
import json
import zlib
from pathlib import Path

import torch

from nanochat.data.dataset import Dataset
from nanochat.data.parquet import Documents
from nanochat.evals import core
from nanochat.evals.bundle import Task, open_bundle
from nanochat.evals.cloze_questions import make_tasks
from nanochat.files import replacing
from nanochat.gpt import GPT

FILE = "own_tasks-3.json.gz"  # a change of the questions needs a higher number, which makes it again


def open_tasks(
    dataset: Dataset, folder: Path, bundle: str | None, base_path: Path, most_per_task: int, say=print
) -> tuple[list[Task], list[Task]]:
    """(the tasks made from the data set's validation text, CORE's). A missing list is empty.

    folder: Dataset.tokenizer_folder. bundle, say: see open_bundle."""
    opened = open_bundle(bundle, base_path, most_per_task, say)
    return cloze_tasks(dataset, folder), opened.tasks if opened else []


def cloze_tasks(dataset: Dataset, folder: Path) -> list[Task]:
    """The tasks made from the validation text of a data set; [] if the text has too few questions.

    A file in `folder` keeps them, if it can be written. A damaged file is made again.
    """
    path = Path(folder) / FILE
    with contextlib.suppress(OSError, EOFError, zlib.error, ValueError, TypeError):  # gzip has a checksum
        return [Task(**task) for task in json.loads(gzip.decompress(path.read_bytes()))]
    tasks = make_tasks(Documents(dataset.val_shards))
    content = json.dumps([dataclasses.asdict(task) for task in tasks]).encode()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(gzip.compress(content, mtime=0))
    return tasks


def score_tasks(
    model, tokenizer, own: list[Task], public: list[Task], dtype: torch.dtype, machine, bar
) -> dict:
    """The fields that metrics.jsonl has for tasks, from an evaluation on all processes.

    own_tasks: {label: accuracy}, own_score: the mean of the centred accuracies; core_tasks: {label: centred
    accuracy}, core: their mean. An empty list of tasks has no fields, and neither has a model that is no GPT:
    it may lack GPT's KV cache. bar(description, unit, total) opens a progress bar, as Console.bar does.
    Raises UserError if the model's loss is not a number.
    """
    if not isinstance(model, GPT):
        return {}
    fields = {}
    if own:
        accuracies = _evaluate(model, tokenizer, own, dtype, machine, bar, "tasks")
        fields |= {"own_tasks": accuracies, "own_score": core.centred(own, accuracies)[1]}
    if public:
        accuracies = _evaluate(model, tokenizer, public, dtype, machine, bar, "CORE")
        fields["core_tasks"], fields["core"] = core.centred(public, accuracies)
    return fields


def _evaluate(model, tokenizer, tasks, dtype, machine, bar, text):
    questions = -(-sum(len(task.examples) for task in tasks) // machine.world_size)
    with bar(text, "questions", questions) as shown:
        return core.evaluate(model, tokenizer, tasks, dtype, machine, progress=shown.update)
