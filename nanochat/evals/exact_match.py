"""How many validation questions a model answers word for word, and how many need no model.

questions = exact_match_questions(data, 300)              # [((messages), answer), ...]
exact_match(model, tokenizer, questions, dtype, machine)  # the share that the model answers
nearest_answer_share(data, questions)                     # with the answer of the nearest training question
"""

import functools
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch

from nanochat.data.chat_format import ConversationData, Conversations, Message, prompt_ids
from nanochat.engine import generate_batch

Question = tuple[tuple[Message, ...], str]  # (a conversation that waits for its answer, the answer)

MOST_ANSWER_TOKENS = 48
BATCH = 16  # conversations that are answered together
MOST_INDEXED = 50_000  # training conversations; a larger index would delay the start

_WORD = re.compile(r"\w+|[^\w\s]")


def exact_match_questions(data: ConversationData, n: int) -> list[Question]:
    """The first questions of at most n validation conversations, with their answers.

    Their order is shuffled, always in the same way, so a smaller n gives the first ones of a larger n.
    """
    firsts = [[role for role, _ in messages].index("assistant") for messages in data.val.messages]
    questions = [(m[:i], m[i][1]) for m, i in zip(data.val.messages, firsts, strict=True)]
    random.Random(0).shuffle(questions)
    return questions[:n]


def answer(model, tokenizer, conversations, dtype: torch.dtype) -> list[str]:
    """The likeliest answer to each conversation, whose last message is a question. An answer ends with
    <|assistant_end|>, after MOST_ANSWER_TOKENS tokens, or at the model's max_seq_len."""
    stop_ids = {tokenizer.special_tokens["<|assistant_end|>"], tokenizer.bos_id}
    prompts = [prompt_ids(tokenizer, messages) for messages in conversations]
    answers = [""] * len(prompts)
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for first in range(0, len(by_length), BATCH):
        batch = by_length[first : first + BATCH]
        options = {"temperature": 0, "stop_ids": stop_ids}
        batch_prompts = [prompts[i] for i in batch]
        columns = list(generate_batch(model, batch_prompts, MOST_ANSWER_TOKENS, dtype, **options))
        for row, i in enumerate(batch):
            ids = [column[row] for column in columns if column[row] is not None]
            answers[i] = tokenizer.decode(ids).strip()
    return answers


def exact_match(model, tokenizer, questions: list[Question], dtype: torch.dtype, machine) -> float:
    """The share of questions that the model answers word for word, over all processes."""
    mine = questions[machine.rank :: machine.world_size]
    answers = answer(model, tokenizer, [messages for messages, _ in mine], dtype)
    total, asked = machine.all_sum([_right(mine, answers), len(mine)])
    return total / asked if asked else 0.0


def _right(questions: list[Question], answers: list[str]) -> int:
    """How many answers are the expected ones, without blanks at both ends."""
    return sum(a.strip() == wanted.strip() for a, (_, wanted) in zip(answers, questions, strict=True))


# -- without a model


def nearest_answer_share(data: ConversationData, questions: list[Question]) -> float | None:
    """The share that `nearest_answers` answers word for word; None if its index would be large."""
    if len(data.train.messages) > MOST_INDEXED:
        return None
    return _right(questions, nearest_answers(data.train, questions)) / len(questions)


def nearest_answers(train: Conversations, questions: list[Question]) -> list[str]:
    """For each question the answer of the nearest training question.

    Nearest by the cosine of tf-idf vectors over words, pairs of words and letter triples. Of equally near
    questions the first one counts.
    """
    asked = list(_asked(train))
    counts = [_features(question) for question, _ in asked]
    seen_in = Counter(feature for count in counts for feature in count)
    rarity = {feature: math.log((1 + len(asked)) / n) for feature, n in seen_in.items()}
    index: dict[str, list[tuple[int, float]]] = defaultdict(list)  # feature: (training question, weight)
    for n, count in enumerate(counts):
        weights = {feature: _weight(times, rarity[feature]) for feature, times in count.items()}
        length = math.sqrt(sum(weight * weight for weight in weights.values()))
        for feature, weight in weights.items():
            index[feature].append((n, weight / length))

    @functools.cache
    def found(feature: str) -> tuple[np.ndarray, np.ndarray]:  # (training questions, weights)
        pairs = np.array(index.get(feature, []), np.float64).reshape(-1, 2)
        return pairs[:, 0].astype(np.int64), pairs[:, 1]

    answers = []
    for messages, _ in questions:
        score = np.zeros(len(asked))
        for feature, times in _features(messages[-1][1]).items():
            numbers, weights = found(feature)
            score[numbers] += weights * _weight(times, rarity.get(feature, 0.0))
        answers.append(asked[int(score.argmax())][1])
    return answers


def _asked(conversations: Conversations) -> Iterator[tuple[str, str]]:
    """(question, answer) of each turn."""
    for messages in conversations.messages:
        for (role, question), (_, answer) in pairwise(messages):
            if role == "user":
                yield question, answer


def _weight(times: int, rarity: float) -> float:
    return (1 + math.log(times)) * rarity


def _features(text: str) -> Counter:
    words = _WORD.findall(text)
    pairs = [" ".join(pair) for pair in pairwise(words)]
    triples = [f"...{text[i : i + 3]}" for i in range(len(text) - 2)]
    return Counter([*words, *pairs, *triples])
