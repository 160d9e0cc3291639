"""What GPUs can do, and what a plan needs to know about the machine: measured here, or from the table."""

import re
import time
from dataclasses import dataclass, replace

import torch

from nanochat.machine import memory, runtime
from nanochat.machine.precision import is_emulated, name_of


@dataclass(frozen=True)
class GPU:
    """A GPU by its data sheet, and the usual machine that it is in (0: not known)."""

    name: str  # a whole word of torch.cuda.get_device_name()
    tflops: float  # peak of dense 16-bit products that are summed in float32
    capability: tuple[int, int] = (0, 0)  # CUDA compute capability
    memory: float = 0  # GiB
    per_node: int = 0  # GPUs of a machine
    link: float = 0  # GB/s that a GPU sends to the others of its machine
    network: float = 0  # GB/s that a GPU sends to other machines

    @property
    def peak_flops(self) -> float:
        """FLOP/s of dense 16-bit products."""
        return self.tflops * 1e12

    @property
    def dtype(self) -> torch.dtype:
        """The one that `--dtype=auto` chooses there (precision.py)."""
        return torch.bfloat16 if self.capability >= (8, 0) else torch.float16


# From the makers' data sheets. The first name that fits counts; a GPU without an entry is measured, and so
# are VARIANTS, whose names only begin with a known one, and the parts of a GPU (MIG).
# link: half of NVLink's rate, because the sheets add both directions; without NVLink, PCIe.
# network: one adapter for each GPU in DGX B200, H200, H100 (400 Gb/s) and A100 (200 Gb/s), four of 100 Gb/s
# for eight GPUs in DGX-1 V100; for PCIe cards an assumed 100 Gb/s for a machine of eight.
# fmt: off
GPUS = [
    #   name       TFLOP/s  capability  GiB  GPUs  link  network
    GPU("GB200",      2500),
    GPU("B200",       2250, (10, 0),    180,  8,   900,  50),
    GPU("GH200",       989),
    GPU("H200",        989, (9, 0),     141,  8,   450,  50),
    GPU("H100 PCIe",   756),
    GPU("H100 NVL",    835),
    GPU("H100",        989, (9, 0),      80,  8,   450,  50),
    GPU("A100",        312, (8, 0),      80,  8,   300,  25),
    GPU("L40S",        362, (8, 9),      48,  8,    32,  12.5 / 8),
    GPU("L4",          121, (8, 9),      24,  8,    32,  12.5 / 8),
    GPU("A40",       149.7),
    GPU("A10",         125),
    GPU("RTX 5090",  209.5, (12, 0),     32,  8,    64,  12.5 / 8),
    GPU("RTX 4090",  165.2, (8, 9),      24,  8,    32,  12.5 / 8),
    GPU("RTX 3090",     71, (8, 6),      24,  8,    32,  12.5 / 8),
    GPU("RTX A6000", 154.8, (8, 6),      48,  8,    32,  12.5 / 8),
    GPU("V100",        125, (7, 0),      32,  8,   150,  6.25),
    GPU("T4",           65, (7, 5),      16,  8,    16,  12.5 / 8),
    GPU("MI300X",     1307, (8, 0),     192,  8,   448,  50),  # AMD's; here it does what an A100 does
]
# fmt: on
VARIANTS = r"(?! (Laptop|Ti|D|NVL)\b|.* MIG )"  # after the name: other peaks


@dataclass(frozen=True)
class Hardware:
    """What the plan needs to know about the machine; the same on every process. `survey` finds it out."""

    device_type: str
    world_size: int
    dtype: torch.dtype  # the compute dtype
    dtype_reason: str
    memory: int  # bytes that each process may still take: the smallest number of all processes
    peak_flops: float  # FLOP/s of all processes together, in `dtype`
    peak_source: str
    held: int = 0  # on a CPU: bytes that a process has taken already (Python, torch, other libraries)
    name: str = ""  # of the device, by its maker

    @property
    def peak(self) -> dict:
        """What a checkpoint keeps of the peak: on a busy machine it is measured lower."""
        where = f"{self.name} x {self.world_size}, {name_of(self.dtype)}"
        return {"machine": where, "flops": self.peak_flops, "source": self.peak_source}

    def with_peak_of(self, resolved: dict) -> "Hardware":
        """The same with the peak of a resumed run's first start, if that was on such a machine: the same
        speed is then the same MFU."""
        before = resolved.get("peak", {})
        if before.get("machine") != self.peak["machine"]:
            return self
        return replace(self, peak_flops=before["flops"], peak_source=before["source"])


def survey(machine, dtype: torch.dtype, dtype_reason: str = "") -> Hardware:
    """Measure the machine, on all its processes: free memory and the peak of matrix products."""
    free = machine.free_memory()  # first: torch keeps the memory of the matrices that are multiplied
    flops, source = peak_flops(machine.device, dtype)
    return Hardware(
        machine.device.type,
        machine.world_size,
        dtype,
        dtype_reason,
        memory=min(machine.all_gather(free)),
        peak_flops=sum(machine.all_gather(flops)),
        peak_source=source,
        held=max(machine.all_gather(memory.held(machine.device))),
        name=machine.all_gather(runtime.device_name(machine.device))[0],
    )


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s of dense matrix products in `dtype`, and where the figure comes from: (value, reason).

    For known GPUs in 16 bits it is the data sheet's. Else it is measured in about a tenth of a second.
    """
    if device.type == "cuda" and dtype != torch.float32:
        name = torch.cuda.get_device_name(device)
        for gpu in GPUS:
            if re.search(rf"\b{gpu.name}\b{VARIANTS}", name):  # a whole word: an "RTX A4000" is no "A40"
                return gpu.peak_flops, f"data sheet of {gpu.name}"
    return measured_flops(device, dtype)


def measured_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """The fastest of several products of two square matrices. On a CPU larger ones are no faster, and take
    seconds in a dtype that it emulates."""
    slow = device.type == "cpu" and is_emulated(name_of(dtype))
    side = 8192 if device.type == "cuda" else 256 if slow else 1024
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    machine, best, began, runs = runtime.Machine(device), float("inf"), time.perf_counter(), 0
    while runs < 3 or time.perf_counter() - began < 0.1:
        machine.synchronize()
        t = time.perf_counter()
        torch.mm(a, b)
        machine.synchronize()
        best, runs = min(best, time.perf_counter() - t), runs + 1
    return 2 * side**3 / best, f"measured: {side} x {side} {name_of(dtype)} product"
