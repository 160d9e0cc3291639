"""What a model scores in tasks: those made from its own validation text, and CORE's."""

import torch

from nanochat import core
from nanochat.data.bundle import Task


def score_tasks(
    model, tokenizer, own: list[Task], public: list[Task], dtype: torch.dtype, machine, progress=None
) -> dict:
    """The fields that metrics.jsonl has for tasks, from an evaluation on all processes.

    own_tasks: {label: accuracy}, own_score: the mean of the centred accuracies; core_tasks: {label: centred
    accuracy}, core: their mean. Fields of an empty list of tasks are absent. model and progress: see
    core.evaluate. Raises UserError if the model's loss is not a number.
    """
    fields = {}
    if own:
        results = core.evaluate(model, tokenizer, own, dtype, machine, progress=progress)
        accuracies = {label: result.accuracy for label, result in results.items()}
        fields |= {"own_tasks": accuracies, "own_score": core.score(results)}
    if public:
        results = core.evaluate(model, tokenizer, public, dtype, machine, progress=progress)
        centred = {label: result.centred for label, result in results.items()}
        fields |= {"core_tasks": centred, "core": core.score(results)}
    return fields
