"""What people change first in the script and the model works, or is refused in one sentence.

Each test edits a copy of the files as text and runs it.
"""

import json
import shutil
from pathlib import Path

import pytest
from helpers import command, edit, losses, run_tree
from safetensors.torch import load_file

SCRIPT, MODEL = "scripts/base_train.py", "nanochat/gpt.py"
MUON_ADAMW = "optimizer = optim.MuonAdamW(groups, compute_dtype, eager_updates, machine.rank, world_size)\n"
ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)\n"


def weights(out: Path) -> dict:
    return load_file(max(out.glob("step_*")) / "model.safetensors")


ADD_TO_BLOCK = "        self.x0_scale = nn.Parameter(torch.empty(()))\n"
MLP = "        return x + self.mlp(norm(x))\n"
INIT_BLOCK = "            nn.init.constant_(block.x0_scale, 0.1)\n"


def test_new_weights_and_matrices_in_a_block_are_trained_by_their_shape(tree, corpus, tmp_path):
    """A norm's weight and a bias go to AdamW, a matrix to Muon; the checkpoint chats."""
    edit(
        tree,
        MODEL,
        (ADD_TO_BLOCK, ADD_TO_BLOCK + "        self.norm_weight = nn.Parameter(torch.empty(config.width))\n"
         "        self.bias = nn.Parameter(torch.empty(config.width))\n"
         "        self.mixer = nn.Linear(config.width, config.width, bias=False)\n"),
        (INIT_BLOCK, INIT_BLOCK + "            nn.init.ones_(block.norm_weight)\n"
         "            nn.init.zeros_(block.bias)\n            nn.init.zeros_(block.mixer.weight)\n"),
        (MLP,
         "        x = x + self.mixer(norm(x))\n"
         "        return x + self.mlp(norm(x) * self.norm_weight.to(x.dtype) + self.bias.to(x.dtype))\n"),
    )  # fmt: skip
    edit(
        tree,
        SCRIPT,
        (MUON_ADAMW, MUON_ADAMW + "print({n: g['method'] for g in groups for n in g['names']})\n"),
    )
    out = tmp_path / "run"
    printed = run_tree(tree, command(corpus, out, "--dtype=bfloat16", "--num_iterations=5"))
    for name, method in (("norm_weight", "adamw"), ("bias", "adamw"), ("mixer.weight", "muon")):
        assert f"'blocks.1.{name}': '{method}'" in printed
    trained = weights(out)
    assert all(trained[f"blocks.{i}.{n}"].isfinite().all() for i in (0, 1) for n in ("norm_weight", "bias"))
    assert (trained["blocks.1.norm_weight"] != 1).any() and (trained["blocks.1.bias"] != 0).any()
    assert (trained["blocks.1.mixer.weight"] != 0).all()
    run_tree(tree, ["scripts.chat", f"--source={out}", "--prompt=a", "--max_tokens=2", "--dtype=bfloat16"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            [(ADD_TO_BLOCK, ADD_TO_BLOCK + "        self.gain = nn.Parameter(torch.empty(config.width))\n"),
             (MLP, "        return x + self.mlp(norm(x) * self.gain)\n")],
            "init_weights gives no value to blocks.0.gain, blocks.1.gain",
        ),
        (
            [("        self.register_buffer(\"cos\", None, persistent=False)\n",
              "        self.positions = nn.Embedding(config.max_seq_len, config.width)\n"
              "        self.register_buffer(\"cos\", None, persistent=False)\n"),
             ("        nn.init.normal_(self.head.weight,", "        nn.init.zeros_(self.positions.weight)\n"
              "        nn.init.normal_(self.head.weight,")],
            "no row of PARAMETER_TABLE in nanochat/optim.py says how to train positions.weight",
        ),
        (
            [(ADD_TO_BLOCK, ADD_TO_BLOCK + "        self.kernel = nn.Parameter(torch.empty(3, 4, 5))\n"),
             (INIT_BLOCK, INIT_BLOCK + "            nn.init.zeros_(block.kernel)\n")],
            "no row of PARAMETER_TABLE in nanochat/optim.py says how to train blocks.0.kernel",
        ),
        (
            [(ADD_TO_BLOCK, ADD_TO_BLOCK + "        self.unused = nn.Parameter(torch.empty(config.width))\n"),
             (INIT_BLOCK, INIT_BLOCK + "            nn.init.zeros_(block.unused)\n")],
            "blocks.0.unused, blocks.1.unused got no gradient; use it in the model's forward, or remove it",
        ),
    ],
    ids=["no initial value", "top-level table", "three dimensions", "never used"],
)  # fmt: skip
def test_what_is_missing_for_a_new_parameter_is_said_by_name(tree, corpus, tmp_path, changes, says):
    edit(tree, MODEL, *changes)
    assert says in run_tree(tree, command(corpus, tmp_path / "run"), status=2)


