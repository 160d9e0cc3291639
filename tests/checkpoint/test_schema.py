"""Checkpoints whose checksums are right and whose content is not ours: a sentence, never a traceback."""

import json
import os

import pytest
import torch
from helpers import craft, numbers, read_manifest, save_step, write_manifest

from nanochat import UserError
from nanochat.checkpoint import Damaged, find, load_weights, open_checkpoint
from nanochat.machine import runtime

STATE = {
    "identity": {"model": {"depth": 2, "window_pattern": "L", "spelled": True}, "data": "d", "seed": 1},
    "resolved": {
        "compiled": False,
        "device_batch_size": 2,
        "rates": {"matrix_lr": 0.1},
        "attention": {},
        "kernels": ["loss"],
    },
    "num_iterations": 8,
    "optimizer": "MuonAdamW",
    "loader": {"rows_per_step": 2, "lanes": {"0": {"epoch": 0, "taken": 3, "pieces": [[5, 0], [6, 2]]}}},
    "scaler": {"scale": 65536.0, "_growth_tracker": 1},
    "loop": {"tokens": 3, "train_seconds": 1.5, "recent": [2.5, 3], "wandb_id": None, "name": "x"},
}
NEEDED = [name for name in STATE if name != "optimizer"]


@pytest.fixture
def run_folder(tmp_path):
    save_step(tmp_path, 1, state=STATE | {"step": 1})
    save_step(tmp_path, 2, state=STATE)
    return tmp_path


@pytest.mark.parametrize("part", NEEDED)
def test_a_state_without_a_part_or_with_one_of_another_type_is_named(run_folder, part):
    inside = {"identity": {"model": {"depth": {}}}, "resolved": {"rates": {"matrix_lr": "x"}}, "loader": 1}
    path, said = run_folder / "step_000002", []
    for wrong in (None, "3", [1], inside.get(part, {"a": {"b": {"c": 1}}})):
        craft(path, {"state.json": json.dumps(STATE | {part: wrong}).encode()})
        for to_continue in (False, True):
            with pytest.raises(Damaged, match=rf"state\.json is not what a run writes: state\.{part}"):
                open_checkpoint(path, to_continue=to_continue)
    lacking = {name: value for name, value in STATE.items() if name != part}
    craft(path, {"state.json": json.dumps(lacking).encode()})
    assert find(run_folder, say=said.append, to_continue=True).step == 1
    assert f"state has no {part}; trying the one before it" in said[0]
    with pytest.raises(Damaged, match=f"state has no {part}"):
        find(run_folder, "2", to_continue=True)
    assert open_checkpoint(path).step == 2  # its weights are usable


@pytest.mark.parametrize(
    "change",
    [
        {"step": "2"}, {"step": 3}, {"step": -1}, {"world_size": 0}, {"world_size": 2**62}, {"files": []},
        {"files": {}}, {"files": {"state.json": 3}}, {"files": {"state.json": {"size": 1}}},
        *({"files": {name: {"size": 0, "sha256": ""}}} for name in ("../x", "", "..", "a/b", "/x")),
    ],
)  # fmt: skip
def test_a_strange_manifest_is_refused(run_folder, change):
    path = run_folder / "step_000002"
    good = read_manifest(path)
    for body in (good | change, {name: good[name] for name in good if name not in change}):
        write_manifest(path, body)
        with pytest.raises(Damaged, match=r"manifest\.json"):
            open_checkpoint(path)


def test_a_manifest_that_nobody_can_write_is_damaged(run_folder):
    path = run_folder / "step_000002" / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 1e999'))
    assert find(run_folder, say=lambda text: None).step == 1


def test_a_config_that_is_not_a_runs_is_damaged(run_folder):
    path = run_folder / "step_000002"
    assert open_checkpoint(path).config == {}
    for content in (b"nonsense", b'{"settings": {"data": "text"}}', b'{"plan": [1]}'):
        craft(path, {"config.json": content})
        with pytest.raises(Damaged, match=r"config\.json"):
            _ = open_checkpoint(path).config


def header_of(text, data=b""):
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer-00000-of-00001.safetensors"])
def test_strange_tensor_files_are_refused_when_opened(run_folder, name):
    eight, path = b"\0" * 8, run_folder / "step_000002"
    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    strange = [
        b"", (2**62).to_bytes(8, "little"), header_of(b"\xff"), header_of([], eight),
        *(header_of({"w": good | change}, eight) for change in (
            {"dtype": "F5"}, {"shape": [3]}, {"shape": [2**32, 2**32, 2]}, {"data_offsets": [4, 12]},
        )),
        header_of({"w": good}, eight + b"hidden"), header_of({"w": good, "v": good}, eight),
    ]  # fmt: skip
    for content in strange:
        craft(path, {name: content})
        with pytest.raises(Damaged, match="is damaged: " + name):
            open_checkpoint(path)
    assert find(run_folder, say=lambda text: None).step == 1
    craft(path, {name: header_of({"w": good}, eight)})
    assert open_checkpoint(path).step == 2


def test_weights_of_another_type_or_shape_do_not_fit_the_model(tmp_path):
    model = torch.nn.Linear(3, 2, bias=False)
    for wrong in (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool), torch.ones(3, 2)):
        save_step(tmp_path, 1, model={"weight": wrong})
        with pytest.raises(UserError, match="does not fit the model"):
            load_weights(open_checkpoint(tmp_path / "step_000001"), model)


@pytest.mark.parametrize("state", [numbers(1), torch.zeros(3, dtype=torch.uint8)])
def test_a_strange_random_state_is_refused(state):
    with pytest.raises(UserError, match="random_state is none of torch's"):
        runtime.set_random_state({"random_state/cpu": state}, torch.device("cpu"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors"])
def test_a_pipe_or_an_endless_device_in_a_checkpoint_is_refused_at_once(run_folder, name):
    path = run_folder / "step_000002"
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(Damaged, match="is not a file"):
        open_checkpoint(path)
    (path / name).unlink()
    (path / name).symlink_to("/dev/zero")
    with pytest.raises(Damaged, match="is not a file"):
        open_checkpoint(path, verify=False)
