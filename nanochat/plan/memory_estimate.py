"""How much device memory training needs, by kind, before any of it is taken.

The factors are counts: of autograd for eager code, and for compiled code of the partitioner that decides what
the backward pass keeps. `python -m experiments.memory_count` counts again; docs/benchmarks.md has its table.
On a GPU the device's own context and libraries are not in them, nor what the allocator cannot use between two
tensors.
"""

import torch

from nanochat.gpt import GPTConfig
from nanochat.ops import attention_blocks, loss
from nanochat.plan import scaling

# Bytes that a token takes: for each channel of the width in each layer, and for each channel once.
# (compiled, bytes of the compute dtype): layer, once
KEPT = {
    (True, 2): (51.8, 5.5),
    (True, 4): (94.6, 5.5),
    (False, 2): (62.3, 11.5),
    (False, 4): (98.9, 13.0),
}
# Bytes of each logit of a chunk (loss.py) by bytes of the compute dtype: the logits in that dtype and two
# float32 tensors, one of which is the logits if they are float32. Compiled for a GPU it is the logits alone.
EAGER_LOGIT = {2: 10, 4: 8}
MUON_COPIES = 5  # float32 tensors of the size of its largest group, a third of all matrices, in Muon's update
# Of a CPU, fitted to the largest resident memory of runs (docs/benchmarks.md). Eager code leaves gaps between
# tensors, as a share of all; compiled code plans its tensors, and the compiler stays in memory
GAPS, COMPILER = 0.2, 130 * 10**6
LIBRARIES = 75 * 10**6  # that the process loads after the plan
BUCKET_BYTES = 25 * 2**20  # DDP sends gradients in such pieces


def training_bytes(
    config: GPTConfig,
    micro_batch_tokens: int,
    dtype: torch.dtype,
    compiled: bool,
    world_size: int = 1,
    on_cpu: bool = False,
) -> dict[str, int]:
    """Bytes of device memory that one of `world_size` training processes needs, by kind.

    Their sum is the most at any moment of a step of several micro-steps.

    dtype: of the forward pass. compiled: the model is, not only the optimizer. On a CPU a save copies weights
    and optimizer state to the same memory, attention keeps its weights (attention_blocks.py), and more is
    loaded and lost than on a GPU.
    """
    counts, size = scaling.on_meta(config).parameter_counts(), torch.finfo(dtype).bits // 8
    total, matrices = counts["total"], counts["matrices"]
    layer, once = KEPT[compiled, size]
    state = (8 * total - 4 * matrices) // world_size  # one moment for Muon's matrices, two for the rest
    casts = size * (matrices + counts["head"]) if size < 4 else 0  # autocast's copies of the weights
    needed = {
        "weights": 4 * total,
        "gradients": 4 * total,
        "optimizer state": state,
        "activations": round(micro_batch_tokens * config.width * (layer * config.depth + once)) + casts,
        "logits": logit_bytes(config, micro_batch_tokens, dtype, compiled, on_cpu=on_cpu),
        "save copies": on_cpu * (4 * total + state),
        "rows with pieces": 16 * config.spelled * counts["head"],  # of both tables, and gradients
        "gradient exchange": 2 * min(BUCKET_BYTES, 4 * total) if world_size > 1 else 0,
    }
    # At the end of a compiled backward pass its gradients are there besides those of earlier micro-steps
    late = max(4 * total * compiled, MUON_COPIES * 4 * matrices // 3 // world_size)
    needed["update"] = max(0, late - needed["activations"] - needed["logits"])  # beyond what it takes over
    if on_cpu:
        needed["attention"] = size * attention_weights(config, micro_batch_tokens // config.max_seq_len)
        needed["gaps"] = 0 if compiled else round(GAPS * sum(needed.values()))
        needed["libraries"] = LIBRARIES + compiled * COMPILER
    return needed


def attention_weights(config: GPTConfig, rows: int) -> int:
    """How many weights attention in blocks keeps for the backward pass."""
    T = config.max_seq_len
    if T > attention_blocks.LONG or rows < 1:
        return 0
    shape = rows, config.num_heads, T
    return sum(attention_blocks.tiles(*shape, window)[-1].place.stop for window in config.windows)


def logit_bytes(config: GPTConfig, tokens: int, dtype: torch.dtype, compiled: bool, on_cpu: bool) -> int:
    """Bytes of a chunk's logits, and of the head's gradient, which is made with them and kept in float32."""
    size, head = torch.finfo(dtype).bits // 8, config.width * config.vocab_size
    rows = loss.chunk_rows(tokens, config.vocab_size, "cpu" if on_cpu else "cuda", dtype)
    logit = size if compiled and not on_cpu else EAGER_LOGIT[size]
    # A product of a chunk is added to it. The backward pass writes it once more, multiplied
    return 4 * head + max(rows * config.vocab_size * logit + size * head, 4 * head)


def in_words(needed: dict[str, int]) -> str:
    """The kinds from the largest on, without those below a hundredth: "logits 3.20, weights 1.05"."""
    total = sum(needed.values())
    large = sorted((item for item in needed.items() if item[1] >= total / 100), key=lambda item: -item[1])
    return ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in large)


def sentence(
    needed: int, memory: int, advice: str = "lower --device_batch_size, --max_seq_len or --depth"
) -> str:
    """What to do if a process needs more bytes than it may take; empty if it does not."""
    if needed <= memory:
        return ""
    said = f"this run needs about {needed / 2**30:.1f} GiB a process and {memory / 2**30:.1f} are free"
    return f"{said}; {advice}"


def pick_device_batch_size(
    rows: int, config: GPTConfig, dtype: torch.dtype, compiled: bool, memory: int, most_tokens: int, **where
) -> int:
    """Rows of a micro-batch: the largest divisor of `rows` with at most `most_tokens` tokens that needs no
    more than `memory` bytes; 1 if none does."""
    for size in range(min(rows, most_tokens // config.max_seq_len), 1, -1):
        tokens = size * config.max_seq_len
        if rows % size == 0 and memory >= sum(
            training_bytes(config, tokens, dtype, compiled, **where).values()
        ):
            return size
    return 1
