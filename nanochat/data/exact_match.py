"""How many held-out questions get exactly the expected answer, and what needs no model to get there.

    questions = exact_match_questions(data, 300)
    exact_match(answers, questions)                                              # of a model
    exact_match(nearest_answer_baseline(data.train, questions), questions)       # {"all": 0.11, ...}

The first baseline gives the answer of the nearest training question, the second the most frequent answer to
questions of the same kind.
"""

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from nanochat.data.conversations import ConversationData, Conversations, Message

_WORD = re.compile(r"\w+|[^\w\s]")


class Question(NamedTuple):
    """A conversation that waits for its answer, the answer, and the kind of question."""

    messages: tuple[Message, ...]
    answer: str
    kind: str


def exact_match_questions(data: ConversationData, n: int) -> list[Question]:
    """At most n validation conversations of one question. A smaller n gives the first ones of a larger n.

    The order is drawn once for all. Where `data` does not know the kind of a question, it is "question".
    """
    kinds = getattr(data, "kinds", {})
    asked = [m for m in data.val.messages if [role for role, _ in m[-2:]] == ["user", "assistant"]]
    single = [m for m in asked if sum(role == "user" for role, _ in m) == 1]
    random.Random(0).shuffle(single)
    return [Question(m[:-1], m[-1][1], kinds.get((m[-2][1], m[-1][1]), "question")) for m in single[:n]]


def exact_match(answers: list[str], questions: list[Question]) -> dict[str, float]:
    """The share of answers that equal the expected one, but for blanks at the ends: of all, and by kind."""
    right: dict[str, list[bool]] = defaultdict(list)
    for answer, question in zip(answers, questions, strict=True):
        same = answer.strip() == question.answer.strip()
        right["all"].append(same)
        right[question.kind].append(same)
    return {kind: sum(found) / len(found) for kind, found in right.items()}


def majority_answer_baseline(data: ConversationData, questions: list[Question]) -> list[str]:
    """For each question the most frequent training answer to questions of its kind, "" if there is none."""
    kinds = getattr(data, "kinds", {})
    of_kind: dict[str, Counter] = defaultdict(Counter)
    for question, answer in _asked(data.train):
        of_kind[kinds.get((question, answer), "question")][answer] += 1
    return [max(of_kind[q.kind], key=of_kind[q.kind].get, default="") for q in questions]


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
    for question in questions:
        score = np.zeros(len(asked))
        for feature, times in _features(question.messages[-1][1]).items():
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
