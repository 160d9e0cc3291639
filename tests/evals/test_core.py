"""CORE against a slow implementation: one choice at a time, nothing batched, all logits.

`slow_decision` also says what karpathy/nanochat decides. On 2026-11-22 the `evaluate_example` of its commit
92d63d4 was run by hand beside this project's, with the logits of the same model, on bundles of bundles.py
(seeds 0 to 2, a model with max_seq_len 96, 160 or 512, with and without windows, helped or not): of 1258
examples 1244 got equal decisions. It ends with an AssertionError in the other 14: in 12 the text without the
answer is no token prefix of the text with it, in 2 the scored tokens do not fit into max_seq_len.
"""

import itertools
import random

import numpy as np
import pytest
import test_gpt
import torch
import torch.nn.functional as F
from bundles import write_bundle
from evals.as_threads import in_processes

from nanochat import UserError
from nanochat.data.tokenizer import train
from nanochat.evals import core
from nanochat.evals.bundle import Task, open_bundle
from nanochat.gpt import GPT
from nanochat.machine.runtime import Machine

ALONE = Machine(torch.device("cpu"))
MAX_SEQ_LEN = 96  # the longest prompts of words_cut have some 500 tokens


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> list[Task]:
    folder = write_bundle(tmp_path_factory.mktemp("core") / "bundle", n=12, high=30)
    return open_bundle(folder, folder).tasks


@pytest.fixture(scope="module")
def tokenizer(tasks):
    return train([str(example) for task in tasks for example in task.examples], 400)


def make_model(tokenizer, window_pattern="L") -> GPT:
    """Large random weights, so that no decision is a matter of rounding."""
    sizes = 2, 32, 2, tokenizer.vocab_size, MAX_SEQ_LEN
    return test_gpt.make_model(*sizes, window_pattern, stir=0.3, bigrams=3)


@pytest.fixture(scope="module")
def model(tokenizer) -> GPT:
    return make_model(tokenizer)


class Helped:
    """A model with a higher logit for three of four true next tokens, so that it completes some texts."""

    def __init__(self, model: GPT):
        self.model, self.config, self.head = model, model.config, model.head

    def __call__(self, idx, positions=None, cache=None):
        following = torch.roll(idx, -1, 1)
        helped = (idx * 7 + following * 3) % 4 != 0
        logits = self.model(idx, cache=cache) + 30 * helped[..., None] * F.one_hot(
            following, self.config.vocab_size
        )
        return logits if positions is None else logits.flatten(0, 1)[positions]


def slow_prompts(task: Task, index: int) -> list[str]:
    """Written with the words of the format, one type after the other."""
    examples, text, delimiter = task.examples, "", task.delimiter
    others = [i for i in range(len(examples)) if i != index]
    number = min(task.num_fewshot, len(others))
    for i in random.Random(1234 + index).sample(others, number) if number else []:
        shot = examples[i]
        if task.task_type == "multiple_choice":
            text += shot["query"] + delimiter + shot["choices"][shot["gold"]] + "\n\n"
        elif task.task_type == "schema":
            text += shot["context_options"][shot["gold"]] + delimiter + shot["continuation"] + "\n\n"
        else:
            text += shot["context"].strip() + delimiter + shot["continuation"] + "\n\n"
    own = examples[index]
    if task.task_type == "multiple_choice":
        return [text + own["query"] + delimiter + choice for choice in own["choices"]]
    if task.task_type == "schema":
        return [text + context + delimiter + own["continuation"] for context in own["context_options"]]
    without = text + own["context"].strip() + delimiter
    return [without.rstrip(), without + own["continuation"]]


def equal_from(rows, indices) -> int:
    """How many tokens are equal in all rows, at 0, 1, 2, ... or at -1, -2, -3, ..."""
    return sum(1 for _ in itertools.takewhile(lambda i: len({row[i] for row in rows}) == 1, indices))


