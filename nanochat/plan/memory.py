"""How much device memory training needs, by kind, before any of it is taken.

The factors were counted: what autograd keeps for the backward pass in eager code, and what the partitioner
keeps in compiled code (experiments/results/memory-estimate.tsv; `python -m experiments.memory_count` counts
again). On a GPU they leave out the device's context and libraries, and the gaps between tensors.
"""

import bisect
from dataclasses import replace

import torch

from nanochat.gpt import GPTConfig
from nanochat.ops import attention_blocks, loss
from nanochat.plan import scaling
from nanochat.plan.counts import on_meta, parameter_counts
from nanochat.terminal import gib

# Bytes that a token takes: for each channel in each layer, and for each channel once.
# (compiled, bytes of the compute dtype): (layer, once)
KEPT = {
    (True, 2): (34.0, 17.0),
    (True, 4): (68.5, 18.5),
    (False, 2): (59.0, 11.5),
    (False, 4): (95.0, 13.0),
}
MLP_KERNEL = 8  # bytes for each channel in each layer that are not kept with the kernels of ops/mlp.py
# Bytes for each logit of a chunk (loss.py), by bytes of the compute dtype: the logits in that dtype and two
# float32 tensors, or one if the logits are float32. Compiled for a GPU, only the logits
EAGER_LOGIT = {2: 10, 4: 8}
MUON_COPIES = 5  # float32 copies of Muon's largest group, a third of all matrices, in its update
# For a CPU, fitted to the largest resident memory of runs (docs/benchmarks.md). Eager code leaves gaps
# between tensors, a share of all; compiled code has none, but the compiler stays in memory (bytes)
GAPS, COMPILER = 0.2, 130 * 10**6
LIBRARIES = 75 * 10**6  # bytes of the libraries that a process loads after the plan
BUCKET_BYTES = 25 * 2**20  # DDP sends gradients in such pieces


