"""What a model answers: its answers to questions, and how many of them are right word for word."""

import torch

from nanochat.data.chat_format import prompt_ids
from nanochat.engine import generate_batch

MOST_ANSWER_TOKENS = 48
BATCH = 16  # conversations that are answered together


def answer(model, tokenizer, conversations, dtype: torch.dtype) -> list[str]:
    """The likeliest answer to each conversation, whose last message is a question. An answer ends at
    <|assistant_end|>, after MOST_ANSWER_TOKENS tokens, or where the model's positions end."""
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


def exact_match(model, tokenizer, questions, dtype: torch.dtype, machine) -> float:
    """The share of questions that the model answers word for word, but for blanks at the ends, over all
    processes."""
    mine = questions[machine.rank :: machine.world_size]
    answers = answer(model, tokenizer, [messages for messages, _ in mine], dtype)
    right = sum(a == wanted.strip() for a, (_, wanted) in zip(answers, mine, strict=True))
    total, asked = machine.all_sum([right, len(mine)])
    return total / asked if asked else 0.0
