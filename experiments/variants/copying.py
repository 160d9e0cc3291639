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
    "today's model": {},
    "key offset, half of the channels": {"patch": "key-offset.patch"},
    "key offset, all channels": {"patch": "key-offset-all.patch"},
    "key offset of half, after the rotation": {"patch": "half-after.patch"},
    "key offset of all, after the rotation": {"patch": "all-after.patch"},
    "keys of the two tokens before, queries of two": {"patch": "bigram.patch"},
    "key offsets of 0, 1 and 2": {"patch": "two-offsets.patch"},
    "smear": {"patch": "smear.patch"},
    "mix of one token before attention": {"patch": "canon1.patch"},
    "mix of three tokens before attention": {"patch": "canon3.patch"},
    "mix of one token in k": {"patch": "kmix.patch"},
    "mix of one token in q and k": {"patch": "qkmix.patch"},
    "mix of one token in k and v": {"patch": "kvmix.patch"},
}
