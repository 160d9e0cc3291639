"""From depth to everything else: width, horizon, batch, learning rates, memory, schedules. Pure functions.

The reference point is a d12 model trained for its compute-optimal horizon with batches of 2**19 tokens:
there the learning rates of the scripts hold as they stand, and these rules carry them elsewhere.
"""

import math
from dataclasses import dataclass

import torch

from nanochat import UserError
from nanochat.gpt import GPT, GPTConfig

REFERENCE_DEPTH = 12
REFERENCE_BATCH = 2**19  # tokens
REFERENCE_WIDTH = 768
HORIZON_EXPONENT = 0.32
MOST_DECAY = 8.0
BATCH_EXPONENT = 0.383  # best batch ~ tokens**0.383: Power Lines, arXiv 2505.13738


def model_config(
    depth: int, aspect_ratio: int, head_dim: int, max_seq_len: int, vocab_size: int, window_pattern: str
) -> GPTConfig:
    """Width = depth * aspect_ratio, rounded up to whole heads. Raises UserError for sizes no model can
    have."""
    for name, value, most in (
        ("depth", depth, 512),
        ("aspect_ratio", aspect_ratio, 4096),
        ("head_dim", head_dim, 1024),
        ("max_seq_len", max_seq_len, 2**20),
    ):
        if not 1 <= value <= most:
            raise UserError(f"{name} is {value}; give a number from 1 to {most}")
    if head_dim % 2:
        raise UserError(
            f"head_dim is {head_dim}; rotary embeddings turn pairs of channels: give an even number"
        )
    if not window_pattern or set(window_pattern) - set("LS"):
        raise UserError(
            f"window_pattern is {window_pattern!r}; give letters L (all of the past) and S (a quarter)"
        )
    num_heads = math.ceil(depth * aspect_ratio / head_dim)
    return GPTConfig(depth, num_heads * head_dim, num_heads, vocab_size, max_seq_len, window_pattern)


def on_meta(config: GPTConfig) -> GPT:
    """The model without memory behind it, to count with."""
    with torch.device("meta"):
        return GPT(config)


def scaling_parameters(config: GPTConfig) -> int:
    """The parameters that a data:parameter ratio counts: matrices and head, which every token is multiplied
    with."""
    counts = on_meta(config).parameter_counts()
    return counts["matrices"] + counts["head"]


@dataclass(frozen=True)
class Horizon:
    """How long a run is and in steps of how many tokens, with the reasons."""

    num_iterations: int
    total_batch_size: int  # tokens a step
    d12_tokens: float  # the reference model's horizon, which rates are carried over from
    reason: str
    batch_reason: str

    @property
    def tokens(self) -> int:
        return self.num_iterations * self.total_batch_size


def derive_horizon(
    config: GPTConfig,
    num_iterations: int,
    target_flops: float,
    target_param_data_ratio: float,
    total_batch_size: int,
    flops_per_token: int,
) -> Horizon:
    """The number of steps from the first of the three that is positive, and the batch where it is -1.

    Raises UserError where none is positive.
    """
    T = config.max_seq_len
    if num_iterations == 0 or num_iterations < -1:
        raise UserError(f"num_iterations is {num_iterations}; give a number of steps, or -1 for off")
    if total_batch_size != -1 and total_batch_size < 1:
        raise UserError(
            f"total_batch_size is {total_batch_size}; give a number of tokens, or -1 for automatic"
        )
    reference = model_config(
        REFERENCE_DEPTH,
        REFERENCE_WIDTH // REFERENCE_DEPTH,
        config.head_dim,
        T,
        config.vocab_size,
        config.window_pattern,
    )
    ratio = target_param_data_ratio if target_param_data_ratio > 0 else 12.0
    d12_tokens = ratio * scaling_parameters(reference)
    if num_iterations > 0:
        tokens, reason = None, "num_iterations is given"
    elif target_flops > 0:
        tokens = target_flops / flops_per_token
        reason = f"{target_flops:.3g} FLOPs / {flops_per_token:.3g} a token"
    elif target_param_data_ratio > 0:
        tokens = target_param_data_ratio * scaling_parameters(config)
        reason = f"{target_param_data_ratio:g} tokens for each of {scaling_parameters(config):,} parameters"
    else:
        raise UserError(
            "the run has no end: give --num_iterations, --target_flops or --target_param_data_ratio "
            "a positive number"
        )
    batch_reason = "as asked for"
    if total_batch_size == -1:
        if tokens is None:
            total_batch_size = best_batch_for_iterations(num_iterations, d12_tokens, T)
        else:
            total_batch_size = best_batch(tokens, d12_tokens, T)
        batch_reason = f"B ~ D^{BATCH_EXPONENT} from d12's 2^19"
    if tokens is not None:
        num_iterations = max(1, round(tokens / total_batch_size))
    return Horizon(num_iterations, total_batch_size, d12_tokens, reason, batch_reason)


def best_batch(tokens: float, d12_tokens: float, max_seq_len: int) -> int:
    """Tokens a step for a horizon of `tokens`: a power of two rows."""
    best = REFERENCE_BATCH * (tokens / d12_tokens) ** BATCH_EXPONENT
    return max_seq_len * 2 ** max(0, round(math.log2(best / max_seq_len)))


def best_batch_for_iterations(num_iterations: int, d12_tokens: float, max_seq_len: int) -> int:
    """The same where the number of steps is given: B = 2**19 * (steps * B / d12_tokens)**0.383, solved for
    B."""
    scale = REFERENCE_BATCH * (num_iterations / d12_tokens) ** BATCH_EXPONENT
    return best_batch(num_iterations * scale ** (1 / (1 - BATCH_EXPONENT)), d12_tokens, max_seq_len)