@torch.no_grad()
def slow_decision(model, tokenizer, task: Task, index: int) -> bool:
    """Whether the example is answered right: one choice at a time, each by itself, with all its logits."""
    rows = [[tokenizer.bos_id, *tokenizer.encode(text).tolist()] for text in slow_prompts(task, index)]
    shortest = min(map(len, rows))
    if task.task_type == "schema":
        suffix = equal_from(rows, range(-1, -shortest - 1, -1))
        starts = [len(row) - suffix for row in rows]
    else:
        starts = [equal_from(rows, range(shortest))] * len(rows)
    losses = []
    for row, start in zip(rows, starts, strict=True):
        start = min(start, len(row) - 1)  # a choice that is the beginning of another keeps its last token
        cut = max(0, len(row) - model.config.max_seq_len)
        row, start = torch.tensor(row[cut:]), max(1, start - cut)
        logits = model(row[None])[0]
        losses.append(F.cross_entropy(logits[start - 1 : -1], row[start:]).item())
        exact = torch.equal(logits[start - 1 : -1].argmax(-1), row[start:])
    if task.task_type == "language_modeling":
        return exact
    return losses.index(min(losses)) == task.examples[index]["gold"]


def evaluate(model, tokenizer, tasks) -> dict[str, float]:
    return core.evaluate(model, tokenizer, tasks, torch.float32, ALONE)


@pytest.fixture(scope="module", params=["L", "SL", "helped"])
def judged(request, tokenizer, tasks):
    """(a model, its slow decisions)"""
    model = make_model(tokenizer, "SL" if request.param == "SL" else "L")
    model = Helped(model) if request.param == "helped" else model
    slow = {
        (number, i): slow_decision(model, tokenizer, task, i)
        for number, task in enumerate(tasks)
        for i in range(len(task.examples))
    }
    return model, slow


@pytest.mark.parametrize("tokens_per_batch", [1, 300, 16384])
def test_every_decision_is_that_of_one_choice_at_a_time(
    judged, tokenizer, tasks, monkeypatch, tokens_per_batch
):
    model, slow = judged
    made, decide = [], core.decide
    monkeypatch.setattr(core, "decide", lambda *given: made.append(decide(*given)) or made[-1])
    monkeypatch.setitem(core.TOKENS_PER_BATCH, "cpu", tokens_per_batch)
    evaluate(model, tokenizer, tasks)
    found = dict(zip(itertools.chain(*core.deal(tasks)), made, strict=True))
    assert found == slow
    for task_type in {"language_modeling"} if isinstance(model, Helped) else {"multiple_choice", "schema"}:
        assert {right for (t, _), right in found.items() if tasks[t].task_type == task_type} == {True, False}


def test_accuracies_are_centred_by_guessing(judged, tokenizer, tasks):
    model, slow = judged
    results = evaluate(model, tokenizer, tasks)
    for number, task in enumerate(tasks):
        assert results[task.label] == np.mean([slow[number, i] for i in range(len(task.examples))])
    scores, mean = core.centred(tasks, results)
    for task in tasks:
        guessing = 0.01 * task.baseline
        assert scores[task.label] == pytest.approx((results[task.label] - guessing) / (1 - guessing))
    assert mean == pytest.approx(np.mean([*scores.values()]))


@pytest.mark.parametrize(("world_size", "group"), [(2, 10), (3, 10), (3, 64)])  # 64: two processes have some
def test_any_number_of_processes_gets_the_same_results(
    model, tokenizer, tasks, monkeypatch, world_size, group
):
    monkeypatch.setattr(core, "GROUP", group)

    def one(machine):
        asked = []
        found = core.evaluate(model, tokenizer, tasks, torch.float32, machine, progress=asked.append)
        return found, sum(asked)

    found, asked = zip(*in_processes(world_size, one), strict=True)
    assert list(found) == [evaluate(model, tokenizer, tasks)] * world_size
    assert sum(asked) == sum(len(task.examples) for task in tasks)
    assert min(asked) >= 10 if group == 10 else min(asked) == 0


def test_a_model_that_is_no_number_is_an_error(model, tokenizer, tasks):
    broken = make_model(tokenizer)
    broken.head.weight.data[5] = float("nan")
    with pytest.raises(UserError, match="is not a number"):
        evaluate(broken, tokenizer, tasks)


# -- Prompts


