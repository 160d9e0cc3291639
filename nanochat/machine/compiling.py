"""torch.compile: whether it pays, and code that runs eager at first and compiled from then on."""

import gc
import os
import shutil
from collections.abc import Callable

import torch

from nanochat.machine import memory

EAGER_STEPS = 10  # steps of a run on a CPU before it compiles


def decide(
    setting: str, device: torch.device, expected_seconds: float, before: bool | None = None
) -> tuple[bool, str]:
    """Whether to compile the model, for the setting `compile` (auto, on, off), and why: (decision, reason).

    On a CPU compiling takes 30 to 45 s and makes steps 1.2 times as fast (docs/benchmarks.md), so it pays
    from about 200 s of steps on; on a GPU it takes about 60 s, and 90 s are assumed. expected_seconds: the
    time of all steps. before: what the resumed run decided at its first start (None: a new run). That stays,
    if this machine can compile.
    """
    if setting != "auto":
        return setting == "on", "as asked for"
    if why_not := cannot_compile(device):
        return False, why_not
    if before is not None:
        return before, "as at the run's first start"
    pays = expected_seconds > (200 if device.type == "cpu" else 90)
    verdict = "pays" if pays else "would take longer"
    return pays, f"about {expected_seconds:,.0f} s of steps: compiling {verdict}"


def cannot_compile(device: torch.device) -> str:
    """Why torch.compile does not work on a device here; empty if it does."""
    if device.type == "cpu":
        compilers = os.environ.get("CXX", "c++"), "g++", "clang++", "cl"
        return "" if any(shutil.which(name) for name in compilers) else "no C++ compiler here"
    if device.type != "cuda":
        return f"{device.type} runs eager"
    if not torch.version.hip and torch.cuda.get_device_capability(device)[0] < 7:
        return "Triton needs CUDA compute capability 7.0"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "no Triton here"
    return ""


def compile_after(function: Callable, steps: int | None, calls: int = 1, say=lambda text: None) -> Callable:
    """A function or module that runs eager for `steps` steps of `calls` calls each, and compiled after that.

    steps: 0 = compiled from the first call, None = never compiled: the function itself. say: print, for the
    step that compiles, which takes longer.
    """
    if steps is None:
        return function
    if steps == 0:
        return torch.compile(function, dynamic=False)
    return CompileAfter(function, steps * calls, say)


class CompileAfter:
    """See `compile_after`."""

    def __init__(self, function: Callable, calls: int, say: Callable):
        self.function, self.eager_calls, self.calls, self.say = function, calls, 0, say

    def __call__(self, *args, **kwargs):
        if self.calls == self.eager_calls:
            self.say("compiling: the next step takes longer")
            self.function = torch.compile(self.function, dynamic=False)
        if self.calls == self.eager_calls + 1:
            freeze_garbage()  # the compiler's objects
        self.calls += 1
        return self.function(*args, **kwargs)


def freeze_garbage():
    """Keep garbage collection fast: collect, and freeze what is left. It lives to the end of the run, so the
    collector need not look at it again. Freed memory goes back to the system."""
    gc.collect()
    gc.freeze()
    memory.give_back()
