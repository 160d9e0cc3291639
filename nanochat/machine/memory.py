"""Memory in bytes: how much a process may still use, and the most it has used."""

import contextlib
import ctypes
import os
import sys
from pathlib import Path, PurePosixPath

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h: bytes


def free(device: torch.device, processes: int) -> int:
    """Bytes that this process may still use: its GPU's, else its share of the machine's memory.

    processes: how many share the machine.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if not hasattr(os, "sysconf"):  # Windows does not say; assume 4 GiB
        return 4 * 2**30 // processes
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # a guess: half of the memory
    with contextlib.suppress(OSError, StopIteration):  # Linux counts what is free or can be freed
        free = 1024 * _entry("/proc/meminfo", "MemAvailable:")
    return min(free // processes, _below_groups() // processes, _below_limit())


def _below_groups() -> int:
    """Bytes below the limits of the control groups that this process is in (version 2): a container's,
    Slurm's or systemd's; 2**63 without one."""
    own, left = "/", 2**63
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line.removeprefix("0::") for line in lines if line.startswith("0::"))
    for group in (own, *PurePosixPath(own).parents):
        folder = f"/sys/fs/cgroup/{group}"
        with contextlib.suppress(OSError, ValueError, StopIteration):  # no such file, or "max"
            limit, used = (int(Path(f"{folder}/memory.{n}").read_text()) for n in ("max", "current"))
            cached = _entry(f"{folder}/memory.stat", "inactive_file")  # can be freed at any time
            left = min(left, limit - used + cached)
    return left


def _below_limit() -> int:
    """Bytes below the limit that `ulimit -v` sets for this process; 2**63 without one."""
    with contextlib.suppress(ImportError, OSError, StopIteration):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            return max(0, limit - 1024 * _entry("/proc/self/status", "VmSize:"))
    return 2**63


def held(device: torch.device) -> int:
    """Bytes of a CPU's memory that this process has now (0: on another device, or unknown)."""
    if device.type == "cpu":
        with contextlib.suppress(OSError, StopIteration):
            return 1024 * _entry("/proc/self/status", "VmRSS:")
    return 0


def peak(device: torch.device) -> int:
    """The most bytes so far: allocated on the GPU, else resident in this process (0: unknown)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":  # what torch holds now; it hardly ever gives any back
        return torch.mps.driver_allocated_memory()
    with contextlib.suppress(OSError, StopIteration):  # Linux; getrusage starts at the parent's peak
        return 1024 * _entry("/proc/self/status", "VmHWM:")
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def give_back():
    """Give memory that was freed back to the system: the compiler leaves 200 MB behind. With glibc only."""
    with contextlib.suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_what_is_freed():
    """From now on this process keeps the memory that it frees, for its next use. With glibc only.

    Otherwise the system takes large pieces back, and clears them page by page when the next step asks for
    them: thousands of pages in each step of the laptop recipe, an eighth of its time (docs/benchmarks.md).
    """
    with contextlib.suppress(OSError, TypeError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_THRESHOLD, 2**30)


def _entry(path: str, name: str) -> int:
    """The number after a name in a table of the kernel. Raises OSError or StopIteration without it."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return int(next(words[1] for words in lines if words[:1] == [name]))
