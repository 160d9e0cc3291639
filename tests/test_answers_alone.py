"""Packed conversations have the gradient of each conversation alone, with its targets picked by hand."""

import random

import numpy as np
import pytest
import test_gpt
import torch
import torch.nn.functional as F

from nanochat.data.chat_format import Conversations
from nanochat.data.conversation_loader import ConversationBatches, ConversationLoader, render_all
from nanochat.data.tokenizer import Tokenizer
from nanochat.evals.bits_per_byte import bits_per_byte
from nanochat.machine.runtime import Machine
from nanochat.ops.attention import attention

TOKENIZER = Tokenizer("bytes", [bytes([i]) for i in range(256)], r"[\s\S]")
SPECIAL, T, ROWS = TOKENIZER.special_tokens, 48, 6


@pytest.fixture(scope="module")
def model():
    return test_gpt.make_model(3, 32, 2, TOKENIZER.vocab_size, T, "SL", stir=0.05, bigrams=3)


def conversations(count=40):
    draw = random.Random(0)

    def turn(role):
        return role, role[0] + "".join(draw.choices("abc ", k=draw.randint(1, 9)))

    talks = [tuple(map(turn, ("user", "assistant") * draw.randint(1, 2))) for _ in range(count)]
    return Conversations(talks, [1.0] * count)


def by_hand(model, messages):
    """(sum of the losses of the answers and their ends, their number) of one conversation, alone."""
    ids, targets = [SPECIAL["<|bos|>"]], []
    for role, content in messages:
        start, end = SPECIAL[f"<|{role}_start|>"], SPECIAL[f"<|{role}_end|>"]
        targets += [-1, *[b if role == "assistant" else -1 for b in content.encode()]]
        targets.append(end if role == "assistant" else -1)
        ids += [start, *content.encode(), end]
    logits = model(torch.tensor([ids[:-1]]))[0]
    targets = torch.tensor(targets)
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum"), (targets >= 0).sum().item()


def gradients(model, loss):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 6), (1, 2), (2, 1), (3, 2)])
def test_the_gradient_of_a_packed_step_is_that_of_each_conversation_alone(model, world_size, micro_batch):
    rendered = render_all(conversations(), TOKENIZER, T, "assistant")
    total, trained = 0.0, []
    for rank in range(world_size):
        options = (ROWS, T, micro_batch, rank, world_size, 5)
        loader = ConversationLoader(rendered, TOKENIZER, *options, boundaries=attention.boundaries)
        shares = 0.0
        for _ in range(ROWS // world_size // micro_batch):
            inputs, targets = next(loader)
            loss = model(inputs, targets, "sum", documents=loader.documents)
            shares = shares + loss / loader.step_targets
        total = total + gradients(model, shares * world_size) / world_size  # DDP takes the mean
        trained += [c for row in loader._rows[:ROWS][rank::world_size] for c in row]
    assert len(trained) > ROWS, "several conversations share a row"
    talks = conversations().messages
    losses, counts = zip(*(by_hand(model, talks[c]) for c in trained), strict=True)
    expected = gradients(model, sum(losses) / sum(counts))
    assert (total - expected).norm() < 1e-5 * expected.norm()


def test_validation_scores_the_same_targets_by_hand(model):
    talks = conversations(13)
    rendered = render_all(talks, TOKENIZER, T, "assistant")
    losses, counts = zip(*(by_hand(model, messages) for messages in talks.messages), strict=True)
    answers = sum(
        len(content) for messages in talks.messages for role, content in messages if role == "assistant"
    )
    token_bytes = torch.from_numpy(TOKENIZER.token_bytes())
    for batch_size in (1, 4, 100):
        batches = ConversationBatches(rendered, TOKENIZER.bos_id, batch_size)
        found = bits_per_byte(model, batches, token_bytes, torch.float32, Machine(torch.device("cpu")))
        assert found.bpb == pytest.approx(sum(losses).item() / np.log(2) / answers, rel=1e-5)
    assert sum(counts) == rendered.is_target.sum()
