"""Python waits for the device only where it has to. Stand-ins show what needs a GPU."""

from types import SimpleNamespace

import torch

from nanochat.machine.transfers import Reading


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


def test_a_reading_has_the_sums_first_then_the_others_and_counts_exactly():
    reading = Reading(
        torch.device("cpu"),
        1,
        [torch.tensor([0.5]), True, 2**40 + 1],
        [torch.tensor(3.0, requires_grad=True)],
    )
    assert reading.is_there() and reading.result() == [0.5, 1, 2**40 + 1, 3]
