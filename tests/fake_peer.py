"""Stands in for karpathy/nanochat where ours is measured beside it.

It prints as the peer's script does, learns nothing, and takes a known time for an update and for each token
that it writes.
"""

from pathlib import Path

FILES = {
    # Says with what it was started, holds 80 MiB, and leaves the checkpoints that it is asked for
    "scripts/base_train.py": """
import argparse, json, os, shutil, sys, time
import rustbpe

held = bytearray(80 << 20)
held[::4096] = b"x" * len(held[::4096])
names = "NANOCHAT_BASE_DIR", "NANOCHAT_DTYPE"
base = os.environ["NANOCHAT_BASE_DIR"]
found = sorted(os.listdir(base + "/base_data_climbmix")), sorted(os.listdir(base + "/tokenizer"))
print(json.dumps([sys.argv[1:], {name: os.environ.get(name) for name in names}, *found]))
parser = argparse.ArgumentParser()
for name in ("num-iterations", "save-every", "depth"):
    parser.add_argument("--" + name, type=int, default=-1)
args = parser.parse_known_args()[0]
if args.depth == 13:
    sys.exit("no such depth")
for step in range(args.num_iterations + 1):
    last = step == args.num_iterations
    if os.path.exists("model.pt") and (last or step and args.save_every > 0 and step % args.save_every == 0):
        folder = os.path.join(base, "base_checkpoints", "run")
        os.makedirs(folder, exist_ok=True)
        shutil.copy("model.pt", os.path.join(folder, f"model_{step:06d}.pt"))
        with open(os.path.join(folder, f"meta_{step:06d}.json"), "w") as file:
            json.dump({"model_config": {"n_layer": args.depth}}, file)
    if not last:
        time.sleep(0.01)
        speed = ("900", "1,000", "3,000", "2,000")[step % 4]
        print(f"step {step:05d}/00004 (25.00%) | loss: 8.5 | lrm: 1.00 | dt: {step}25.00ms | "
              f"tok/sec: {speed} | bf16_mfu: 0.00 | epoch: 1 pq: 0 rg: 0 | total time: 0.00m")
""",
    "nanochat/__init__.py": "",
    # Takes all tokens for equally likely
    "nanochat/gpt.py": """
import time, torch

class GPTConfig:
    def __init__(self, n_layer, **sizes):
        assert n_layer == 1 and sizes in ({}, sizes | {"n_embd": 64, "vocab_size": 512, "sequence_len": 64})

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.vocab = torch.nn.Parameter(torch.zeros(()))

    def init_weights(self):
        torch.nn.init.ones_(self.vocab)

    def forward(self, inputs, targets, loss_reduction):
        assert loss_reduction == "none" and not self.training
        return self.vocab.log().expand(targets.numel())

    def setup_optimizer(self, weight_decay):
        return self

    def step(self):
        assert self.vocab.grad is not None
        time.sleep(0.5)

    def num_scaling_params(self):
        return {"total": 1}

    def estimate_flops(self):
        return 1
""",
    "nanochat/engine.py": """
import time
from nanochat.checkpoint_manager import load_model

class Engine:
    def __init__(self, model, tokenizer):
        assert tokenizer.get_bos_token_id() == -1

    def generate(self, tokens, num_samples, max_tokens, temperature, top_k):
        for _ in range(max_tokens):
            time.sleep(0.01)
            yield [0] * num_samples, [1] * num_samples
""",
    "nanochat/flash_attention.py": "USE_FA3 = False\n",
}


def checkout(folder: Path) -> Path:
    """The folder, with the stand-in's files in it."""
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder
