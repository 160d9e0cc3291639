"""How documents become rows."""

settings = {
    "depth": 4,
    "aspect_ratio": 32,
    "head_dim": 32,
    "max_seq_len": 256,
    "vocab_size": 1024,
    "total_batch_size": 4096,
    "num_iterations": 200,
    "eval_tokens": 65_536,
}
variants = {
    "best fit, remainders kept": {},
    "best fit, cropped": {"patch": "cropped.patch"},
    "concatenation": {"patch": "concatenation.patch"},
}
