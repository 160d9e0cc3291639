"""The stream's three properties against slow, obviously right implementations: nothing lost, same batch on
any machine, exact position. In most tests every token of every document is a different number, its own name.
"""

import collections
import functools
import itertools
import json
import tempfile

import numpy as np
import pytest
import torch
from corpora import BOS, Corpus, Numbers, run
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import flat

from nanochat import UserError
from nanochat.data import loader as loader_module
from nanochat.data import packing
from nanochat.data.loader import TrainLoader, merge_states
from nanochat.data.parquet import Documents


def slow_rows(epochs, row_tokens: int, windows: bool = False):
    """Rows of one lane by the rule, scanning the whole buffer for each piece; `epochs` yields documents.

    windows: documents come as windows, in several passes.
    """
    row = []
    for documents in epochs:
        waiting, taken = collections.deque(documents), 0
        buffer: list[list[int]] = []  # oldest first
        while waiting or buffer:
            while waiting and len(buffer) < 32 and sum(map(len, buffer)) < 256 * row_tokens:
                buffer += [window for window in waiting.popleft() if window]
                taken += 1
            if not buffer:
                break
            space = row_tokens - len(row)
            fitting = [piece for piece in buffer if 1 + len(piece) <= space]
            if fitting:
                longest = max(map(len, fitting))
                i, *others = (i for i, p in enumerate(buffer) if len(p) == longest)
                if windows:
                    newest_first = [*reversed(others), i]
                    sizes = [1 + longest] * len(newest_first)
                    i = newest_first[packing.drawn_piece(sizes, taken)]
                row += [BOS, *buffer.pop(i)]
            else:
                by_size = sorted(range(len(buffer)), key=lambda i: (len(buffer[i]), -i))
                i = by_size[packing.drawn_piece([1 + len(buffer[i]) for i in by_size], taken)]
                row += [BOS, *buffer[i][: space - 1]]
                buffer[i] = buffer[i][space - 1 :]
            if len(row) == row_tokens:
                yield row
                row = []


@st.composite
def corpora(draw):
    """Lengths of documents, and sizes of everything else, from degenerate to plenty."""
    n_lanes = draw(st.sampled_from([1, 2, 3, 4, 8]))
    T = draw(st.sampled_from([1, 2, 3, 7, 16, 33]))
    length = st.sampled_from([0, 1, 2, T - 1, T, T + 1, 2 * T, 5 * T + 1]) | st.integers(0, 60)
    most = 120 if T > 3 else 40  # of rows of a token or two there are thousands
    lengths = draw(st.lists(length, min_size=4 * n_lanes, max_size=most))
    lengths[: n_lanes * 2] = [max(1, n) for n in lengths[: n_lanes * 2]]
    lengths.append(max(0, n_lanes * T - sum(lengths)))  # less than one batch is refused
    group_size, shards = draw(st.sampled_from([1, 2, 5, 50])), draw(st.integers(1, 3))
    return lengths, group_size, shards, n_lanes, T, draw(st.integers(0, 99))


