"""Batches of the laptop's recipe on equally many tokens, and rates with them."""

settings = {
    "depth": 4,
    "aspect_ratio": 48,
    "head_dim": 64,
    "max_seq_len": 512,
    "total_batch_size": 4096,
    "device_batch_size": 4,
    "vocab_size": 4096,
    "embedding_lr": 0.3,  # the default of that day
    "num_iterations": 375,
    "warmdown_ratio": 0.5,
    "eval_tokens": 100_000,
}
variants = {
    "4096": {},
    "2048": {"total_batch_size": 2048, "num_iterations": 750},
    "8192": {"total_batch_size": 8192, "num_iterations": 188},
    "16384": {"total_batch_size": 16384, "num_iterations": 94},
    "4096, unembedding_lr x 2": {"unembedding_lr": 0.008},
    "4096, unembedding_lr x 2, embedding_lr x 2": {"unembedding_lr": 0.008, "embedding_lr": 0.6},
    "8192, matrix_lr x 1.5": {"total_batch_size": 8192, "num_iterations": 188, "matrix_lr": 0.03},
}
