"""CORE: what a model can do, as one number from many tasks (DCLM, arXiv 2406.11794).

Every task is a list of questions with known answers. A question becomes one text for each possible answer,
after a few worked examples ("few-shot"). The model never writes: it is asked how likely each text is.

    multiple_choice      one context, several continuations: right if the true one has the lowest mean loss
    schema               several contexts, one continuation: right if the true context gives it the lowest one
    language_modeling    right if every token of the continuation is the model's most probable one

A task's accuracy is centred, so that guessing gives 0 and no mistake gives 1. CORE is the mean over its 22
tasks. Prompts, seeds and decisions are those of karpathy/nanochat, which publishes a bundle of these tasks
(data/bundle.py reads it): the same model gets the same answers right.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from nanochat import UserError
from nanochat.data.bundle import Task
from nanochat.precision import autocast

FEWSHOT_SEED = 1234  # plus the index of the question: which worked examples it gets
GROUP = 64  # questions that one process takes at a time
TOKENS_PER_BATCH = {"cuda": 32768, "cpu": 2048}  # tokens of a forward pass, padding included


@dataclass(frozen=True)
class Accuracy:
    """The result of a task."""

    accuracy: float  # share of right answers
    centred: float  # the same, moved and stretched so that guessing gives 0 and no mistake gives 1
    n: int  # questions


@dataclass
class Question:
    """A question as token rows: a different text each, and from where in each the tokens are scored."""

    task: int  # index of its task
    gold: int  # index of the right choice (language_modeling: 0)
    rows: list[np.ndarray] = field(default_factory=list)  # (length,) uint32 each, at most max_seq_len
    starts: list[int] = field(default_factory=list)  # the first scored token of each row, at least 1
    row_of_choice: list[int] = field(default_factory=list)  # equal texts share a row, so that they tie


@torch.no_grad()
def evaluate(
    model,
    tokenizer,
    tasks: list[Task],
    dtype: torch.dtype,
    machine,
    tokens_per_batch: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Accuracy]:
    """The accuracy of a GPT in each task, by label.

    The questions are dealt to the processes; every process gets all results, which do not depend on the
    number of processes. model: a gpt.GPT, not compiled, because nearly every batch has another shape.
    progress(n) is called after every n questions of this process. Raises UserError if a loss is not a number.
    """
    tokens_per_batch = tokens_per_batch or TOKENS_PER_BATCH.get(machine.device.type, 8192)
    right, broken, launched = [0] * len(tasks), 0, None
    for group in [*deal(tasks)[machine.rank :: machine.world_size], None]:
        before, launched = launched, None
        if group:  # a GPU works on this group while the one before is counted and the next one tokenized
            questions = [tokenize(tasks[t], t, i, tokenizer, model.config.max_seq_len) for t, i in group]
            launched = questions, launch(model, questions, tokenizer.bos_id, dtype, tokens_per_batch)
        if before:
            questions, scored = before
            for question, (losses, exact) in zip(questions, finish(*scored, questions), strict=True):
                broken += int(np.isnan(losses).any())
                right[question.task] += decide(tasks[question.task], question, losses, exact)
            if progress:
                progress(len(questions))
    *right, broken = machine.all_sum([*right, broken])
    if broken:
        raise UserError(
            "the loss on the tasks is not a number, so the model is broken; go on from an earlier checkpoint "
            "with --resume=STEP and lower rates, or use --dtype=float32"
        )
    return {task.label: _accuracy(task, count) for task, count in zip(tasks, right, strict=True)}


def decide(task: Task, question: Question, losses: np.ndarray, exact: np.ndarray) -> bool:
    """Whether a question is answered right, by the mean loss (choices,) and the exactness (choices,) of its
    choices. The first of equally likely choices counts."""
    if task.task_type == "language_modeling":
        return bool(exact[0])
    return int(losses.argmin()) == question.gold


def score(results: dict[str, Accuracy]) -> float:
    """The mean of the centred accuracies: over the public bundle's tasks, this is CORE."""
    return sum(result.centred for result in results.values()) / len(results)


def _accuracy(task: Task, right: float) -> Accuracy:
    accuracy, guessing = right / len(task.examples), task.baseline / 100
    return Accuracy(accuracy, (accuracy - guessing) / (1 - guessing), len(task.examples))


# ------------------------------------------------------------------------------------------------------
# From examples to token rows


def fewshot(task: Task, index: int) -> list[dict]:
    """The worked examples of a question: other examples of its task, drawn by its index."""
    others = len(task.examples) - 1
    drawn = random.Random(FEWSHOT_SEED + index).sample(range(others), min(task.num_fewshot, others))
    return [task.examples[i + (i >= index)] for i in drawn]


def prompts(task: Task, index: int) -> list[str]:
    """The texts of a question: one for each choice; for language_modeling, without and with the answer."""
    example, delimiter = task.examples[index], task.delimiter

    def context(example: dict) -> str:
        match task.task_type:
            case "multiple_choice":
                return example["query"]
            case "schema":
                return example["context_options"][example["gold"]]
            case _:
                return example["context"].strip()

    def answer(example: dict) -> str:
        return example["choices"][example["gold"]] if "choices" in example else example["continuation"]

    worked = "".join(f"{context(shot)}{delimiter}{answer(shot)}\n\n" for shot in fewshot(task, index))
    match task.task_type:
        case "multiple_choice":
            return [f"{worked}{example['query']}{delimiter}{choice}" for choice in example["choices"]]
        case "schema":
            ending = f"{delimiter}{example['continuation']}"
            return [f"{worked}{option}{ending}" for option in example["context_options"]]
        case _:  # blanks at the end would be part of the answer's first token
            question = f"{worked}{context(example)}{delimiter}"
            return [question.rstrip(), f"{question}{example['continuation']}"]


