"""The stream's three properties against slow, obviously right implementations: nothing lost, same batch on
any machine, exact position. In most tests every token of every document is a different number, its own name.
"""

import collections
import gc
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import UserError
from nanochat.data import loader as loader_module
from nanochat.data import packing
from nanochat.data.amount import check_amount
from nanochat.data.loader import TrainLoader, merge_states
from nanochat.data.parquet import RowGroups, iterate_documents
from nanochat.data.tokenizer import Tokenizer, train
from nanochat.data.validation import validation_batches

BOS = 0


class Numbers:
    """A tokenizer for texts that are numbers: "7 8 9" -> [7, 8, 9]."""

    bos_id = BOS
    fingerprint = "numbers"

    def encode(self, text: str) -> np.ndarray:
        return np.array(text.split(), dtype=np.uint32)

    def copy(self) -> "Numbers":
        return Numbers()


def flat(lists) -> list:
    return list(itertools.chain.from_iterable(lists))


class Corpus:
    """Documents of given lengths in shards of given row groups; all their tokens differ, and none is BOS."""

    def __init__(self, folder: Path, lengths: list[int], group_size: int, shards: int = 1):
        numbers = itertools.count(1)
        self.documents = [[next(numbers) for _ in range(n)] for n in lengths]
        texts = [" ".join(map(str, document)) for document in self.documents]
        self.shards = []
        per_shard = -(-len(texts) // shards)
        for i in range(shards):
            self.shards.append(Path(folder) / f"s{i}.parquet")
            part = pa.table({"text": pa.array(texts[i * per_shard : (i + 1) * per_shard], pa.string())})
            pq.write_table(part, self.shards[-1], row_group_size=group_size)
        self.sizes = RowGroups(self.shards).sizes

    def deal(self, n_lanes: int, seed: int, epoch: int) -> list[list[list[int]]]:
        """The documents of each lane in an epoch, dealt one by one, or by row groups where these are many."""
        sizes = self.sizes
        starts = np.cumsum([0, *sizes])
        groups = [
            [self.documents[starts[g] + i] for i in packing._permutation(sizes[g], seed, epoch, g + 1)]
            for g in packing._permutation(len(sizes), seed, epoch, 0).tolist()
        ]
        dealt = (
            groups if len(sizes) >= 8 * n_lanes else [[document] for group in groups for document in group]
        )
        return [flat(dealt[lane::n_lanes]) for lane in range(n_lanes)]


def slow_rows(epochs, row_tokens: int):
    """Rows of one lane by the rule, scanning the whole buffer for each piece; `epochs` yields documents."""
    row = []
    for documents in epochs:
        waiting, taken = collections.deque(documents), 0
        buffer: list[list[int]] = []  # oldest first
        while waiting or buffer:
            while waiting and len(buffer) < 32 and sum(map(len, buffer)) < 256 * row_tokens:
                document = waiting.popleft()
                taken += 1
                if document:
                    buffer.append(document)
            if not buffer:
                break
            space = row_tokens - len(row)
            fitting = [piece for piece in buffer if 1 + len(piece) <= space]
            if fitting:
                longest = max(map(len, fitting))
                i = next(i for i, p in enumerate(buffer) if len(p) == longest)
                row += [BOS, *buffer.pop(i)]
            else:
                by_size = sorted(range(len(buffer)), key=lambda i: (len(buffer[i]), -i))
                i = by_size[packing.drawn_piece([1 + len(buffer[i]) for i in by_size], taken)]
                row += [BOS, *buffer[i][: space - 1]]
                buffer[i] = buffer[i][space - 1 :]
            if len(row) == row_tokens:
                yield row
                row = []


def run(
    corpus, steps, *, n_lanes, T, B=1, W=1, seed=0, state=None, tokenizer=None
) -> tuple[np.ndarray, list]:
    """The rows of `steps` global batches, (steps, n_lanes, T + 1), put together from W ranks, and states."""
    rows = np.zeros((steps, n_lanes, T + 1), dtype=np.int64)
    states = []
    for rank in range(W):
        with TrainLoader(
            corpus.shards, tokenizer or Numbers(), n_lanes, T, B, rank, W, seed=seed, state=state
        ) as loader:
            for step in range(steps):
                batches = [next(loader) for _ in range(n_lanes // W // B)]
                inputs = torch.cat([inputs for inputs, _ in batches])
                targets = torch.cat([targets for _, targets in batches])
                assert torch.equal(inputs[:, 1:], targets[:, :-1])
                rows[step, rank::W, :-1] = inputs
                rows[step, rank::W, -1] = targets[:, -1]
            states.append(loader.state())
    return rows, states


@st.composite
def corpora(draw):
    """Lengths of documents, and sizes of everything else, from degenerate to plenty."""
    n_lanes = draw(st.sampled_from([1, 2, 3, 4, 8]))
    T = draw(st.sampled_from([1, 2, 3, 7, 16, 33]))
    length = st.sampled_from([0, 1, 2, T - 1, T, T + 1, 2 * T, 5 * T + 1]) | st.integers(0, 60)
    lengths = draw(st.lists(length, min_size=4 * n_lanes, max_size=120))
    lengths[: n_lanes * 2] = [max(1, n) for n in lengths[: n_lanes * 2]]
    lengths.append(max(0, n_lanes * T - sum(lengths)))  # less than one batch is refused
    return (
        lengths,
        draw(st.sampled_from([1, 2, 5, 50])),
        draw(st.integers(1, 3)),
        n_lanes,
        T,
        draw(st.integers(0, 99)),
    )


@given(case=corpora())
@settings(max_examples=60, deadline=None)
def test_every_lane_packs_its_documents_as_the_slow_packer_does(case):
    lengths, group_size, shards, n_lanes, T, seed = case
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(folder, lengths, group_size, shards)
        steps = 3 * sum(lengths) // (n_lanes * T) + 5
        rows, _ = run(corpus, steps, n_lanes=n_lanes, T=T, seed=seed)
        dealt = [corpus.deal(n_lanes, seed, epoch) for epoch in range(40)]
        for lane in range(n_lanes):
            expected = slow_rows((epoch[lane] for epoch in dealt), T + 1)
            for row, slow in zip(rows[:, lane], expected, strict=False):
                assert row.tolist() == slow


@given(case=corpora())
@settings(max_examples=40, deadline=None)
def test_nothing_is_lost_and_nothing_repeated_in_an_epoch(case):
    lengths, group_size, shards, n_lanes, T, seed = case
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(folder, lengths, group_size, shards)
        epochs = [corpus.deal(n_lanes, seed, epoch) for epoch in range(2)]
        shares = [[sum(map(len, documents)) for documents in epoch] for epoch in epochs]
        longest = max(sum(share) for share in zip(*shares, strict=True))
        rows, _ = run(corpus, longest // max(1, T // 2) + 3, n_lanes=n_lanes, T=T, seed=seed)
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
@settings(max_examples=40, deadline=None)
def test_restarts_at_any_row_and_with_any_number_of_processes_change_nothing(case, data):
    lengths, group_size, shards, n_lanes, T, seed = case
    divisors = [d for d in (1, 2, 3, 4, 8) if n_lanes % d == 0]
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(folder, lengths, group_size, shards)
        stretches = data.draw(
            st.lists(st.integers(0, 2 * sum(lengths) // (n_lanes * T)), min_size=2, max_size=4)
        )
        expected, states = run(corpus, sum(stretches), n_lanes=n_lanes, T=T, seed=seed)
        pieces, state = [], None
        for steps in stretches:
            W = data.draw(st.sampled_from(divisors))
            B = data.draw(st.sampled_from([d for d in divisors if n_lanes // W % d == 0]))
            rows, at_end = run(corpus, steps, n_lanes=n_lanes, T=T, seed=seed, W=W, B=B, state=state)
            pieces.append(rows)
            state = json.loads(json.dumps(merge_states(at_end)))
    assert np.array_equal(np.concatenate(pieces), expected)
    assert state == json.loads(json.dumps(states[0]))


@pytest.mark.parametrize("group_size", [1, 30])
def test_a_restart_where_the_lanes_are_in_different_epochs_changes_nothing(tmp_path, group_size):
    corpus = Corpus(tmp_path, [2000] + [10] * 63, group_size)
    expected, _ = run(corpus, 120, n_lanes=4, T=16)
    for steps in (30, 60, 90):
        _, (state,) = run(corpus, steps, n_lanes=4, T=16)
        assert len({position["epoch"] for position in state["lanes"].values()}) > 1
        assert np.array_equal(run(corpus, 120 - steps, n_lanes=4, T=16, state=state)[0], expected[steps:])


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """Shards of real source text, and a tokenizer trained on it."""
    folder = tmp_path_factory.mktemp("real")
    texts = [path.read_text("utf-8") for path in sorted(Path(json.__file__).parent.parent.glob("[a-h]*.py"))]
    texts = [text[i : i + 3000] for text in texts for i in range(0, len(text), 3000)][:300]
    for i in range(2):
        pq.write_table(pa.table({"text": texts[i::2]}), folder / f"{i}.parquet", row_group_size=16)
    return [folder / "0.parquet", folder / "1.parquet"], train(texts, 600), texts


def rows_of_real(real, W: int, B: int, steps: int, **options) -> np.ndarray:
    shards, tokenizer, _ = real
    corpus = Corpus.__new__(Corpus)
    corpus.shards = shards
    return run(corpus, steps, n_lanes=8, T=128, W=W, B=B, tokenizer=tokenizer, **options)[0]


def test_real_text_gives_the_same_rows_for_any_processes_and_batch_sizes(real):
    expected = rows_of_real(real, 1, 8, 60)
    for W, B in [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (8, 1)]:
        assert np.array_equal(rows_of_real(real, W, B, 60), expected), (W, B)
    assert not np.array_equal(rows_of_real(real, 1, 8, 60, seed=1), expected)


def test_rows_of_real_text_say_what_the_documents_say(real):
    _, tokenizer, texts = real
    rows = rows_of_real(real, 1, 8, 40)
    known = {tuple(tokenizer.encode(text).tolist()) for text in texts}
    every = rows.reshape(-1, 129)
    whole = 0
    for row in every:
        starts = np.flatnonzero(row == tokenizer.bos_id)
        assert starts[0] == 0
        whole += sum(tuple(piece[1:].tolist()) in known for piece in np.split(row, starts[1:]))
    assert whole > 0
    text = "".join(texts)
    for row in every[:20]:
        for piece in np.split(row, np.flatnonzero(row == tokenizer.bos_id)):
            assert tokenizer.decode(piece[1:]).strip("�") in text


def test_long_documents_take_turns_and_a_document_of_a_million_tokens_is_streamed(tmp_path):
    corpus = Corpus(tmp_path, [1_000_000, 3, 1, 0, 500, 2000], 2)
    rows, _ = run(corpus, 8000, n_lanes=1, T=128)
    tokens = rows[:, 0][rows[:, 0] != BOS][: 1_000_000 + 2504]
    assert sorted(tokens.tolist()) == list(range(1, 1_002_505))


def test_rows_that_follow_each_other_come_from_several_documents_even_beside_a_huge_one(tmp_path):
    corpus = Corpus(tmp_path, [20_000] + [1000] * 20, 8)
    rows, _ = run(corpus, 200, n_lanes=1, T=100)
    share = np.mean([row[1] <= 20_000 for row in rows[:, 0]])
    assert 0.3 < share < 0.7, "the huge document is half of the tokens"
    for first in range(0, 100, 10):
        assert len({max(0, row[1] - 20_001) // 1000 for row in rows[first : first + 10, 0]}) >= 3


def test_a_piece_is_drawn_as_often_as_its_size_says():
    counts = collections.Counter(packing.drawn_piece([1, 20, 79], salt) for salt in range(5000))
    assert [counts[i] / 5000 for i in range(3)] == pytest.approx([0.01, 0.2, 0.79], abs=0.02)


def test_epochs_differ_in_their_order(tmp_path):
    corpus = Corpus(tmp_path, [15] * 40, 10)
    rows, _ = run(corpus, 80, n_lanes=1, T=15)
    first, second = rows[:40, 0, 1].tolist(), rows[40:, 0, 1].tolist()
    assert sorted(first) == sorted(second) and first != second


def test_a_lane_reads_whole_row_groups_where_they_are_many_and_no_others(tmp_path, monkeypatch):
    corpus = Corpus(tmp_path, [10] * 64, 2)  # 32 row groups for 4 lanes
    monkeypatch.setattr(loader_module, "check_amount", lambda *_: None)
    read = collections.Counter()
    original = RowGroups.read
    monkeypatch.setattr(RowGroups, "read", lambda self, g: (read.update([g]), original(self, g))[1])
    run(corpus, 12, n_lanes=4, T=10, W=4)
    assert set(read) == set(range(32)) and max(read.values()) <= 2  # at most once in each of two epochs


def test_a_restart_costs_no_replay_of_the_epoch(tmp_path, monkeypatch):
    corpus = Corpus(tmp_path, [20] * 2000, 10)
    _, (state,) = run(corpus, 75, n_lanes=8, T=32)
    read, encoded = [], []
    original, encode = RowGroups.read, Numbers.encode
    monkeypatch.setattr(RowGroups, "read", lambda self, g: (read.append(g), original(self, g))[1])
    monkeypatch.setattr(Numbers, "encode", lambda self, text: (encoded.append(text), encode(self, text))[1])
    run(corpus, 1, n_lanes=8, T=32, state=state)
    assert len(encoded) < 8 * 32 * 2 and len(set(read)) < 100  # of 2000 documents in 200 row groups
    assert len(json.dumps(state)) < 8 * 32 * 20


# -- refusals


def test_numbers_that_do_not_divide_are_refused_with_those_that_do(tmp_path):
    corpus = Corpus(tmp_path, [5] * 50, 5)
    with pytest.raises(UserError, match=r"cannot share the 6 rows .* one of 1, 2, 3, 6 processes or another"):
        TrainLoader(corpus.shards, Numbers(), 6, 8, 1, 0, 4)
    with pytest.raises(UserError, match=r"4 does not divide a process.s 6 rows .* use one of 1, 2, 3, 6 or"):
        TrainLoader(corpus.shards, Numbers(), 12, 8, 4, 1, 2)


def test_fewer_documents_than_rows_of_a_batch_are_refused_with_the_numbers(tmp_path):
    corpus = Corpus(tmp_path, [5, 5, 5], 5)
    with pytest.raises(UserError, match=r"has 3 documents, fewer than the 4 rows .* at most 24 tokens"):
        TrainLoader(corpus.shards, Numbers(), 4, 8, 4)


def test_a_data_set_smaller_than_one_batch_is_refused_with_the_numbers(tmp_path):
    corpus = Corpus(tmp_path, [5, 5, 5, 5, 4], 2)
    TrainLoader(corpus.shards, Numbers(), 3, 8, 1).close()  # exactly one batch
    with pytest.raises(
        UserError, match=r"has 24 tokens, fewer than the 32 of a batch; .* at most 24, or more"
    ):
        TrainLoader(corpus.shards, Numbers(), 4, 8, 4)
    with pytest.raises(UserError, match=r"has 24 tokens, fewer than the 100 .* a smaller max_seq_len"):
        TrainLoader(corpus.shards, Numbers(), 1, 100, 1)


def test_data_without_text_are_refused_at_once(tmp_path):
    corpus = Corpus(tmp_path, [0] * 20, 2)
    with pytest.raises(UserError, match="has 0 tokens"):
        TrainLoader(corpus.shards, Numbers(), 2, 8, 1)


def test_tokens_are_counted_only_where_they_may_be_too_few(tmp_path, monkeypatch):
    corpus = Corpus(tmp_path, [100] * 100, 20)
    monkeypatch.setattr(Numbers, "encode", lambda *_: pytest.fail("counted"))
    check_amount(RowGroups(corpus.shards), Numbers(), 4, 8)


def test_a_lane_without_any_text_ends_in_an_error_not_in_an_endless_loop(tmp_path):
    corpus = Corpus(tmp_path, [100, *[0] * 20], 30)
    with (
        TrainLoader(corpus.shards, Numbers(), 8, 8, 1) as loader,
        pytest.raises(UserError, match="without any text"),
    ):
        for _ in range(800):
            next(loader)


def test_many_epochs_of_little_text_are_no_error(tmp_path):
    corpus = Corpus(tmp_path, [1, 0, 2, 13], 2)
    rows, _ = run(corpus, 400, n_lanes=1, T=16)
    assert collections.Counter(rows[rows != BOS].tolist())[1] > 100


def test_the_position_of_another_stream_is_refused_with_both_values(tmp_path):
    corpus = Corpus(tmp_path, [5] * 50, 5)
    _, (state,) = run(corpus, 3, n_lanes=4, T=8)
    cases = [
        ({"seed": 1}, "seed 0, this run has 1"),
        ({"n_lanes": 2}, "rows_per_step 4"),
        ({"T": 9}, "max_seq_len 8"),
    ]
    for change, message in cases:
        with pytest.raises(UserError, match=message):
            run(corpus, 1, **{"n_lanes": 4, "T": 8, "state": state, **change})
    with pytest.raises(UserError, match="packing None"):  # of a version that placed documents otherwise
        run(corpus, 1, n_lanes=4, T=8, state={k: v for k, v in state.items() if k != "packing"})
    other = Numbers()
    other.fingerprint = "other"
    with pytest.raises(UserError, match="tokenizer numbers, this run has other"):
        run(corpus, 1, n_lanes=4, T=8, state=state, tokenizer=other)
    (tmp_path / "more").mkdir()
    with pytest.raises(UserError, match="documents 50, this run has 51"):
        run(Corpus(tmp_path / "more", [5] * 51, 5), 1, n_lanes=4, T=8, state=state)


# -- steps, buffers, threads


def test_the_state_is_that_of_the_last_complete_step_not_of_what_is_prepared(tmp_path):
    corpus = Corpus(tmp_path, [30] * 100, 5)
    with TrainLoader(corpus.shards, Numbers(), 4, 8, 2) as loader:
        states = [loader.state()]
        for _ in range(10):
            next(loader)
            assert loader.state() == states[-1]  # in the middle of a step
            next(loader)
            states.append(loader.state())
    assert len({json.dumps(state) for state in states}) == 11
    for steps in (0, 3, 10):
        assert run(corpus, steps, n_lanes=4, T=8)[1] == [states[steps]]


@pytest.mark.parametrize("device_batch_size", [1, 4])
def test_a_batch_in_hand_is_never_overwritten(tmp_path, device_batch_size):
    corpus = Corpus(tmp_path, [30] * 100, 5)
    with TrainLoader(corpus.shards, Numbers(), 4, 8, device_batch_size) as loader:
        batches = [next(loader) for _ in range(60)]
        copies = [[tensor.clone() for tensor in batch] for batch in batches]
        for _ in range(60):
            next(loader)
        time.sleep(0.05)
    for batch, copy in zip(batches, copies, strict=True):
        for tensor, same in zip(batch, copy, strict=True):
            assert tensor.dtype == torch.int64 and tensor.shape == (device_batch_size, 8)
            assert tensor.is_contiguous() and torch.equal(tensor, same)
    tokens = torch.cat([targets.flatten() for _, targets in batches])
    tokens = tokens[tokens != BOS].tolist()
    assert len(set(tokens)) == len(tokens)


def loader_threads() -> int:
    return sum(thread.name == "nanochat-loader" for thread in threading.enumerate())


def test_no_thread_is_left_after_close_exception_or_neglect(tmp_path):
    corpus = Corpus(tmp_path, [30] * 100, 5)
    loader = TrainLoader(corpus.shards, Numbers(), 4, 8, 2)
    next(loader)
    assert loader_threads() == 1
    loader.close()
    loader.close()
    assert loader_threads() == 0
    next(loader)  # the rest of the step in hand
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)

    with pytest.raises(KeyError), TrainLoader(corpus.shards, Numbers(), 4, 8, 2) as loader:
        raise KeyError
    assert loader_threads() == 0

    neglected = TrainLoader(corpus.shards, Numbers(), 4, 8, 2)
    del neglected
    gc.collect()
    assert loader_threads() == 0


def test_an_error_of_the_thread_reaches_the_caller_with_its_place(tmp_path):
    class Broken(Numbers):
        def copy(self):
            return self

        def encode(self, text):
            raise ZeroDivisionError("in encode")

    corpus = Corpus(tmp_path, [30] * 100, 5)
    loader = TrainLoader(corpus.shards, Broken(), 4, 8, 2)
    with pytest.raises(ZeroDivisionError, match="in encode") as error:
        next(loader)
    assert any(entry.name == "encode" for entry in error.traceback)
    assert loader_threads() == 0


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError('by hand')"])
def test_a_process_ends_cleanly_with_a_loader_in_full_swing(real, tmp_path, end):
    shards, tokenizer, _ = real
    tokenizer.save(tmp_path / "t.json")
    script = f"""
import sys
from nanochat.data.loader import TrainLoader
from nanochat.data.tokenizer import Tokenizer
loader = TrainLoader({[str(s) for s in shards]!r}, Tokenizer.load({str(tmp_path / "t.json")!r}), 64, 512, 64)
next(loader)
{end}
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == {"": 0, "s": 3, "r": 1}[end[:1]]
    assert ("by hand" in result.stderr) == end.startswith("raise")
    assert result.stderr.count("\n") <= 4


# -- processes


def rows_of_rank(shards, n_lanes: int, T: int, W: int, rank: int, steps: int, results) -> None:
    with TrainLoader(shards, Numbers(), n_lanes, T, 1, rank, W, seed=5) as loader:
        rows = [next(loader)[0][0].tolist() for _ in range(steps * n_lanes // W)]
    results.put((rank, rows))


@pytest.mark.parametrize(("method", "W"), [("fork", 1), ("fork", 2), ("fork", 3), ("fork", 4), ("spawn", 3)])
def test_real_processes_together_see_the_rows_that_one_sees(tmp_path, method, W):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip("not here")
    corpus = Corpus(tmp_path, [30] * 200, 7)
    expected, _ = run(corpus, 5, n_lanes=12, T=16, seed=5)
    with TrainLoader(corpus.shards, Numbers(), 12, 16, 12, seed=5) as running:  # and is not disturbed
        first = next(running)[0]
        context = multiprocessing.get_context(method)
        results = context.SimpleQueue()
        arguments = [(corpus.shards, 12, 16, W, rank, 5, results) for rank in range(W)]
        processes = [context.Process(target=rows_of_rank, args=each) for each in arguments]
        for process in processes:
            process.start()
        rows = dict(results.get() for _ in processes)
        for process in processes:
            process.join(30)
            assert process.exitcode == 0
        assert torch.equal(first, torch.from_numpy(expected[0, :, :-1]))
        for step in range(1, 5):
            assert torch.equal(next(running)[0], torch.from_numpy(expected[step, :, :-1]))
    for rank in range(W):
        assert rows[rank] == expected[:, rank::W, :-1].reshape(-1, 16).tolist()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_loader_inherited_through_fork_says_so_and_the_child_ends(tmp_path):
    corpus = Corpus(tmp_path, [30] * 100, 5)
    script = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_loader import Numbers, TrainLoader
loader = TrainLoader({[str(s) for s in corpus.shards]!r}, Numbers(), 4, 8, 4)
next(loader)
for _ in range(3):
    child = os.fork()
    if not child:
        try:
            next(loader)
        except RuntimeError as error:
            sys.exit(7 * ("belongs to the process that made it" in str(error)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    next(loader)
print("fine")
"""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "fine\n", result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process_that_waits_for_data(tmp_path, number):
    corpus = Corpus(tmp_path, [30] * 100, 5)
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_loader import Numbers, TrainLoader
loader = TrainLoader({[str(s) for s in corpus.shards]!r}, Numbers(), 4, 8, 4)
print("ready", flush=True)
while True:
    next(loader)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(number)
    try:
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()  # it would read for ever
    assert process.returncode != 0 and "Fatal" not in err


def test_the_order_of_row_groups_is_that_of_seed_and_epoch(tmp_path, monkeypatch):
    corpus = Corpus(tmp_path, [10] * 60, 6)
    monkeypatch.setattr(loader_module, "check_amount", lambda *_: None)
    read: list[int] = []
    original = RowGroups.read
    monkeypatch.setattr(RowGroups, "read", lambda self, g: (read.append(g), original(self, g))[1])
    orders = {}
    for seed in (0, 1):
        read.clear()
        run(corpus, 100, n_lanes=2, T=10, seed=seed)
        orders[seed] = [tuple(read[10 * epoch : 10 * epoch + 10]) for epoch in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders[0] + orders[1])
    assert len({*orders[0], *orders[1]}) == 6


def test_waiting_is_counted_and_epochs_are_told(tmp_path):
    class Slow(Numbers):
        def copy(self):
            return self

        def encode(self, text):
            time.sleep(0.01)
            return super().encode(text)

    corpus = Corpus(tmp_path, [8] * 8, 5)
    with TrainLoader(corpus.shards, Slow(), 2, 8, 2) as loader:
        next(loader)
        assert loader.wait_s >= 0.05 and loader.epoch == 0
        for _ in range(12):
            next(loader)
        assert loader.epoch >= 2


# -- validation


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=20).filter(any),
    T=st.sampled_from([1, 2, 5, 8, 64]),
    B=st.integers(1, 5),
    W=st.integers(1, 4),
    limit=st.none() | st.integers(1, 100),
)
@settings(max_examples=60, deadline=None)
def test_validation_scores_every_token_once_in_windows_of_one_document(lengths, T, B, W, limit):
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(folder, lengths, 4)
        ranks = [
            validation_batches(corpus.shards, Numbers(), T, B, limit or -1, rank, W) for rank in range(W)
        ]
    batches = [list(rank) for rank in ranks]
    assert {len(b) for b in batches} == {len(rank) for rank in ranks} and len({len(b) for b in batches}) == 1
    owner = {token: i for i, document in enumerate(corpus.documents) for token in document}
    scored = []
    for inputs, targets in itertools.chain(*batches):
        assert inputs.shape == targets.shape == (B, T) and inputs.dtype == targets.dtype == torch.int64
        for input_row, row in zip(inputs.tolist(), targets.tolist(), strict=True):
            n = sum(target != -1 for target in row)
            assert row[n:] == [-1] * (T - n) and input_row[0] == BOS
            assert input_row[1:n] == row[: max(0, n - 1)] and set(input_row[n:]) <= {BOS}
            assert len({owner[token] for token in row[:n]}) <= 1
            scored += row[:n]
    everything = flat(corpus.documents)
    assert sorted(scored) == (everything if limit is None else everything[:limit])
    assert ranks[0].tokens == len(scored)


def test_validation_can_be_iterated_again_and_again_without_tokenizing_again(real, monkeypatch):
    shards, tokenizer, _ = real
    batches = validation_batches(shards, tokenizer, 64, 4)
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("tokenized again"))
    first, second = list(batches), list(batches)
    assert len(first) == len(batches) > 10
    assert all(
        torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)
    )


def test_validation_in_windows_covers_as_many_bytes_as_the_text_has(real):
    shards, tokenizer, _ = real
    sizes = torch.from_numpy(tokenizer.token_bytes())
    batches = validation_batches(shards, tokenizer, 64, 4)
    scored = sum(int(sizes[targets[targets >= 0]].sum()) for _, targets in batches)
    assert scored == sum(len(text.encode()) for text in iterate_documents(shards))


def test_validation_without_anything_to_score_is_refused(tmp_path):
    corpus = Corpus(tmp_path, [0, 0], 2)
    with pytest.raises(UserError, match="has no text"):
        validation_batches(corpus.shards, Numbers(), 8, 2)
    with pytest.raises(UserError, match="eval_tokens 0 scores nothing"):
        validation_batches(corpus.shards, Numbers(), 8, 2, eval_tokens=0)
