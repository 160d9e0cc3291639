"""Softcapped cross-entropy: with all logits in memory, or with some rows of them at a time."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

SOFTCAP = 15.0  # logits are squashed into (-15, 15), so that no token's probability runs away


def softcap(logits):
    """(..., V) of any dtype -> (..., V) float32 in (-SOFTCAP, SOFTCAP); the tanh of Gemma 2, arXiv
    2408.00118."""
    return SOFTCAP * torch.tanh(logits.float() / SOFTCAP)


def _plain(x, weight, targets, reduction):
    return F.cross_entropy(softcap(F.linear(x, weight)), targets, ignore_index=-1, reduction=reduction)


def softcapped_cross_entropy(x, weight, targets, reduction="mean", chunk_rows=0):
    """Cross-entropy of softcap(x @ weight.T), in nats, float32.

    x (N, C), weight (V, C), targets (N,) int64; a target of -1 is not scored. With `chunk_rows` > 0 only the
    logits of so many rows are in memory at a time. The backward pass computes them again: less memory for one
    third more work in the head.
    """
    if not chunk_rows or x.size(0) <= chunk_rows:
        return _plain(x, weight, targets, reduction)
    partial = "none" if reduction == "none" else "sum"
    losses = [
        checkpoint(_plain, *piece, partial, use_reentrant=False)
        for piece in zip(
            x.split(chunk_rows),
            [weight] * -(-x.size(0) // chunk_rows),
            targets.split(chunk_rows),
            strict=True,
        )
    ]
    if reduction == "none":
        return torch.cat(losses)
    total = torch.stack(losses).sum()
    return total if reduction == "sum" else total / (targets != -1).sum()
