"""Copying: the token that followed when a row had the same tokens before, up to LONGEST of them."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanochat.ops.attention import same_document
from nanochat.ops.elementwise import norm
from nanochat.ops.operators import register
from nanochat.ops.tables import look_up

LONGEST = 8  # tokens of a match; what is longer counts as this long
BITS = 20  # of an id, and of a place in the rows that are sorted together


def followers(ids, new: int, visible=None):
    """For each of the last `new` tokens of ids (B, L) int64: the longest match, that is, up to LONGEST tokens
    that end with it and that its row (its document of `visible`) had before; of equally long ones the last.

    Returns (the token that followed the match, the length of the match), (B, new) int64 each, 0 and 0 without
    one. ids of -1 match nothing; the others are less than 2^20, and L is at most that.
    """
    begins, on_cpu = ids < 0, ids.device.type == "cpu"
    if visible is not None:
        begins = begins | ~same_document(visible, *ids.shape)
    if on_cpu or (ids.is_cuda and not torch.compiler.is_compiling()):
        found = (torch.ops.nanochat.followers if on_cpu else _sort)(ids, begins)
        return [x[:, -new:] for x in found]
    # Equal ones are of one document
    return _compare(ids, ids.int() if visible is None else ids + (begins.cumsum(1) << BITS), new)


def _compare(ids, tokens, new: int):
    """Every new one of the tokens with every earlier one, and those before both. Compiled, it is one kernel,
    without a tensor of (B, new, L)."""
    L = ids.size(1)
    place = torch.arange(L, device=ids.device)
    ours, theirs = (F.pad(tokens, (LONGEST, 0), value=none) for none in (-1, -2))
    same, length = (tokens >= 0)[:, None] & (place < place[-new:, None]), 0
    for i in range(LONGEST, 0, -1):
        same = same & (ours[:, i + L - new : i + L, None] == theirs[:, None, i : i + L])
        length = length + same.int()
    best = (length * L + place.int() * (length > 0)).amax(-1)
    after = ids.gather(1, (best % L + 1).clamp_max(L - 1).long())
    return torch.where(best >= L, after, 0), (best // L).long()


def _sort(ids, begins):
    """Number the n-grams, for n from 1 to LONGEST, and sort the numbers, each with its place: before a place
    stands the one where its n-gram was last. An n-gram's number comes from that of its first n - 1 tokens and
    from its last token; where a document begins, from the place, so that it is no other's."""
    (B, L), N = ids.shape, ids.numel()
    rows = max(1, 2**BITS // L)
    if rows < B:
        parts = [_sort(*part) for part in zip(ids.split(rows), begins.split(rows), strict=True)]
        return tuple(map(torch.cat, zip(*parts, strict=True)))
    place = torch.arange(N, device=ids.device)
    ids, begins = ids.flatten() & 2**BITS - 1, begins.flatten() | (place % L == 0)
    before, at, length = begins.cumsum(0), torch.zeros_like(ids), torch.zeros_like(ids)
    for n in range(1, LONGEST + 1):
        ngrams = ((before << BITS | ids) << BITS | place).sort().values
        places, ngrams = ngrams & 2**BITS - 1, ngrams >> BITS
        new = F.pad(ngrams[1:] != ngrams[:-1], (1, 0), value=True)
        last = torch.empty_like(ids).index_copy(0, places, torch.where(new, -1, places.roll(1)))
        at, length = torch.where(last < 0, at, last), torch.where(last < 0, length, n)
        number = torch.empty_like(ids).index_copy(0, places, new.cumsum(0))
        before = torch.where(begins, N + 1 + place, number.roll(1))
    after = ids[(at + 1).clamp_max(N - 1)]
    return torch.where(length > 0, after, 0).view(B, L), length.view(B, L)


register(
    "followers",
    "(Tensor ids, Tensor begins) -> (Tensor, Tensor)",
    _sort,
    lambda ids, begins: (torch.empty_like(ids), torch.empty_like(ids)),
)


class Copying(nn.Module):
    """The rows of the token that followed the longest match, times a factor for each length of a match."""

    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.empty(2, LONGEST))  # of its row of the embedding, and of the head

    def forward(self, x, share, ids, embedding_rows, head_rows, visible=None):
        """x and share (B, T, C), each with a multiple of that token's normed row: of the embedding in x, of
        the head in share. ids: the tokens so far, (B, L) int64, of which the last T are those of x.

        The rows get no gradient from here, which would be as many bytes again (docs/ablations.md).
        """
        token, length = followers(ids, x.size(1), visible)
        lengths = length[..., None] == torch.arange(1, LONGEST + 1, device=ids.device)  # (B, T, LONGEST)
        into, onto = ((lengths * scales).sum(-1, keepdim=True) for scales in self.scales.to(x.dtype))
        x = x + into * norm(look_up(embedding_rows.detach(), token), x.dtype)
        return x, share + onto * norm(look_up(head_rows.detach(), token), x.dtype)
