"""The peer gets our documents and our tokens, and what its run prints and takes is read as it is."""

import ast
import copy
import json
import pickle
import sys
import time
from pathlib import Path

import fake_peer
import pytest
import torch
from helpers import ROOT, assert_ended, python_m
from watch import Watch

from experiments import peer_run
from nanochat import UserError
from nanochat.data.parquet import Documents
from nanochat.data.sources import open_dataset
from nanochat.data.tokenizer import train


@pytest.fixture
def checkout(tmp_path) -> Path:
    return fake_peer.checkout(tmp_path / "peer")


def functions(count: int) -> str:
    return "".join(
        f"# number {i}\n@wrapped({i})\ndef f{i}(a, b):\n    return a + b * {i}\n\n" for i in range(count)
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A data set of two long files and its validation file, its tokenizer, and the folder for the peer."""
    place = tmp_path_factory.mktemp("texts")
    for name, count in (("a", 90), ("b", 60), ("val", 70)):
        (place / f"{name}.txt").write_text(functions(count))
    dataset = open_dataset(f"{place / 'a.txt'},{place / 'b.txt'}", place / "val.txt", base_dir=place / "base")
    tokenizer = train(dataset.train_texts(), 280)
    return dataset, tokenizer, peer_run.prepare(dataset, tokenizer, place / "base")


def test_pieces_begin_at_definitions_and_together_are_the_text():
    text = "import os\n\n" + functions(40) + "class C:\n    x = 1\n\n"
    text += "    def g(self):\n        pass\n\n" * 60
    found = list(peer_run.pieces(text, at_least=200))
    assert "".join(found) == text and len(found) > 10
    assert all(len(piece) >= 200 for piece in found[:-1])
    assert max(map(len, found)) < 300  # no definition here has 100 characters
    for piece in found[1:]:
        assert piece.startswith(("@wrapped", "class C", "    def g"))
    for other in ("def f(:\n", "words and words\r\n", "x = 1\0\n", "x\x0cy\u2028z = 1\n"):  # no Python: whole
        assert list(peer_run.pieces(other * 200, at_least=100)) == [other * 200]


def test_both_read_the_same_documents_of_the_same_splits(prepared, tmp_path):
    dataset, tokenizer, text = prepared
    folder = text / "base_data_climbmix"
    *train_shards, val_shard = sorted(folder.iterdir())  # as the peer takes them
    assert val_shard.name == peer_run.VALIDATION and len(train_shards) == 1
    for shards, originals in ((train_shards, dataset.train_shards), ([val_shard], dataset.val_shards)):
        documents = list(Documents(shards))
        whole = list(Documents(originals))
        expected = sorted(piece for text in whole for piece in peer_run.pieces(text))
        assert sorted(documents) == expected and len(expected) > len(whole)
        for document in documents:
            ast.parse(document)
    ours = peer_run.our_settings(text)  # our own script reads the same files
    opened = open_dataset(ours["data"], ours["val_data"], base_dir=tmp_path)
    assert sorted(opened.train_texts()) == sorted(Documents(train_shards))
    assert ours["vocab_size"] == tokenizer.vocab_size and ours["tokenizer"].exists()


def test_a_prepared_folder_is_taken_with_its_own_validation(prepared, tmp_path):
    text = prepared[2]
    assert peer_run.text_of(str(text), 4096, tmp_path) == text
    with pytest.raises(UserError, match="leave --val_data out"):
        peer_run.text_of(str(text), 4096, tmp_path, val_data="other.jsonl")
    with pytest.raises(UserError, match="a user who is unknown here"):
        peer_run.text_of("~nobody-here/text", 4096, tmp_path)


def test_the_peers_tokenizer_gives_our_tokens_and_our_bytes(prepared):
    _, tokenizer, text = prepared
    # The peer reads a pickle, so one is written; nothing of ours reads it. A copy is made as from a pickle
    encoding = copy.copy(tokenizer._encoding)
    assert (text / "tokenizer" / "tokenizer.pkl").read_bytes() == pickle.dumps(encoding)
    sample = functions(5) + "äöü 12345\n"
    assert encoding.encode_ordinary(sample) == tokenizer._encoding.encode_ordinary(sample)
    assert encoding.n_vocab == tokenizer.vocab_size
    assert encoding.encode_single_token("<|bos|>") == tokenizer.bos_id
    lengths = torch.load(text / "tokenizer" / "token_bytes.pt")
    assert lengths.dtype == torch.int32
    of_each = [len(encoding.decode_single_token_bytes(i)) for i in range(len(tokenizer.tokens))]
    assert lengths.tolist() == of_each + [0] * len(tokenizer.special_tokens)


def test_a_run_has_the_settings_asked_for_and_its_figures_are_read(checkout, prepared, tmp_path):
    place = tmp_path / "place"
    settings = {"depth": 4, "num_iterations": 4, "window_pattern": "SSSL"}
    run = peer_run.train(checkout, prepared[2], place, settings, "bfloat16")
    options, environment, shards, tokenizer = json.loads(run.lines[0][1])
    assert {"--depth=4", "--num-iterations=4", "--window-pattern=SSSL", "--eval-every=-1"} < set(options)
    assert environment == {"NANOCHAT_BASE_DIR": str(place), "NANOCHAT_DTYPE": "bfloat16"}
    assert shards[-1] == peer_run.VALIDATION and {"tokenizer.pkl", "token_bytes.pt"} <= set(tokenizer)
    assert len(run.step_done_s) == 4 and run.step_done_s == sorted(run.step_done_s)
    assert run.tok_per_sec == 2000  # the median of 1,000, 3,000 and 2,000
    assert 80 << 20 < run.peak_memory_bytes < 140 << 20  # it holds 80 MiB
    assert 0 < run.first_step_s <= run.seconds


def test_a_run_that_fails_says_why(checkout, prepared, tmp_path):
    with pytest.raises(UserError, match="no such depth"):
        peer_run.train(checkout, prepared[2], tmp_path / "place", {"depth": 13}, "float32")
    program = "print('one'); print('two', end=''); raise SystemExit(3)"
    done = peer_run.watch([sys.executable, "-S", "-c", program])  # the last line needs no end
    assert done.status == 3 and done.tail() == "one\ntwo" and done.peak_memory_bytes > 1 << 20
    assert [line for _, line in done.lines[:2]] == ["one", "two"]


def test_a_run_of_ours_is_killed_after_the_steps_that_are_waited_for(tmp_path, monkeypatch):
    prints = "print('step 10/12 | another')\nprint('step 1/12 | loss 8.3', flush=True)\n"
    (tmp_path / "sleeps.py").write_text(SLEEPS.replace("time.sleep(600)\n", prints + "time.sleep(600)\n"))
    began = time.monotonic()
    monkeypatch.chdir(tmp_path)
    (seconds,) = peer_run.until_steps([sys.executable, "-S", "sleeps.py"], (1,))
    assert 0 < seconds <= time.monotonic() - began < 500
    assert_ended(*pids_in(tmp_path))
    monkeypatch.setattr(peer_run, "time", Watch(tick=1))
    prints = "print('step 1/12 |'); print('warning'); print('step 3/12 |')"
    assert peer_run.until_steps([sys.executable, "-S", "-c", prints], (1, 3)) == [1, 3]
    with pytest.raises(UserError, match=r"ended before its step 1: no such depth$"):
        peer_run.until_steps([sys.executable, "-S", "-c", "raise SystemExit('no such depth')"], (1,))


INTERRUPTED = f"""
import signal, sys, threading, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from experiments import peer_run

def interrupt():
    while not Path("pids").exists():
        time.sleep(0.01)
    signal.pthread_kill(threading.main_thread().ident, getattr(signal, sys.argv[1]))

threading.Thread(target=interrupt).start()
try:
    peer_run.watch([sys.executable, "-S", "sleeps.py"])
except KeyboardInterrupt:
    print("interrupted")
"""
SLEEPS = """
import os, subprocess, sys, time

child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
with open("new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename("new", "pids")
time.sleep(600)
"""


@pytest.mark.parametrize(("name", "ends_with"), [("SIGINT", (0, "interrupted\n")), ("SIGKILL", (-9, ""))])
def test_what_is_interrupted_or_killed_leaves_no_process(tmp_path, name, ends_with):
    """The signal comes while the command sleeps, and the command has started a process of its own."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    done = python_m(["interrupted", name], tmp_path)
    assert (done.returncode, done.stdout) == ends_with, done.stderr
    assert_ended(*pids_in(tmp_path))


def pids_in(folder: Path) -> list[int]:
    """The numbers of the two processes of SLEEPS."""
    one, other = map(int, (folder / "pids").read_text().split())
    return [one, other]
