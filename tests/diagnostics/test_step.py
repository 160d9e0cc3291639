"""The diagnostics make the same step as the training script."""

import json
import re
from dataclasses import replace

import torch
from helpers import TINY, command, insert, losses, run_tree
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

AT_END = """
names = "initial_lr", "initial_weight_decay", "lr", "betas", "weight_decay"
print("groups", __import__("json").dumps([[g[name] for name in names] for g in optimizer.param_groups]))
"""


def test_it_is_the_step_of_base_train_to_the_last_digit(tree, tmp_path, corpus):
    insert(tree, at_step_end=AT_END)
    batch = ["--total_batch_size=64", "--num_iterations=2"]
    printed = run_tree(tree, command(corpus, tmp_path / "run", *batch))
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
        for step, line in enumerate(re.findall("^groups (.+)", printed, re.MULTILINE)):
            for group, (*initial, lr, betas, weight_decay) in zip(
                optimizer.param_groups, json.loads(line), strict=True
            ):
                assert initial == [group["initial_lr"], group["initial_weight_decay"]]
                group.update(lr=lr, betas=betas, weight_decay=weight_decay)  # the script's schedules
            ours[step] = training_step(
                model, optimizer, scaler, torch.float32, *next(loader), DEFAULTS.get("grad_clip", -1)
            ).item()
            optimizer.zero_grad(set_to_none=True)
    assert ours == losses(tmp_path / "run")
    theirs = load_file(run_folder / "model.safetensors")
    assert theirs.keys() == model.state_dict().keys()
    assert all(torch.equal(p, theirs[name]) for name, p in model.state_dict().items())
