"""What a model has and costs: its parameters by role, and the FLOPs of a token."""

import functools

import torch

from nanochat.gpt import GPT, GPTConfig


@functools.lru_cache(8)  # a plan asks many times, and 512 layers take seconds
def on_meta(config: GPTConfig) -> GPT:
    """The model without memory behind it, to count its parameters and FLOPs. Do not change it."""
    with torch.device("meta"):
        return GPT(config)


def parameter_counts(model: GPT) -> dict[str, int]:
    """Parameters by role. Each token is multiplied with all of `matrices` and `head`."""

    def size(module) -> int:
        return 0 if module is None else sum(p.numel() for p in module.parameters())

    counts = {
        "embedding": size(model.embedding),
        "bigrams": size(model.ngrams),
        "value_embeddings": size(model.value_embeddings),
        "matrices": sum(p.numel() for p in model.blocks.parameters() if p.ndim >= 2),
        "head": size(model.head),
        "pieces": size(model.pieces),
    }
    total = size(model)
    return counts | {"scalars": total - sum(counts.values()), "total": total}


def scaling_parameters(config: GPTConfig) -> int:
    """The parameters that a data:parameter ratio counts: matrices and head, which multiply every token."""
    counts = parameter_counts(on_meta(config))
    return counts["matrices"] + counts["head"]


def flops_per_token(model: GPT) -> int:
    """FLOPs to train on one token, forward and backward.

    6 for each parameter of a matrix multiplication (2 forward, 4 backward), and 12 * C * window for QK^T and
    AV in each layer, not halved for causality: the count of PaLM (arXiv 2204.02311, appendix B).
    """
    counts, attended = parameter_counts(model), sum(model.config.windows)
    return 6 * (counts["matrices"] + counts["head"]) + 12 * model.config.width * attended
