"""Widths at equal FLOPs: a wider model reads fewer tokens.

    python -m scripts.ablate --variants=widths --seeds=1

for about the FLOPs of five minutes on two cores. The rule of the dial is fitted to such runs with other FLOPs
(`--more="--target_flops=2.2e13 --total_batch_size=4096"`, `--target_flops=5e12 --total_batch_size=2048
--device_batch_size=4`) and at `--depths=6`, where the width is 6 times the aspect ratio, in whole heads.
"""

settings = {
    "depth": 4,
    "head_dim": 64,
    "max_seq_len": 512,
    "total_batch_size": 8192,
    "device_batch_size": 8,
    "vocab_size": 4096,
    "target_flops": 1.1e14,
    "compile": "on",
    "eval_tokens": -1,
}
variants = {
    "192": {"aspect_ratio": 48},
    "128": {"aspect_ratio": 32},
    "256": {"aspect_ratio": 64},
    "96": {"aspect_ratio": 24, "head_dim": 48},
    "64": {"aspect_ratio": 16, "head_dim": 32},
    "320": {"aspect_ratio": 80},
    "d6 128": {"aspect_ratio": 21},
    "d6 96": {"aspect_ratio": 16, "head_dim": 48},
    "d6 192": {"aspect_ratio": 32},
}
