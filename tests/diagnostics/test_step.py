"""The diagnostics make the same step as the training script."""

from dataclasses import replace

import torch
from helpers import TINY, command, losses, run
from safetensors.torch import load_file
from small_model import CPU, DEFAULTS

from nanochat import optim
from nanochat.data.loader import TrainLoader
from nanochat.data.sources import open_dataset
from nanochat.data.tokenizer import open_tokenizer
from nanochat.diagnostics import scaled_rates, training_step
from nanochat.gpt import GPT
from nanochat.machine import precision
from nanochat.ops.subword import register_subwords
from nanochat.plan import scaling

# What base_train's schedules give in a run of two steps: Muon's momentum, and the share of the weight decay
SCHEDULES = [(0.85, 1.0), (0.95, 0.5)]


def test_it_is_the_step_of_base_train_to_the_last_digit(tmp_path, corpus):
    batch = ["--total_batch_size=64", "--num_iterations=2", "--warmup_steps=0", "--warmdown_ratio=0"]
    run(command(corpus, tmp_path / "run", *batch))
    assert {"--max_seq_len=32", "--device_batch_size=2", "--dtype=float32"} <= {*TINY}

    run_folder = tmp_path / "run" / "step_000002"
    dataset = open_dataset(str(corpus), str(corpus / "val.parquet"), base_dir=tmp_path)
    tokenizer = open_tokenizer(str(run_folder / "tokenizer.json"), -1, tmp_path, dataset.train_texts)
    config = replace(scaling.model_config(2, 16, 16, 32, tokenizer.vocab_size, "L"), spelled=True)
    model = GPT(config)
    model.init_weights(torch.Generator().manual_seed(DEFAULTS["seed"]))
    register_subwords(model, tokenizer)
    rates, decay = scaled_rates(DEFAULTS, config, batch_tokens=64, steps=2)
    optimizer = optim.MuonAdamW(optim.parameter_groups(model, rates, decay))
    scaler = precision.make_scaler(CPU, torch.float32)
    ours = {}
    with TrainLoader(dataset.train_shards, tokenizer, 2, 32, 2, seed=DEFAULTS["seed"]) as loader:
        for step, (momentum, share) in enumerate(SCHEDULES):
            for group in optimizer.param_groups:
                if group["method"] == "muon":
                    group["betas"] = (momentum, group["betas"][1])
                    group["weight_decay"] = decay * share
            ours[step] = training_step(
                model, optimizer, scaler, torch.float32, *next(loader), DEFAULTS["grad_clip"]
            ).item()
            optimizer.zero_grad(set_to_none=True)
    assert ours == losses(tmp_path / "run")
    theirs = load_file(run_folder / "model.safetensors")
    assert theirs.keys() == model.state_dict().keys()
    assert all(torch.equal(p, theirs[name]) for name, p in model.state_dict().items())
