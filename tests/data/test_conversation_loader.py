"""Conversations as batches: the mask token by token, whole conversations in rows, the stream's properties."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import UserError
from nanochat.data.chat_format import Conversations, next_turn_ids, prompt_ids, render
from nanochat.data.conversation_loader import ConversationLoader, Rendered, pack, render_all
from nanochat.data.tokenizer import Tokenizer

TOKENIZER = Tokenizer("bytes", [bytes([i]) for i in range(256)], r"[\s\S]")
T = 32


def spelled(ids, counted):
    """The tokens as text, those that are targets in capitals."""
    names = {v: k for k, v in TOKENIZER.special_tokens.items()}
    parts = [names.get(i) or chr(i) for i in ids.tolist()]
    return "".join(p.upper() if c else p for p, c in zip(parts, counted, strict=True))


def test_the_mask_token_by_token():
    conversation = (("system", "be"), ("user", "hi"), ("assistant", "yo"), ("user", "a"), ("assistant", "b"))
    ids, counted = render(TOKENIZER, conversation, "assistant")
    assert spelled(ids, counted) == (
        "<|bos|><|user_start|>be\n\nhi<|user_end|><|assistant_start|>YO<|ASSISTANT_END|>"
        "<|user_start|>a<|user_end|><|assistant_start|>B<|ASSISTANT_END|>"
    )
    everything, counted = render(TOKENIZER, conversation, "all")
    assert (everything == ids).all() and not counted[0] and counted[1:].all()
    prompt = prompt_ids(TOKENIZER, conversation[:2])
    assert prompt == ids[: len("be\n\nhi") + 4].tolist()
    assert prompt == next_turn_ids(TOKENIZER, "hi", "be", begun=False)  # as a chat reads it, turn by turn
    text = "<|assistant_end|><|bos|>"  # stays text in a message
    ids, _ = render(TOKENIZER, (("user", text), ("assistant", text)), "all")
    assert (ids >= 256).sum() == 5 and len(ids) == 5 + 2 * len(text)


def rendered(sizes, weights=None):
    """Conversation n has `sizes[n]` tokens, all of them the number n; all but the first are targets."""
    first = np.concatenate([[0], np.cumsum(sizes)])
    ids = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    counted = np.ones(len(ids), bool)
    counted[first[:-1]] = False
    return Rendered(ids, counted, first, np.array(weights or [1.0] * len(sizes)), 0, 0)


@given(st.lists(st.integers(2, T + 1), min_size=1, max_size=80), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_best_fit_is_that_of_a_slow_search(sizes, random):
    order = list(range(len(sizes)))
    random.shuffle(order)
    rows = pack(np.array(sizes), np.array(order), T + 1)
    slow = []
    for n in sorted(order, key=lambda n: -sizes[n]):
        fits = [r for r in slow if sum(sizes[m] for m in r) + sizes[n] <= T + 1]
        rest = {id(r): T + 1 - sum(sizes[m] for m in r) for r in fits}
        row = min(fits, key=lambda r: rest[id(r)]) if fits else None
        if row is None:
            slow.append(row := [])
        row.append(n)
    assert sorted(n for row in rows for n in row) == sorted(order)
    assert all(sum(sizes[n] for n in row) <= T + 1 for row in rows)
    used = lambda rows: Counter(sum(sizes[n] for n in row) for row in rows)  # noqa: E731
    assert used(rows) == used(slow)


def steps(loader, count, micro_batches):
    """[(inputs, targets)] of whole steps, and the targets that the loader counted in each."""
    out = []
    for _ in range(count):
        batches = zip(*(next(loader) for _ in range(micro_batches)), strict=True)
        out.append((*map(np.concatenate, batches), loader.step_targets))
    return out


def make(sizes, rank=0, world_size=1, device_batch_size=1, state=None, weights=None, rows=6):
    return ConversationLoader(
        rendered(sizes, weights), TOKENIZER, rows, T, device_batch_size, rank, world_size, 7, "cpu", state
    )


SIZES = [3 + 7 * n % 29 for n in range(60)]


def test_in_an_epoch_every_conversation_is_trained_on_as_often_as_its_weight_says():
    weights = [2.0 if n % 3 else 1.0 for n in range(60)]
    loader = make(SIZES, weights=weights, rows=1)
    seen = Counter()
    for _ in range(len(loader._rows)):
        _, targets = next(loader)
        seen.update(targets[targets >= 0].tolist())
    assert loader.epoch == 0 and loader.state()["row"] == len(loader._rows)
    assert seen == {n: weights[n] * (SIZES[n] - 1) for n in range(60)}
    next(loader)
    assert loader.state()["epoch"] == 1


def test_a_weight_below_one_is_a_share_of_the_epochs():
    quarter = rendered([5] * 200, [0.25] * 200)
    counts = [sum(map(len, quarter.epoch_rows(epoch, 7, T))) for epoch in range(8)]
    assert 35 < np.mean(counts) < 65 and len(set(counts)) > 1


def test_an_epoch_is_never_empty_and_weights_for_less_than_one_conversation_are_refused():
    for epoch in range(50):
        assert rendered([5] * 10, [0.1] * 10).epoch_rows(epoch, 0, T)
    with pytest.raises(UserError, match=r"0\.005 conversations an epoch"):
        rendered([5] * 50, [0.0001] * 50).epoch_rows(0, 0, T)


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_processes_sees_the_same_rows_and_counts_the_same_targets(world_size):
    alone = steps(make(SIZES, device_batch_size=6), 8, 1)
    shares = [steps(make(SIZES, rank, world_size), 8, 6 // world_size) for rank in range(world_size)]
    for step, (inputs, targets, counted) in enumerate(alone):
        assert counted == (targets >= 0).sum() > 0
        for rank, share in enumerate(shares):
            assert (share[step][0] == inputs[rank::world_size]).all()
            assert (share[step][1] == targets[rank::world_size]).all() and share[step][2] == counted


def test_a_saved_position_continues_to_the_row_with_any_number_of_processes():
    expected = steps(make(SIZES, device_batch_size=6), 9, 1)
    loader = make(SIZES, device_batch_size=2)
    steps(loader, 4, 3)
    next(loader)  # in the middle of a step: the position is that of the last whole one
    state = loader.state()
    again = steps(make(SIZES, device_batch_size=3, state=state), 5, 2)
    for (inputs, targets, _), (expected_inputs, expected_targets, _) in zip(again, expected[4:], strict=True):
        assert (inputs == expected_inputs).all() and (targets == expected_targets).all()


def test_a_position_of_other_conversations_is_refused():
    state = make(SIZES).state()
    with pytest.raises(UserError, match="conversations 60, this run has 59"):
        make(SIZES[:-1], state=state)
    with pytest.raises(UserError, match="cannot share"):
        make(SIZES, world_size=4)


def test_a_long_conversation_loses_its_end_and_one_without_answer_within_the_row_is_dropped():
    def talk(question, answer):
        return (("user", "q" * question), ("assistant", "a" * answer))

    conversations = Conversations([talk(3, 50), talk(40, 3), talk(2, 2)], [1.0, 1.0, 2.0])
    short = render_all(conversations, TOKENIZER, T, "assistant")
    assert (short.cut, short.dropped, short.sizes.tolist()) == (2, 1, [T + 1, 9])
    assert short.weights.tolist() == [1, 2]
    assert render_all(conversations, TOKENIZER, T, "all").dropped == 0
    with pytest.raises(UserError, match="no conversation has an answer"):
        render_all(Conversations([talk(40, 3)], [1.0]), TOKENIZER, T, "assistant")
