"""CORE: what a model can do, as one number from many tasks (DCLM, arXiv 2406.11794).

A task is a list of questions with known answers. A question becomes one text for each possible answer, after
a few worked examples ("few-shot"). The model writes nothing: we compute how likely each text is.

    multiple_choice      one context, several continuations: right if the true one has the lowest mean loss
    schema               several contexts, one continuation: right if its mean loss is lowest in the true one
    language_modeling    right if every token of the continuation is the model's most probable one

A task's accuracy is centred: 0 is guessing, 1 is no mistake. CORE is the mean over its 22 tasks. Prompts,
seeds and decisions are those of karpathy/nanochat, which publishes a bundle of these tasks (bundle.py reads
it): the same model gets the same answers right.
"""

import functools
import random
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from nanochat import UserError
from nanochat.evals.bits_per_byte import BROKEN
from nanochat.evals.bundle import Task
from nanochat.machine.precision import autocast
from nanochat.machine.transfers import to_device
from nanochat.ops.attention import previous_token, shift_keys

FEWSHOT_SEED = 1234  # plus the index of the question: which worked examples it gets
GROUP = 64  # questions that one process takes at a time
TOKENS_PER_BATCH = {"cuda": 131072, "cpu": 16384}  # of all rows of a forward pass, with padding and prefixes
MOST_PADDING = 1.25  # tokens of a batch, with padding, over the tokens that it needs
SHORTEST_PREFIX = 16  # tokens; a shorter common beginning is not worth a forward pass of its own


@dataclass
class TokenizedQuestion:
    """A question as rows of tokens, one for each different text, and where their scored tokens begin."""

    task: int  # index of its task
    gold: int  # index of the right choice (language_modeling: 0)
    rows: list[np.ndarray] = field(default_factory=list)  # (length,) uint32 each, at most max_seq_len
    starts: list[int] = field(default_factory=list)  # the first scored token of each row, at least 1
    row_of_choice: list[int] = field(default_factory=list)  # equal texts share a row, so that they tie

    @property
    def longest(self) -> int:
        return max(map(len, self.rows))

    @functools.cached_property
    def prefix(self) -> int:
        """How many tokens all rows have in common at their beginning, up to the first one whose logits are
        scored; 0 for one row."""
        return min(common_prefix(self.rows), min(self.starts) - 1) if len(self.rows) > 1 else 0


@torch.no_grad()
def evaluate(
    model, tokenizer, tasks: list[Task], dtype: torch.dtype, machine, progress=None
) -> dict[str, float]:
    """The accuracy of a GPT in each task, by label: the share of right answers.

    The processes share the questions; each gets all results, which do not depend on the number of processes.
    model: a gpt.GPT, not compiled, because nearly every batch has another shape. progress(n) is called after
    every n questions of this process. Raises UserError if a loss is not a number.
    """
    right, broken, launched = [0] * len(tasks), 0, None
    for group in [*deal(tasks)[machine.rank :: machine.world_size], None]:
        before, launched = launched, None
        if group:  # a GPU works on this group while we count the one before and tokenize the next one
            questions = [tokenize(tasks[t], t, i, tokenizer, model.config.max_seq_len) for t, i in group]
            launched = questions, launch(model, questions, tokenizer.bos_id, dtype)
        if before:
            questions, scored = before
            for question, (losses, exact) in zip(questions, finish(*scored, questions), strict=True):
                broken += int(np.isnan(losses).any())
                right[question.task] += decide(tasks[question.task], question, losses, exact)
            if progress:
                progress(len(questions))
    *right, broken = machine.all_sum([*right, broken])
    if broken:
        raise UserError(f"the loss on the tasks {BROKEN}")
    return {task.label: count / len(task.examples) for task, count in zip(tasks, right, strict=True)}


def decide(task: Task, question: TokenizedQuestion, losses: np.ndarray, exact: np.ndarray) -> bool:
    """Whether a question is answered right. losses, exact (choices,): the mean loss of each choice, and
    whether all its tokens are the most probable ones. Of equally likely choices the first one counts."""
    if task.task_type == "language_modeling":
        return bool(exact[0])
    return int(losses.argmin()) == question.gold


def centred(tasks: list[Task], accuracies: dict[str, float]) -> tuple[dict[str, float], float]:
    """The accuracies on a scale from guessing to no mistake, and their mean: over the public bundle, CORE."""
    scores = {task.label: task.centred(accuracies[task.label]) for task in tasks}
    return scores, sum(scores.values()) / len(scores)


# ------------------------------------------------------------------------------------------------------
# From examples to token rows


