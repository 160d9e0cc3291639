"""Bits per byte: the loss in a unit that does not depend on the tokenizer."""

import math

import torch

from nanochat import UserError
from nanochat.precision import autocast


@torch.no_grad()
def bits_per_byte(model, batches, token_bytes, dtype: torch.dtype, machine) -> float:
    """Mean -log2 p of the text's bytes under the model, over all processes.

    `batches` yields (inputs, targets) of (B, T) int64; a target of -1 is not scored. token_bytes (V,)
    int64, on the model's device, is the length of each token in bytes. The result is the sum of nats / ln
    2, divided by the bytes of all scored tokens. Longer tokens have a higher loss each, but the same bits
    per byte.
    """
    nats, scored_bytes = 0.0, 0.0
    for inputs, targets in batches:
        with autocast(inputs.device, dtype):
            nats += model(inputs, targets, reduction="sum").item()  # float32 over one batch, float64 over all
        scored_bytes += token_bytes[targets.clamp_min(0)].mul(targets >= 0).sum().item()
    nats, scored_bytes = machine.all_sum([nats, scored_bytes])
    if not math.isfinite(nats):
        raise UserError(
            "the loss on the validation text is not a number, so the model is broken; go on from an earlier "
            "checkpoint with --resume=STEP and lower rates, or use --dtype=float32"
        )
    return nats / math.log(2) / scored_bytes if scored_bytes else math.nan