@given(case=corpora())
@settings(max_examples=60)
def test_every_lane_packs_its_documents_as_the_slow_packer_does_and_nothing_is_lost_or_repeated(case):
    lengths, group_size, shards, n_lanes, T, seed = case
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(folder, lengths, group_size, shards)
        dealt = functools.cache(lambda epoch: corpus.deal(n_lanes, T, seed, epoch))
        shares = [[len(flat(flat(documents))) for documents in dealt(epoch)] for epoch in range(2)]
        longest = max(sum(share) for share in zip(*shares, strict=True))
        steps = max(3 * sum(lengths) // (n_lanes * T) + 5, longest // max(1, T // 2) + 3)
        rows, _ = run(corpus.shards, steps, n_lanes=n_lanes, T=T, seed=seed)
    for lane in range(n_lanes):
        dealt_to_lane = (dealt(epoch)[lane] for epoch in itertools.count())
        expected = slow_rows(dealt_to_lane, T + 1, corpus.passes(T) > 1)
        for row in rows[:, lane]:
            assert row.tolist() == next(expected)
    assert (rows[:, :, 0] == BOS).all()
    targets = rows[:, :, 1:]
    streams = [targets[:, lane][targets[:, lane] != BOS] for lane in range(n_lanes)]
    # Epoch by epoch: the lanes' next tokens, as many as each was dealt, are together the whole corpus.
    at = [0] * n_lanes
    for epoch in shares:
        seen = flat(streams[lane][at[lane] : at[lane] + n].tolist() for lane, n in enumerate(epoch))
        assert sorted(seen) == list(range(1, sum(lengths) + 1))
        at = [start + n for start, n in zip(at, epoch, strict=True)]


@given(case=corpora(), data=st.data())
@settings(max_examples=40)
def test_restarts_at_any_row_and_with_any_number_of_processes_change_nothing(case, data):
    lengths, group_size, shards, n_lanes, T, seed = case
    divisors = [d for d in (1, 2, 3, 4, 8) if n_lanes % d == 0]
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(folder, lengths, group_size, shards)
        steps = st.integers(0, 2 * sum(lengths) // (n_lanes * T))
        stretches = data.draw(st.lists(steps, min_size=2, max_size=4))
        expected, states = run(corpus.shards, sum(stretches), n_lanes=n_lanes, T=T, seed=seed)
        stretches_rows, state = [], None
        for steps in stretches:
            W = data.draw(st.sampled_from(divisors))
            B = data.draw(st.sampled_from([d for d in divisors if n_lanes // W % d == 0]))
            rows, at_end = run(corpus.shards, steps, n_lanes=n_lanes, T=T, seed=seed, W=W, B=B, state=state)
            stretches_rows.append(rows)
            state = json.loads(json.dumps(merge_states(at_end)))
    assert np.array_equal(np.concatenate(stretches_rows), expected)
    assert state == json.loads(json.dumps(states[0]))


@pytest.mark.parametrize("group_size", [1, 30])
def test_a_restart_where_the_lanes_are_in_different_epochs_changes_nothing(tmp_path, group_size):
    shards = Corpus(tmp_path, [2000] + [10] * 63, group_size).shards
    expected, _ = run(shards, 120, n_lanes=4, T=16)
    for steps in (30, 60, 90):
        _, (state,) = run(shards, steps, n_lanes=4, T=16)
        assert len({position["epoch"] for position in state["lanes"].values()}) > 1
        assert np.array_equal(run(shards, 120 - steps, n_lanes=4, T=16, state=state)[0], expected[steps:])


def test_a_document_much_longer_than_the_buffer_is_streamed(tmp_path):
    corpus = Corpus(tmp_path, [200_000, 3, 1, 0, 500, 2000], 2)  # the buffer holds 256 x 129 tokens
    rows, _ = run(corpus.shards, 1620, n_lanes=1, T=128)
    tokens = rows[:, 0][rows[:, 0] != BOS][:202_504]
    assert sorted(tokens.tolist()) == list(range(1, 202_505))


def test_rows_that_follow_each_other_come_from_several_documents_even_beside_a_huge_one(tmp_path):
    corpus = Corpus(tmp_path, [20_000] + [1000] * 20, 8)
    rows, _ = run(corpus.shards, 200, n_lanes=1, T=100)
    share = np.mean([row[1] <= 20_000 for row in rows[:, 0]])
    assert 0.3 < share < 0.7, "the huge document is half of the tokens"
    for first in range(0, 100, 10):
        assert len({max(0, row[1] - 20_001) // 1000 for row in rows[first : first + 10, 0]}) >= 3


def test_a_quarter_of_an_epoch_reads_from_most_documents_that_are_longer_than_a_row(tmp_path, monkeypatch):
    corpus = Corpus(tmp_path, [80] * 400, 50)
    encoded = arguments_of(monkeypatch, Numbers, "encode")
    rows, _ = run(corpus.shards, 500, n_lanes=1, T=16)
    assert len({int(row[1] - 1) // 80 for row in rows[:, 0]}) > 250
    run(corpus.shards, 2500, n_lanes=1, T=16)
    assert corpus.passes(16) > 4 and len(encoded) <= 1.2 * 2 * 400, "tokens are kept for the next pass"
    monkeypatch.setattr(packing, "KEPT_BYTES", 1000)
    assert corpus.passes(16) == 1


def test_a_position_of_the_time_before_there_were_passes_is_continued(tmp_path, monkeypatch):
    shards = Corpus(tmp_path, [80] * 100, 10).shards
    with monkeypatch.context() as patch:
        patch.setattr(packing, "MOST_PASSES", 1)
        expected, _ = run(shards, 60, n_lanes=4, T=16)
        _, (state,) = run(shards, 20, n_lanes=4, T=16)
    del state["passes"]
    assert np.array_equal(run(shards, 40, n_lanes=4, T=16, state=state)[0], expected[20:])


# -- what is read


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """The numbers of the row groups that are read, in order. The check of the amount reads none."""
    monkeypatch.setattr(loader_module, "check_amount", lambda *_: None)
    return arguments_of(monkeypatch, Documents, "read")


def arguments_of(monkeypatch, owner: type, method: str) -> list:
    """The first argument of each call of a method from now on."""
    seen, original = [], getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda self, *args: (seen.append(args[0]), original(self, *args))[1])
    return seen


def test_a_lane_reads_whole_row_groups_if_they_are_many_and_no_others(tmp_path, read):
    corpus = Corpus(tmp_path, [10] * 64, 2)  # 32 row groups for 4 lanes
    read.clear()
    run(corpus.shards, 12, n_lanes=4, T=10, W=4)
    assert set(read) == set(range(32))
    assert max(collections.Counter(read).values()) <= 2  # at most once in each of two epochs


def test_text_whose_tokens_are_kept_for_the_next_pass_is_not_read_again(tmp_path, read):
    corpus = Corpus(tmp_path, [80] * 100, 10)
    read.clear()
    run(corpus.shards, 2000, n_lanes=1, T=16)
    assert corpus.passes(16) > 2 and sorted(read) == list(range(10)), "in four epochs of several passes"


@pytest.mark.parametrize(("passes", "documents", "groups"), [(1, 2000, 100), (2, 4000, 150)])
def test_a_restart_costs_no_replay_of_the_epoch(tmp_path, read, monkeypatch, passes, documents, groups):
    monkeypatch.setattr(packing, "MOST_PASSES", passes)
    shards = Corpus(tmp_path, [20] * documents, 10).shards
    _, (state,) = run(shards, 75, n_lanes=8, T=32)
    read.clear()
    encoded = arguments_of(monkeypatch, Numbers, "encode")
    run(shards, 1, n_lanes=8, T=32, state=state)
    assert len(encoded) < 8 * 32 * 2 and len(set(read)) < groups  # of 10 documents
    assert len(json.dumps(state)) < 8 * 32 * 20


def test_an_order_is_that_of_all_its_seeds():
    all_seeds = itertools.product((0, 1), range(3), (0, 7))
    orders = {tuple(packing.permutation(10, *seeds).tolist()) for seeds in all_seeds}
    assert len(orders) == 12 and all(sorted(order) == list(range(10)) for order in orders)


# -- refusals


@pytest.mark.parametrize(
    ("lengths", "rows", "T", "B", "W", "message"),
    [
        ([5] * 50, 6, 8, 1, 4, r"4 processes cannot share the 6 rows .* one of 1, 2, 3, 6 processes"),
        ([5] * 50, 12, 8, 4, 2, r"4 does not divide a process's 6 rows .* use one of 1, 2, 3, 6 or another"),
        ([5, 5, 5], 4, 8, 4, 1, r"has 3 documents, fewer than the 4 rows .* at most 24 tokens"),
        ([5, 5, 5, 5, 4], 4, 8, 4, 1, r"has 24 tokens, fewer than the 32 of a batch; .* at most 24, or more"),
        ([0] * 20, 2, 8, 1, 1, "has 0 tokens"),
    ],
)
def test_a_batch_that_cannot_be_made_is_refused_with_numbers_that_can(
    tmp_path, lengths, rows, T, B, W, message
):
    shards = Corpus(tmp_path, lengths, 2).shards
    with pytest.raises(UserError, match=message):
        TrainLoader(shards, Numbers(), rows, T, B, 0, W)
    if sum(lengths) == 24:
        TrainLoader(shards, Numbers(), 3, T, 1).close()  # exactly one batch


def test_documents_are_those_of_the_same_micro_batch(tmp_path):
    shards = Corpus(tmp_path, [3] * 40, 5).shards
    boundaries = lambda inputs, bos: (inputs == bos).long()  # noqa: E731
    with TrainLoader(shards, Numbers(), 4, 8, 2, boundaries=boundaries) as batches:
        for _ in range(5):
            inputs, _ = next(batches)
            assert torch.equal(batches.documents, (inputs == BOS).long()) and batches.documents.sum() > 2
    with TrainLoader(shards, Numbers(), 4, 8, 2) as batches:
        next(batches)
        assert batches.documents is None


def test_a_lane_without_any_text_ends_in_an_error_not_in_an_endless_loop(tmp_path):
    corpus = Corpus(tmp_path, [100, *[0] * 20], 30)
    with pytest.raises(UserError, match="without any text"):
        run(corpus.shards, 100, n_lanes=8, T=8)


def test_the_position_of_another_stream_is_refused_with_both_values(tmp_path, monkeypatch):
    shards, more = (Corpus(tmp_path / str(n), [5] * n, 5).shards for n in (50, 51))
    _, (state,) = run(shards, 3, n_lanes=4, T=8)
    good = {"shards": shards, "n_lanes": 4, "T": 8, "state": state}
    for change, message in (
        ({"seed": 1}, "seed 0, this run has 1"),
        ({"n_lanes": 2}, "rows_per_step 4"),
        ({"T": 9}, "max_seq_len 8"),
        ({"shards": more}, "documents 50, this run has 51"),
        ({"state": state | {"packing": None}}, "packing None"),  # of a version that packed otherwise
    ):
        with pytest.raises(UserError, match=message):
            run(steps=1, **good | change)
    monkeypatch.setattr(Numbers, "fingerprint", "other")
    with pytest.raises(UserError, match="tokenizer numbers, this run has other"):
        run(steps=1, **good)