def choices(example: dict) -> list[tuple[str, str]]:
    """(context, continuation) of each choice of an example; of language_modeling the only one."""
    if "choices" in example:
        return [(example["query"], choice) for choice in example["choices"]]
    if "context_options" in example:
        return [(option, example["continuation"]) for option in example["context_options"]]
    return [(example["context"].strip(), example["continuation"])]


def prompts(task: Task, index: int) -> list[str]:
    """The texts of a question: one for each choice; for language_modeling, without and with the answer.

    Each begins with the worked examples: other examples of the task, drawn by the question's index.
    """
    worked, others = "", len(task.examples) - 1
    for i in random.Random(FEWSHOT_SEED + index).sample(range(others), min(task.num_fewshot, others)):
        shot = task.examples[i + (i >= index)]
        context, answer = choices(shot)[shot.get("gold", 0)]
        worked += f"{context}{task.delimiter}{answer}\n\n"
    of_question = [
        (f"{worked}{context}{task.delimiter}", end) for context, end in choices(task.examples[index])
    ]
    texts = [beginning + end for beginning, end in of_question]
    if task.task_type == "language_modeling":  # blanks at the end would be part of the answer's first token
        texts.insert(0, of_question[0][0].rstrip())
    return texts


def common_prefix(rows: list[np.ndarray]) -> int:
    """How many tokens at the beginning are equal in all rows."""
    shortest = min(map(len, rows))
    stacked = np.stack([row[:shortest] for row in rows])
    equal = (stacked == stacked[0]).all(axis=0)
    return shortest if equal.all() else int(equal.argmin())


def tokenize(task: Task, number: int, index: int, tokenizer, max_seq_len: int) -> TokenizedQuestion:
    """A question of task `number` as rows of at most `max_seq_len` tokens; a longer text keeps its end.

    The tokens after the common prefix are scored (schema: the common suffix; language_modeling: the answer),
    and one token at least.
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
    question, row_of_text = TokenizedQuestion(number, task.examples[index].get("gold", 0)), {}
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

    Groups, and so batches, do not depend on the number of processes: it cannot change a close decision. Each
    process tokenizes only its own questions.
    """
    questions = []
    for number, task in enumerate(tasks):
        sizes = [sum(map(_characters, example.values())) for example in task.examples]
        mean = sum(sizes) / max(1, len(sizes))  # of a worked example: each question has others
        questions += [(size + task.num_fewshot * mean, number, i) for i, size in enumerate(sizes)]
    order = [(number, i) for _, number, i in sorted(questions, reverse=True)]
    return [order[i : i + GROUP] for i in range(0, len(order), GROUP)]


def _characters(value: str | list[str] | int) -> int:
    return 0 if isinstance(value, int) else len(value) if isinstance(value, str) else max(map(len, value))


# ------------------------------------------------------------------------------------------------------
# From token rows to losses


class SharedPrefix:
    """Keys, values and last stream of prefixes, each computed once for all rows that begin with it.

    It takes the place of a decode.KVCache: the first forward pass fills it, the second one continues it. Row
    i of the second one continues prefix owner[i]; owner is (rows,) int64.
    """

    def __init__(self, depth: int):
        self.length, self.owner, self.ids = 0, None, None
        self.layers = [_Layer(self) for _ in range(depth)]

    def places(self, T: int) -> slice:
        return slice(self.length, self.length + T)

    def all_ids(self, idx):  # (B, T)
        if self.ids is None:
            self.ids = idx
            return idx
        return torch.cat((self.ids[self.owner], idx), 1)


class _Layer:
    def __init__(self, prefix: SharedPrefix):
        self.prefix, self.x, self.keys, self.values = prefix, None, None, None

    def previous_token(self, x):  # (B, T, C)
        if self.x is None:
            self.x = x[:, -1]
            return previous_token(x)
        return torch.cat((self.x[self.prefix.owner, None], x[:, :-1]), 1)

    def append(self, k, v):  # (B, H, T, D) both; returns (keys, values, no mask)
        if self.keys is None:
            self.keys, self.values = k, v
            return shift_keys(k), v, None
        k, v = (torch.cat((x[self.prefix.owner], new), 2) for x, new in ((self.keys, k), (self.values, v)))
        return shift_keys(k), v, None


