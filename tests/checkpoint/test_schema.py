"""Checkpoints whose checksums are right and whose content no run writes: a sentence, never a traceback."""

import contextlib
import copy
import hashlib
import json
import math
import os
from dataclasses import replace

import pytest
import torch
from helpers import craft, numbers, save_step

from nanochat import UserError
from nanochat.checkpoint import Damaged, find, load_weights, open_checkpoint, save_and_load
from nanochat.checkpoint.schema import data_class
from nanochat.data import loader
from nanochat.machine import runtime
from nanochat.plan import scaling
from nanochat.run import metrics

LANES = {str(lane): {"epoch": 0, "taken": 3, "pieces": [[5, 0], [6, 2]]} for lane in range(2)}
STREAM = {"rows_per_step": 2, "max_seq_len": 8, "seed": 1, "tokenizer": "t", "packing": 2, "documents": 9}
STATE = {
    "identity": {
        "model": {"depth": 2, "max_seq_len": 8, "window_pattern": "L"},
        "data": "d", "tokenizer": "t", "seed": 1,
    },
    "resolved": {
        "compiled": False, "device_batch_size": 2, "aspect_ratio": 64, "spelled": True, "table_share": 0.5,
    },
    "num_iterations": 8,
    "optimizer": "MuonAdamW",
    "loader": STREAM | {"lanes": LANES},
    "scaler": {
        "scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000,
        "_growth_tracker": 1,
    },
    "loop": {
        "tokens": 3, "train_seconds": 1.5, "skipped": 0, "recent": [2.5], "wandb_id": None,
    },
}  # fmt: skip
STRANGE = [
    None, True, "3", "", "\ud800", -1, 0, 2.5, -1.5, 2**40, 10**30, 1e999, [], ["x"], [None], [[1]], {},
    {"a": 1}, {"a": {"b": []}}, [[5, 0, 1]], [[10**6, 0]], [["5", 0]],
]  # fmt: skip


