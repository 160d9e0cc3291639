"""profile=N writes a trace of step N, and of no other."""

import sys
from types import SimpleNamespace

import pytest
import torch

from nanochat import UserError
from nanochat.machine import runtime
from nanochat.machine.profiler import StepProfiler, named_kernels

CPU = runtime.Machine(torch.device("cpu"))


def run(folder, wanted: int, first: int = 0, steps: int = 4, machine=CPU):
    """The turns of a loop whose step n multiplies a 2 x (n + 1) matrix; what is said."""
    said: list = []
    profiler = StepProfiler(wanted, steps, folder, machine, said.append)
    for step in range(first, steps):
        profiler.end()
        profiler.begin(step)
        torch.randn(2, step + 1) @ torch.randn(step + 1, 3)
    profiler.end()
    return said


def test_a_step_that_the_run_does_not_have_is_refused_and_the_last_one_is_traced(tmp_path):
    with pytest.raises(UserError, match=r"profile=4: the last of 4 steps is 3"):
        run(tmp_path, wanted=4)
    assert run(tmp_path, wanted=3) == [f"step 3: trace in {tmp_path / 'profile_3.json.gz'}"]


def test_a_trace_that_cannot_be_written_is_said_and_the_run_goes_on(tmp_path):
    (said,) = run(tmp_path / "gone", wanted=1)
    assert said.startswith("warning: the trace of step 1 could not be written")


def test_fused_kernels_of_loaded_modules_are_named_with_their_bytes_while_a_trace_is_made(monkeypatch):
    def kernel(x, n, out):
        out.copy_(x + n)

    module = SimpleNamespace(cpp_fused_add_3=kernel, call=kernel)
    codecache = SimpleNamespace(PyCodeCache=SimpleNamespace(modules=[module]))
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", codecache)
    x, out = torch.ones(5), torch.zeros(5, dtype=torch.float64)
    with torch.profiler.profile() as profile, named_kernels():
        module.cpp_fused_add_3(x, 2, out)
        module.call(x, 2, out)
    assert module.cpp_fused_add_3 is kernel and out.tolist() == [3.0] * 5
    assert [e.key for e in profile.key_averages() if "fused" in e.key] == ["cpp_fused_add_3 [60 bytes]"]
