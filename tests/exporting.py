"""Small checkpoints and their exports, made by scripts/export.py in this process."""

import runpy
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import test_gpt

from nanochat import checkpoint
from nanochat.data.tokenizer import train
from nanochat.gpt import GPT
from nanochat.ops.subword import register_subwords

TOKENIZER = train(["naïve café 東京 🙂🙃 straße, print(alpha)\n" * 20], 320, exact=False)


def make_model(depth=3, width=48, num_heads=3, max_seq_len=256, stir=0.2, **more) -> GPT:
    """A model with noise in all parameters, none of which is zero then."""
    sizes = depth, width, num_heads, TOKENIZER.vocab_size, max_seq_len
    model = test_gpt.make_model(*sizes, stir=stir, **{"bigrams": 0} | more)
    register_subwords(model, TOKENIZER)
    return model.eval().requires_grad_(False)


def save(folder: Path, model: GPT, /, step: int = 7, **identity) -> Path:
    """A run's folder with a checkpoint of the model."""
    identity = {"model": asdict(model.config), "tokenizer": TOKENIZER.fingerprint} | identity
    state = {"identity": identity, "num_iterations": step, "resolved": {}}
    files = {"tokenizer.json": TOKENIZER.to_bytes()}
    checkpoint.save(folder, step, model=model.state_dict(), optimizer={}, state=state, files=files)
    return folder


def export(source: Path | str, out: Path, *more: str) -> Path:
    """Run scripts/export.py in this process; returns the folder."""
    from transformers import dynamic_module_utils

    # transformers keeps the code of a folder that it loads; not in the cache of the person who tests
    dynamic_module_utils.HF_MODULES_CACHE = str(out.parent / "modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["export", f"--source={source}", f"--out={out}", *more])
        patch.setattr(sys, "excepthook", sys.excepthook)  # which the script changes
        runpy.run_module("scripts.export", run_name="__main__")
    return out
