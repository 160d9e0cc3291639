"""Schedule and rates with the batch that the laptop's recipe had until 2026-11-22: one changed at a time."""

settings = {
    "depth": 4,
    "aspect_ratio": 48,
    "head_dim": 64,
    "max_seq_len": 512,
    "total_batch_size": 2048,
    "device_batch_size": 4,
    "vocab_size": 4096,
    "embedding_lr": 0.3,  # the default of that day
    "num_iterations": 750,
    "warmdown_ratio": 0.5,
    "eval_tokens": 100_000,
}
variants = {
    "as it is": {},
    "warm-down over 0.65": {"warmdown_ratio": 0.65},
    "warm-down over 0.8": {"warmdown_ratio": 0.8},
    "matrix_lr x 1.5": {"matrix_lr": 0.03},
    "matrix_lr / 1.5": {"matrix_lr": 0.0133},
    "embedding_lr x 2": {"embedding_lr": 0.6},
    "embedding_lr / 2": {"embedding_lr": 0.15},
    "unembedding_lr x 2": {"unembedding_lr": 0.008},
    "unembedding_lr / 2": {"unembedding_lr": 0.002},
    "batches of 4096": {"total_batch_size": 4096, "num_iterations": 375},
    "rate falls to 0": {"final_lr_frac": 0.0},
}
