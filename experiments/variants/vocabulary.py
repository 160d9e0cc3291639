"""Vocabularies of several sizes, each with as many FLOPs: with a larger one a token is more text.

    python -m scripts.ablate --variants=vocabulary --seeds=1 --more="--data=FOLDER --val_data=FILE"

The tokenizer of each size is trained on the text, and bits per byte compare them.
"""

settings = {
    "depth": 4,
    "aspect_ratio": 64,
    "max_seq_len": 512,
    "total_batch_size": 8192,
    "device_batch_size": 8,
    "target_flops": 5e13,
    "eval_tokens": -1,
}
variants = {
    "4,096": {"vocab_size": 4096},
    "1,024": {"vocab_size": 1024},
    "2,048": {"vocab_size": 2048},
    "8,192": {"vocab_size": 8192},
    "16,384": {"vocab_size": 16384},
    "32,768": {"vocab_size": 32768},
}
