"""What people change first in the script and the model works, or is refused in one sentence.

Each test changes a copy of the sources and runs it. The walkthrough's edits are run by tests/test_docs.py.
"""

import re
import shutil
from pathlib import Path

import pytest
from helpers import assert_same_run, command, insert, losses, multiply_loss, records, run_tree

from nanochat import checkpoint

ONCE = "--eval_every=-1"  # each evaluation writes a report
CHANGED_BLOCK = """

class ChangedBlock(Block):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        {make}

    def forward(self, x, *arguments, **options):
        x, branch = super().forward(x, *arguments, **options)
        return {use}, branch


def init_weights(self, generator=None, plain=GPT.init_weights):
    plain(self, generator)
    for block in self.blocks:
        {begin}


Block, GPT.init_weights = ChangedBlock, init_weights
"""
POSITIONS = """

class PositionGPT(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.positions = nn.Embedding(config.max_seq_len, config.width)

    def init_weights(self, generator=None):
        super().init_weights(generator)
        nn.init.zeros_(self.positions.weight)


GPT = PositionGPT
"""
VECTOR = "nn.Parameter(torch.empty(config.width))"


def change_model(tree: Path, make="", use="x", begin="pass", code=CHANGED_BLOCK):
    """Give each block a parameter: statements that make it and begin it, and its output, made of x."""
    with open(tree / "nanochat" / "gpt.py", "a", encoding="utf-8") as file:
        file.write(code.format(make=make or "pass", use=use, begin=begin))


def test_new_weights_and_matrices_in_a_block_are_trained_and_the_checkpoint_chats(tree, corpus, tmp_path):
    change_model(
        tree,
        make=f"self.gain, self.bias = {VECTOR}, {VECTOR}; "
        "self.mixer = nn.Linear(config.width, config.width, bias=False)",
        use="x * self.gain.to(x.dtype) + self.bias.to(x.dtype) + self.mixer(norm(x))",
        begin="nn.init.ones_(block.gain), nn.init.zeros_(block.bias), nn.init.zeros_(block.mixer.weight)",
    )
    out = tmp_path / "run"
    run_tree(tree, command(corpus, out, ONCE, "--dtype=bfloat16", "--num_iterations=5"))
    trained = checkpoint.find(out).load_model()
    for name, start in (("gain", 1), ("bias", 0), ("mixer.weight", 0)):
        values = [trained[f"blocks.{layer}.{name}"] for layer in (0, 1)]
        assert all(value.isfinite().all() and (value != start).any() for value in values), name
    run_tree(tree, ["scripts.chat", f"--source={out}", "--prompt=a", "--max_tokens=2", "--dtype=bfloat16"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"make": f"self.gain = {VECTOR}", "use": "x * self.gain"}, "no value to blocks.0.gain"),
        ({"code": POSITIONS}, "PARAMETER_TABLE .* positions.weight"),
        (
            {
                "make": "self.kernel = nn.Parameter(torch.zeros(3, 4, 5))",
                "begin": "nn.init.zeros_(block.kernel)",
            },
            "PARAMETER_TABLE .* blocks.0.kernel",
        ),
        (
            {"make": f"self.unused = {VECTOR}", "begin": "nn.init.zeros_(block.unused)"},
            "blocks.0.unused, blocks.1.unused got no gradient",
        ),
    ],
    ids=["no initial value", "top-level table", "three dimensions", "never used"],
)
def test_what_is_missing_for_a_new_parameter_is_said_by_name(tree, corpus, tmp_path, change, says):
    change_model(tree, **change)
    assert re.search(says, run_tree(tree, command(corpus, tmp_path / "run", ONCE), status=2))


def test_a_checkpoint_from_before_a_change_of_the_model_is_refused_by_name(tree, corpus, tmp_path):
    out = tmp_path / "run"
    run_tree(tree, command(corpus, out, ONCE, "--num_iterations=2"))
    change_model(tree, f"self.gain = {VECTOR}", "x * self.gain", "nn.init.ones_(block.gain)")
    printed = run_tree(tree, command(corpus, out, ONCE, "--num_iterations=4"), status=2)
    assert "does not fit the model" in printed and "blocks.0.gain, blocks.1.gain" in printed
    printed = run_tree(tree, ["scripts.chat", f"--source={out}", "--prompt=a"], status=2)
    assert "blocks.0.gain, blocks.1.gain" in printed


TORCHS_ADAMW = """
def torchs_adamw(groups, *_):
    return torch.optim.AdamW([p for group in groups for p in group["params"]], lr=3e-4)

optim = type("optim", (), {**vars(optim), "MuonAdamW": torchs_adamw})
"""


def test_torchs_adamw_in_place_of_ours_trains_saves_and_resumes_bit_for_bit(tree, corpus, tmp_path):
    insert(tree, after_settings=TORCHS_ADAMW)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run_tree(tree, command(corpus, whole, ONCE))
    assert losses(whole)[7] < losses(whole)[0]
    shutil.copytree(whole, halves)
    shutil.rmtree(halves / "step_000008")
    assert "step_000006" in run_tree(tree, command(corpus, halves, ONCE))
    assert_same_run(halves, whole)
    script = tree / "scripts" / "base_train.py"
    script.write_text(script.read_text().replace("torch.optim.AdamW", "torch.optim.RMSprop"))
    printed = run_tree(tree, command(corpus, whole, ONCE, "--num_iterations=9"), status=2)
    assert "has the state of AdamW, not of RMSprop" in printed


def test_torchs_adamw_skips_a_step_that_is_not_finite(tree, corpus, tmp_path):
    insert(tree, after_settings=TORCHS_ADAMW)
    multiply_loss(tree, "inf if step == 2 else 1")
    out = tmp_path / "run"
    run_tree(tree, command(corpus, out, ONCE))
    assert [r["skipped"] for r in records(out) if "loss" in r] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert losses(out)[7] < losses(out)[0]


def test_another_model_class_takes_a_few_lines(tree, corpus, tmp_path):
    insert(tree, after_settings=MY_MODEL)
    out = tmp_path / "run"
    run_tree(tree, command(corpus, out, ONCE))
    assert losses(out)[7] < losses(out)[0] - 0.001


MY_MODEL = """
class MyModel(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = torch.nn.Embedding(config.vocab_size, config.vocab_size)

    def init_weights(self, generator):
        torch.nn.init.normal_(self.embedding.weight, std=0.01, generator=generator)

    def forward(self, idx, targets=None, reduction="mean", documents=None):
        logits = self.embedding(idx)
        if targets is None:
            return logits
        logits, targets = logits.flatten(0, 1), targets.flatten()
        return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction=reduction)

GPT = MyModel
"""
