"""The loader's steps, buffers, thread and processes."""

import gc
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from corpora import BOS, Corpus, Numbers, run
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_cannot_use_its_parents_loader_which_goes_on(shards):
    with TrainLoader(shards, Numbers(), 4, 8, 4) as loader:
        next(loader)
        child = os.fork()
        if not child:
            signal.alarm(300)  # ends a child that waits for a thread which it does not have
            try:
                next(loader)
            except RuntimeError as error:
                os._exit("make one in each process" not in str(error))
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        next(loader)


def test_the_threads_that_save_and_load_use_the_gpu_of_their_process(shards, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    set_device = lambda gpu: calls.append((threading.current_thread().name, gpu))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    saver = AsyncSaver(tmp_path)
    saver.reserve({"weight": torch.ones(2)}, {})
    saver.close()
    with TrainLoader(shards, Numbers(), 4, 8, 4) as loader:
        next(loader)
    assert calls == [("checkpoint_0", 3), ("nanochat-loader", 3)]
