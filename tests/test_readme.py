"""The README from top to bottom, on small numbers: its commands in order end in a chat with the laptop's model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, names_in

from nanochat import checkpoint

# What needs a GPU, a network or an installation is left out; the rest runs word for word but for these
UNTIL, LEFT_OUT = "## A GPU, with its data", r"-m venv|^pip |-m pytest"
SMALL = {
    ".venv/bin/python ": "python ",
    "base_train runs/laptop.py": "base_train runs/laptop.py --num_iterations=12 --aspect_ratio=16 --eval_tokens=8192",
    "--depth=4 ": "--depth=4 --aspect_ratio=16 --head_dim=64 ",
    "--num_iterations=20": "--num_iterations=4",
    "mid_train --source=laptop": "mid_train --source=laptop --num_iterations=4 --eval_questions=4 --eval_every=-1",
    "--prompt=": "--max_tokens=8 --prompt=",
}


def commands() -> list[str]:
    """The blocks of the README in order, and the command that compares runs, with SMALL put in."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text[: text.index(UNTIL)], re.MULTILINE | re.DOTALL)
    (compare,) = re.findall(r"`(python -m scripts\.report [^`]+)`", text)
    lines = [[line for line in b.splitlines() if not re.search(LEFT_OUT, line)] for b in (*blocks, compare)]
    found = ["\n".join(block) for block in lines if block]
    for old, new in SMALL.items():
        assert any(old in block for block in found), f"the README no longer has {old}"
        found = [block.replace(old, new) for block in found]
    return found


@pytest.mark.slow  # a minute or two
def test_the_readme_in_order_ends_in_a_chat_with_the_laptops_model(tmp_path):
    pytest.importorskip("transformers")
    base, path = tmp_path / "base", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"NANOCHAT_BASE_DIR": str(base), "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    variables |= {"PATH": path, "PYTHONPATH": str(ROOT)}
    said = []
    for block in commands():
        shell = ["bash", "-euo", "pipefail", "-c", block]
        done = subprocess.run(
            shell, capture_output=True, text=True, cwd=tmp_path, env=os.environ | variables, timeout=900
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
        said.append(done)
    laptop = checkpoint.find(base / "base_checkpoints" / "laptop")
    answering = checkpoint.find(base / "mid_checkpoints" / "laptop")
    assert names_in(base / "base_checkpoints") == ["d4", "laptop"] and laptop.step == 12
    assert names_in(base / "mid_checkpoints") == ["laptop"]
    assert answering.state["identity"]["source"] == laptop.fingerprint
    (chat,) = (done for done in said if "scripts.chat" in done.args[-1])
    assert "finished already" in chat.stdout and "mid_checkpoints/laptop" in chat.stderr
    assert (tmp_path / "laptop-hf" / "model.safetensors").exists()
