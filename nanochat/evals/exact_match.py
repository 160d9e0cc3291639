"""How many validation questions a model answers word for word.

questions = exact_match_questions(data, 300)              # [((messages), answer), ...]
exact_match(model, tokenizer, questions, dtype, machine)  # the share that the model answers
"""

import random

import torch

from nanochat.data.chat_format import ConversationData, Message, prompt_ids
from nanochat.engine import generate_batch

Question = tuple[tuple[Message, ...], str]  # (a conversation that waits for its answer, the answer)

MOST_ANSWER_TOKENS = 48
BATCH = 16  # conversations that are answered together


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
    """The share of questions that the model answers word for word, but for blanks at both ends, over all
    processes."""
    mine = questions[machine.rank :: machine.world_size]
    answers = answer(model, tokenizer, [messages for messages, _ in mine], dtype)
    right = sum(a == wanted.strip() for a, (_, wanted) in zip(answers, mine, strict=True))
    total, asked = machine.all_sum([right, len(mine)])
    return total / asked if asked else 0.0
