"""The loader's steps, buffers, thread and processes."""

import gc
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from corpora import BOS, Corpus, Numbers, run
from helpers import ROOT
from watch import Watch

from nanochat.checkpoint import AsyncSaver
from nanochat.data import loader as loader_module
from nanochat.data.loader import TrainLoader


@pytest.fixture
def shards(tmp_path) -> list[Path]:
    return Corpus(tmp_path, [30] * 100, 5).shards


def test_the_state_is_that_of_the_last_complete_step_not_of_what_is_prepared(shards):
    with TrainLoader(shards, Numbers(), 4, 8, 2) as loader:
        states = [loader.state()]
        for _ in range(10):
            next(loader)
            assert loader.state() == states[-1]  # in the middle of a step
            next(loader)
            states.append(loader.state())
    assert len({json.dumps(state) for state in states}) == 11
    for steps in (0, 3, 10):
        assert run(shards, steps, n_lanes=4, T=8)[1] == [states[steps]]


@pytest.mark.parametrize("device_batch_size", [1, 4])
def test_a_batch_in_hand_is_never_overwritten(shards, device_batch_size):
    with TrainLoader(shards, Numbers(), 4, 8, device_batch_size) as loader:
        batches = [next(loader) for _ in range(60)]
        copies = [[tensor.clone() for tensor in batch] for batch in batches]
        for _ in range(60):
            next(loader)
        time.sleep(0.05)
    for batch, copy in zip(batches, copies, strict=True):
        for tensor, same in zip(batch, copy, strict=True):
            assert tensor.dtype == torch.int64 and tensor.shape == (device_batch_size, 8)
            assert tensor.is_contiguous() and torch.equal(tensor, same)
    tokens = torch.cat([targets.flatten() for _, targets in batches])
    tokens = tokens[tokens != BOS].tolist()
    assert len(set(tokens)) == len(tokens)


def loader_threads() -> int:
    return sum(thread.name == "nanochat-loader" for thread in threading.enumerate())


def test_no_thread_is_left_after_close_exception_or_neglect(shards):
    loader = TrainLoader(shards, Numbers(), 4, 8, 2)
    next(loader)
    assert loader_threads() == 1
    loader.close()
    loader.close()
    assert loader_threads() == 0
    next(loader)  # the rest of the step in hand
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)

    with pytest.raises(KeyError), TrainLoader(shards, Numbers(), 4, 8, 2) as loader:
        raise KeyError
    assert loader_threads() == 0

    neglected = TrainLoader(shards, Numbers(), 4, 8, 2)
    del neglected
    gc.collect()
    assert loader_threads() == 0


def test_an_error_of_the_thread_reaches_the_caller_with_its_place(shards):
    class Broken(Numbers):
        def encode(self, text):
            raise ZeroDivisionError("in encode")

    loader = TrainLoader(shards, Broken(), 4, 8, 2)
    with pytest.raises(ZeroDivisionError, match="in encode") as error:
        next(loader)
    assert any(entry.name == "encode" for entry in error.traceback)
    assert loader_threads() == 0


def test_waiting_is_counted_and_epochs_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(loader_module, "time", Watch(tick=1))
    corpus = Corpus(tmp_path, [8] * 8, 5)
    with TrainLoader(corpus.shards, Numbers(), 2, 8, 1) as loader:
        next(loader)
        next(loader)  # the second micro-batch of the step is there
        assert loader.wait_s == 1 and loader.epoch == 0
        for _ in range(24):
            next(loader)
        assert loader.wait_s == 13 and loader.epoch >= 2


# -- processes


def rows_of_rank(shards, n_lanes: int, T: int, W: int, rank: int, steps: int, results) -> None:
    with TrainLoader(shards, Numbers(), n_lanes, T, 1, rank, W, seed=5) as loader:
        rows = [next(loader)[0][0].tolist() for _ in range(steps * n_lanes // W)]
    results.put((rank, rows))


@pytest.mark.parametrize(("method", "W"), [("fork", 3), ("spawn", 2)])
def test_real_processes_together_see_the_rows_that_one_sees(tmp_path, method, W):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip("not here")
    shards = Corpus(tmp_path, [30] * 200, 7).shards
    expected, _ = run(shards, 5, n_lanes=12, T=16, seed=5)
    with TrainLoader(shards, Numbers(), 12, 16, 12, seed=5) as running:  # and is not disturbed
        first = next(running)[0]
        context = multiprocessing.get_context(method)
        results = context.SimpleQueue()
        arguments = [(shards, 12, 16, W, rank, 5, results) for rank in range(W)]
        processes = [context.Process(target=rows_of_rank, args=each) for each in arguments]
        for process in processes:
            process.start()
        rows = dict(results.get() for _ in processes)
        for process in processes:
            process.join(300)
            assert process.exitcode == 0
        assert torch.equal(first, torch.from_numpy(expected[0, :, :-1]))
        for step in range(1, 5):
            assert torch.equal(next(running)[0], torch.from_numpy(expected[step, :, :-1]))
    for rank in range(W):
        assert rows[rank] == expected[:, rank::W, :-1].reshape(-1, 16).tolist()


# How a process ends while its loader is in full swing. Each case is a forked child of one fresh Python, so
# torch is imported once. A child that hangs is ended by the alarm, with status -14.
ENDS = """
import os, signal, sys, time
import pyarrow.parquet, tiktoken  # once, not in each child
from nanochat.data import loader as loader_module
from nanochat.checkpoint import AsyncSaver, background
from nanochat.data.loader import TrainLoader
from nanochat.data.tokenizer import Tokenizer
tokenizer, *shards = sys.argv[1:]

def started():
    loader = TrainLoader(shards, Tokenizer.load(tokenizer), 64, 512, 64)
    next(loader)
    return loader

ready, tell = os.pipe()
for case in ("the end", "exit", "SIGINT", "SIGTERM", "inherited"):
    loader = started() if case == "inherited" else None
    child = os.fork()
    if not child:
        break
    if case.startswith("SIG"):
        os.read(ready, 1)
        time.sleep(0.05)
        os.kill(child, getattr(signal, case))
    print(f"{case}: {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}", flush=True)
else:
    next(loader)  # the process that made it is not disturbed
    print("fine")
    sys.exit(0)

signal.alarm(300)
loader = loader or started()
if case == "exit":
    sys.exit(3)
if case.startswith("SIG"):
    os.write(tell, b".")
    while True:
        next(loader)
if case == "inherited":
    next(loader)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_process_ends_cleanly_however_it_ends_and_a_fork_cannot_use_its_parents_loader(real, tmp_path):
    shards, tokenizer, _ = real
    tokenizer.save(tmp_path / "t.json")
    command = [sys.executable, "-W", "ignore", "-c", ENDS, tmp_path / "t.json", *shards]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    statuses = ["the end: 0", "exit: 3", "SIGINT: -2", "SIGTERM: -15", "inherited: 1", "fine"]
    assert done.stdout.splitlines() == statuses, done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith((" ", "Traceback"))]
    assert said == [
        "KeyboardInterrupt",
        "RuntimeError: this loader belongs to the process that made it; make one in each process",
    ]


def test_the_threads_that_save_and_load_use_the_gpu_of_their_process(shards, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda gpu: calls.append((threading.current_thread().name, gpu))
    )
    saver = AsyncSaver(tmp_path)
    saver.reserve({"weight": torch.ones(2)}, {})
    saver.close()
    with TrainLoader(shards, Numbers(), 4, 8, 4) as loader:
        next(loader)
    assert calls == [("checkpoint_0", 3), ("nanochat-loader", 3)]
