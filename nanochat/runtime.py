"""The machine a script runs on: device, processes, signals, and how fast the device can multiply."""

import contextlib
import gc
import inspect
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nanochat import UserError, distributed

# Dense 16-bit matrix multiplication with float32 accumulation, in TFLOP/s, from the makers' data sheets.
# The first name that stands as a word in torch.cuda.get_device_name() decides; others are measured.
DATA_SHEET_TFLOPS = [
    ("GB200", 2500),
    ("B200", 2250),
    ("GH200", 989),
    ("H200", 989),
    ("H100 PCIe", 756),
    ("H100 NVL", 835),
    ("H100", 989),
    ("A100", 312),
    ("L40S", 362),
    ("L4", 121),
    ("A40", 149.7),
    ("A10", 125),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71),
    ("V100", 125),
    ("T4", 65),
    ("MI300X", 1307),
]

PATHS = {"data", "val_data", "tokenizer", "init_from", "base_dir", "out_dir"}  # settings that are paths

# All processes have the same rotary tables, so DDP need not send them; newer torch renamed the option
_renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_no_buffers = {"forward_sync_buffers" if _renamed else "broadcast_buffers": False}
DDP_OPTIONS = {"gradient_as_bucket_view": True, **_no_buffers}


@dataclass(frozen=True)
class Machine:
    """Where this process runs: its device and its place among the processes that torchrun started (or
    alone)."""

    device: torch.device
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    store: dist.Store | None = None  # where processes leave notes for each other

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def print(self, *words, **options):
        """print(), by the first process alone."""
        if self.is_main:
            try:
                print(*words, **options, flush=True)
            except BrokenPipeError:  # Ctrl-C ends the `tee` behind a run too; the run is still to save
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def all_sum(self, values: list[float]) -> list[float]:
        """Element-wise sums over all processes."""
        if self.world_size == 1:
            return values
        # float64 for exact counts; MPS has none, but is never distributed
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def all_gather(self, value):
        """The JSON-able values of all processes in order of rank, on every process."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def check_same(self, what: dict):
        """UserError on every process, naming the first difference, unless all gave equal JSON-able values."""
        first, *others = self.all_gather(what)
        for rank, other in enumerate(others, start=1):
            for name, value in first.items():
                if other[name] != value:
                    raise UserError(
                        f"process {rank} has {name} {other[name]}, process 0 has {value}; give every process "
                        "the same command, code and data"
                    )

    def check_same_settings(self, values: dict):
        """The same for the values of all settings but paths, which may differ from machine to machine."""
        self.check_same({name: value for name, value in values.items() if name not in PATHS})

    @contextlib.contextmanager
    def main_first(self, key: str, stop: "StopSignal | None" = None):
        """The first process does what stands inside alone, then the first of every other machine, then the
        rest: each finds what is there already. Waits without limit; `key` is the place's name.
        """
        turn = 0 if self.is_main else 1 if self.local_rank == 0 else 2
        if self.world_size > 1 and turn:
            before = [self.rank - self.local_rank] * (turn == 2) + [0]
            for rank in before:
                distributed.wait_for(self.store, f"{key}/{rank}", lambda: stop.name if stop else "")
        yield
        if self.world_size > 1:
            self.store.set(f"{key}/{self.rank}", "")

    def synchronize(self):
        """Wait until the device has done everything it was asked to do, so that a clock tells the truth."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def free_memory(self) -> int:
        """Bytes that this process may still take: of the GPU, else its share of the machine's memory."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        if not hasattr(os, "sysconf"):  # Windows does not say; what any machine has
            return 4 * 2**30 // processes
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        with contextlib.suppress(OSError, StopIteration):  # Linux: what is free or could be freed
            free = 1024 * _entry("/proc/meminfo", "MemAvailable:")
        with contextlib.suppress(OSError, ValueError, StopIteration):  # a container's limit ("max" = none)
            limit, used = (int(Path(f"/sys/fs/cgroup/memory.{n}").read_text()) for n in ("max", "current"))
            cached = _entry("/sys/fs/cgroup/memory.stat", "inactive_file")  # of files, which gives way
            free = min(free, limit - used + cached)
        return free // processes

    def peak_memory(self) -> int:
        """Bytes: the most allocated on the GPU, else the most this process had resident (0: unknown)."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if self.device.type == "mps":  # what the driver gave torch; it hardly ever takes any back
            return torch.mps.driver_allocated_memory()
        with contextlib.suppress(OSError, StopIteration):  # Linux; getrusage begins with what the parent held
            return 1024 * _entry("/proc/self/status", "VmHWM:")
        try:
            import resource
        except ImportError:  # Windows
            return 0
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def environment(self) -> dict:
        """What a run's config.json says about the machine and the versions it ran on."""
        return {
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "git_commit": git_commit(),
            "device": device_name(self.device),
            "world_size": self.world_size,
        }

    def exit(self):
        """Leave the other processes and end this one with status 0."""
        self.close()
        sys.exit(0)

    def close(self):
        """Leave the other processes."""
        if dist.is_initialized():
            # gloo's thread needs the GIL to let go of the last exchange's tensors. A DistributedDataParallel
            # that ends later waits for that thread and holds the GIL (pytorch/pytorch#56297): let it go on.
            time.sleep(0.1)
            dist.destroy_process_group()