def rows_per_process(total_batch_size: int, max_seq_len: int, device_batch_size: int, world_size: int) -> int:
    """Rows of the batch that each process serves. Raises UserError where they do not come out even."""
    rows = total_batch_size // max_seq_len
    unit = max_seq_len * world_size * max(1, device_batch_size)
    if device_batch_size != -1 and device_batch_size < 1:
        raise UserError(
            f"device_batch_size is {device_batch_size}; give a number of rows from 1, or -1 for automatic"
        )
    if total_batch_size % unit:
        shape = (
            "device_batch_size x max_seq_len x processes"
            if device_batch_size > 0
            else "max_seq_len x processes"
        )
        raise UserError(
            f"total_batch_size {total_batch_size} is not a multiple of {shape} = {unit}; "
            f"use {valid_batch_sizes(total_batch_size, unit)}"
        )
    return rows // world_size


def rate_scale(total_batch_size: int, tokens: float, d12_tokens: float) -> float:
    """What all learning rates are multiplied with, at most 2.

    They go with the square root of the batch, the noise of an Adam-like step (arXiv 2205.10287), and with
    tokens**-0.32: a shorter run wants larger steps (arXiv 2409.19913). Measured at d4: docs/ablations.md.
    """
    scale = math.sqrt(total_batch_size / REFERENCE_BATCH) * (tokens / d12_tokens) ** -HORIZON_EXPONENT
    return min(2.0, scale)


def adam_width_scale(width: int) -> float:
    """Rates of AdamW's groups go with width**-0.5, tuned at 768. Muon's update needs no such correction."""
    return (width / REFERENCE_WIDTH) ** -0.5


def scaled_weight_decay(
    weight_decay: float, scale: float, total_batch_size: int, tokens: float, d12_tokens: float
) -> float:
    """Weight decay for rates multiplied by `scale`.

    Keeps rate * decay * steps, the averaging times in a run, as they are at d12 (arXiv 2405.13698), up to
    what would be MOST_DECAY times the setting.
    """
    d12_steps, steps = d12_tokens / REFERENCE_BATCH, tokens / total_batch_size
    return weight_decay * min(MOST_DECAY, d12_steps / steps) / scale


def lr_multiplier(step, num_iterations, warmup_steps, warmdown_ratio, final_lr_frac) -> float:
    """Linear warm-up over `warmup_steps`, constant, linear warm-down over the last `warmdown_ratio` of the
    run."""
    warmdown = warmdown_ratio * num_iterations
    left = num_iterations - step
    up = min(1.0, (step + 1) / warmup_steps) if warmup_steps > 0 else 1.0
    down = final_lr_frac + (1 - final_lr_frac) * min(1.0, left / warmdown) if warmdown > 0 else 1.0
    return up * down


def muon_momentum(step: int, num_iterations: int) -> float:
    """0.85 -> 0.95 over the first 300 steps or the first third of a shorter run: early gradients change
    direction quickly, so a long memory of them misleads."""
    return 0.85 + 0.10 * min(1.0, step / min(300, max(1, num_iterations / 3)))


def weight_decay_multiplier(step: int, num_iterations: int) -> float:
    """Linear to zero over the run."""
    return 1 - step / num_iterations


def training_bytes(
    config: GPTConfig,
    micro_batch_tokens: int,
    dtype: torch.dtype,
    world_size: int = 1,
    saves_here: bool = False,
) -> int:
    """Estimate of the device memory that one of `world_size` training processes needs.

    All in float32: weight and gradient of each parameter; its share of the optimizer's state (one value for
    Muon's matrices, two for the rest); and where a save copies to the same memory (`saves_here`: a CPU's)
    weights and state once more. 18 C values a token and layer kept for the backward pass in float32, 30 C in
    16 bit, where some are kept in both (counted in tests/test_scaling.py). The logits three times over: in
    the compute dtype, softcapped, and as probabilities.
    """
    size, counts = torch.finfo(dtype).bits // 8, on_meta(config).parameter_counts()
    weights = 4 * counts["total"]
    state = (8 * counts["total"] - 4 * counts["matrices"]) // world_size
    lasting = 2 * weights + state + (weights + state) * saves_here
    activations = micro_batch_tokens * config.depth * config.width * (18 if size == 4 else 30) * size
    return lasting + activations + micro_batch_tokens * config.vocab_size * (8 + size)


def check_memory(config: GPTConfig, micro_batch_tokens: int, dtype: torch.dtype, memory: int, **where) -> int:
    """The bytes that `training_bytes` estimates; UserError where a process has less `memory` than that."""
    needed = training_bytes(config, micro_batch_tokens, dtype, **where)
    if needed > memory:
        raise UserError(
            f"this run needs about {needed / 2**30:.1f} GiB a process and {memory / 2**30:.1f} are free; "
            "lower --device_batch_size, --max_seq_len or --depth"
        )
    return needed


def pick_device_batch_size(
    rows: int, config: GPTConfig, dtype: torch.dtype, memory: int, most_tokens: int, **where
) -> int:
    """Rows of a micro-batch: the largest divisor of `rows` within `most_tokens` tokens and 80 % of `memory`
    bytes, by `training_bytes`."""
    sizes = [n for n in range(rows, 0, -1) if rows % n == 0]
    for size in sizes:
        tokens = size * config.max_seq_len
        if tokens <= most_tokens and training_bytes(config, tokens, dtype, **where) <= 0.8 * memory:
            return size
    return 1


def valid_batch_sizes(total_batch_size: int, unit: int) -> str:
    """The multiples of `unit` on both sides of a batch that is none, for a sentence: "4096 or 8192"."""
    below = total_batch_size // unit * unit
    return " or ".join(str(n) for n in (below, below + unit) if n)
