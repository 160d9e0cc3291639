"""The README from top to bottom on small numbers, and the commands of docs/how-do-i.md."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, names_in, python_m, records

from nanochat import checkpoint

# What needs a GPU, a network or an installation is left out; the rest runs word for word but for these
UNTIL, LEFT_OUT = "## A GPU, with its data", r"-m venv|^pip |-m pytest"
MORE = {  # arguments that are added
    "base_train runs/laptop.py": "--num_iterations=12 --aspect_ratio=16 --eval_tokens=8192",
    "mid_train --source=laptop": "--num_iterations=4 --eval_questions=4 --eval_every=-1",
    "base_train --depth=4": "--aspect_ratio=16 --head_dim=64",
    "chat --source=laptop": "--max_tokens=8",
}
SMALL = {".venv/bin/python ": "python ", "--num_iterations=20": "--num_iterations=4"}
SMALL |= {command: f"{command} {more}" for command, more in MORE.items()}


def blocks(text: str) -> list[str]:
    """The commands of a page, each as it stands between ```sh and ```."""
    return re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def page(name: str) -> list[str]:
    return blocks((ROOT / "docs" / name).read_text(encoding="utf-8"))


def readme() -> list[str]:
    """The blocks of the README in order, and the command that compares runs, with SMALL put in."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (compare,) = re.findall(r"`(python -m scripts\.report d4[^`]+)`", text)
    every = (*blocks(text[: text.index(UNTIL)]), compare)
    lines = [[line for line in block.splitlines() if not re.search(LEFT_OUT, line)] for block in every]
    found = ["\n".join(block) for block in lines if block]
    for old, new in SMALL.items():
        assert any(old in block for block in found), f"the README no longer has {old}"
        found = [block.replace(old, new) for block in found]
    return found


@pytest.mark.slow  # a minute of CPU
def test_the_readme_in_order_ends_in_a_chat_with_the_laptops_model(tmp_path):
    pytest.importorskip("transformers")
    path, base = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", tmp_path / "nanochat"
    home = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    variables = os.environ | home | {"PATH": path, "PYTHONPATH": str(ROOT), "NANOCHAT_BASE_DIR": str(base)}
    (tmp_path / "home").mkdir()
    said = []
    for block in readme():
        shell = ["bash", "-euo", "pipefail", "-c", block]
        done = subprocess.run(shell, capture_output=True, text=True, cwd=tmp_path, env=variables, timeout=900)
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
        said.append(done)
    laptop = checkpoint.find(base / "base_checkpoints" / "laptop")
    answering = checkpoint.find(base / "mid_checkpoints" / "laptop")
    assert names_in(base / "base_checkpoints") == ["d4", "laptop"] and laptop.step == 12
    assert names_in(base / "mid_checkpoints") == ["laptop"]
    assert answering.state["identity"]["source"] == laptop.fingerprint
    assert any("own_score" in record for record in records(base / "base_checkpoints" / "laptop"))
    assert not checkpoint.find(base / "base_checkpoints" / "d4").resolved["compiled"], "it takes seconds"
    (chat,) = (done for done in said if "scripts.chat" in done.args[-1])
    assert "finished already" in chat.stdout and "mid_checkpoints/laptop" in chat.stderr
    assert (tmp_path / "laptop-hf" / "model.safetensors").exists()
    # What docs/how-do-i.md removes is all that was written at home
    (remove,) = (block for block in page("how-do-i.md") if block.startswith("rm "))
    subprocess.run(["bash", "-euc", remove], env=variables | {"USER": tmp_path.name}, check=True)
    assert [path for path in (tmp_path / "home").rglob("*") if path.is_file()] == []


def test_the_tables_of_models_and_of_gpus_are_those_of_the_plan(monkeypatch):
    """If this fails, put in the tables that `python -m experiments.scale` prints."""
    monkeypatch.setattr("sys.argv", ["scale"])
    scale = importlib.import_module("experiments.scale")
    assert scale.models() in (ROOT / "README.md").read_text(encoding="utf-8")
    printed = f"{scale.speeds()}\n{scale.limits()}".replace("|  ", "| ").splitlines()
    text = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| \d+ .*", text, re.MULTILINE)) <= set(printed)
    assert f"up to depth {scale.deepest()}," in text


def test_both_languages_have_the_same_commands():
    assert page("how-do-i.md") == page("how-do-i.zh.md")


@pytest.mark.slow  # a dozen starts, and a tokenizer
def test_the_commands_of_how_do_i_run(tree):
    pytest.importorskip("transformers")
    from exporting import make_model, save

    save(Path(os.environ["NANOCHAT_BASE_DIR"], "base_checkpoints", "laptop"), make_model(2, 32, 2))
    (tree / "runs").symlink_to(ROOT / "runs")
    (tree / "mine.jsonl").write_text("".join(f'{{"text": "line {i} of my text"}}\n' for i in range(30000)))
    for name in ("held-out.jsonl", "others.jsonl"):
        (tree / name).write_text("".join(f'{{"text": "{name} has line {i}"}}\n' for i in range(40)))
    turns = '{"messages": [{"role": "user", "content": "%d"}, {"role": "assistant", "content": "Hello"}]}\n'
    (tree / "chats.jsonl").write_text("".join(turns % i for i in range(300)))
    ours = [block for block in page("how-do-i.md") if block.startswith("python -m ")]
    assert len(ours) > 10
    for block in ours:
        done = python_m(shlex.split(block)[2:], tree)
        assert done.returncode == 0 and done.stdout, f"{block}{done.stdout}{done.stderr}"
