"""Does a token see the other documents of its row?"""

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
variants = {"whole row": {}, "own document": {"document_mask": True}}