def test_a_prompt_is_the_worked_examples_of_the_published_seed_and_the_question(tasks):
    for task in tasks:
        for index in range(len(task.examples)):
            assert core.prompts(task, index) == slow_prompts(task, index)
    two = [{"context": " c  ", "continuation": "d"}, {"context": "e\n", "continuation": "f "}]
    task = Task("t", "language_modeling", 10, ": ", 0, two)  # more examples than there are
    assert core.prompts(task, 0) == ["e: f \n\nc:", "e: f \n\nc: d"]


def test_a_prompt_that_is_too_long_keeps_its_end(tokenizer, tasks):
    task = next(task for task in tasks if task.label == "words_cut")
    question = core.tokenize(task, 8, 0, tokenizer, MAX_SEQ_LEN)
    (row,), (start,) = question.rows, question.starts
    whole = tokenizer.encode(core.prompts(task, 0)[1])
    assert len(whole) > 2 * MAX_SEQ_LEN == 2 * len(row)
    assert row.tolist() == whole[-MAX_SEQ_LEN:].tolist()
    assert tokenizer.decode(row[start:]).strip() == task.examples[0]["continuation"]
    short = core.tokenize(task, 8, 0, tokenizer, 3)  # not even the continuation fits
    assert short.starts == [1] and len(short.rows[0]) == 3


# -- Batches


def test_batches_hold_every_question_once_and_no_more_tokens_than_asked():
    draw, questions = random.Random(0), []
    for _ in range(300):
        lengths = [draw.randint(2, 300) for _ in range(draw.choice([1, 2, 4]))]
        rows = [np.arange(n, dtype=np.uint32) for n in lengths]
        questions.append(core.TokenizedQuestion(0, 0, rows, [n - 1 for n in lengths], []))
    made = core.batches(questions, 4096, 2048)
    assert sorted(itertools.chain(*made)) == list(range(300))
    for batch in made:
        rows = sum(len(questions[i].rows) for i in batch)
        assert rows * max(questions[i].longest for i in batch) <= 4096
    assert len(made) < 200
    assert [len(batch) for batch in core.batches(questions[:5], 1, 2048)] == [1] * 5


def three_questions(tokenizer):
    choices = ["alpha", "beta", "gamma", "delta"]
    task = Task("t", "multiple_choice", 0, " ", 25, [{"query": "w" * 60, "choices": choices, "gold": 0}])
    return [core.tokenize(task, 0, 0, tokenizer, MAX_SEQ_LEN)] * 3


def test_what_a_forward_pass_needs_goes_to_a_gpu_without_a_wait(model, tokenizer, monkeypatch):
    copies, given = [], []

    def to_device(tensor, device):
        copies.append(tensor.clone())
        return copies[-1]

    def receiving(idx, cache, positions):
        given.extend(x for x in (idx, positions, cache.owner) if x is not None and x.numel())
        return model(idx, cache=cache, positions=positions)

    monkeypatch.setattr(core, "to_device", to_device)
    receiving.config, receiving.head = model.config, model.head
    with torch.no_grad():
        _, targets = core.forward(receiving, three_questions(tokenizer), tokenizer.bos_id)
    assert len(copies) == 5 and {*map(id, copies)} == {*map(id, given), id(targets)}


def test_what_the_rows_of_a_question_share_is_computed_once(model, tokenizer):
    questions = three_questions(tokenizer)
    seen = []

    def counting(idx, **options):
        seen.append(tuple(idx.shape))
        return model(idx, **options)

    counting.config, counting.head = model.config, model.head
    with torch.no_grad():
        logits, targets = core.forward(counting, questions, tokenizer.bos_id)
        cached = questions[0].prefix
        assert seen[0] == (3, cached) and cached > 40 and seen[1][0] == 12 and seen[1][1] < 30
        rows = [(row, start) for q in questions for row, start in zip(q.rows, q.starts, strict=True)]
        whole = [model(torch.tensor(row.astype(int))[None])[0, start - 1 : -1] for row, start in rows]
    torch.testing.assert_close(logits, torch.cat(whole), rtol=1e-4, atol=1e-4)
    assert targets.tolist() == [token for row, start in rows for token in row[start:].tolist()]
