"""What keeps a model from learning a short text by heart, which it reads three times.

python -m scripts.ablate --variants=epochs --more="--data=FILE --val_data=FILE"     # about 550,000 tokens
"""

settings = {
    "depth": 4,
    "max_seq_len": 512,
    "total_batch_size": 8192,
    "device_batch_size": 8,
    "vocab_size": 4096,
    "num_iterations": 200,
    "eval_tokens": -1,
    "compile": "on",
}
variants = {
    "today": {},
    "embeddings and head do not decay": {"table_decay": 0.0},
    "they decay three times as much": {"table_decay": 3.0},
    "document mask": {"document_mask": True},
}
