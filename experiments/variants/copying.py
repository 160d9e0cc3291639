"""What brings copying from the context forward: ways in which a token knows the one before it."""

settings = {
    "depth": 4,
    "aspect_ratio": 48,
    "head_dim": 64,
    "max_seq_len": 512,
    "total_batch_size": 2048,
    "device_batch_size": 4,
    "vocab_size": 4096,
    "num_iterations": 500,
    "warmdown_ratio": 0.5,
    "eval_tokens": 100_000,
}
variants = {
    "key of the token before": {},
    "own key": {"patch": "own-key.patch"},
    "half of the key of the token before": {"patch": "key-offset.patch"},
    "key of the token before, rotated as that of its place": {"patch": "key-offset-all.patch"},
    "keys of the two tokens before, queries of two": {"patch": "bigram.patch"},
    "own key, smear": {"patch": "smear.patch"},
}
