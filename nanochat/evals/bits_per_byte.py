"""Bits per byte, the loss in a unit that does not depend on the tokenizer, and the loss by position."""

import itertools
import math
from dataclasses import dataclass

import torch

from nanochat import UserError
from nanochat.machine.compiling import compile_parts
from nanochat.machine.precision import autocast

BROKEN = (
    "is not a number, so the model is broken; score an earlier checkpoint with --step=STEP, train on from it "
    "with --resume=STEP and lower rates, or use --dtype=float32"
)
# Tokens of context: 1-16, 17-64, 65-256 and so on, up to max_seq_len, which is 2^20 at most
EDGES = [0, *(4**k for k in range(2, 11))]
BUCKETS = list(itertools.pairwise(EDGES))


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation on a text."""

    bpb: float  # bits per byte; nan if no token was scored
    # {"1-16": nats per token, ...}: the mean loss of tokens by the length of their context, <|bos|> included.
    # It falls from bucket to bucket if the model uses its context.
    loss_by_position: dict[str, float]


def validate(model, sets: dict, token_bytes, dtype: torch.dtype, machine, compiled: bool, shown) -> dict:
    """The fields of a record for validation sets {"val_bpb": batches, "val_bpb_NAME": others}: the bits per
    byte of each, and the first one's loss_by_position. shown(batches, text) shows the progress, as
    Console.over does; the rest is as in bits_per_byte."""
    found = {}
    for name, batches in sets.items():
        result = bits_per_byte(model, shown(batches, "validation"), token_bytes, dtype, machine, compiled)
        found |= {name: result.bpb} | ({} if found else {"loss_by_position": result.loss_by_position})
    return found


@torch.no_grad()
def bits_per_byte(
    model, batches, token_bytes, dtype: torch.dtype, machine, compiled: bool = False
) -> Evaluation:
    """Mean -log2 p of the text's bytes under the model, over all processes, and the loss by position.

    batches: (inputs, targets), both (B, T) int64; B and T may change, and a target of -1 is not scored.
    token_bytes (V,) int64, on the model's device: the length of each token in bytes. compiled: training is
    compiled; then this is compiled too, except on a CPU. Raises UserError if a loss is not a number.

    Bits per byte = sum of nats / ln 2 / bytes of the scored tokens. A longer token has a higher loss and
    more bytes.
    """
    longest = model.config.max_seq_len
    if compiled and token_bytes.device.type != "cpu":
        # On a CPU it takes 20 s and gains nothing: without gradients loss.py is as fast
        model = compile_parts(model, dynamic=True)  # one code for all the shapes of batches
    nats, counts = [], []  # of each batch; on the device until the end, so that nothing waits for it
    with autocast(token_bytes.device, dtype):
        for inputs, targets in batches:
            nats.append(_by_position(model(inputs, targets, reduction="none").view_as(targets)))
            scored = targets >= 0
            scored_bytes = token_bytes[targets.clamp_min(0)].mul(scored).sum()
            counts.append(torch.cat([_by_position(scored), scored_bytes[None]]))
    nats, counts = _total(nats, len(BUCKETS)), _total(counts, len(BUCKETS) + 1)
    *sums, scored_bytes = machine.all_sum(nats + counts)  # float64 from here on
    nats, counts = sums[: len(BUCKETS)], sums[len(BUCKETS) :]
    if not math.isfinite(sum(nats)):
        raise UserError(f"the loss on the validation text {BROKEN}")
    buckets = zip(BUCKETS, nats, counts, strict=True)
    by_position = {f"{a + 1}-{min(b, longest)}": total / count for (a, b), total, count in buckets if count}
    return Evaluation(sum(nats) / math.log(2) / scored_bytes if scored_bytes else math.nan, by_position)


def _by_position(values):
    """(B, T) -> sums over the positions of each bucket, (len(BUCKETS),)."""
    return torch.stack([values[:, a:b].sum() for a, b in BUCKETS])


def _total(sums: list[torch.Tensor], size: int) -> list[float]:
    """The sum of the batches' tensors of `size` numbers, in float64 on the CPU."""
    return torch.stack(sums).cpu().double().sum(0).tolist() if sums else [0.0] * size
