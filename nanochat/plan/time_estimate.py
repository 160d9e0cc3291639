"""How long the steps of a run take, from the machine's peak and two counts, before any of them is timed.

On a CPU a step has two kinds of work. Matrix products, of the model and of Muon, reach a share of the peak.
All else (norms, casts, softmax, losses, updates) goes value by value through memory; its time is given in
FLOPs that the products could have made meanwhile, so that a slower machine makes both slower. SPEED has the
two numbers, fitted to measured steps; docs/benchmarks.md shows how near other shapes come. For other devices
a share of the peak is assumed.
"""

import torch

from nanochat.gpt import GPTConfig
from nanochat.machine.hardware import Hardware
from nanochat.plan import scaling

# (compiled, bytes of the compute dtype): share of the peak of products, FLOPs for the time of a value
SPEED = {
    (True, 2): (0.82, 123.0),
    (True, 4): (0.74, 5.0),
    (False, 2): (0.76, 140.0),
    (False, 4): (0.74, 5.0),
}
# How many values a step works on, about: for each channel of a token in a layer, for each logit, and for each
# parameter in its update
LAYER_VALUES, LOGIT_VALUES, UPDATE_VALUES = 60, 10, 30


def seconds_of_step(config: GPTConfig, tokens: int, compiled: bool, hardware: Hardware) -> float:
    """Seconds of an optimizer step of `tokens` tokens, by all processes of the hardware together."""
    model = scaling.on_meta(config)
    flops = tokens * model.flops_per_token()
    if hardware.device_type != "cpu":
        return flops / (scaling.ASSUMED_MFU * hardware.peak_flops)
    share, flops_of_value = SPEED[compiled, torch.finfo(hardware.dtype).bits // 8]
    values = tokens * (LAYER_VALUES * config.depth * config.width + LOGIT_VALUES * config.vocab_size)
    values += UPDATE_VALUES * model.parameter_counts()["total"]
    return ((flops + muon_flops(config)) / share + flops_of_value * values) / hardware.peak_flops


def muon_flops(config: GPTConfig) -> int:
    """FLOPs of an update by Muon, whose time is in the products that make matrices orthogonal. By a formula:
    to let torch count them (simulation.py) takes a second or two."""
    flops = 0
    for p in scaling.on_meta(config).blocks.parameters():
        if p.ndim == 2:
            n, m = sorted(p.shape)
            plain = 5 * (4 * n * n * m + 2 * n**3)  # five steps: X X^T, its square, and that times X
            flops += plain * 2 // 3 if m >= 2 * n >= 256 else plain  # muon.polar_factor's short cut
    return flops
