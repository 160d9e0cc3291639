"""Our model at a size that takes milliseconds, and a recorded step of it."""

import torch
from helpers import DEFAULTS
from test_gpt import make_model

from nanochat import optim
from nanochat.diagnostics import scaled_rates
from nanochat.diagnostics.recorder import Record, record_step
from nanochat.gpt import GPT
from nanochat.machine import precision

CPU = torch.device("cpu")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def gpt() -> GPT:
    return make_model(2, 32, 2, 64, 16, stir=0, bigrams=0)


def optimizer_of(model: GPT, dtype=F32) -> optim.MuonAdamW:
    rates, decay = scaled_rates(DEFAULTS, model.config, batch_tokens=32, steps=100)
    return optim.MuonAdamW(optim.parameter_groups(model, rates, decay), dtype)


def record_gpt(dtype) -> Record:
    model = gpt()
    idx = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    scaler = precision.make_scaler(CPU, dtype)
    return record_step(model, optimizer_of(model, dtype), scaler, dtype, idx, idx, [1, 2, 3], max_tokens=2)
