"""The machine a script runs on: its device, and its place among the processes of a run."""

import contextlib
import functools
import hashlib
import inspect
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nanochat import UserError
from nanochat.machine import distributed, memory, watchdog
from nanochat.machine.signals import StopSignal
from nanochat.machine.transfers import Reading
from nanochat.terminal import printable

PROJECT = Path(__file__).resolve().parent.parent.parent
COMPUTE_NOTHING = {"run", "diagnostics", "evals", "hf", "checkpoint"}  # rooms that do not decide the losses
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
        """How many steps Python may be ahead of the numbers that it reads. One keeps a GPU busy. A CPU
        has done a step when Python has asked for it."""
        return 1 if self.device.type == "cuda" else 0

    def print(self, *words):
        """print() in the first process, with control characters as escapes; nothing in the others."""
        if self.is_main:
            print(*map(printable, map(str, words)), flush=True)

    def all_sum(self, values: list[float]) -> list[float]:
        """Element-wise sums over all processes."""
        return values if self.world_size == 1 else self.read(values).result()

    def read(self, sums: list, same: list = ()) -> Reading:
        """Start to bring numbers from the device to Python: `sums` over all processes, and `same`, which all
        processes have alike."""
        reading = Reading(self.device, self.world_size, sums, same)
        if self.world_size > 1:
            watchdog.expect(reading.is_there)
        return reading

    def all_gather(self, value):
        """The values of all processes as a list in order of rank, on every process. They are pickled."""
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
            for name in first | other:  # code of another version has other names
                theirs, ours = other.get(name, "unknown"), first.get(name, "unknown")
                if theirs != ours:
                    raise UserError(
                        f"process {rank} has {name} {theirs}, process 0 has {ours}; give every process the "
                        "same command, code and data"
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
        if self.world_size > 1 and not self.is_main:
            before = self.rank - self.local_rank if self.local_rank else 0
            while not self.store.check([f"{key}/{before}"]):
                if stop and stop.name:
                    print(f"stopped by {stop.name} while another process prepares the data", file=sys.stderr)
                    sys.exit(0)
                time.sleep(0.05)
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
        """Bytes that this process may still use: its GPU's, else its share of the machine's memory."""
        return memory.free(self.device, distributed.processes_here(self.world_size))

    @functools.cached_property
    def environment(self) -> dict:
        """The machine and the versions that a run uses, for its config.json; found out once."""
        return {
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "sources": sources(PROJECT, Path(sys.argv[0])),
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
    """Choose the device, join torchrun's process group if there is one, and seed torch.

    device_type: cuda, mps, cpu or auto, the first of these that this machine has. timeout_s: seconds that
    processes wait for one that does not answer before they all end. Raises UserError if the device is not
    available, or if there are more processes than GPUs.
    """
    (rank, local_rank, world_size), store = distributed.place(), None
    if world_size > 1:  # first of all: from here on, an error that all processes have is printed once
        store = distributed.meet(rank, world_size, timeout_s)
    device = _choose_device(device_type, local_rank)
    if world_size > 1:
        if device.type == "mps":
            raise UserError(
                "MPS runs one process; start it with python, or use --device_type=cpu with torchrun"
            )
        distributed.join(device, store, rank, world_size, timeout_s)
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
            p.fill_(torch.nan)  # to find below what init_weights forgets
    model.init_weights(torch.Generator(device).manual_seed(seed))
    if forgotten := [name for name, p in model.named_parameters() if p.isnan().any()]:
        raise UserError(
            f"init_weights gives no value to {', '.join(forgotten)}; add it to init_weights in "
            "nanochat/gpt.py (ones for the weight of a norm, zeros for a bias)"
        )
    return model


def git_commit(checkout: Path = PROJECT) -> str | None:
    """The commit of this project, with "+" if files differ from it; None if its folder is no git checkout."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
    # Neither a repository above the project nor that of a git hook, which GIT_DIR names
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(checkout.parent)}
    environment = {k: v for k, v in environment.items() if k not in ("GIT_DIR", "GIT_WORK_TREE")}
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=5, cwd=checkout, env=environment
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def sources(folder: Path, script: Path) -> dict[str, str]:
    """{file: its SHA-256} of a script and the sources in a checkout that decide what it computes. A script
    that is no file is left out: under cProfile, say, sys.argv[0] is the name of a module."""
    found = sorted((folder / "nanochat").rglob("*.py"))
    files = {file.relative_to(folder).as_posix(): file for file in found}
    files = {name: file for name, file in files.items() if name.split("/")[1] not in COMPUTE_NOTHING}
    files[script.name] = script
    # An editor's lock, such as .#gpt.py, is a link to nothing
    return {name: hashlib.sha256(f.read_bytes()).hexdigest() for name, f in files.items() if f.is_file()}


def sources_fingerprint(folder: Path) -> str:
    """SHA-256 of the sources in the checkout `folder` that decide what a run of base_train computes."""
    found = sources(folder, folder / "scripts" / "base_train.py")
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


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