def training_bytes(
    config: GPTConfig,
    micro_batch_tokens: int,
    dtype: torch.dtype,
    compiled: bool,
    world_size: int = 1,
    on_cpu: bool = False,
    mlp_kernel: bool = False,
) -> dict[str, int]:
    """Bytes of device memory that one of `world_size` training processes needs, by kind.

    Their sum is the most at any moment of a step of several micro-steps.

    dtype: of the forward pass. compiled: whether the model is compiled. mlp_kernel: whether the kernels of
    ops/mlp.py are used. On a CPU a save copies weights and optimizer state to the same memory, attention
    keeps its weights (attention_blocks.py), and libraries and gaps count.
    """
    counts, size = parameter_counts(on_meta(config)), torch.finfo(dtype).bits // 8
    total, matrices = counts["total"], counts["matrices"]
    layer, once = KEPT[compiled, size]
    layer -= MLP_KERNEL * mlp_kernel
    # Muon's matrices have one moment, shared rows next to nothing, the rest two
    state = (8 * (total - counts["bigrams"]) - 4 * matrices) // world_size
    casts = size * (matrices + counts["head"]) if size < 4 else 0  # autocast's copies of the weights
    needed = {
        "weights": 4 * total,
        "gradients": 4 * total,
        "optimizer state": state,
        "activations": round(micro_batch_tokens * config.width * (layer * config.depth + once)) + casts,
        "logits": logit_bytes(config, micro_batch_tokens, dtype, compiled, on_cpu=on_cpu),
        "save copies": on_cpu * (4 * total + state),
        "sub-word rows": 16 * config.spelled * counts["head"],  # of both tables, and their gradients
        "gradient exchange": 2 * min(BUCKET_BYTES, 4 * total) if world_size > 1 else 0,
    }
    # A compiled backward pass ends with its own gradients and those of earlier micro-steps in memory. In a
    # single process those of tables are added to at once
    twice = total if world_size > 1 else matrices + counts["head"] + counts["pieces"]
    late = max(4 * twice * compiled, MUON_COPIES * 4 * matrices // 3 // world_size)
    needed["update"] = max(0, late - needed["activations"] - needed["logits"])  # these are free by then
    if on_cpu:
        needed["attention"] = size * attention_weights(config, micro_batch_tokens // config.max_seq_len)
        needed["gaps"] = 0 if compiled else round(GAPS * sum(needed.values()))
        needed["libraries"] = LIBRARIES + compiled * COMPILER
    return needed


def attention_weights(config: GPTConfig, rows: int) -> int:
    """How many softmax weights attention in blocks keeps for the backward pass."""
    T = config.max_seq_len
    if T > attention_blocks.LONG or rows < 1:
        return 0
    shape = rows, config.num_heads, T
    return sum(attention_blocks.tiles(*shape, window)[-1].place.stop for window in config.windows)


def logit_bytes(config: GPTConfig, tokens: int, dtype: torch.dtype, compiled: bool, on_cpu: bool) -> int:
    """Bytes of a chunk's logits, and of the head's gradient, which is summed with them in float32."""
    size, head = torch.finfo(dtype).bits // 8, config.width * config.vocab_size
    in_one_pass = compiled and not on_cpu
    rows = loss.chunk_rows(tokens, config.vocab_size, "cpu" if on_cpu else "cuda", dtype, in_one_pass)
    logit = size if in_one_pass else EAGER_LOGIT[size]
    # Each chunk adds a product to it. The backward pass writes it a second time, multiplied
    return 4 * head + max(rows * config.vocab_size * logit + size * head, 4 * head)


def in_words(needed: dict[str, int]) -> str:
    """GiB by kind, the largest first, without those below a hundredth: "logits 3.20, weights 1.05"."""
    total = sum(needed.values())
    large = sorted((item for item in needed.items() if item[1] >= total / 100), key=lambda item: -item[1])
    return ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in large)


def refusal(plan) -> str:
    """Why a run does not fit into memory and what to lower; empty if it fits. plan: a planning.Plan."""
    needed, memory = plan.expected_bytes, plan.hardware.memory
    if needed <= memory:
        return ""
    said = f"this run needs about {gib(needed)} a process and {gib(memory)} are free"
    return f"{said}; {advice(plan, memory)}"


def advice(plan, memory: int) -> str:
    """What to lower, and to which value, so that a process needs at most `memory` bytes."""
    if rows := plan.most_rows(plan.device_batch_size - 1, memory):
        return f"lower --device_batch_size to {rows}"
    one_row, config = plan.with_rows(1), plan.config
    rows_too = " and --device_batch_size to 1" if plan.device_batch_size > 1 else ""

    def needs(**changes) -> int:
        return replace(one_row, config=replace(config, **changes)).expected_bytes

    found = []
    lengths = [config.max_seq_len >> n for n in range(1, 12) if config.max_seq_len % (1 << n) == 0]
    if length := next((T for T in lengths if needs(max_seq_len=T) <= memory), 0):
        found.append(f"--max_seq_len to {length}")
    if plan.aspect_ratio:  # else the model is given
        # Memory grows at most with the cube of the depth, so deeper than this cannot fit
        deepest = int(config.depth * (memory / one_row.expected_bytes) ** (1 / 3)) + 2

        def needs_at(depth: int) -> int:
            sizes = depth, plan.aspect_ratio, config.head_dim, config.max_seq_len, config.vocab_size
            shape = scaling.model_config(*sizes, config.window_pattern)
            return needs(depth=depth, width=shape.width, num_heads=shape.num_heads)

        if depth := bisect.bisect_right(range(1, min(config.depth, deepest)), memory, key=needs_at):
            found.append(f"--depth to {depth}")
        if fitting := bisect.bisect_right(range(config.bigrams), memory, key=lambda n: needs(bigrams=n)):
            found.append(f"--bigrams to {fitting - 1}")
    return f"lower {' or '.join(found or ['--max_seq_len and --depth'])}{rows_too}"
