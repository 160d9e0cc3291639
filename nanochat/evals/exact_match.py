"""How many held-out questions get exactly the expected answer, and what needs no model to get there.

    questions = exact_match_questions(data, 300)                    # [((messages), answer), ...]
    answers = nearest_answer_baseline(data.train, questions)        # or those of a model
    exact_match_by_kind(data, questions, answers)                   # {"all": 0.11, "call": 0.0, ...}

The baseline gives the answer of the nearest training question.
"""

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from nanochat.data.conversations import ConversationData, Conversations, Message

Question = tuple[tuple[Message, ...], str]  # (a conversation that waits for its answer, the answer)

MOST_INDEXED = 50_000  # training conversations; a larger index would delay the start

_WORD = re.compile(r"\w+|[^\w\s]")


def exact_match_questions(data: ConversationData, n: int) -> list[Question]:
    """The first questions of at most n validation conversations, with their answers.

    The order is drawn once for all, so a smaller n gives the first ones of a larger n.
    """
    firsts = [[role for role, _ in messages].index("assistant") for messages in data.val.messages]
    questions = [(m[:i], m[i][1]) for m, i in zip(data.val.messages, firsts, strict=True)]
    random.Random(0).shuffle(questions)
    return questions[:n]


def kind_of(data: ConversationData, question: str, answer: str) -> str:
    """The kind of a question; "question" where `data` does not know it."""
    return getattr(data, "kinds", {}).get((question, answer), "question")


def exact_match_by_kind(
    data: ConversationData, questions: list[Question], answers: list[str]
) -> dict[str, float]:
    """The share of answers that equal the expected one, but for blanks at the ends: of all, and by kind."""
    right: dict[str, list[bool]] = defaultdict(list)
    for (messages, expected), answer in zip(questions, answers, strict=True):
        same = answer.strip() == expected.strip()
        right["all"].append(same)
        right[kind_of(data, messages[-1][1], expected)].append(same)
    return {kind: sum(found) / len(found) for kind, found in right.items()}


def nearest_answer_share(data: ConversationData, questions: list[Question]) -> float | None:
    """The share that `nearest_answer_baseline` answers word for word; None if its index would be large."""
    if len(data.train.messages) > MOST_INDEXED:
        return None
    return exact_match_by_kind(data, questions, nearest_answer_baseline(data.train, questions))["all"]


def nearest_answer_baseline(train: Conversations, questions: list[Question]) -> list[str]:
    """For each question the answer of the nearest training question.

    Near means a large cosine between the counts of words, pairs of words and letter triples, each weighted
    by how rare it is in the training questions (tf-idf). Of questions equally near the first one counts.
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
    wanted = {}  # feature: (training questions, weights) as arrays
    answers = []
    for messages, _ in questions:
        score = np.zeros(len(asked))
        for feature, times in _features(messages[-1][1]).items():
            if feature not in wanted:
                pairs = np.array(index.get(feature, []), np.float64).reshape(-1, 2)
                wanted[feature] = pairs[:, 0].astype(np.int64), pairs[:, 1]
            numbers, weights = wanted[feature]
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
