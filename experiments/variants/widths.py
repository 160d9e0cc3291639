"""Widths, each with the FLOPs that five minutes on two cores are: a wider model reads fewer tokens.

    python -m scripts.ablate --variants=widths --seeds=1

Not run so far.
"""

settings = {
    "depth": 4,
    "head_dim": 64,
    "max_seq_len": 512,
    "total_batch_size": 8192,
    "device_batch_size": 8,
    "vocab_size": 4096,
    "target_flops": 5e13,
    "warmdown_ratio": 0.5,
    "eval_tokens": -1,
}
variants = {
    "192": {"aspect_ratio": 48},
    "128": {"aspect_ratio": 32},
    "256": {"aspect_ratio": 64},
    "256, heads of 128": {"aspect_ratio": 64, "head_dim": 128},
}
