"""The machine a script runs on: device, processes, memory, peak FLOP/s."""

import contextlib
import hashlib
import inspect
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nanochat import UserError
from nanochat import terminal as bars
from nanochat.machine import distributed, memory, watchdog
from nanochat.machine.signals import StopSignal
from nanochat.machine.transfers import Reading

# TFLOP/s of dense 16-bit matrix products that are summed in float32, from the makers' data sheets. The first
# name that is a whole word in torch.cuda.get_device_name() counts; a GPU without an entry is measured.
DATA_SHEET_TFLOPS = [
    ("GB200", 2500), ("B200", 2250), ("GH200", 989), ("H200", 989), ("H100 PCIe", 756), ("H100 NVL", 835),
    ("H100", 989), ("A100", 312), ("L40S", 362), ("L4", 121), ("A40", 149.7), ("A10", 125),
    ("RTX 4090", 165.2), ("RTX 3090", 71), ("V100", 125), ("T4", 65), ("MI300X", 1307),
]  # fmt: skip

EAGER_STEPS = 10  # of a run on a CPU, before it compiles
# Settings that can be paths, which differ between machines
PATHS = {"data", "val_data", "tokenizer", "init_from", "core_bundle", "base_dir", "out_dir"}

# DDP need not send the rotary tables: every process computes the same ones. Newer torch renamed the option.
_renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_no_buffers = {"forward_sync_buffers" if _renamed else "broadcast_buffers": False}
DDP_OPTIONS = {"gradient_as_bucket_view": True, **_no_buffers}


@dataclass(frozen=True)
class Machine:
    """Where this process runs: its device, and its place among the processes that torchrun started."""

    device: torch.device
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    store: dist.Store | None = None  # where processes leave notes for each other (None: one process)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def steps_ahead(self) -> int:
        """Steps that Python may give to the device before it reads the numbers of the first of them. A GPU
        works on its own, and is never idle with 1. On a CPU a step is done when Python has asked for it."""
        return 1 if self.device.type == "cuda" else 0

    def print(self, *words, **options):
        """print() in the first process; nothing in the others."""
        if self.is_main:
            try:
                print(*words, **options, flush=True)
            except OSError:
                bars.give_up(sys.stdout)

    def all_sum(self, values: list[float]) -> list[float]:
        """Element-wise sums over all processes."""
        return values if self.world_size == 1 else self.read(values).result()

    def read(self, sums: list, same: list = ()) -> Reading:
        """Start to bring numbers from the device to Python: sums over all processes, and what is the same on
        all of them."""
        reading = Reading(self.device, self.world_size, sums, same)
        if self.world_size > 1:
            watchdog.expect(reading.is_there)
        return reading

    def all_gather(self, value):
        """A list of what each process gives, in order of rank, on every process. Values are pickled."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        with watchdog.waiting():
            dist.all_gather_object(values, value)
        return values

    def check_same(self, what: dict):
        """Raise UserError on every process, with the first difference, unless `what` is equal on all."""
        first, *others = self.all_gather(what)
        for rank, other in enumerate(others, start=1):
            for name, value in first.items():
                if other[name] != value:
                    raise UserError(
                        f"process {rank} has {name} {other[name]}, process 0 has {value}; give every process "
                        "the same command, code and data"
                    )

    def check_same_settings(self, values: dict):
        """check_same for all settings except paths, which may differ from machine to machine."""
        self.check_same({name: value for name, value in values.items() if name not in PATHS})

    @contextlib.contextmanager
    def main_first(self, key: str, stop: StopSignal | None = None):
        """Run the body in the first process, then in the first process of every other machine, then in all
        others, so that each finds what the earlier ones have made.

        key: a name for this place in the script. The wait has no time limit; `stop` can end it.
        """
        turn = 0 if self.is_main else 1 if self.local_rank == 0 else 2
        if self.world_size > 1 and turn:
            before = [0] if turn == 1 else [self.rank - self.local_rank, 0]
            for rank in before:
                distributed.wait_for(self.store, f"{key}/{rank}", lambda: stop.name if stop else "")
        yield
        if self.world_size > 1:
            self.store.set(f"{key}/{self.rank}", "")

    def synchronize(self):
        """Wait until the device has finished all its work, so that a clock measures that work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def free_memory(self) -> int:
        """Bytes that this process may still use: of its GPU, else its share of the machine's memory."""
        return memory.free(self.device, distributed.processes_here(self.world_size))

    def held_memory(self) -> int:
        """Bytes of a CPU's memory that this process has now (0: on another device, or unknown)."""
        return memory.held() if self.device.type == "cpu" else 0

    def peak_memory(self) -> int:
        """The most bytes so far: allocated on the GPU, else of this process in memory (0: unknown)."""
        return memory.peak(self.device)

    def environment(self) -> dict:
        """The machine and the versions that a run uses, for its config.json."""
        return {
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "git_commit": git_commit(),
            "device": device_name(self.device),
            "world_size": self.world_size,
        }

    def exit(self):
        """Leave the process group and end this process with status 0."""
        self.close()
        sys.exit(0)

    def close(self):
        """Leave the process group."""
        if dist.is_initialized():
            # gloo's thread needs the GIL to release the tensors of the last exchange. Give it time: a model
            # in DDP that is destroyed meanwhile holds the GIL and waits for it (pytorch/pytorch#56297).
            time.sleep(0.1)
            dist.destroy_process_group()


