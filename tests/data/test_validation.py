"""Validation batches: every token is scored once, whatever the batch size and the number of processes."""

import itertools
import tempfile

import pytest
import torch
from corpora import BOS, Corpus, Numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import flat

from nanochat import UserError
from nanochat.data.parquet import iterate_documents
from nanochat.data.tokenizer import Tokenizer
from nanochat.data.validation import validation_batches


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=20).filter(any),
    T=st.sampled_from([1, 2, 5, 8, 64]),
    B=st.integers(1, 5),
    W=st.integers(1, 4),
    limit=st.none() | st.integers(1, 100),
)
@settings(max_examples=60, deadline=None)
def test_every_token_is_scored_once_in_windows_of_one_document(lengths, T, B, W, limit):
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


def test_real_text_is_tokenized_once_for_any_number_of_iterations_and_all_its_bytes_count(real, monkeypatch):
    shards, tokenizer, _ = real
    sizes = torch.from_numpy(tokenizer.token_bytes())
    batches = validation_batches(shards, tokenizer, 64, 4)
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("tokenized again"))
    first, second = list(batches), list(batches)
    assert len(first) == len(batches) > 10
    assert all(torch.equal(a, b) for a, b in zip(flat(first), flat(second), strict=True))
    scored = sum(int(sizes[targets[targets >= 0]].sum()) for _, targets in batches)
    assert scored == sum(len(text.encode()) for text in iterate_documents(shards))


def test_nothing_to_score_is_refused(tmp_path):
    corpus = Corpus(tmp_path, [0, 0], 2)
    with pytest.raises(UserError, match="has no text"):
        validation_batches(corpus.shards, Numbers(), 8, 2)
