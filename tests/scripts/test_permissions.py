"""A colleague's folders on a shared machine: what may not be read is a sentence, and never called damaged."""

import os
import re
import shutil
from contextlib import contextmanager

import pytest
from helpers import ROOT, command, python_m, run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")]

# Permissions do not bind root. So the script runs without the two capabilities that let root read everything
BOUND = f"""
import ctypes, os, runpy, sys
if os.geteuid() == 0:
    libc, header, data = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, data)
    data[0] &= ~0b110
    assert libc.capset(header, data) == 0
del sys.argv[0]
os.chdir({str(ROOT)!r})
sys.path.insert(0, {str(ROOT)!r})
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """A base folder with two runs: mine, and the newer one of a colleague."""
    base = tmp_path_factory.mktemp("base")
    run(command(corpus, base / "base_checkpoints" / "mine", "--num_iterations=2"))
    shutil.copytree(base / "base_checkpoints" / "mine", base / "base_checkpoints" / "theirs")
    return base


@contextmanager
def locked(path):
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        yield
    finally:
        path.chmod(mode)


def bound(tmp_path, arguments):
    (tmp_path / "bound.py").write_text(BOUND)
    return python_m(["bound", *arguments], tmp_path)


THEIRS = "base_checkpoints/theirs"
STEP = "base_checkpoints/mine/step_000002"
CASES = [
    (THEIRS, ["scripts.chat", "--base_dir={}/base_checkpoints/theirs/x", "--prompt=a"]),
    (STEP, ["scripts.chat", "--source=mine", "--prompt=a"]),
    (THEIRS, ["scripts.base_eval", "--source=theirs"]),
    (THEIRS, ["scripts.mid_train", "--source=mine", "--data={}/base_checkpoints/theirs/a.jsonl", "--plan"]),
    (THEIRS, ["scripts.report", "{}/base_checkpoints/theirs/x"]),
    (THEIRS, ["train", "--resume={}/base_checkpoints/theirs"]),
    (THEIRS, ["train", "--init_from={}/base_checkpoints/theirs"]),
    (THEIRS, ["train", "--base_dir={}/base_checkpoints/theirs/x"]),
    (STEP, ["continue"]),
    (f"{STEP}/model.safetensors", ["continue"]),
    ("base_checkpoints/mine/metrics.jsonl", ["continue"]),
]


@pytest.mark.parametrize("path, arguments", CASES, ids=lambda value: "".join(value))
def test_what_may_not_be_read_is_one_sentence(corpus, runs, tmp_path, path, arguments):
    script, *more = (argument.format(runs) for argument in arguments)
    if script in ("train", "continue"):
        out = tmp_path if script == "train" else runs / "base_checkpoints" / "mine"
        arguments = [*command(corpus, out), *more]
    else:
        arguments = [script, *([] if "--base_dir" in more[0] else [f"--base_dir={runs}"]), *more]
    with locked(runs / path):
        done = bound(tmp_path, arguments)
    said = done.stdout + done.stderr
    assert done.returncode == 2 and "Traceback" not in said and said.count("error:") == 1, said
    assert re.search(r"no permission|Permission denied|may not be read", said), said
    assert "damaged" not in said and "--resume=never" not in said, said


def test_the_newest_checkpoint_is_the_newest_that_may_be_read(runs, tmp_path):
    with locked(runs / THEIRS):
        done = bound(tmp_path, ["scripts.chat", f"--base_dir={runs}", "--prompt=a", "--max_tokens=2"])
    assert done.returncode == 0 and "mine/step_000002" in done.stderr, done.stderr
