"""Python waits for the device only where it has to. Stand-ins show what needs a GPU."""

import threading
from types import SimpleNamespace

import pytest
import torch

from nanochat import UserError
from nanochat.checkpoint import background
from nanochat.checkpoint.background import AsyncSaver, check_finite
from nanochat.machine import transfers
from nanochat.machine.transfers import Reading

CPU = torch.device("cpu")


def test_a_reading_has_the_sums_first_then_the_others_and_counts_exactly():
    reading = Reading(CPU, 1, [torch.tensor([0.5]), True, 2**40 + 1], [torch.tensor(3.0, requires_grad=True)])
    assert reading.is_there() and reading.result() == [0.5, 1, 2**40 + 1, 3]


class Copied:
    """A CUDA event that is over when somebody waits for it."""

    def __init__(self, blocking):
        self.blocking, self.over = blocking, False

    def record(self):
        pass

    def query(self):
        return self.over

    def synchronize(self):
        self.over = True


def test_on_a_gpu_a_reading_is_copied_without_a_wait_and_its_result_waits_without_a_busy_core(monkeypatch):
    to, copies = torch.Tensor.to, []

    def spy(tensor, *arguments, **options):
        if options:
            copies.append((arguments, options))
        return to(tensor, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "to", spy)
    full, device = torch.full, SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch, "full", lambda *rest, dtype, device: full(*rest, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "Event", Copied)
    reading = Reading(device, 1, [torch.tensor(2.0), False])
    assert copies == [(("cpu",), {"non_blocking": True})]
    assert not reading.is_there() and reading._copied.blocking
    assert reading.result() == [2, 0] and reading.is_there()


@pytest.fixture
def gpu_3(monkeypatch):
    """As if this process used GPU 3; the calls of set_device as (name of the thread, GPU)."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda gpu: calls.append((threading.current_thread().name, gpu))
    )
    return calls


def test_the_thread_that_saves_uses_the_gpu_of_its_process(gpu_3, tmp_path, monkeypatch):
    monkeypatch.setattr(background, "KEEP_BYTES", 0)  # so that a small tensor's buffer is made ahead
    saver = AsyncSaver(tmp_path)
    saver.reserve({"weight": torch.ones(2)}, {})
    saver.wait()
    assert gpu_3 == [("checkpoint_0", 3)]
    saver.close()


def test_without_cuda_a_new_thread_sets_no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: pytest.fail("touched CUDA"))
    transfers.for_new_thread()()


def test_all_weights_are_looked_at_with_one_wait(monkeypatch, tmp_path):
    tensors = {name: torch.ones(3) for name in "abc"}
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: pytest.fail("a wait for one tensor"))
    check_finite(tensors, 5, tmp_path)
    check_finite({}, 5, tmp_path)
    tensors["b"][1] = torch.nan
    with pytest.raises(UserError, match="the weights are not finite in b, so"):
        check_finite(tensors, 5, tmp_path)
