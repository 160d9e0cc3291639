"""torch.compile: whether it pays, and code that runs eager at first and compiled from then on."""

import atexit
import copy
import gc
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn as nn

from nanochat import UserError
from nanochat.machine import memory
from nanochat.terminal import duration

EAGER_STEPS = 10  # steps of a run on a CPU before it compiles


def decide(
    setting: str, device: torch.device, expected_seconds: float, before: bool | None = None
) -> tuple[bool, str]:
    """Whether to compile the model, for the setting `compile` (auto, on, off), and why: (decision, reason).

    On a CPU compiling takes 30 to 45 s and makes steps 1.2 times as fast (docs/benchmarks.md), so it pays
    from about 200 s of steps on; on a GPU d12 as one graph took 57 s, and 90 s are assumed.
    expected_seconds: the time of all steps. before: what the resumed run decided at its first start (None: a
    new run). That stays, if this machine can compile. Raises UserError for `on` where it cannot.
    """
    if setting == "off":
        return False, "as asked for"
    missing = missing_to_compile(device)
    if setting == "on":
        if missing:
            raise UserError(f"--compile=on needs {missing}, which is not here; get it, or leave it out")
        return True, "as asked for"
    if missing:
        return False, f"that needs {missing}"
    if device.type == "mps":
        return False, "mps runs eager"
    if before is not None:
        return before, "as at the run's first start"
    pays = expected_seconds > (200 if device.type == "cpu" else 90)
    verdict = "pays" if pays else "would take longer"
    return pays, f"about {duration(expected_seconds)} of steps: compiling {verdict}"


def missing_to_compile(device: torch.device) -> str:
    """What torch.compile needs for a device and does not find here; empty if nothing."""
    if device.type == "cuda":
        if not torch.version.hip and torch.cuda.get_device_capability(device)[0] < 7:
            return "CUDA compute capability 7.0"
        try:
            import triton  # noqa: F401
        except ImportError:
            return "Triton"
        found = any(shutil.which(os.environ.get("CC", name)) for name in ("gcc", "clang"))
        if sys.platform == "linux" and not found:  # on Windows Triton brings one
            return "a C compiler for Triton (gcc, clang, or what the variable CC names)"
    elif device.type == "cpu":
        usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
        if not shutil.which(os.environ.get("CXX", usual)):
            return f"a C++ compiler ({usual}, or what the variable CXX names)"
    headers = sysconfig.get_path("include"), *os.environ.get("CPATH", "").split(os.pathsep)
    if sys.platform == "linux" and not any(Path(folder, "Python.h").exists() for folder in headers):
        return "Python's headers (in Debian the package python3-dev)"
    return ""


def keep_rows_in_registers():
    """Let PyTorch's compiler write kernels for a GPU that read a row once.

    A kernel that sums over a row can keep it in registers, or read it in a loop for each sum and write to
    memory what a later loop needs. The compiler does the first for rows of up to 1,024 numbers that are read
    in order, and of up to 64 where rows are shifted or their halves change places, as by RoPE. Here it does
    so for all of up to 2,048.
    """
    from torch._inductor import config

    config.inductor_choices_class = _choices
    # Fewer operations than the gradient of RoPE has, so that it is computed with its sums and not in a kernel
    # of its own (torch 2.11; the default is 30)
    config.realize_opcount_threshold = 27


def _choices():
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    class Choices(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features, cooperative_reduction):
            along_rows = features.get_reduction_hint() in (ReductionHint.INNER, ReductionHint.DEFAULT)
            short = V.graph.sizevars.statically_known_leq(features.reduction_numel, 2048)
            default = InductorChoices.should_use_persistent_reduction
            return (along_rows and short) or default(features, cooperative_reduction)

        def uuid(self):
            """For the compiler's cache on disk."""
            return "rows of up to 2,048 in registers"

    return Choices()


def compile_parts(model: nn.Module, dynamic: bool = False, backend: str | Callable = "inductor") -> nn.Module:
    """A gpt.GPT with the same parameters and compiled parts: what comes before the blocks, the blocks, and
    what comes after them. The model itself stays eager.

    Blocks of a kind share their code: with value embeddings or without, with a window or without. So the time
    it takes does not grow with the depth. dynamic: one code for all numbers of rows and positions.
    """
    # Here, because they take seconds to load
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch

    functorch.autograd_cache_allow_custom_autograd_functions = True  # else torch keeps no such code on disk
    dynamo.recompile_limit = 32  # kinds of blocks, each for training and for evaluation
    if next(model.parameters()).is_cuda:
        keep_rows_in_registers()
    options = {"dynamic": dynamic, "backend": backend}
    if not hasattr(model, "begin"):  # a model of your own
        return torch.compile(model, **options)
    compiled = copy.copy(model)
    blocks = nn.ModuleList(torch.compile(block, **options) for block in model.blocks)
    compiled._modules = model._modules | {"blocks": blocks}
    for name in ("begin", "end"):
        setattr(compiled, name, torch.compile(getattr(model, name), **options))
    return compiled


def compile_after(model: nn.Module, steps: int | None, calls: int, say: Callable) -> Callable:
    """A model that runs eager for `steps` steps of `calls` calls each, and compiled after that.

    steps: 0 = compiled from the first call, None = never compiled: the model itself. say: print, for the
    step that compiles, which takes longer.
    """
    if steps is None:
        return model
    if steps == 0:
        return compile_parts(model)
    done, eager_calls = 0, steps * calls

    def call(*args, **kwargs):
        nonlocal model, done
        if done == eager_calls:
            say("compiling: the next step takes longer")
            model = compile_parts(model)
        if done == eager_calls + 1:
            freeze_garbage()  # the compiler's objects
        done += 1
        return model(*args, **kwargs)

    return call


def freeze_garbage():
    """Keep garbage collection fast: collect, and freeze what is left. It lives to the end of the run, so the
    collector need not look at it again. Freed memory goes back to the system."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else Triton says at the end which of its objects are still there
    memory.give_back()
