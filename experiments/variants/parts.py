"""The parts of the model and of its optimizer, each taken away or changed, and candidates for new ones.

    python -m scripts.ablate --variants=parts --seeds=1 --more="--data=FOLDER --val_data=FILE"     # to screen

The settings are those of a short run, for screening. `--more="--aspect_ratio=64 --head_dim=128
--num_iterations=600 --compile=on"` makes them those of the d4 model of docs/benchmarks.md.
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
    "no value embeddings": {"patch": "parts/no-value-embeddings.patch"},
    "a table of its own for the last layer's value embeddings": {"patch": "parts/own-table.patch"},
    "value embeddings without gate": {"patch": "parts/no-value-gate.patch"},
    "no gate for a head's output": {"patch": "parts/no-head-gate.patch"},
    "tokens do not share their spelling": {"spelling": "off"},
    "no residual scale": {"patch": "parts/no-residual-scale.patch"},
    "no share of the first embedding": {"patch": "parts/no-x0.patch"},
    "no stream of the token before": {"patch": "parts/no-stream-before.patch"},
    "no gate for the stream of the token before": {"patch": "parts/no-x-before-gate.patch"},
    "keys do not begin as queries": {"patch": "parts/own-keys.patch"},
    "own key": {"patch": "own-key.patch"},
    "QK scale 1": {"patch": "parts/qk-scale-1.patch"},
    "QK scale 1.5": {"patch": "parts/qk-scale-1.5.patch"},
    "softcap 10": {"patch": "parts/softcap-10.patch"},
    "softcap 30": {"patch": "parts/softcap-30.patch"},
    "rotary base 1,000": {"patch": "parts/rope-1k.patch"},
    "rotary base 10,000": {"patch": "parts/rope-10k.patch"},
    "projections do not start at zero": {"patch": "parts/projections-not-zero.patch"},
    # Parts of the optimizer and the schedules
    "plain weight decay": {"patch": "parts/plain-decay.patch"},
    "no weight decay": {"weight_decay": 0.0},
    "no normalization by neuron": {"patch": "parts/no-normuon.patch"},
    "constant momentum": {"patch": "parts/constant-momentum.patch"},
    "momentum to 0.97": {"patch": "parts/momentum-to-0.97.patch"},
    "matrix_lr x 2": {"matrix_lr": 0.04},
    "matrix_lr / 2": {"matrix_lr": 0.01},
    "embedding_lr x 2": {"embedding_lr": 1.2},
    "embedding_lr / 2": {"embedding_lr": 0.3},
    "unembedding_lr x 2": {"unembedding_lr": 0.008},
    "unembedding_lr / 2": {"unembedding_lr": 0.002},
    "scalar_lr x 2": {"scalar_lr": 0.2},
    "scalar_lr / 2": {"scalar_lr": 0.05},
    "warm-down over 0.5": {"warmdown_ratio": 0.5},
    "warm-down over 0.8": {"warmdown_ratio": 0.8},
    "rate falls to 0": {"final_lr_frac": 0.0},
    "rate falls by a root": {"patch": "parts/rate-falls-by-a-root.patch"},
    # Sizes
    "batches of 4,096": {"total_batch_size": 4096, "num_iterations": 500},
    "batches of 16,384": {"total_batch_size": 16384, "num_iterations": 125},
    "heads of 32": {"head_dim": 32},
    "heads of 128": {"head_dim": 128},
    # Candidates
    "document mask": {"document_mask": True},
    "value embeddings on every layer": {"patch": "parts/value-embeddings-everywhere.patch"},
    "rows of the head as all value embeddings": {"patch": "parts/no-tables.patch"},
    "queries, keys and values with a share of the token before": {"patch": "parts/mixed-qkv.patch"},
    "exclusive self-attention": {"patch": "parts/exclusive-self-attention.patch"},
    "leaky ReLU squared": {"patch": "parts/leaky-relu-squared.patch"},
    "rotary positions in half of the channels": {"patch": "parts/half-rotary.patch"},
    "attention and MLP in parallel": {"patch": "parts/parallel.patch"},
    "norms scaled by layer": {"patch": "parts/norm-by-layer.patch"},
    "U-Net skips": {"patch": "parts/u-net.patch"},
    "backout": {"patch": "parts/backout.patch"},
    "weights averaged at the end": {"patch": "parts/averaged-weights.patch"},
    "eps of x_before_scale 1e-8": {"patch": "parts/small-eps.patch"},
}
