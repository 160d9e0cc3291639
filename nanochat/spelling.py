"""What tokens share with those that are spelled alike.

` self`, `Self` and `self` are three tokens, and each would have to learn alone what they have in common. So a
row of the embedding, and of the head, is the token's own plus the mean of the rows of its pieces: two to
four letters in a row, the whole word, and its shape, each shared with all tokens that have it. fastText (arXiv
1607.04606) does so for words.
"""

import re
from collections import Counter

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanochat.lookup import embedding

PIECES = 32  # that a token has at most


def pieces_of(token: bytes) -> set[bytes]:
    """The pieces of a token's spelling.

    `<` and `>` stand for where the word begins and ends. Blanks around it and the case of ASCII letters count
    for its shape alone: ` assertEqual(` has the shape ` aAa(`.
    """
    word = b"<" + token.strip().lower() + b">"
    shape = token
    for run, letter in ((rb"[a-z]+", b"a"), (rb"[A-Z]+", b"A"), (rb"[0-9]+", b"0")):
        shape = re.sub(run, letter, shape)
    letters = {word[i : i + n] for n in (2, 3, 4) for i in range(len(word) - n + 1)}
    return letters | {word, b"shape " + shape}


def pieces_table(tokens: list[bytes], vocab_size: int) -> torch.Tensor:
    """The pieces of each token by number, (V, PIECES) int32, filled up with 0; special tokens have none.

    Only pieces that several tokens have get a number, the most frequent ones if there are more than V - 1. Of
    a token with many pieces the rarest ones count.
    """
    pieces = [pieces_of(token) for token in tokens]
    count = Counter(piece for found in pieces for piece in found)
    order = sorted((piece for piece, n in count.items() if n > 1), key=lambda piece: (-count[piece], piece))
    number = {piece: i for i, piece in enumerate(order[: vocab_size - 1], start=1)}
    table = torch.zeros(vocab_size, PIECES, dtype=torch.int32)
    for row, found in zip(table, pieces, strict=False):
        rarest = sorted((number[piece] for piece in found if piece in number), reverse=True)[:PIECES]
        row[: len(rarest)] = torch.tensor(rarest, dtype=torch.int32)
    return table


class Pieces(nn.Module):
    """The rows of pieces, for the embedding and for the head, and which pieces each token has."""

    def __init__(self, vocab_size: int, width: int):
        super().__init__()
        self.embedding, self.head = embedding(vocab_size, width), embedding(vocab_size, width)
        self.register_buffer("spelling", torch.empty(vocab_size, PIECES, dtype=torch.int32))

    def init_weights(self, generator: torch.Generator | None = None):
        """Fill the tables in place. Tokens have no pieces yet: `spelling` is for the caller to fill."""
        nn.init.normal_(self.embedding.weight, std=2.0, generator=generator)
        nn.init.zeros_(self.head.weight)
        self.spelling.zero_()

    def forward(self, embedding, head):
        """Rows of tokens, (V, C) each, plus the mean of the rows of their pieces: (V, C) each."""
        pairs = (embedding, self.embedding.weight), (head, self.head.weight)
        return [own + F.embedding_bag(self.spelling, rows, mode="mean", padding_idx=0) for own, rows in pairs]
