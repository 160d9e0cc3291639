"""The optimizer against a plain per-matrix Muon: the same steps on the same text, judged by bits per byte."""

import pytest
import torch

from nanochat import runtime, scaling
from nanochat.data.dataset import open_dataset
from nanochat.data.loader import TrainLoader
from nanochat.data.parquet import iterate_documents
from nanochat.data.tokenizer import open_tokenizer
from nanochat.data.validation import validation_batches
from nanochat.evaluate import bits_per_byte
from nanochat.gpt import GPT
from nanochat.optim import MuonAdamW, parameter_groups

STEPS, ROWS, T = 300, 12, 128


class PlainMuon:
    """Muon as it was first written down (Jordan et al. 2024), one matrix after the other."""

    def __init__(self, params, weight_decay):
        self.momentum = {p: torch.zeros_like(p) for p in params}
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self, lr, beta):
        for p, momentum in self.momentum.items():
            momentum.lerp_(p.grad, 1 - beta)
            X = p.grad.lerp(momentum, beta)
            X = X / (X.norm() + 1e-7)
            X = X.T if p.size(0) > p.size(1) else X
            for _ in range(5):
                A = X @ X.T
                X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
            X = X.T if p.size(0) > p.size(1) else X
            p.mul_(1 - lr * self.weight_decay)
            p.sub_(X, alpha=lr * max(1, p.size(0) / p.size(1)) ** 0.5)


def bits_after_training(plain: bool, seed: int, base) -> float:
    """Validation bits per byte of a small GPT after STEPS steps on the embedded text, in float32."""
    machine = runtime.start("cpu", seed)
    dataset = open_dataset("embedded", base_dir=base)
    encoding = open_tokenizer("auto", 1024, base / "tok", lambda: iterate_documents(dataset.train_shards))
    config = scaling.model_config(3, 32, 32, T, encoding.vocab_size, "L")
    model = GPT(config)
    model.init_weights(torch.Generator().manual_seed(seed))
    rates = {"embedding_lr": 0.2, "unembedding_lr": 0.003, "scalar_lr": 0.05, "matrix_lr": 0.013}
    decay = 0.3
    groups = parameter_groups(model, rates, decay)
    matrices = [p for g in groups if g["method"] == "muon" for p in g["params"]]
    muon = PlainMuon(matrices, decay) if plain else None
    if plain:
        groups = [g for g in groups if g["method"] == "adamw"]
    optimizer = MuonAdamW(groups)
    with TrainLoader(dataset.train_shards, encoding, ROWS, T, ROWS, seed=seed) as loader:
        for step in range(STEPS):
            multiplier = scaling.lr_multiplier(step, STEPS, 30, 0.5, 0.05)
            beta = scaling.muon_momentum(step, STEPS)
            inputs, targets = next(loader)
            model(inputs, targets).backward()
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * multiplier
                if group["method"] == "muon":
                    group["betas"] = (beta, group["betas"][1])
            optimizer.step()
            if plain:
                muon.step(rates["matrix_lr"] * multiplier, beta)
            model.zero_grad(set_to_none=True)
    validation = validation_batches(dataset.val_shards, encoding, T, ROWS, 60_000)
    token_bytes = torch.from_numpy(encoding.token_bytes())
    return bits_per_byte(model, validation, token_bytes, torch.float32, machine)


@pytest.mark.slow
def test_after_300_steps_bits_per_byte_are_no_worse_than_with_a_plain_per_matrix_muon(tmp_path_factory):
    base = tmp_path_factory.mktemp("base")
    ours, plain = ([bits_after_training(kind, seed, base) for seed in (0, 1)] for kind in (False, True))
    print(f"bits per byte, two seeds: ours {ours}, plain Muon {plain}")
    assert sum(ours) <= sum(plain)
    assert max(ours) < 2.6  # it has learnt: an untrained model is at 4.6