def places(value, path=()):
    """The paths of all values inside a value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def replaced(value, path, new):
    """A copy of `value` with the thing at that path replaced, or deleted if `new` is ..."""
    value = copy.deepcopy(value)
    *to, last = path
    inner = value
    for key in to:
        inner = inner[key]
    if new is ...:
        del inner[last]
    else:
        inner[last] = new
    return value


def use(state):
    """What base_train.py does with a state when it goes on."""
    metrics.LoopState(**state["loop"]).add_step(2.5, 8, 0.1, True)
    position = state["loader"]
    loader._start_positions(STREAM, range(2), position)
    if state["scaler"]:
        torch.amp.GradScaler("cpu").load_state_dict(state["scaler"])
    resolved, model = state["resolved"], state["identity"].get("model", {})
    torch.arange(model.get("max_seq_len", 8), dtype=torch.float32)
    config = scaling.model_config(2, resolved.get("aspect_ratio", 64), 64, 8, 300, "L")
    scaling.on_meta(replace(config, spelled=resolved.get("spelled", False)))
    assert resolved.get("table_share", 0) < math.inf
    return 8 % resolved.get("device_batch_size", 1), state["num_iterations"] > 3


@pytest.fixture
def run_folder(tmp_path):
    save_step(tmp_path, 1, state=STATE | {"step": 1})
    save_step(tmp_path, 2, state=STATE)
    return tmp_path


def test_a_good_state_is_taken(run_folder):
    found = find(run_folder, to_continue=True)
    assert found.step == 2
    use(found.state)


@pytest.mark.parametrize("part", STATE)
def test_a_strange_state_is_refused_or_harmless(run_folder, part):
    """Every value of the state is deleted, or becomes each of the strange ones."""
    refused = 0
    for path in places(STATE[part], (part,)):
        for new in [..., *STRANGE]:
            content = json.dumps(replaced(STATE, path, new)).encode()  # ASCII, so lone surrogates get in
            craft(run_folder / "step_000002", {"state.json": content})
            try:
                use(open_checkpoint(run_folder / "step_000002", to_continue=True).state)
            except UserError as error:
                refused += 1
                assert "\n" not in str(error) and len(str(error)) < 500
    assert refused > 5


def test_resume_auto_names_a_crafted_state_and_takes_the_one_before(run_folder):
    without = {name: value for name, value in STATE.items() if name != "loop"}
    craft(run_folder / "step_000002", {"state.json": json.dumps(without).encode()})
    said = []
    assert find(run_folder, say=said.append, to_continue=True).step == 1
    assert "state.json is not what a run writes: state has no loop; trying the one before it" in said[0]
    with pytest.raises(Damaged, match="state has no loop"):
        find(run_folder, "2", to_continue=True)
    assert open_checkpoint(run_folder / "step_000002").step == 2  # its weights are usable


def test_what_an_older_nanochat_did_not_remember_has_a_default():
    form = data_class(metrics.LoopState)
    assert form({"tokens": 5}) == "" and metrics.LoopState(tokens=5).val_bpb is None
    assert form({"val_bpb": 1.5, "smooth_steps": 3}) == form({"val_bpb": None}) == ""
    assert "is 'text' and not a number" in form({"val_bpb": "text"})


def test_a_value_that_the_loop_does_not_know_is_named(run_folder):
    state = replaced(STATE, ("loop", "seconds"), 1)
    craft(run_folder / "step_000002", {"state.json": json.dumps(state).encode()})
    with pytest.raises(Damaged, match=r"state\.loop has 'seconds', which this nanochat does not know"):
        open_checkpoint(run_folder / "step_000002", to_continue=True)


def test_a_strange_manifest_is_refused_or_harmless(run_folder):
    path = run_folder / "step_000002"
    good = json.loads((path / "manifest.json").read_bytes())
    del good["checksum"]
    nested = json.loads("[" * 400 + "]" * 400)
    for place in places(good):
        for new in [..., nested, *STRANGE, "../state.json", "a\x00b"] if place else []:
            body = replaced(good, place, new)
            try:
                content = save_and_load._manifest(body)
            except (ValueError, RecursionError):
                content = json.dumps(body | {"checksum": "0" * 64}).encode()
            (path / "manifest.json").write_bytes(content)
            with contextlib.suppress(UserError):
                open_checkpoint(path).load_optimizer()
    for name in ("../x", "", ".", "..", "a\x00b", "a/b", "x" * 300):
        body = replaced(good, ("files", name), {"size": 0, "sha256": hashlib.sha256().hexdigest()})
        (path / "manifest.json").write_bytes(save_and_load._manifest(body))
        with pytest.raises(Damaged):
            open_checkpoint(path)


def header_of(text, data=b""):
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer-00000-of-00001.safetensors"])
def test_strange_tensor_files_are_refused_when_opened(run_folder, name):
    eight, path = b"\0" * 8, run_folder / "step_000002"
    strange = [
        b"", b"\0" * 7, b"\xff" * 8, (2**62).to_bytes(8, "little"), header_of(b"[" * 100_000),
        header_of(b"\xff"),
        header_of([], eight), header_of(7), header_of({"w": 3}, eight), header_of({"w": {}}, eight),
        header_of({"__metadata__": {"a": 1}}), header_of({"__metadata__": [1]}),
        *(header_of(tensor(dtype=d), eight) for d in ("F4", "C64", "", None, 32, ["F32"], "F64", "\ud800")),
        *(header_of(tensor(shape=s), eight) for s in (2, [3], [-2], [2.0], ["2"], [10**30], [2] + [1] * 40)),
        *(header_of(tensor(shape=s), eight) for s in ([2**62, 4], [2**32, 2**32, 2], [0], None, {})),
        *(
            header_of(tensor(offsets=o), eight)
            for o in ([0, 4], [8, 0], [-8, 0], [0, 10**30], [0, 2**63], [4, 12], [0], [0, 8, 8], [0, "8"])
        ),
        header_of(tensor(), eight + b"hidden"), header_of(tensor(), eight[:7]),
        header_of(tensor() | {"v": tensor()["w"]}, eight), header_of({"x" * 2000: tensor()["w"]}, eight),
    ]  # fmt: skip
    for content in strange:
        craft(path, {name: content})
        with pytest.raises(Damaged, match="is damaged: " + name):
            open_checkpoint(path)
        assert find(run_folder, say=lambda text: None).step == 1
    craft(path, {name: header_of(tensor(), eight)})
    assert open_checkpoint(path).step == 2


def test_weights_of_another_type_or_shape_do_not_fit_the_model(tmp_path):
    model = torch.nn.Linear(3, 2, bias=False)
    for wrong in (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool), torch.ones(3, 2)):
        save_step(tmp_path, 1, model={"weight": wrong})
        with pytest.raises(UserError, match="does not fit the model"):
            load_weights(open_checkpoint(tmp_path / "step_000001"), model)


@pytest.mark.parametrize("state", [numbers(1), torch.zeros(3, dtype=torch.uint8), torch.tensor(1)])
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
