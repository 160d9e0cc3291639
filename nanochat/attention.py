"""Causal attention: one function, several ways to compute it."""

import torch
import torch.nn.functional as F


def attention(q, k, v, window: int, visible=None):
    """Causal softmax attention of the last Tq of Tk positions.

    q (B, H, Tq, D), k and v (B, H, Tk, D) of one dtype, Tq <= Tk. Each position sees the last `window`
    positions, itself included, and of them only what is `visible`, (B, 1, 1 or Tq, Tk) bool; None: all.
    Returns (B, H, Tq, D). Scores are divided by sqrt(D). The fused kernels compute the softmax and the sums
    in float32.
    """
    Tq, Tk = q.size(2), k.size(2)
    if visible is not None:
        mask = _band(Tq, Tk, window, q.device) & visible
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    if Tq == Tk and window >= Tk:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if Tq == Tk and Tk % window == 0:
        return _banded(q, k, v, window)
    if Tq == 1:  # one new token: everything in its window is its past
        return F.scaled_dot_product_attention(q, k[:, :, -window:], v[:, :, -window:])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=_band(Tq, Tk, window, q.device))


def _band(Tq: int, Tk: int, window: int, device):
    """(Tq, Tk) bool: which of the Tk positions each of the last Tq positions sees."""
    distance = torch.arange(Tk - Tq, Tk, device=device)[:, None] - torch.arange(Tk, device=device)[None, :]
    return (distance >= 0) & (distance < window)


def _banded(q, k, v, window: int):
    """A sliding window without a T x T mask: a block of `window` queries sees its own block and the last.

    It computes T * 2 * window scores for each head instead of T * T.
    """
    B, H, T, D = q.shape
    blocks = T // window
    q = q.reshape(B, H, blocks, window, D)

    def with_previous(x):  # (B, H, T, D) -> (B, H, blocks, 2 * window, D); the first block's past is zeros
        x = x.reshape(B, H, blocks, window, D)
        return torch.cat((F.pad(x[:, :, :-1], (0, 0, 0, 0, 1, 0)), x), dim=3)

    mask = _band(window, 2 * window, window, q.device).repeat(blocks, 1, 1)  # (blocks, window, 2 * window)
    mask[0, :, :window] = False
    q, k, v = q.flatten(1, 2), with_previous(k).flatten(1, 2), with_previous(v).flatten(1, 2)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.repeat(H, 1, 1)[None])  # 3-D is not fused
    return y.reshape(B, H, T, D)
