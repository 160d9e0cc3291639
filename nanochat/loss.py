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


def _without_gradient(x, weight, targets, chunk_rows):
    """The loss of each target, (N,) float32; only the logits of `chunk_rows` rows are in memory at a time.

    tanh(z) is 2 sigmoid(2 z) - 1, and a constant added to all logits changes no probability. So
    2 * SOFTCAP * sigmoid(2 * logits / SOFTCAP) has the cross-entropy of softcap(logits), and on a CPU torch
    computes sigmoid several times as fast as tanh.
    """
    if not chunk_rows:  # on a CPU what stays in the cache; the head's weights are read again for each chunk
        chunk_rows = max(128, (2**20 if x.device.type == "cpu" else 2**27) // weight.size(0))
    losses = []
    for piece, piece_targets in zip(x.split(chunk_rows), targets.split(chunk_rows), strict=True):
        logits = F.linear(piece, weight).float().mul_(2 / SOFTCAP).sigmoid_().mul_(2 * SOFTCAP)
        losses.append(F.cross_entropy(logits, piece_targets, ignore_index=-1, reduction="none"))
    return torch.cat(losses)


def softcapped_cross_entropy(x, weight, targets, reduction="mean", chunk_rows=0):
    """Cross-entropy of softcap(x @ weight.T), in nats, float32.

    x (N, C), weight (V, C), targets (N,) int64; a target of -1 is not scored. With `chunk_rows` > 0 only the
    logits of so many rows are in memory at a time. The backward pass computes them again: less memory for one
    third more work in the head. Without gradients there are always such chunks, unless this is compiled.
    """
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        losses = _without_gradient(x, weight, targets, chunk_rows)
        if reduction == "none":
            return losses
        return losses.sum() if reduction == "sum" else losses.sum() / (targets != -1).sum()
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
