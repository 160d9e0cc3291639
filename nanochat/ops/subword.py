"""Sub-word embeddings: tokens that are spelled alike share a part of their rows (fastText, arXiv 1607.04606).

` self`, `Self` and `self` are three tokens, and each would have to learn alone what they have in common. So
the rows of a token's sub-words are added to its own row, in the embedding and in the head. Its sub-words are
each two to four letters in a row, the whole word, and the word's shape; all tokens with a sub-word share its
row.
"""

import re
from collections import Counter

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanochat import UserError
from nanochat.ops.operators import register, register_autograd
from nanochat.ops.tables import embedding

MOST = 40  # sub-words of a token
# The sum of n rows is multiplied by WEIGHT / sqrt(n): with ten sub-words it moves about as fast as the
# token's own row. STD: standard deviation of the embedding's rows at the start
WEIGHT, STD = 0.3, 2.0


def subwords_of(token: bytes) -> set[bytes]:
    """The sub-words of a token.

    `<` and `>` mark where the word begins and ends. The blanks before it and the case of its letters are only
    in its shape: ` Self` has the shape ` Aa`.
    """
    body, blanks = token.strip(), token[: len(token) - len(token.lstrip())]
    word = b"<" + body.lower() + b">"
    kinds = {
        b"": not body,
        b"A": body.isupper(),
        b"a": body.islower(),
        b"Aa": body.istitle(),
        b"0": body.isdigit(),
        b"-": not re.search(rb"[A-Za-z0-9\x80-\xff]", body),
    }
    shape = b"shape " + blanks + next((kind for kind, fits in kinds.items() if fits), b"aA")
    letters = {word[i : i + n] for n in (2, 3, 4) for i in range(len(word) - n + 1)}
    return {shape} | ({word} | letters if body else set())


def subword_table(tokens: list[bytes], vocab_size: int) -> torch.Tensor:
    """The numbers of each token's sub-words, (V, MOST) int32, filled up with 0; special tokens have none.

    Only sub-words of several tokens get a number, the V - 1 most frequent ones; among equally frequent ones
    those of earlier tokens come first. A token with more than MOST keeps the rarest.
    """
    found = [subwords_of(token) for token in tokens]
    count = Counter(subword for subwords in found for subword in sorted(subwords))
    shared = (subword for subword, n in count.most_common(vocab_size - 1) if n > 1)
    number = {subword: i for i, subword in enumerate(shared, start=1)}
    rows = [
        sorted((number.get(subword, 0) for subword in subwords), reverse=True)[:MOST] for subwords in found
    ]
    rows = [row + [0] * (MOST - len(row)) for row in rows + [[]] * (vocab_size - len(tokens))]
    return torch.tensor(rows, dtype=torch.int32)


def register_subwords(model: nn.Module, tokenizer):
    """Register each token's sub-words in a model that has sub-word embeddings; else do nothing."""
    if (subword := getattr(model, "pieces", None)) is not None:
        subword.register(subword_table(tokenizer.tokens, tokenizer.vocab_size))


class SubwordEmbedding(nn.Module):
    """The rows of sub-words, for the embedding and for the head, and which sub-words each token has."""

    def __init__(self, vocab_size: int, width: int):
        super().__init__()
        self.embedding, self.head = embedding(vocab_size, width), embedding(vocab_size, width)
        self.register_buffer("spelling", torch.empty(vocab_size, MOST, dtype=torch.int32))  # a subword_table
        for name in INDEX:
            self.register_buffer(name, None, persistent=False)

    def init_weights(self, generator: torch.Generator | None = None):
        """Fill the tables in place. No token has sub-words before `register`."""
        nn.init.normal_(self.embedding.weight, std=STD, generator=generator)
        nn.init.zeros_(self.head.weight)
        self.register(torch.zeros_like(self.spelling))

    def register(self, table):
        """Take a `subword_table`, and index it both ways. UserError for a number without a row."""
        least, most = table.aminmax()
        if least < 0 or most >= len(table):
            raise UserError(
                f"the table of sub-words has numbers from {least} to {most}, and there are "
                f"{len(table)} rows; the checkpoint is damaged, use another one"
            )
        self.spelling.copy_(table)
        table, each = table.cpu(), torch.arange(len(table))
        tokens, places = table.nonzero().unbind(1)
        subwords = table[tokens, places].long()
        order = subwords.argsort(stable=True)
        index = (
            subwords,
            torch.searchsorted(tokens, each),
            tokens[order],
            torch.searchsorted(subwords[order], each),
            WEIGHT / tokens.bincount(minlength=len(each)).clamp_min(1)[:, None].sqrt(),
        )
        for name, tensor in zip(INDEX, index, strict=True):
            setattr(self, name, tensor.to(self.spelling.device))

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        self.register(self.spelling)

    def forward(self, embedding, head):
        """Rows of tokens, (V, C) each, plus those of their sub-words: (V, C) each."""
        index = [getattr(self, name) for name in INDEX]
        return embedding + sums(self.embedding.weight, *index), head + sums(self.head.weight, *index)


# Buffers of SubwordEmbedding, which no checkpoint holds: the sub-words of all tokens, one after another, and
# where those of each token begin; the tokens of all sub-words likewise; the factor (V, 1) of a token's sum
INDEX = "subword_ids", "first_subword", "token_ids", "first_token", "share"


def sums(rows, *index):
    """The sum of the rows (V, C) of each token's sub-words, times its share: (V, C), zeros where it has none.

    On a CPU the backward pass is a sum over the tokens of each sub-word, so that it has one order.
    """
    return (torch.ops.nanochat.sums if rows.device.type == "cpu" else _sums)(rows, *index)


def _sums(rows, subwords, first_subword, tokens, first_token, share):
    return share * F.embedding_bag(subwords, rows, first_subword, mode="sum")


def _sums_backward(gradient, tokens, first_token, share):
    return F.embedding_bag(tokens, share * gradient, first_token, mode="sum")


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[3:])


def _gradients(ctx, gradient):
    return torch.ops.nanochat.sums_backward(gradient, *ctx.saved_tensors), *[None] * 5


TOKENS = "Tensor tokens, Tensor first_token, Tensor share) -> Tensor"
register(
    "sums",
    f"(Tensor rows, Tensor subwords, Tensor first_subword, {TOKENS}",
    _sums,
    lambda rows, *index: torch.empty_like(rows),
)
register(
    "sums_backward",
    f"(Tensor gradient, {TOKENS}",
    _sums_backward,
    lambda gradient, *index: torch.empty_like(gradient),
)
register_autograd("sums", _keep, _gradients)
