"""The optimizer against a plain Muon in its place: the same runs of base_train, judged by bits per byte."""

from pathlib import Path

import pytest
from helpers import records, run_tree

RUN = [
    "--depth=3", "--aspect_ratio=32", "--head_dim=32", "--max_seq_len=128", "--vocab_size=1024",
    "--device_batch_size=12", "--total_batch_size=1536", "--num_iterations=300",
    "--weight_decay=0.024", "--eval_every=-1", "--eval_tokens=60000", "--dtype=float32", "--compile=off",
    "--core_metric_every=-1",
]  # fmt: skip
PLAIN_MUON = '''

def muon_update(params, grads, momentum, second_moment, lr, beta, beta2, weight_decay, skip, dtype):
    """Muon as it was first written down (Jordan et al. 2024), one matrix after the other."""
    momentum.lerp_(grads, 1 - beta)
    for p, X in zip(params, grads.lerp(momentum, beta), strict=True):
        X = X / (X.norm() + 1e-7)
        X = X.T if p.size(0) > p.size(1) else X
        for _ in range(5):
            A = X @ X.T
            X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
        X = X.T if p.size(0) > p.size(1) else X
        p.mul_(1 - lr * weight_decay)
        p.sub_(lr * max(1, p.size(0) / p.size(1)) ** 0.5 * X)
'''


def bits_after_training(tree: Path, seed: int, base: Path) -> float:
    """Validation bits per byte after 300 steps on the embedded text."""
    out = base / f"run-{seed}"
    places = [f"--base_dir={base}", f"--out_dir={out}", "--resume=never", f"--seed={seed}"]
    run_tree(tree, ["scripts.base_train", *RUN, *places])
    return records(out)[-1]["val_bpb"]


@pytest.mark.slow
def test_after_300_steps_bits_per_byte_are_no_worse_than_with_a_plain_muon(tree, tmp_path):
    seeds = range(4)  # differences scatter by 0.003 from seed to seed: two would decide nothing
    ours = [bits_after_training(tree, seed, tmp_path / "base") for seed in seeds]
    with open(tree / "nanochat" / "muon.py", "a", encoding="utf-8") as file:
        file.write(PLAIN_MUON)
    plain = [bits_after_training(tree, seed, tmp_path / "base") for seed in seeds]
    print(f"bits per byte, four seeds: ours {ours}, plain Muon {plain}")
    assert sum(ours) <= sum(plain)
    assert max(ours) < 2.6  # it has learnt: an untrained model is at 4.6
