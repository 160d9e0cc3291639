"""Our model at a size that takes milliseconds, and a recorded step of it."""

import torch
from helpers import ROOT

import configurator
from nanochat import optim
from nanochat.diagnostics.recorder import Record, record_step
from nanochat.diagnostics.step import scaled_rates
from nanochat.gpt import GPT, GPTConfig
from nanochat.machine import precision

CPU = torch.device("cpu")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DEFAULTS = configurator.defaults(ROOT / "scripts" / "base_train.py")
PAGE = (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")


def gpt(depth=2, width=32) -> GPT:
    model = GPT(GPTConfig(depth=depth, width=width, num_heads=2, vocab_size=64, max_seq_len=16))
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def optimizer_of(model: GPT, dtype=F32) -> optim.MuonAdamW:
    rates, decay = scaled_rates(DEFAULTS, model.config, batch_tokens=32, steps=100)
    return optim.MuonAdamW(optim.parameter_groups(model, rates, decay), dtype)


def record_gpt(dtype, **size) -> Record:
    model = gpt(**size)
    idx = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    scaler = precision.make_scaler(CPU, dtype)
    return record_step(model, optimizer_of(model, dtype), scaler, dtype, idx, idx, [1, 2, 3], max_tokens=2)
