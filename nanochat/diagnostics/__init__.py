"""Which operator runs in which precision, and what each precision costs.

Both use the training step of scripts/base_train.py as a function, for one micro-step on one process.
tests/diagnostics/test_step.py compares its losses with the script's to the last digit.
"""

import contextlib
import math

import torch

from nanochat import optim
from nanochat.machine.precision import autocast
from nanochat.plan import scaling


def training_step(
    model, optimizer, scaler, dtype, inputs, targets, grad_clip=1.0, at=contextlib.nullcontext
) -> torch.Tensor:
    """Forward, backward, clip, update; returns the loss, a 0-dim tensor.

    inputs, targets (B, T) int64. at(phase): a context manager for each phase: "forward", "backward", "clip",
    "optimizer". The caller clears the gradients.
    """
    with at("forward"), autocast(inputs.device, dtype):
        loss = model(inputs, targets)
    with at("backward"):
        scaler.scale(loss).backward()
    with at("clip"):
        scaler.unscale_(optimizer)
        max_norm = grad_clip if grad_clip > 0 else math.inf
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optim.skip_if_not_finite(optimizer, grad_norm)
    with at("optimizer"):
        scaler.step(optimizer)
        scaler.update()
    return loss


def scaled_rates(defaults: dict, config, batch_tokens: int, steps: int) -> tuple[dict[str, float], float]:
    """(rates, weight decay): base_train's defaults, scaled to a model and a run of that length.

    defaults: {setting: value}, of configurator.defaults("scripts/base_train.py").
    """
    horizon = scaling.derive_horizon(config, steps, -1, -1, batch_tokens)
    scaled = scaling.scaled_rates(defaults, config.width, horizon)
    return scaled.rates, scaled.weight_decay
