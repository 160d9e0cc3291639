"""What tokens share with those that are spelled alike.

` self`, `Self` and `self` are three tokens, and each would have to learn alone what they have in common. So
to a token's own row of the embedding, and of the head, those of its pieces are added: two to four letters in
a row, the whole word, and its shape, each shared with all tokens that have it. fastText (arXiv 1607.04606)
does so for words.
"""

import re
from collections import Counter

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanochat import UserError
from nanochat.ops.lookup import embedding
from nanochat.ops.operators import register, register_autograd

PIECES = 40  # that a token has at most
# The sum of n pieces is divided by the square root of n and multiplied by WEIGHT: with ten pieces it moves
# about as fast as the token's own row. STD is that of the rows of the embedding's pieces at the start
WEIGHT, STD = 0.3, 2.0


def pieces_of(token: bytes) -> set[bytes]:
    """The pieces of a token's spelling.

    `<` and `>` stand for where the word begins and ends. The blanks before it and the case of its letters
    count for its shape alone, which is of few kinds: ` Self` has the shape ` Aa`.
    """
    body, before = token.strip(), token[: len(token) - len(token.lstrip())]
    word = b"<" + body.lower() + b">"
    kinds = {
        b"": not body,
        b"A": body.isupper(),
        b"a": body.islower(),
        b"Aa": body.istitle(),
        b"0": body.isdigit(),
        b"-": not re.search(rb"[A-Za-z0-9\x80-\xff]", body),
    }
    shape = b"shape " + before + next((kind for kind, fits in kinds.items() if fits), b"aA")
    letters = {word[i : i + n] for n in (2, 3, 4) for i in range(len(word) - n + 1)}
    return {shape} | ({word} | letters if body else set())


def pieces_table(tokens: list[bytes], vocab_size: int) -> torch.Tensor:
    """The pieces of each token by number, (V, PIECES) int32, filled up with 0; special tokens have none.

    Only pieces that several tokens have get a number, the most frequent ones if there are more than V - 1; of
    equally frequent ones those of earlier tokens. Of a token with many pieces the rarest ones count.
    """
    pieces = [pieces_of(token) for token in tokens]
    count = Counter(piece for found in pieces for piece in sorted(found))
    shared = (piece for piece, n in count.most_common(vocab_size - 1) if n > 1)
    number = {piece: i for i, piece in enumerate(shared, start=1)}
    rows = [sorted((number.get(piece, 0) for piece in found), reverse=True)[:PIECES] for found in pieces]
    rows = [row + [0] * (PIECES - len(row)) for row in rows + [[]] * (vocab_size - len(tokens))]
    return torch.tensor(rows, dtype=torch.int32)


def spell(model: nn.Module, tokenizer):
    """Tell a model how its tokens are spelled, if it is one whose tokens share that."""
    if (pieces := getattr(model, "pieces", None)) is not None:
        pieces.spell(pieces_table(tokenizer.tokens, tokenizer.vocab_size))


class Pieces(nn.Module):
    """The rows of pieces, for the embedding and for the head, and which pieces each token has."""

    def __init__(self, vocab_size: int, width: int):
        super().__init__()
        self.embedding, self.head = embedding(vocab_size, width), embedding(vocab_size, width)
        self.register_buffer("spelling", torch.empty(vocab_size, PIECES, dtype=torch.int32))
        for name in INDEX:
            self.register_buffer(name, None, persistent=False)

    def init_weights(self, generator: torch.Generator | None = None):
        """Fill the tables in place. No token has pieces before `spell`."""
        nn.init.normal_(self.embedding.weight, std=STD, generator=generator)
        nn.init.zeros_(self.head.weight)
        self.spell(torch.zeros_like(self.spelling))

    def spell(self, spelling):
        """Take a `pieces_table`, and note who has what in the order in which it is added up.

        UserError for numbers that no piece has.
        """
        least, most = spelling.aminmax()
        if least < 0 or most >= len(spelling):
            raise UserError(
                f"the table of pieces has numbers from {least} to {most}, and there are "
                f"{len(spelling)} rows; the checkpoint is damaged, use another one"
            )
        self.spelling.copy_(spelling)
        table, each = spelling.cpu(), torch.arange(len(spelling))
        tokens, places = table.nonzero().unbind(1)
        pieces = table[tokens, places].long()
        order = pieces.argsort(stable=True)
        index = {
            "piece_ids": pieces,
            "first_piece": torch.searchsorted(tokens, each),
            "token_ids": tokens[order],
            "first_token": torch.searchsorted(pieces[order], each),
            "share": WEIGHT / tokens.bincount(minlength=len(each)).clamp_min(1)[:, None].sqrt(),
        }
        for name in INDEX:
            setattr(self, name, index[name].to(self.spelling.device))

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        self.spell(self.spelling)

    def forward(self, embedding, head):
        """Rows of tokens, (V, C) each, plus those of their pieces: (V, C) each."""
        index = [getattr(self, name) for name in INDEX]
        return embedding + sums(self.embedding.weight, *index), head + sums(self.head.weight, *index)


# Buffers of Pieces, which no checkpoint holds: the pieces of all tokens, one after another, and where those
# of each token begin; the tokens of all pieces likewise; and the factor (V, 1) of the sum over its pieces
INDEX = "piece_ids", "first_piece", "token_ids", "first_token", "share"


def sums(rows, *index):
    """The sum of the rows (V, C) of each token's pieces, times its share: (V, C), zeros where it has none.

    On a CPU the backward pass is a sum over the tokens of each piece, so that it has one order.
    """
    return (torch.ops.nanochat.sums if rows.device.type == "cpu" else _sums)(rows, *index)


def _sums(rows, pieces, first_piece, tokens, first_token, share):
    return share * F.embedding_bag(pieces, rows, first_piece, mode="sum")


register(
    "sums",
    "(Tensor rows, Tensor pieces, Tensor first_piece, Tensor tokens, Tensor first_token, Tensor share)"
    " -> Tensor",
    _sums,
    lambda rows, *index: torch.empty_like(rows),
)
register(
    "sums_backward",
    "(Tensor gradient, Tensor tokens, Tensor first_token, Tensor share) -> Tensor",
    lambda gradient, tokens, first_token, share: F.embedding_bag(
        tokens, share * gradient, first_token, mode="sum"
    ),
    lambda gradient, *index: torch.empty_like(gradient),
)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[3:])


def _gradients(ctx, gradient):
    return torch.ops.nanochat.sums_backward(gradient, *ctx.saved_tensors), *[None] * 5


register_autograd("sums", _keep, _gradients)