def _entry(path: str, name: str) -> int:
    """The number behind a name in a table of the kernel's; OSError or StopIteration where there is none."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return int(next(words[1] for words in lines if words[:1] == [name]))


def start(device_type: str, seed: int, timeout_s: float = 600.0) -> Machine:
    """Choose the device (`auto`: cuda, else mps, else cpu), join torchrun's process group if there is one,
    and seed.

    timeout_s: how long processes wait for one of them before they end. Raises UserError for a device this
    machine does not have, and for a seed that a random number generator does not take.
    """
    if not 0 <= seed < 2**62:
        raise UserError(f"seed is {seed}; give a number from 0 to 2**62")
    have = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device_type == "auto":
        device_type = next(name for name, there in have.items() if there)
    if not have.get(device_type):
        there = ", ".join(name for name, yes in have.items() if yes)
        raise UserError(f"device_type {device_type} is not available here; this machine has: {there}")
    rank, local_rank, world_size = (
        int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
    )
    device, store = torch.device(device_type), None
    if device_type == "cuda":
        processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
        if processes_here > torch.cuda.device_count():
            raise UserError(
                f"{processes_here} processes on this machine but it has {torch.cuda.device_count()} GPUs; "
                "lower --nproc_per_node"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if world_size > 1:
        if device_type == "mps":
            raise UserError(
                "MPS runs one process; start it with python, or use --device_type=cpu with torchrun"
            )
        options = {"device_id": device} if device_type == "cuda" else {}
        store = distributed.join("nccl" if device_type == "cuda" else "gloo", timeout_s, **options)
    torch.manual_seed(seed)
    return Machine(device, rank, local_rank, world_size, store)


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s of dense matrix multiplication in `dtype`, and where the figure comes from.

    Known GPUs in 16 bit: the data sheet. Everything else is measured on the spot in about a third of a
    second: the best of several products of two square matrices.
    """
    if device.type == "cuda" and dtype != torch.float32:
        name = torch.cuda.get_device_name(device)
        for part, tflops in DATA_SHEET_TFLOPS:
            if re.search(rf"\b{part}\b", name):  # "A40" is not in "RTX A4000"
                return tflops * 1e12, f"data sheet of {part}"
    side = 8192 if device.type == "cuda" else 2048 if dtype != torch.float16 or device.type != "cpu" else 512
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    machine, best, began, runs = Machine(device), float("inf"), time.perf_counter(), 0
    while runs < 3 or time.perf_counter() - began < 0.25:
        machine.synchronize()
        t = time.perf_counter()
        torch.mm(a, b)
        machine.synchronize()
        best, runs = min(best, time.perf_counter() - t), runs + 1
    return 2 * side**3 / best, f"measured: {side} x {side} {str(dtype).removeprefix('torch.')} product"


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of torch's random number generators, of this process and its GPU, as uint8 tensors."""
    states = {"random_state/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random_state/cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: dict[str, torch.Tensor], device: torch.device):
    """Put back what `random_state` gave; other keys, and those of another kind of device, stay unread."""
    if "random_state/cpu" in states:
        torch.set_rng_state(states["random_state/cpu"])
    if "random_state/cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["random_state/cuda"], device)


def is_random_state(name: str) -> bool:
    """Whether `random_state` gives a tensor of that name."""
    return name.startswith("random_state/")


def decide_compile(
    setting: str, device: torch.device, expected_seconds: float, before: bool | None = None
) -> tuple[bool, str]:
    """Whether to compile the model, for the setting `compile` (auto, on, off), and the reason.

    Compiling takes a GPU about a minute and a CPU about half a minute; it makes steps about 1.5 times as
    fast. `before` is what a run that is resumed did until now: it stays so, where this machine can.
    """
    if setting != "auto":
        return setting == "on", "as asked for"
    if device.type == "cpu":
        if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++", "cl")):
            return False, "no C++ compiler here"
    elif device.type == "cuda":
        if not torch.version.hip and torch.cuda.get_device_capability(device)[0] < 7:
            return False, "Triton needs CUDA compute capability 7.0"
        try:
            import triton  # noqa: F401
        except ImportError:
            return False, "no Triton here"
    else:
        return False, f"{device.type} runs eager"
    if before is not None:
        return before, "as at the run's first start"
    worth = expected_seconds > 90
    verdict = "pays" if worth else "would take longer"
    return worth, f"about {expected_seconds:,.0f} s of steps: compiling {verdict}"


def git_commit() -> str | None:
    """The commit of the working tree this runs from, with "+" where files differ from it; None outside of
    git."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def freeze_garbage():
    """Keep garbage collection fast: what is allocated by now lives to the end and need not be looked at."""
    gc.collect()
    gc.freeze()


class StopSignal:
    """Remembers a SIGTERM, SIGINT or SIGUSR1, so that the loop can end at a step's boundary. A second
    SIGINT stops at once. The death of the torchrun that started this process counts as a signal too."""

    def __init__(self):
        self._name = ""
        self._torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
            if hasattr(signal, name):  # Windows has no SIGUSR1
                with contextlib.suppress(ValueError):  # not in the main thread: the caller's handlers stay
                    signal.signal(getattr(signal, name), self._remember)

    @property
    def name(self) -> str:
        """What asked to stop; empty as long as nothing has."""
        if not self._name and self._torchrun and os.getppid() != self._torchrun:
            self._name = "the death of torchrun"
        return self._name

    def _remember(self, number, frame):
        if self._name == "SIGINT" and number == signal.SIGINT:
            os._exit(130)  # checkpoints are whole or absent at any moment, so nothing has to be tidied up
        self._name = signal.Signals(number).name
        with contextlib.suppress(OSError):  # nobody may read it any more; and print() is not safe here
            os.write(2, f"\n{self._name}: finishing this step, then saving\n".encode())
