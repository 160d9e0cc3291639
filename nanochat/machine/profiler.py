"""A trace of one training step by torch.profiler, for Perfetto or chrome://tracing (docs/walkthrough.md)."""

import contextlib
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function

from nanochat import UserError


class StepProfiler:
    """Traces the step `wanted` (-1: none) of a run and writes `profile_<step>.json.gz` into its folder.

    `begin` stands before each step, `end` after its log. Only the first process traces. Operators have the
    sizes of their inputs. The traced step computes the same numbers as any other, and takes a little longer.
    Raises UserError if the run of `num_iterations` steps has no such step.
    """

    def __init__(self, wanted: int, num_iterations: int, folder: Path, machine, say=print):
        if wanted >= num_iterations:
            raise UserError(f"profile={wanted}: the last of {num_iterations} steps is {num_iterations - 1}")
        self._wanted = wanted if machine.is_main else -1
        self._folder, self._machine, self._say = folder, machine, say
        self._open = None  # the contexts of an open trace, which `end` closes

    def begin(self, step: int):
        """Start the trace if this is the step."""
        if step != self._wanted:
            return
        on_gpu = self._machine.device.type == "cuda"
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
        self._machine.synchronize()  # the GPU's earlier work is not part of this step
        self._open = contextlib.ExitStack()
        self._open.enter_context(named_kernels())
        profile = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profile = self._open.enter_context(profile)
        if on_gpu:  # the first kernel under a profiler waits until the profiler is ready
            torch.zeros(1, device=self._machine.device)
        self._machine.synchronize()
        self._open.enter_context(record_function(f"step {step}"))

    def end(self):
        """Write the trace if one is open. A full disk loses the trace and not the run."""
        if not self._open:
            return
        self._machine.synchronize()
        self._open.close()
        self._open = None
        path = self._folder / f"profile_{self._wanted}.json.gz"
        try:
            self._profile.export_chrome_trace(str(path))
            self._say(f"step {self._wanted}: trace in {path}")
        except (OSError, RuntimeError) as error:
            self._say(f"warning: the trace of step {self._wanted} could not be written: {error}")
        self._profile = None


@contextlib.contextmanager
def named_kernels():
    """Inside, a trace has the fused kernels of compiled code on a CPU, by name and with the bytes of the
    tensors that they read and write: `cpp_fused_add_3 [98304 bytes]`.

    Inductor can do it too (cpp.enable_kernel_profile), but would compile all code again. Here the loaded
    modules call a marked function meanwhile. On a GPU kernels have names by themselves.
    """
    changed, codecache = [], sys.modules.get("torch._inductor.codecache")  # not loaded: nothing is compiled
    for module in list(codecache.PyCodeCache.modules) if codecache else ():
        for name, kernel in list(vars(module).items()):
            if name.startswith("cpp_fused"):
                changed.append((module, name, kernel))
                setattr(module, name, _marked(name, kernel))
    try:
        yield
    finally:
        for module, name, kernel in changed:
            setattr(module, name, kernel)


def _marked(name: str, kernel):
    def call(*arguments):
        size = sum(a.nbytes for a in arguments if isinstance(a, torch.Tensor))
        with record_function(f"{name} [{size} bytes]"):
            return kernel(*arguments)

    return call
