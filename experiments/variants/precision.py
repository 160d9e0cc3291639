"""The compute dtype."""

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
variants = {"float32": {"dtype": "float32"}, "bfloat16": {"dtype": "bfloat16"}}
