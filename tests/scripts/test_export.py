"""scripts/export.py: what is in its folder, what it refuses, and that training and chatting go on from it."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("transformers")

from exporting import TOKENIZER, export, make_model, save
from helpers import command, conversation, disk, losses, names_in, python_m, run
from safetensors.torch import load_file

from nanochat import UserError, checkpoint
from nanochat.data.tokenizer import Tokenizer
from nanochat.terminal import printable


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The folder of a run."""
    return save(tmp_path_factory.mktemp("run") / "tiny", make_model(2, 32, 2, max_seq_len=32))


def test_weights_get_the_dtype_that_is_asked_for(source, tmp_path):
    kept = checkpoint.find(source).load_model()
    for dtype in ("float32", "bfloat16"):
        folder = export(source, tmp_path / dtype, f"--dtype={dtype}")
        tensors = load_file(folder / "model.safetensors")
        assert tensors.keys() == kept.keys()
        assert all(torch.equal(t, kept[name].to(getattr(torch, dtype))) for name, t in tensors.items())
        assert json.loads((folder / "config.json").read_bytes())["dtype"] == dtype


def test_the_code_in_the_folder_needs_torch_and_transformers_alone(source, tmp_path):
    from transformers.dynamic_module_utils import get_imports, get_relative_imports

    code = export(source, tmp_path / "out") / "modeling_nanochat.py"
    found = {name.split(".")[0] for name in get_imports(code)} - sys.stdlib_module_names
    assert found == {"torch", "transformers"} and get_relative_imports(code) == []


def test_a_folder_with_something_in_it_is_left_alone_and_an_empty_one_is_filled(
    source, tmp_path, monkeypatch
):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="full exists already; give another folder with --out"):
        export(source, tmp_path / "full")
    assert names_in(tmp_path) == ["full"] and names_in(tmp_path / "full") == ["notes.txt"]
    for name in ("empty", "linked"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    export(source, Path("."))
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    export(source, tmp_path / "link")
    assert all("model.safetensors" in names_in(tmp_path / name) for name in ("empty", "linked"))


def test_a_changed_gpt_is_refused_and_leaves_nothing(source, tmp_path, monkeypatch):
    monkeypatch.setattr("nanochat.gpt.QK_SCALE", 0.7)
    with pytest.raises(UserError, match=r"make the same change in nanochat/hf/modeling_nanochat\.py"):
        export(source, tmp_path / "out")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("there", [None, types.ModuleType("transformers.utils")], ids=["none", "an old one"])
def test_without_transformers_it_says_what_to_install(source, tmp_path, monkeypatch, there):
    monkeypatch.setitem(sys.modules, "transformers.utils", there)
    monkeypatch.delitem(sys.modules, "nanochat.hf.modeling_nanochat", raising=False)
    with pytest.raises(UserError, match=r"missing or too old \(.*\); pip install -e '\.\[export\]'"):
        export(source, tmp_path / "out")


def test_a_folder_that_cannot_be_written_is_named(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*/file/out"):
        export(source, tmp_path / "file" / "out")
    with disk(tmp_path / "disk", "64k") as full:
        with pytest.raises(UserError, match=r"cannot write .*No space left on device"):
            export(source, full / "out")
        assert names_in(full) == []


def test_training_goes_on_from_an_export_as_from_its_checkpoint(corpus, tmp_path):
    base, settings = tmp_path / "base", ["--spelling=on", "--eval_every=-1"]
    run(command(corpus, base, "--num_iterations=3", *settings))
    folder = export(base, tmp_path / "out")
    for path in (base, folder):
        more = [*settings, "--num_iterations=2", f"--init_from={path}"]
        run(command(corpus, tmp_path / f"from-{path.name}", *more))
    expected, found = losses(tmp_path / "from-base"), losses(tmp_path / "from-out")
    assert found[0] == pytest.approx(expected[0], abs=1e-5) and expected[0] < losses(base)[0]
    # The rows of sub-words begin at zero, so their updates differ a little
    assert found[1] == pytest.approx(expected[1], abs=0.05)


def test_training_with_another_model_or_tokenizer_is_told_what_to_give(source, tmp_path):
    folder = export(source, tmp_path / "out")
    identity = checkpoint.find(source).state["identity"]
    others = identity | {"tokenizer": "f" * 64}, identity | {"model": identity["model"] | {"depth": 3}}
    for other, advice in zip(
        others, (f"--tokenizer={folder}/nanochat_tokenizer.json", "--depth=2"), strict=True
    ):
        with pytest.raises(UserError, match=advice):
            checkpoint.start_from(checkpoint.find_weights(folder), other, None)
    assert Tokenizer.load(folder / "nanochat_tokenizer.json").fingerprint == TOKENIZER.fingerprint


def test_the_card_has_the_plan_the_figures_and_the_name_of_the_text(source, tmp_path):
    # A checkpoint is saved before the evaluation at its step, so its state has the one before
    state = checkpoint.find(source).state | {"loop": {"tokens": 51200, "val_bpb": 9.8765}}
    files = {
        "tokenizer.json": TOKENIZER.to_bytes(),
        "config.json": json.dumps({"plan": ["data: poems, 3 documents", "folder: /home/me"]}).encode(),
    }
    model = checkpoint.find(source).load_model()
    checkpoint.save(tmp_path / "run", 100, model=model, optimizer={}, state=state, files=files)
    scores = ({"step": step, "val_bpb": bits} for step, bits in [(50, 9.8765), (100, 1.2345), (150, 1.1111)])
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(score) + "\n" for score in scores))
    text = (export(tmp_path / "run", tmp_path / "out") / "README.md").read_text("utf-8")
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["library_name"] == "transformers" and "license" not in front  # it is the user's choice
    assert all(figure in text for figure in ("poems, 3 documents", "1.2345", "51,200"))
    assert all(other not in text for other in ("/home/me", "9.8765", "1.1111"))


