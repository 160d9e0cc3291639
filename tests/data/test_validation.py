"""Validation batches: every token is scored once, whatever the batch size and the number of processes."""

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import BOS, Corpus, Numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import flat

from nanochat import UserError
from nanochat.data.validation import ValidationBatches, tokenize_validation


@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=20).filter(any),
    T=st.sampled_from([1, 2, 5, 8, 40, 64]),
    B=st.integers(1, 5),
    W=st.integers(1, 4),
    limit=st.none() | st.integers(1, 100),
)
@settings(max_examples=60)
def test_every_token_is_scored_once_in_windows_of_one_document(lengths, T, B, W, limit):
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(folder, lengths, 4)
        tokens = tokenize_validation(corpus.shards, Numbers(), limit or -1, Path(folder))
    ranks = [ValidationBatches(tokens, T, B, rank, W) for rank in range(W)]
    assert [len(list(rank)) for rank in ranks] == [len(rank) for rank in ranks]
    owner = {token: i for i, document in enumerate(corpus.documents) for token in document}
    scored = []
    for inputs, targets in itertools.chain(*ranks):  # they can be iterated again
        assert inputs.shape == targets.shape and inputs.dtype == targets.dtype == torch.int64
        assert inputs.numel() <= B * T and inputs.size(1) <= T
        for input_row, row in zip(inputs.tolist(), targets.tolist(), strict=True):
            n = sum(target != -1 for target in row)
            assert set(row[n:]) <= {-1} and input_row[0] == BOS
            assert input_row[1:n] == row[: max(0, n - 1)] and set(input_row[n:]) <= {BOS}
            assert n and len({owner[token] for token in row[:n]}) == 1
            scored += row[:n]
    everything = flat(corpus.documents)
    assert sorted(scored) == (everything if limit is None else everything[:limit])


def test_windows_of_like_lengths_share_a_batch_and_the_processes_share_the_windows_evenly(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 300, 900).tolist()
    tokens = tokenize_validation(Corpus(tmp_path, lengths, 50).shards, Numbers(), -1, tmp_path)
    seen = []
    for rank in range(3):
        batches = ValidationBatches(tokens, 256, 8, rank, 3)
        sizes = [((targets >= 0).sum(1), targets.size(1)) for _, targets in batches]
        assert all(length - n.max() < 16 for n, length in sizes)  # no longer than the longest needs
        assert all(len(n) == 8 * 256 // length for n, length in sizes[:-1])  # and filled with rows
        seen.append(torch.cat([n for n, _ in sizes]))
        assert seen[-1].tolist() == sorted(seen[-1].tolist(), reverse=True)
        assert seen[-1].sum() > 0.9 * sum(n.numel() * length for n, length in sizes)  # little is padding
    assert len({len(n) for n in seen}) <= 2 and max(map(sum, seen)) < 1.03 * min(map(sum, seen))


def test_nothing_to_score_is_refused(tmp_path):
    corpus = Corpus(tmp_path, [0, 0], 2)
    with pytest.raises(UserError, match="has no text"):
        tokenize_validation(corpus.shards, Numbers(), -1, tmp_path)


# -- The file that keeps the tokens


class Other(Numbers):
    fingerprint = "other"


def test_a_second_start_reads_the_tokens_that_the_first_has_kept(tmp_path, monkeypatch):
    corpus, other = Corpus(tmp_path / "a", [5, 0, 9], 2), Corpus(tmp_path / "b", [5, 9], 2)
    folder = tmp_path / "kept"
    plain = tokenize_validation(corpus.shards, Numbers(), -1, tmp_path)
    assert plain.tolist() == [BOS, *corpus.documents[0], BOS, BOS, *corpus.documents[2]]
    asked = [(corpus, Numbers(), -1), (corpus, Numbers(), 7), (corpus, Other(), -1), (other, Numbers(), -1)]
    made = [tokenize_validation(c.shards, tokenizer, n, folder) for c, tokenizer, n in asked]
    assert len(list(folder.iterdir())) == 4  # one for each text, tokenizer and number of tokens
    monkeypatch.setattr(Numbers, "encode", lambda *_: pytest.fail("tokenized again"))
    again = [tokenize_validation(c.shards, tokenizer, n, folder) for c, tokenizer, n in asked]
    assert all(np.array_equal(a, b) for a, b in zip(made, again, strict=True))
    assert np.array_equal(made[0], plain) and len(made[1]) == 7 + 3


def test_a_damaged_file_is_made_again_and_a_folder_that_cannot_be_written_only_costs_the_time(tmp_path):
    shards, folder = Corpus(tmp_path / "corpus", [50, 30], 2).shards, tmp_path / "kept"
    tokens = tokenize_validation(shards, Numbers(), -1, folder).tolist()
    (file,) = folder.iterdir()
    good = file.read_bytes()
    flipped = good[:-100] + bytes([good[-100] ^ 1]) + good[-99:]
    flags = good.rindex(b"PK\x01\x02") + 8  # in the zip file's directory
    encrypted, unknown = (good[:flags] + bytes([flag]) + good[flags + 1 :] for flag in (1, 32))
    for damaged in (good[:-40], good[:8], b"", flipped, encrypted, unknown):  # 8 bytes: shorter than its head
        file.write_bytes(damaged)
        assert tokenize_validation(shards, Numbers(), -1, folder).tolist() == tokens
        assert file.read_bytes() == good and list(folder.iterdir()) == [file]  # nothing else is left there
    assert tokenize_validation(shards, Numbers(), -1, file / "folder").tolist() == tokens
