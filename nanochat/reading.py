"""Numbers on their way from the device to Python, in one transfer."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Reading:
    """Numbers that Python wants from the device. Making a Reading waits for nothing; result() waits for them.

    sums: numbers to add up over all processes. same: numbers that all processes have alike. Each one is a
    number of Python or a tensor with one element on `device`. A Reading also ends the work that the device
    was given before it: when the numbers are there, that work is done.
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
