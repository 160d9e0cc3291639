"""scripts/export.py: what is in its folder, what it refuses, and that training and chatting go on from it."""

import json
import sys

import pytest
import torch
import yaml

pytest.importorskip("transformers")

from exporting import TOKENIZER, export, make_model, save
from helpers import command, losses, names_in, run
from safetensors.torch import load_file

from nanochat import UserError, checkpoint
from nanochat.data.tokenizer import Tokenizer


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


def test_a_folder_with_something_in_it_is_left_alone_and_an_empty_one_is_filled(source, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="full exists already; give another folder with --out"):
        export(source, tmp_path / "full")
    assert names_in(tmp_path) == ["full"] and names_in(tmp_path / "full") == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    assert "model.safetensors" in names_in(export(source, tmp_path / "empty"))


def test_a_changed_gpt_is_refused_and_leaves_nothing(source, tmp_path, monkeypatch):
    monkeypatch.setattr("nanochat.gpt.QK_SCALE", 1.0)
    with pytest.raises(UserError, match=r"make the same change in nanochat/hf/modeling_nanochat\.py"):
        export(source, tmp_path / "out")
    assert names_in(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*/file/out"):
        export(source, tmp_path / "file" / "out")


@pytest.mark.parametrize("spelling", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_training_goes_on_from_an_export_as_from_its_checkpoint(corpus, tmp_path, spelling):
    base, settings = tmp_path / "base", [f"--spelling={spelling}", "--eval_every=-1"]
    run(command(corpus, base, "--num_iterations=3", *settings))
    folder = export(base, tmp_path / "out")
    for path in (base, folder):
        more = [*settings, "--num_iterations=2", f"--init_from={path}"]
        run(command(corpus, tmp_path / f"from-{path.name}", *more))
    expected, found = losses(tmp_path / "from-base"), losses(tmp_path / "from-out")
    assert found[0] == pytest.approx(expected[0], abs=1e-5) and expected[0] < losses(base)[0]
    # The rows of sub-words begin at zero, so their updates differ a little
    assert found[1] == pytest.approx(expected[1], abs=0.05 if spelling == "on" else 1e-5)


def test_training_with_another_model_or_tokenizer_is_told_what_to_give(source, tmp_path):
    folder = export(source, tmp_path / "out")
    identity = checkpoint.find(source).state["identity"]
    others = identity | {"tokenizer": "f" * 64}, identity | {"model": identity["model"] | {"depth": 3}}
    for other, advice in zip(
        others, (f"--tokenizer={folder}/nanochat_tokenizer.json", "--depth=2"), strict=True
    ):
        with pytest.raises(UserError, match=advice):
            checkpoint.find_weights(folder, other)
    assert Tokenizer.load(folder / "nanochat_tokenizer.json").fingerprint == TOKENIZER.fingerprint


def test_the_card_has_the_plan_the_figures_and_the_name_of_the_text(source, tmp_path):
    state = checkpoint.find(source).state | {"loop": {"tokens": 51200, "val_bpb": 1.2345}}
    files = {
        "tokenizer.json": TOKENIZER.to_bytes(),
        "config.json": json.dumps({"plan": ["data: poems, 3 documents", "folder: /home/me"]}).encode(),
    }
    model = checkpoint.find(source).load_model()
    checkpoint.save(tmp_path / "run", 100, model=model, optimizer={}, state=state, files=files)
    text = (export(tmp_path / "run", tmp_path / "out") / "README.md").read_text("utf-8")
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["library_name"] == "transformers" and "license" not in front  # it is the user's choice
    assert all(figure in text for figure in ("poems, 3 documents", "1.2345", "51,200"))
    assert "/home/me" not in text