def common_prefix(rows: list[np.ndarray]) -> int:
    """How many tokens at the beginning are equal in all rows."""
    shortest = min(map(len, rows))
    stacked = np.stack([row[:shortest] for row in rows])
    equal = (stacked == stacked[0]).all(axis=0)
    return shortest if equal.all() else int(equal.argmin())


def tokenize(task: Task, number: int, index: int, tokenizer, max_seq_len: int) -> Question:
    """A question of task `number` as rows of at most `max_seq_len` tokens; a longer text keeps its end.

    Scored are the tokens after the common prefix (schema: the common suffix; language_modeling: what follows
    the text without the answer), but always one token at least.
    """
    bos = np.array([tokenizer.bos_id], dtype=np.uint32)
    rows = [np.concatenate([bos, tokenizer.encode(text)]) for text in prompts(task, index)]
    if task.task_type == "schema":
        suffix = common_prefix([row[::-1] for row in rows])
        starts = [len(row) - suffix for row in rows]
    else:
        starts = [common_prefix(rows)] * len(rows)
    if task.task_type == "language_modeling":
        rows, starts = rows[1:], starts[1:]
    question, row_of_text = Question(number, task.examples[index].get("gold", 0)), {}
    for row, start in zip(rows, starts, strict=True):
        key = row.tobytes()
        if key not in row_of_text:
            row_of_text[key] = len(question.rows)
            cut = max(0, len(row) - max_seq_len)
            question.rows.append(row[cut:])
            question.starts.append(max(1, min(start, len(row) - 1) - cut))
        question.row_of_choice.append(row_of_text[key])
    return question


def deal(tasks: list[Task]) -> list[list[tuple[int, int]]]:
    """All questions as (index of the task, index of the example), in groups of similar length, longest first.

    The groups, and with them the batches, do not depend on the number of processes. So a close decision
    cannot turn with it, and each process tokenizes only its own questions.
    """
    questions = []
    for number, task in enumerate(tasks):
        sizes = [sum(map(_characters, example.values())) for example in task.examples]
        mean = sum(sizes) / max(1, len(sizes))  # the worked examples of each question are others
        questions += [(size + task.num_fewshot * mean, number, i) for i, size in enumerate(sizes)]
    order = [(number, i) for _, number, i in sorted(questions, reverse=True)]
    return [order[i : i + GROUP] for i in range(0, len(order), GROUP)]


def _characters(value: str | list[str] | int) -> int:
    return 0 if isinstance(value, int) else len(value) if isinstance(value, str) else max(map(len, value))


# ------------------------------------------------------------------------------------------------------
# From token rows to losses


def launch(model, questions: list[Question], bos_id: int, dtype: torch.dtype, tokens_per_batch: int):
    """Start the forward passes for all rows of these questions.

    Returns (row of each scored token, its loss in nats, whether it is the most probable one): a list, and
    tensors (scored tokens,) float32 and bool on the model's device. Nothing here waits for the device.
    """
    rows = list(itertools.chain.from_iterable(question.rows for question in questions))
    starts = list(itertools.chain.from_iterable(question.starts for question in questions))
    device, max_seq_len = model.head.weight.device, model.config.max_seq_len
    row_of, losses, exact = [], [], []
    for batch in batches(rows, tokens_per_batch, max_seq_len):
        length = padded(len(rows[batch[0]]), max_seq_len)
        idx = np.full((len(batch), length), bos_id, dtype=np.int64)
        for i, row in enumerate(batch):
            idx[i, : len(rows[row])] = rows[row]
            row_of += [row] * (len(rows[row]) - starts[row])
        scored = np.concatenate(
            [np.arange(starts[row], len(rows[row])) + i * length for i, row in enumerate(batch)]
        )
        idx, targets, before = (
            torch.from_numpy(array).to(device) for array in (idx, idx.ravel()[scored], scored - 1)
        )
        with autocast(device, dtype):
            logits = model(idx, positions=before)  # (scored tokens, V) float32
        losses.append(F.cross_entropy(logits, targets, reduction="none"))
        exact.append(logits.argmax(-1) == targets)
    return row_of, torch.cat(losses), torch.cat(exact)


def finish(row_of: list[int], losses: torch.Tensor, exact: torch.Tensor, questions: list[Question]):
    """(mean loss (choices,) float64, whether all its scored tokens are the most probable ones (choices,)) of
    each question; waits for the device."""
    count = np.bincount(row_of)  # scored tokens of each row
    mean = np.bincount(row_of, losses.cpu().double().numpy()) / count
    all_exact = np.bincount(row_of, exact.cpu().double().numpy()) == count
    first = 0
    for question in questions:
        rows = first + np.array(question.row_of_choice)
        yield mean[rows], all_exact[rows]
        first += len(question.rows)


def batches(rows: list[np.ndarray], tokens_per_batch: int, max_seq_len: int) -> list[list[int]]:
    """The indices of the rows, longest first, in batches of at most `tokens_per_batch` tokens or one row."""
    order, made = sorted(range(len(rows)), key=lambda i: -len(rows[i])), []
    while order:
        size = max(1, tokens_per_batch // padded(len(rows[order[0]]), max_seq_len))
        made.append(order[:size])
        order = order[size:]
    return made


def padded(length: int, max_seq_len: int) -> int:
    """A row's length with its padding: few different shapes, and at most an eighth more than needed."""
    step = 128 if length > 1024 else 64 if length > 512 else 32 if length > 256 else 16
    return min(max_seq_len, -(-length // step) * step)
