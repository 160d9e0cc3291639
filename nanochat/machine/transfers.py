"""Transfers between Python and the device that do not make Python wait for earlier work.

A copy between a GPU and ordinary memory of the host makes Python wait for all work that the GPU was given
before. A copy between a GPU and page-locked memory does not.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


class Reading:
    """Numbers on their way from the device to Python. Making a Reading does not wait; result() does.

    sums: numbers to add up over all processes. same: numbers that all processes have alike. Each one is a
    number of Python or a tensor with one element on `device`. When the numbers are there, the work that the
    device was given before them is done too.
    """

    def __init__(self, device: torch.device, world_size: int, sums: Sequence, same: Sequence = ()):
        # float64 for exact counts; MPS has none, but is never distributed
        dtype = torch.float32 if device.type == "mps" else torch.float64
        # torch.full takes its number along to the device; torch.tensor would copy it there and wait
        numbers = [
            x.detach().to(dtype).reshape(()) if isinstance(x, torch.Tensor) else
            torch.full((), x, dtype=dtype, device=device)
            for x in (*sums, *same)
        ]  # fmt: skip
        self._numbers, self._copied = torch.stack(numbers), None
        if world_size > 1:
            dist.all_reduce(self._numbers[: len(sums)])
        if device.type == "cuda":
            self._numbers = self._numbers.to("cpu", non_blocking=True)  # torch takes page-locked memory here
            self._copied = torch.cuda.Event(blocking=True)  # Python sleeps; by default it keeps a core busy
            self._copied.record()

    def is_there(self) -> bool:
        """Whether result() returns at once."""
        return self._copied is None or self._copied.query()

    def result(self) -> list[float]:
        """The sums, then the others."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._numbers.tolist()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to the device. With a GPU, Python goes on meanwhile."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def for_new_thread() -> Callable[[], None]:
    """A function that a new thread calls first, so that it uses the GPU of the thread that is here.

    CUDA gives a new thread GPU 0. There it would take some hundred MB from another process.
    """
    if not torch.cuda.is_initialized():
        return lambda: None
    return functools.partial(torch.cuda.set_device, torch.cuda.current_device())