CHAT = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, question = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
messages = [{"role": "user", "content": question}]
how = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
ids = tokenizer.apply_chat_template(messages, **how)
written = model.generate(**ids, max_new_tokens=200, do_sample=False)[0, ids["input_ids"].size(1):]
sys.stdout.buffer.write(tokenizer.decode(written, skip_special_tokens=True).encode())
"""


@pytest.mark.slow
def test_far_from_this_project_transformers_answers_as_chat_does(corpus, tmp_path):
    words = ["alpha", "beta"] * 40
    lines = [conversation(f"say {word} {i}", f"{word} " * (1 + i % 9)) for i, word in enumerate(words)]
    (chats := tmp_path / "chats.jsonl").write_text("".join(lines), "utf-8")
    short = ["--num_iterations=30", "--total_batch_size=512"]
    run(command(corpus, tmp_path / "base", "--max_seq_len=256", *short))
    data = f"--source={tmp_path / 'base'}", f"--data={chats}", f"--val_data={chats}", "--eval_questions=0"
    more = f"--out_dir={tmp_path / 'mid'}", "--dtype=float32", "--compile=off"
    run(["scripts.mid_train", *data, *short, *more])
    folder, question = export(tmp_path / "mid", tmp_path / "out"), "say beta 3"
    greedy = ["--temperature=0", "--max_tokens=200", "--dtype=float32"]
    ours = python_m(["scripts.chat", f"--source={tmp_path / 'mid'}", f"--prompt={question}", *greedy])
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONUTF8": "1"}
    theirs = subprocess.run(
        [sys.executable, "-I", "-c", CHAT, folder, question],
        capture_output=True, env=environment, cwd=tmp_path, timeout=300,
    )  # fmt: skip
    assert theirs.returncode == 0, theirs.stderr.decode()
    assert len(ours.stdout) > 50 and printable(theirs.stdout.decode()) + "\n" == ours.stdout
