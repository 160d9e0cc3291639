"""Causal attention on a CPU in blocks of queries: matrix products and a softmax.

SDPA on a CPU computes many of the pairs that causal attention masks. Here a block of queries meets only the
keys that one of them sees, in several rows and all heads at once. The forward pass is one operation and the
backward pass another. Compiled code calls them as they are, so its bits are those of eager code.
"""

import functools
from typing import NamedTuple

import torch

from nanochat.ops.operators import register, register_autograd

# The sizes were found by measurement (experiments/results/attention-on-a-cpu.tsv)
BLOCK = 128, 256  # fewest and most queries of a block, which is else a quarter of the row
SCORES = 2**20  # scores computed at a time, so that they stay in the cache
LONG = 1024  # positions; longer rows compute the softmax again in the backward pass, to save memory


class Tile(NamedTuple):
    """A block of queries, in some rows of the batch, with the keys that they see."""

    rows: slice
    queries: slice
    keys: slice
    shape: tuple[int, int, int]  # its scores': rows * heads, queries, keys
    place: slice  # where its weights are in the memory for all tiles


def in_blocks(q, k, v, window: int, visible=None):
    """Causal attention of q, k, v (B, H, T, D) of one dtype; returns (B, H, T, D).

    Each position sees the last `window` positions if they are `visible`, (B, 1, 1 or T, T) bool; None: all.
    Scores and weights are rounded to the dtype; the softmax computes in float32.
    """
    T = q.size(2)
    if visible is not None:
        visible = visible.expand(-1, 1, T, T)
    keep = torch.is_grad_enabled() and T <= LONG
    return torch.ops.nanochat.attention_in_blocks(q, k, v, min(window, T), visible, keep)[0]


def forward(q, k, v, window: int, visible, keep: bool):
    """y (B, H, T, D), and the weights of all tiles one behind another: (0,) if they are not to be kept."""
    y, kept = _empty(q), q.new_empty(_size(q, window) if keep else 0)
    for tile in tiles(*q.shape[:3], window):
        queries, keys = (tile.rows, slice(None), tile.queries), (tile.rows, slice(None), tile.keys)
        q_part, k_part, v_part = (x.flatten(0, 1) for x in (q[queries], k[keys], v[keys]))
        weights = _softmax(q_part, k_part, tile, window, visible, out=_weights_of(tile, kept))
        y[queries] = _split(weights @ v_part, q)
    return y, kept


def backward(dy, q, k, v, kept, window: int, visible):
    """The gradients of q, k and v (B, H, T, D), from dy and the weights that `forward` kept."""
    dq, dk, dv = _empty(q), _empty(k), _empty(v)
    # A key's gradient is a sum over the blocks that see it: at most four terms unless rows are long
    sums = torch.float32 if q.size(2) > LONG and q.dtype == torch.bfloat16 else q.dtype
    dk_sum, dv_sum = (torch.zeros(q.shape, dtype=sums) for _ in "kv")
    scale = q.size(-1) ** -0.5
    for tile in tiles(*q.shape[:3], window):
        queries, keys = (tile.rows, slice(None), tile.queries), (tile.rows, slice(None), tile.keys)
        q_part, k_part, v_part, dy_part = (
            x.flatten(0, 1) for x in (q[queries], k[keys], v[keys], dy[queries])
        )
        weights = _weights_of(tile, kept)
        if weights is None:
            weights = _softmax(q_part, k_part, tile, window, visible)
        dscores = torch._softmax_backward_data(dy_part @ v_part.mT, weights, -1, q.dtype)
        dq[queries] = _split(_product(dscores, k_part, scale), q)
        dk_sum[keys] += _split(_product(dscores.mT, q_part, scale), q)
        dv_sum[keys] += _split(weights.mT @ dy_part, q)
    return dq, dk.copy_(dk_sum), dv.copy_(dv_sum)


def _softmax(q, k, tile: Tile, window: int, visible, out=None):
    """The softmax weights of a tile, in its shape, from its part of q and k (rows * H, positions, D)."""
    _, Q, K = tile.shape
    scores = _product(q, k.mT, q.size(-1) ** -0.5)
    if visible is not None:
        visible = visible[tile.rows, :, tile.queries, tile.keys]
        hidden = ~visible | (_bias(Q, K, window, q.dtype) < 0)
        scores.unflatten(0, (len(visible), -1)).masked_fill_(hidden, torch.finfo(q.dtype).min)
    elif window >= K:  # every query sees the keys in front of the block
        scores[:, :, K - Q :] += _bias(Q, Q, window, q.dtype)
    else:
        scores += _bias(Q, K, window, q.dtype)
    return torch.softmax(scores, -1, out=out)


def _product(a, b, scale: float):
    """scale * a @ b, scaled before it is rounded."""
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=scale)


def _split(x, like):
    """(rows * H, n, m) -> (rows, H, n, m), with the heads of `like`."""
    return x.unflatten(0, (-1, like.size(1)))


@functools.lru_cache(maxsize=64)
def _bias(Q: int, K: int, window: int, dtype):
    """(Q, K): 0 where one of the last Q of K positions sees a key, elsewhere the most negative finite number,
    so that a query that sees nothing gives no NaN."""
    distance = torch.arange(K - Q, K)[:, None] - torch.arange(K)
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(Q, K, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)


@functools.lru_cache(maxsize=64)
def tiles(B: int, H: int, T: int, window: int) -> list[Tile]:
    """The tiles of B rows, H heads and T positions."""
    found, size, queries = [], 0, min(max(-(-T // 4), BLOCK[0]), BLOCK[1])
    for first in range(0, T, queries):
        end, low = min(first + queries, T), max(0, first - window + 1)
        step = max(1, SCORES // (H * (end - first) * (end - low)))
        for row in range(0, B, step):
            rows = slice(row, min(row + step, B))
            shape = (rows.stop - row) * H, end - first, end - low
            place = slice(size, size + shape[0] * shape[1] * shape[2])
            size = place.stop
            found.append(Tile(rows, slice(first, end), slice(low, end), shape, place))
    return found


def _size(q, window: int) -> int:
    return tiles(*map(int, q.shape[:3]), window)[-1].place.stop


def _weights_of(tile: Tile, kept):
    """A view of a tile's weights in `kept`, or None if none are kept."""
    return kept[tile.place].view(tile.shape) if kept.numel() else None


def _empty(x):
    """Uninitialised (B, H, T, D), laid out as (B, T, H, D), as the products before and after read it."""
    B, H, T, D = x.shape
    return x.new_empty(B, T, H, D).transpose(1, 2)


register(
    "attention_in_blocks",
    "(Tensor q, Tensor k, Tensor v, int window, Tensor? visible, bool keep) -> (Tensor, Tensor)",
    forward,
    lambda q, k, v, window, visible, keep: (_empty(q), q.new_empty(_size(q, window) if keep else 0)),
)
register(
    "attention_in_blocks_backward",
    "(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor kept, int window, Tensor? visible)"
    " -> (Tensor, Tensor, Tensor)",
    backward,
    lambda dy, q, k, v, kept, window, visible: (_empty(q), _empty(k), _empty(v)),
)


def _keep(ctx, inputs, output):
    q, k, v, ctx.window, visible, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, output[1], visible)


def _gradients(ctx, dy, _):
    q, k, v, kept, visible = ctx.saved_tensors
    gradients = torch.ops.nanochat.attention_in_blocks_backward(dy, q, k, v, kept, ctx.window, visible)
    return *gradients, None, None, None


register_autograd("attention_in_blocks", _keep, _gradients)
