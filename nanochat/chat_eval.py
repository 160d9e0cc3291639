"""What a model answers: its answers to questions, and how many of them are right word for word."""

import torch

from nanochat.data.chat_format import prompt_ids
from nanochat.data.conversations import Conversations, Message
from nanochat.engine import generate

MOST_ANSWER_TOKENS = 64


def questions(split: Conversations, most: int) -> list[tuple[tuple[Message, ...], str]]:
    """(messages up to the first question, its answer) of up to `most` conversations, evenly chosen."""
    stride = max(1, len(split.messages) // max(1, most))
    chosen = split.messages[::stride][:most]
    first = [next(i for i, (role, _) in enumerate(messages) if role == "assistant") for messages in chosen]
    return [(messages[:i], messages[i][1]) for messages, i in zip(chosen, first, strict=True)]


def answer(model, tokenizer, conversations, dtype: torch.dtype, max_tokens=MOST_ANSWER_TOKENS) -> list[str]:
    """The likeliest answer to each conversation, whose last message is a question."""
    stop_ids = {tokenizer.special_tokens["<|assistant_end|>"], tokenizer.bos_id}
    texts = []
    for messages in conversations:
        ids = prompt_ids(tokenizer, messages)
        written = generate(model, ids, max_tokens, dtype, temperature=0, stop_ids=stop_ids)
        texts.append(tokenizer.decode(list(written)))
    return texts


def exact_match(model, tokenizer, questions, dtype: torch.dtype, machine) -> float:
    """The share of questions that the model answers word for word, over all processes."""
    mine = questions[machine.rank :: machine.world_size]
    answers = answer(model, tokenizer, [messages for messages, _ in mine], dtype)
    right = sum(a.strip() == wanted.strip() for a, (_, wanted) in zip(answers, mine, strict=True))
    total, asked = machine.all_sum([right, len(mine)])
    return total / asked if asked else 0.0