def launch(model, questions: list[TokenizedQuestion], bos_id: int, dtype: torch.dtype):
    """Start the forward passes for all rows of these questions, without waiting for the device.

    Returns (row of each scored token, its loss in nats, whether it is the most probable one): a list, and
    tensors (scored tokens,) float32 and bool on the model's device. Rows are numbered through all questions.
    """
    first_row = np.cumsum([0, *(len(question.rows) for question in questions)])
    row_of, losses, exact = [], [], []
    device = model.head.weight.device
    for batch in batches(questions, TOKENS_PER_BATCH.get(device.type, 8192), model.config.max_seq_len):
        with autocast(device, dtype):
            logits, targets = forward(model, [questions[i] for i in batch], bos_id)
        losses.append(F.cross_entropy(logits, targets, reduction="none"))
        exact.append(logits.argmax(-1) == targets)
        for i in batch:
            pairs = zip(questions[i].rows, questions[i].starts, strict=True)
            for number, (row, start) in enumerate(pairs, start=first_row[i]):
                row_of += [number] * (len(row) - start)
    return row_of, torch.cat(losses), torch.cat(exact)


def forward(model, questions: list[TokenizedQuestion], bos_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits (N, V) float32, the true tokens (N,) int64) of all scored tokens of a batch of questions.

    The rows of a question have a common prefix, often with many worked examples. Its tokens, up to the length
    of the batch's shortest prefix, are computed once for each question; the other tokens for each row.
    """
    device = model.head.weight.device
    cached, cache = min(question.prefix for question in questions), None
    if cached < SHORTEST_PREFIX:
        cached = 0
    else:
        cache = SharedPrefix(model.config.depth)
        beginnings = np.stack([question.rows[0][:cached] for question in questions]).astype(np.int64)
        no_logits = torch.empty(0, dtype=torch.int64, device=device)
        model(to_device(torch.from_numpy(beginnings), device), cache=cache, positions=no_logits)
        owner = np.repeat(np.arange(len(questions)), [len(question.rows) for question in questions])
        cache.length, cache.owner = cached, to_device(torch.from_numpy(owner), device)
    rows = [row[cached:] for question in questions for row in question.rows]
    starts = [start - cached for question in questions for start in question.starts]
    length = padded(max(map(len, rows)), model.config.max_seq_len - cached)
    idx = np.full((len(rows), length), bos_id, dtype=np.int64)
    for row, tokens in zip(idx, rows, strict=True):
        row[: len(tokens)] = tokens
    scored = np.concatenate(  # indices into the flat idx
        [np.arange(starts[i], len(row)) + i * length for i, row in enumerate(rows)]
    )
    of_host = idx.ravel()[scored], scored - 1, idx
    targets, before, idx = (to_device(torch.from_numpy(array), device) for array in of_host)
    return model(idx, cache=cache, positions=before), targets


def finish(row_of: list[int], losses: torch.Tensor, exact: torch.Tensor, questions: list[TokenizedQuestion]):
    """Wait for the device, and yield (losses (choices,) float64, exact (choices,) bool) of each question; see
    `decide`."""
    count = np.bincount(row_of)  # scored tokens of each row
    mean = np.bincount(row_of, losses.cpu().double().numpy()) / count
    all_exact = np.bincount(row_of, exact.cpu().double().numpy()) == count
    first = 0
    for question in questions:
        rows = first + np.array(question.row_of_choice)
        yield mean[rows], all_exact[rows]
        first += len(question.rows)


def batches(questions: list[TokenizedQuestion], tokens_per_batch: int, max_seq_len: int) -> list[list[int]]:
    """The indices of the questions in batches of similar prefixes and lengths.

    The padded rows of a batch have at most `tokens_per_batch` tokens, unless it is a single question.
    """
    order = sorted(range(len(questions)), key=lambda i: (questions[i].prefix, questions[i].longest))
    made, needed = [], 0
    for i in order:
        question = questions[i]
        own = question.prefix + sum(len(row) - question.prefix for row in question.rows)
        batch = [*made[-1], i] if made else []
        rows = sum(len(questions[j].rows) for j in batch)
        longest = max((questions[j].longest for j in batch), default=0)
        cached = questions[batch[0]].prefix if batch else 0  # the shortest prefix
        computed = len(batch) * cached + rows * padded(longest - cached, max_seq_len)
        fits = rows * longest <= tokens_per_batch and computed <= MOST_PADDING * (needed + own) + 256
        if batch and fits:
            made[-1], needed = batch, needed + own
        else:
            made.append([i])
            needed = own
    return made


def padded(length: int, max_seq_len: int) -> int:
    """A row's length with its padding: few different shapes, and little more than needed."""
    step = 4 if length <= 64 else 16 if length <= 512 else 128
    return min(max_seq_len, -(-length // step) * step)
