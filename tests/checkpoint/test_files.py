"""The files of a checkpoint: any tensor comes back bit for bit, also through safetensors' own reader."""

import json
import os
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers import names_in
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.checkpoint.files import Damaged, read_json, read_tensors, write_tensors
from nanochat.files import replacing

INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda n: n != "__metadata__")


@st.composite
def any_tensor(draw):
    dtype = draw(st.sampled_from(INTEGERS + FLOATS))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    n = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=n, max_size=n))), dtype=torch.uint8)
    tensor = (raw & 1 if dtype == torch.bool else raw).view(dtype).reshape(shape)
    return tensor.transpose(0, -1) if draw(st.booleans()) and shape else tensor  # not contiguous


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@settings(max_examples=60)
@given(st.dictionaries(NAMES, any_tensor(), max_size=4))
def test_any_name_shape_and_bits_come_back_as_they_were(tensors):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tensors.safetensors"
        write_tensors(path, tensors)
        ours, theirs = read_tensors(path), safetensors.torch.load_file(path)
        raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    assert ours.keys() == theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (start + header[name]["data_offsets"][0]) % tensor.itemsize == 0  # aligned when mapped
        for copy in (ours[name], theirs[name]):
            assert copy.dtype == tensor.dtype and copy.shape == tensor.shape
            assert bits(copy) == bits(tensor)


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "7", '{"a": NaN}', '{"a": -Infinity}', "[" * 100_000, "\xff"]
)
def test_a_file_that_holds_no_json_object_is_damaged(tmp_path, content):
    path = tmp_path / "state.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(Damaged, match=r"is damaged: state\.json is not"):
        read_json(path)


def test_a_file_is_replaced_whole_or_not_at_all_and_no_link_is_followed(tmp_path):
    outside, path = tmp_path / "outside", tmp_path / "file"
    outside.write_bytes(b"mine")
    path.symlink_to(outside)
    with pytest.raises(LookupError), replacing(path) as file:
        file.write(b"half of it")
        raise LookupError
    assert path.is_symlink() and len(names_in(tmp_path)) == 2
    for sync in (False, True):
        with replacing(path, sync) as file:
            file.write(b"new")
    assert path.read_bytes() == b"new" and not path.is_symlink() and outside.read_bytes() == b"mine"
    assert len(names_in(tmp_path)) == 2


def test_what_is_no_file_is_not_replaced_and_that_is_told_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, ".", tmp_path / "pipe"):
        with pytest.raises(OSError, match="not a file"), replacing(place):
            pytest.fail("the work was done in vain")
    assert names_in(tmp_path) == ["pipe"]