def start(device_type: str, seed: int, timeout_s: float = 600.0) -> Machine:
    """Choose the device, join torchrun's process group if there is one, and seed torch. On a CPU, memory that
    one step frees is kept for the next one, and torch's compiler takes AVX-512 for granted if torch uses it.

    device_type: cuda, mps, cpu or auto, the first of these that this machine has. timeout_s: seconds that
    processes wait for one that does not answer before they all end. Raises UserError if the device is not
    available, or if there are more processes than GPUs.
    """
    (rank, local_rank, world_size), store = distributed.place(), None
    if world_size > 1:  # before anything else: from here on, the processes print an error of all once
        store = distributed.meet(rank, world_size, timeout_s)
    device = _choose_device(device_type, local_rank)
    if world_size > 1:
        if device.type == "mps":
            raise UserError(
                "MPS runs one process; start it with python, or use --device_type=cpu with torchrun"
            )
        options = {"device_id": device} if device.type == "cuda" else {}
        backend = "nccl" if device.type == "cuda" else "gloo"
        distributed.join(backend, store, rank, world_size, timeout_s, **options)
    if device.type == "cpu":
        memory.keep_what_is_freed()
        if torch.backends.cpu.get_cpu_capability() == "AVX512":
            # The compiler need not find out by test programs, which takes 9 s on a machine that is new to it
            os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    torch.manual_seed(seed)
    return Machine(device, rank, local_rank, world_size, store)