def test_a_checkpoint_from_before_a_change_of_the_model_is_refused_by_name(tree, corpus, tmp_path):
    out = tmp_path / "run"
    run_tree(tree, command(corpus, out, "--num_iterations=2"))
    edit(
        tree,
        MODEL,
        (ADD_TO_BLOCK, ADD_TO_BLOCK + "        self.gain = nn.Parameter(torch.empty(()))\n"),
        (INIT_BLOCK, INIT_BLOCK + "            nn.init.ones_(block.gain)\n"),
        (MLP, "        return x + self.mlp(self.gain * norm(x))\n"),
    )
    printed = run_tree(tree, command(corpus, out, "--num_iterations=4"), status=2)
    assert "does not fit the model, which has changed since: blocks.0.gain, blocks.1.gain" in printed


def test_torchs_adamw_in_place_of_ours_trains_saves_and_resumes_bit_for_bit(tree, corpus, tmp_path):
    edit(tree, SCRIPT, (MUON_ADAMW, ADAMW))
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run_tree(tree, command(corpus, whole))
    assert losses(whole)[7] < losses(whole)[0]
    shutil.copytree(whole, halves)
    shutil.rmtree(halves / "step_000008")
    assert "step_000006" in run_tree(tree, command(corpus, halves))
    assert losses(halves) == losses(whole)
    assert all((a == b).all() for a, b in zip(weights(whole).values(), weights(halves).values(), strict=True))
    edit(tree, SCRIPT, (ADAMW, MUON_ADAMW))
    printed = run_tree(tree, command(corpus, whole, "--num_iterations=9"), status=2)
    assert "has the state of AdamW, not of MuonAdamW" in printed


def test_torchs_adamw_skips_a_step_that_is_not_finite(tree, corpus, tmp_path):
    edit(
        tree,
        SCRIPT,
        (MUON_ADAMW, ADAMW),
        ("            scaler.scale(loss).backward()\n",
         "            scaler.scale(loss * (math.inf if step == 2 else 1)).backward()\n"),
    )  # fmt: skip
    out = tmp_path / "run"
    run_tree(tree, command(corpus, out))
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["skipped"] for r in records if "loss" in r] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert losses(out)[7] < losses(out)[0]


def test_another_loss_another_model_and_ones_own_batches_take_a_few_lines(tree, corpus, tmp_path):
    """A loss made of the logits, a model class that someone wrote, and batches made by hand, all at once."""
    edit(
        tree,
        SCRIPT,
        ("loss = train_model(inputs, targets, documents=loader.documents) / plan",
         "logits = train_model(inputs).flatten(0, 1)\n"
         "                smoothed = torch.nn.CrossEntropyLoss(label_smoothing=0.1)\n"
         "                loss = smoothed(logits, targets.flatten()) / plan"),
        ("    model = GPT(plan.config)\n", "    model = MyModel(plan.config)\n"),
        ("# Build: model, optimizer, batches\n", "# Build: model, optimizer, batches\n"
         + MY_MODEL + MY_BATCHES),
        (MUON_ADAMW, ADAMW),
        ("groups = optim.parameter_groups(model, plan.rates, plan.weight_decay, plan.table_decay)\n", ""),
        ("loader = TrainLoader(\n", "loader = MyBatches(position)\nassert (\n"),
    )  # fmt: skip
    out = tmp_path / "run"
    run_tree(tree, command(corpus, out))
    expected = losses(out)
    assert expected[7] < expected[0] - 0.001
    shutil.rmtree(out / "step_000008")
    run_tree(tree, command(corpus, out))  # goes on from step 6 with the batches' own position
    assert losses(out) == expected


MY_MODEL = """
class MyModel(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)

    def init_weights(self, generator):
        torch.nn.init.normal_(self.table.weight, std=0.01, generator=generator)

    def forward(self, idx, targets=None, reduction="mean"):
        logits = self.table(idx)
        if targets is None:
            return logits
        logits, targets = logits.flatten(0, 1), targets.flatten()
        return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction=reduction)

"""
MY_BATCHES = """
class MyBatches:
    documents, wait_s, epoch = None, 0.0, 0

    def __init__(self, state):
        self.count = state["count"] if state else 0

    def __next__(self):
        self.count += 1
        ids = torch.arange(self.count, self.count + 2 * max_seq_len + 2).reshape(2, -1) % 7
        return ids[:, :-1], ids[:, 1:]

    def state(self):
        return {"count": self.count}

    def close(self):
        pass

"""


def test_a_new_setting_is_one_line_at_the_top(tree, corpus, tmp_path):
    edit(
        tree,
        SCRIPT,
        ("grad_clip = 1.0 ", "greeting = 'hello'  # what to say first (any text)\ngrad_clip = 1.0 "),
        ("# Set up: machine, text, tokenizer\n", "# Set up: machine, text, tokenizer\nprint(greeting)\n"),
    )
    assert "what to say first (any text)" in run_tree(tree, ["scripts.base_train", "--help"])
    out = tmp_path / "run"
    assert run_tree(tree, command(corpus, out, "--num_iterations=1", "--greeting=ahoy")).startswith("ahoy")
    assert json.loads((out / "config.json").read_text())["settings"]["greeting"]["value"] == "ahoy"
