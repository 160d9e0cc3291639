"""What to lower when a run does not fit into memory: for each setting that alone can help, its largest value
that fits, by the estimate of memory_estimate.py."""

import bisect
from collections.abc import Iterator
from dataclasses import replace

from nanochat.plan import memory_estimate, scaling

# Smaller values of these are proposed only if they are unusually large; else another setting is
LARGE_ASPECT_RATIO, LARGE_VOCABULARY = 128, 2**16


def sentence(plan) -> str:
    """What to do if a run needs more memory than there is; empty if it does not."""
    needed, memory = plan.expected_bytes, plan.hardware.memory
    return memory_estimate.sentence(needed, memory, advice(plan, memory)) if needed > memory else ""


def advice(plan, memory: int) -> str:
    """`lower --device_batch_size to 4, or --depth to 6`: each of them alone needs at most `memory` bytes."""
    found = [f"--{name} to {value}" for name, value in smaller_values(plan, memory)]
    if not found and plan.device_batch_size > 1:
        one_row = smaller_values(plan.with_rows(1), memory)
        found = [f"--device_batch_size to 1 and --{name} to {value}" for name, value in one_row]
    return f"lower {', or '.join(found or ['--max_seq_len and --depth'])}"


def smaller_values(plan, memory: int) -> Iterator[tuple[str, int]]:
    """The settings that alone make a plan fit into `memory` bytes, each with its largest value that does."""
    config, rows = plan.config, plan.device_batch_size * plan.grad_accum_steps

    def needs(**changes) -> int:
        return replace(plan, **changes).expected_bytes

    def needs_at(depth: int, aspect_ratio: int) -> int:
        others = config.head_dim, config.max_seq_len, config.vocab_size, config.window_pattern
        smaller = scaling.model_config(depth, aspect_ratio, *others)
        return needs(config=replace(smaller, spelled=config.spelled, value_tables=config.value_tables))

    divisors = [size for size in range(1, plan.device_batch_size) if rows % size == 0]
    # Each setting with its valid values, rising, and what a plan needs with one of them
    smaller = {
        "device_batch_size": (divisors, lambda n: needs(device_batch_size=n)),
        "max_seq_len": (_halves(config.max_seq_len), lambda T: needs(config=replace(config, max_seq_len=T))),
    }
    if config.vocab_size > LARGE_VOCABULARY:
        sizes = [size for size in _halves(config.vocab_size) if size >= 256]
        smaller["vocab_size"] = sizes, lambda V: needs(config=replace(config, vocab_size=V))
    if plan.aspect_ratio > LARGE_ASPECT_RATIO:
        smaller["aspect_ratio"] = range(64, plan.aspect_ratio, 64), lambda r: needs_at(config.depth, r)
    if plan.aspect_ratio:  # else the model is given
        # Memory grows at most with the cube of the depth, so deeper than this cannot fit
        too_deep = int(config.depth * (memory / plan.expected_bytes) ** (1 / 3)) + 2
        smaller["depth"] = range(1, min(config.depth, too_deep)), lambda d: needs_at(d, plan.aspect_ratio)
    for name, (values, bytes_of) in smaller.items():
        if fitting := bisect.bisect_right(values, memory, key=bytes_of):
            yield name, values[fitting - 1]


def _halves(value: int) -> list[int]:
    """A half, a quarter, ... of a number, as far as they are whole, rising."""
    twos = (value & -value).bit_length() - 1
    return [value >> n for n in range(twos, 0, -1)]