def _choose_device(device_type: str, local_rank: int) -> torch.device:
    have = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device_type == "auto":
        device_type = next(name for name, there in have.items() if there)
    if not have.get(device_type):
        there = ", ".join(name for name, yes in have.items() if yes)
        raise UserError(f"device_type {device_type} is not available here; this machine has: {there}")
    if device_type != "cuda":
        return torch.device(device_type)
    processes_here = distributed.processes_here(local_rank + 1)
    if processes_here > torch.cuda.device_count():
        raise UserError(
            f"{processes_here} processes on this machine but it has {torch.cuda.device_count()} GPUs; "
            "lower --nproc_per_node"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s of dense matrix products in `dtype`, and where the figure comes from: (value, reason).

    For known GPUs in 16 bit it is the data sheet's. Else it is measured in about a tenth of a second: the
    fastest of several products of two square matrices. On a CPU larger ones are no faster.
    """
    if device.type == "cuda" and dtype != torch.float32:
        name = torch.cuda.get_device_name(device)
        for part, tflops in DATA_SHEET_TFLOPS:
            if re.search(rf"\b{part}\b", name):  # a whole word: an "RTX A4000" is no "A40"
                return tflops * 1e12, f"data sheet of {part}"
    return measured_flops(device, dtype)


def measured_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """What `peak_flops` measures, also where there is a data sheet."""
    slow = device.type == "cpu" and dtype == torch.float16
    side = 8192 if device.type == "cuda" else 512 if slow else 1024
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    machine, best, began, runs = Machine(device), float("inf"), time.perf_counter(), 0
    while runs < 3 or time.perf_counter() - began < 0.1:
        machine.synchronize()
        t = time.perf_counter()
        torch.mm(a, b)
        machine.synchronize()
        best, runs = min(best, time.perf_counter() - t), runs + 1
    return 2 * side**3 / best, f"measured: {side} x {side} {str(dtype).removeprefix('torch.')} product"


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of torch's random number generators for the CPU and this process's GPU: uint8 tensors."""
    states = {"random_state/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random_state/cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: dict[str, torch.Tensor], device: torch.device):
    """Restore what `random_state` returned. Other keys, and the states of other devices, are ignored."""
    try:
        if "random_state/cpu" in states:
            torch.set_rng_state(states["random_state/cpu"])
        if "random_state/cuda" in states and device.type == "cuda":
            torch.cuda.set_rng_state(states["random_state/cuda"], device)
    except (TypeError, RuntimeError) as error:
        raise UserError(
            "the checkpoint's random_state is none of torch's random number generators; go on from an "
            "earlier one with --resume=STEP, or start a new run from its weights with --init_from"
        ) from error


def is_random_state(name: str) -> bool:
    """Whether a tensor of that name comes from `random_state`."""
    return name.startswith("random_state/")


def materialize(model: torch.nn.Module, device: torch.device, seed: int) -> torch.nn.Module:
    """Give a model made on the meta device its memory on `device`, and its initial weights; returns it.

    Raises UserError that names the parameters which the model's `init_weights` leaves without a value.
    """
    # Module.to_empty, without its empty_like: on the meta device that loads sympy, which takes half a second
    model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(torch.nan)  # what init_weights forgets is found below
    model.init_weights(torch.Generator(device).manual_seed(seed))
    if forgotten := [name for name, p in model.named_parameters() if p.isnan().any()]:
        raise UserError(
            f"init_weights gives no value to {', '.join(forgotten)}; add it to init_weights in "
            "nanochat/gpt.py (ones for the weight of a norm, zeros for a bias)"
        )
    return model


def decide_compile(
    setting: str, device: torch.device, expected_seconds: float, before: bool | None = None
) -> tuple[bool, str]:
    """Whether to compile the model, for the setting `compile` (auto, on, off), and why: (decision, reason).

    On a CPU compiling takes 30 to 45 s and makes steps 1.2 times as fast (docs/benchmarks.md), so it pays
    from about 200 s of steps on; for a GPU, where nobody has measured it, 90 s are assumed. expected_seconds:
    the time of all steps without it. before: the decision of the run that is resumed (None: a new run); it
    stands, if this machine can compile.
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
    worth = expected_seconds > (200 if device.type == "cpu" else 90)
    verdict = "pays" if worth else "would take longer"
    return worth, f"about {expected_seconds:,.0f} s of steps: compiling {verdict}"


def eager_steps(setting: str, machine: Machine, plan, before: dict) -> int:
    """How many first steps of a run that is compiled are not: its first losses are there at once, and what
    fails in a step fails before the wait.

    Only on a CPU, where memory suffices for eager steps too, and with one process: DDP wraps a model once.
    setting: `compile`; "on" compiles from the first step on. plan: a planning.Plan. before: what a resumed
    run has resolved; it goes on with its number, so that it computes the same bits.
    """
    if not plan.compiled or machine.device.type != "cpu" or machine.world_size > 1:
        return 0
    if before:
        return before.get("eager_steps", 0)
    return EAGER_STEPS if setting == "auto" and plan.fits_eager else 0


def git_commit() -> str | None:
    """The commit of the current folder's working tree, with "+" if files differ from it; None outside git."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def sources_fingerprint(folder: Path) -> str:
    """Of the sources below `folder`, a checkout, that decide what a run of base_train computes."""
    files = [folder / "scripts" / "base_train.py", *sorted((folder / "nanochat").rglob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor with its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"
