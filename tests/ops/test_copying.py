"""What followed the longest match of a row's last tokens, against a search by the definition."""

import pytest
import torch
from test_gpt import make_model

from nanochat.ops import copying


def search(ids, begins):
    """The followers by their definition: all earlier places, all lengths."""
    tokens, lengths = torch.zeros_like(ids), torch.zeros_like(ids)
    for r, (row, document) in enumerate(zip(ids.tolist(), begins.cumsum(1).tolist(), strict=True)):
        for i in range(len(row)):
            for j in range(i):
                n = 0
                while n < min(copying.LONGEST, j + 1) and row[i - n] == row[j - n] >= 0:
                    if not document[i] == document[i - n] == document[j - n]:
                        break
                    n += 1
                if n and n >= lengths[r, i]:
                    tokens[r, i], lengths[r, i] = row[j + 1], n
    return tokens, lengths


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("vocab_size, bits", [(2, 20), (12, 20), (12, 6), (12, 7)])
def test_both_ways_find_what_the_definition_says(vocab_size, bits, documents, monkeypatch):
    """With few bits only a row or two of 50 tokens are sorted together."""
    monkeypatch.setattr(copying, "BITS", bits)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (3, 50), generator=generator)
    ids[1, :7] = -1  # slots before a text begins
    begins = (ids < 0) | (torch.rand(ids.shape, generator=generator) < 0.05 * documents)
    expected, tokens = search(ids, begins), ids + (begins.cumsum(1) << bits) if documents else ids.int()
    assert set(expected[1].flatten().tolist()) >= {0, 1, 2, 3}
    for new in (1, 3, 50):
        for found, wanted in zip(copying._compare(ids, tokens, new), expected, strict=True):
            assert torch.equal(found, wanted[:, -new:])
    for found, wanted in zip(copying._sort(ids, begins), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.slow
def test_compiled_as_for_a_gpu_the_comparison_finds_the_same():
    ids = torch.randint(5, (2, 60), generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(copying._compare)
    for found, wanted in zip(compiled(ids, ids.int(), 60), search(ids, ids < 0), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("documents", [None, "numbers", "begins"])
def test_a_match_is_of_the_same_row_and_document(documents):
    ids = torch.tensor([[5, 6, 7, 5, 6, 8, 6, 5], [9, 6, 7, 5, 3, 9, 6, 7]])
    visible = None
    if documents == "numbers":
        number = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [0] * 8])
        visible = (number[:, :, None] == number[:, None])[:, None]
    elif documents == "begins":
        visible = torch.tensor([0, 4, 8, 16, 16], dtype=torch.int32)
    token, length = copying.followers(ids, 8, visible)
    whole = documents is None
    assert token.tolist() == [
        [0, 0, 0, 6, 7 if whole else 0, 0, 8, 6 if whole else 0],
        [0, 0, 0, 0, 0, 6, 7, 5],
    ]
    assert length.tolist() == [
        [0, 0, 0, 1, 2 if whole else 0, 0, 1, 1 if whole else 0],
        [0, 0, 0, 0, 0, 1, 2, 3],
    ]


def test_a_text_that_repeats_costs_less_than_one_that_does_not():
    model = make_model(copying=True, bigrams=0, stir=0, vocab_size=500)
    with torch.no_grad():
        model.copying.scales[1].fill_(20.0)
        model.head.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    new = torch.randperm(500, generator=torch.Generator().manual_seed(1))[:32][None]
    again = torch.cat((new[:, :16], new[:, :16]), 1)
    loss = [model(row[:, :-1], row[:, 1:], reduction="none")[16:].mean() for row in (again, new)]
    assert loss[0] < loss[1] - 2
