"""What a plan needs to know about the machine: measured here, or imagined (simulation.py)."""

from dataclasses import dataclass

import torch

from nanochat.machine import runtime


@dataclass(frozen=True)
class Hardware:
    """What the plan needs to know about the machine; the same on every process. `survey` finds it out."""

    device_type: str
    world_size: int
    dtype: torch.dtype  # to compute in
    dtype_reason: str
    memory: int  # bytes that a process may still take: the least of all processes
    peak_flops: float  # FLOP/s of all processes together, in `dtype`
    peak_source: str
    held: int = 0  # bytes of a CPU's memory that a process has already: Python, torch, other libraries

    @property
    def sharing(self) -> dict:
        """Keywords for `memory_estimate.training_bytes`: with whom the memory is shared, and for what."""
        return {"world_size": self.world_size, "on_cpu": self.device_type == "cpu"}


def survey(machine, dtype: torch.dtype, dtype_reason: str = "") -> Hardware:
    """Measure the machine, on all its processes: free memory and the peak of matrix products."""
    peak_flops, peak_source = runtime.peak_flops(machine.device, dtype)
    return Hardware(
        machine.device.type,
        machine.world_size,
        dtype,
        dtype_reason,
        memory=min(machine.all_gather(machine.free_memory())),
        peak_flops=sum(machine.all_gather(peak_flops)),
        peak_source=peak_source,
        held=max(machine.all_gather(machine.held_memory())),
    )
