"""Parts of the model and of its optimizer, each taken away, and the settings, each changed.

    python -m scripts.ablate --variants=parts --seeds=1 --more="--data=FOLDER --val_data=FILE"     # to screen

The settings are those of a short run, for screening. `--more="--aspect_ratio=64 --head_dim=128
--num_iterations=600 --compile=on"` makes them those of the d4 model of docs/benchmarks.md, and
`--more="--max_seq_len=256 --vocab_size=2048 --num_iterations=1536 --compile=on"` with the mixed text those of
the long runs in docs/ablations.md.
"""

settings = {
    "depth": 4,
    "aspect_ratio": 32,
    "head_dim": 64,
    "max_seq_len": 512,
    "total_batch_size": 8192,
    "device_batch_size": 8,
    "vocab_size": 4096,
    "num_iterations": 250,
    "eval_tokens": -1,
}
variants = {
    "today": {},
    # Parts of the model
    "without shifted keys": {"patch": "without.patch"},
    "without keys as queries": {"patch": "without.patch"},
    "without QK scale": {"patch": "without.patch"},  # 1, not 1.2
    "without gates of heads": {"patch": "without.patch"},
    "without value embeddings": {"patch": "without.patch"},
    "without gate of value embeddings": {"patch": "without.patch"},
    "without tables": {"patch": "without.patch"},  # all value embeddings are rows of the head
    "without rows of the head": {"patch": "without.patch"},
    "without smear": {"patch": "without.patch"},
    "without gate of the smear": {"patch": "without.patch"},
    "without x0 in the last block": {"patch": "without.patch"},
    "without leak": {"patch": "without.patch"},  # ReLU squared
    "without softcap": {"patch": "without.patch"},  # 60, not 15
    "tokens do not share their spelling": {"spelling": "off"},
    "no copying": {"copying": "off"},
    "no rows for pairs of tokens": {"bigrams": 0},
    # Parts of the optimizer and the schedules
    "without normalization": {"patch": "without.patch"},
    "without cautious decay": {"patch": "without.patch"},
    "without falling momentum": {"patch": "without.patch"},
    "no weight decay": {"weight_decay": 0.0},
    "no clipping": {"grad_clip": -1},
    "weight_decay x 2": {"weight_decay": 0.56},
    "weight_decay / 2": {"weight_decay": 0.14},
    "matrix_lr x 1.3": {"matrix_lr": 0.026},
    "matrix_lr x 2": {"matrix_lr": 0.04},
    "matrix_lr / 2": {"matrix_lr": 0.01},
    "embedding_lr x 2": {"embedding_lr": 1.2},
    "embedding_lr / 2": {"embedding_lr": 0.3},
    "unembedding_lr x 2": {"unembedding_lr": 0.008},
    "unembedding_lr / 2": {"unembedding_lr": 0.002},
    "scalar_lr x 2": {"scalar_lr": 0.2},
    "scalar_lr / 2": {"scalar_lr": 0.05},
    "warm-down over 0.5": {"warmdown_ratio": 0.5},
    "warm-down over 0.65": {"warmdown_ratio": 0.65},
    "rate falls to 0": {"final_lr_frac": 0.0},
    # Sizes
    "batches of 2,048": {"total_batch_size": 2048, "device_batch_size": 4, "num_iterations": 1000},
    "batches of 4,096": {"total_batch_size": 4096, "num_iterations": 500},
    "batches of 16,384": {"total_batch_size": 16384, "num_iterations": 125},
    "heads of 32": {"head_dim": 32},
    "heads of 128": {"head_dim": 128},
    "document mask": {"document_mask": True},
}
