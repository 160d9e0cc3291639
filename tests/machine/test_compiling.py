"""When code is compiled, which parts of it, and code that runs eager at first."""

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import make_plan, needs_compiler, python
from test_gpt import make_model
from torch._dynamo.utils import counters

from nanochat import UserError
from nanochat.machine import compiling
from nanochat.ops import kernels
from nanochat.ops.attention import attention
from nanochat.plan.planning import eager_steps

CPU = torch.device("cpu")


def test_the_setting_decides_about_compiling_then_the_tools_then_the_time_it_saves(monkeypatch):
    monkeypatch.setattr(compiling, "missing_to_compile", lambda device: "")
    assert compiling.decide("on", CPU, 0) == (True, "as asked for")
    assert compiling.decide("auto", CPU, 1e6)[0] is True
    assert compiling.decide("auto", CPU, 1)[0] is False
    assert compiling.decide("auto", CPU, 1, before=True) == (True, "as at the run's first start")
    assert compiling.decide("auto", CPU, 1e6, before=False)[0] is False
    assert compiling.decide("auto", torch.device("mps"), 1e6)[0] is False
    monkeypatch.setattr(compiling, "missing_to_compile", lambda device: "a compiler")
    assert compiling.decide("off", CPU, 1e9) == (False, "as asked for")
    assert compiling.decide("auto", CPU, 1e6) == (False, "that needs a compiler")
    assert compiling.decide("auto", CPU, 1e6, before=True) == (False, "that needs a compiler")
    with pytest.raises(UserError, match="--compile=on needs a compiler, which is not here"):
        compiling.decide("on", CPU, 1e6)


GPU = torch.device("cuda", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have compilers of other names")
@pytest.mark.parametrize(
    ("device", "there", "variable", "missing"),
    [
        (CPU, "g++", None, ""),
        (CPU, "clang++", None, "a C++ compiler"),  # torch asks for g++ alone
        (CPU, "clang++", "clang++", ""),
        (CPU, "g++", "ccache g++", "a C++ compiler"),
        (GPU, "clang", None, ""),
        (GPU, "cc", None, "a C compiler for Triton"),
        (GPU, "mycc", "mycc", ""),
    ],
)
def test_what_torch_needs_to_compile_is_looked_for_as_torch_does(
    device, there, variable, missing, monkeypatch, tmp_path
):
    def found() -> str:
        return compiling.missing_to_compile(device).split(" (")[0]

    for name in ("CC", "CXX"):
        monkeypatch.setenv(name, variable or "")
        if variable is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(compiling.shutil, "which", lambda name: name if name == there else None)
    monkeypatch.setattr(compiling.sysconfig, "get_path", lambda name: str(tmp_path / name))
    monkeypatch.setenv("CPATH", f"/nowhere:{tmp_path / 'more'}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    for name in ("include", "more"):
        assert found() == (missing or "Python's headers")
        (tmp_path / name).mkdir()
        (tmp_path / name / "Python.h").touch()
        assert found() == missing
        (tmp_path / name / "Python.h").unlink()
    (tmp_path / name / "Python.h").touch()
    monkeypatch.setitem(sys.modules, "triton", None)
    assert device == CPU or found() == "Triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 0))  # a P100
    assert device == CPU or found() == "CUDA compute capability 7.0"


def test_a_compiled_run_begins_eager_where_it_can_wait_and_memory_suffices():
    fits = replace(make_plan()[0], compiled=True)
    assert eager_steps(fits, "auto", {}) == compiling.EAGER_STEPS
    assert eager_steps(fits, "on", {}) == 0
    assert eager_steps(replace(fits, compiled=False), "auto", {}) == 0
    assert eager_steps(replace(make_plan(world_size=2)[0], compiled=True), "auto", {}) == 0
    assert eager_steps(replace(make_plan(device_type="cuda")[0], compiled=True), "auto", {}) == 0
    tight = replace(fits, hardware=replace(fits.hardware, memory=round(1.1 * fits.expected_bytes)))
    assert eager_steps(tight, "auto", {}) == 0
    assert eager_steps(tight, "auto", {"eager_steps": 10}) == 10  # as it began
    assert eager_steps(fits, "auto", {"eager_steps": 0}) == 0
    assert eager_steps(fits, "auto", {"compiled": True}) == 0  # of an earlier version


def loss_and_gradients(model, run, *arguments, **options):
    model.zero_grad()
    loss = run(*arguments, **options)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


TOKENS = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "depth, pattern, spelled, used, biases",
    [(4, "SL", False, {"head"}, False), (2, "L", True, set(), False), (2, "L", False, set(), True)],
)
def test_compiled_parts_compute_what_the_model_computes(depth, pattern, spelled, used, biases, monkeypatch):
    monkeypatch.setattr(kernels, "IN_USE", used)
    model = make_model(depth, 32, 2, 61, 16, pattern, spelled=spelled)
    for linear in [m for m in model.blocks.modules() if biases and isinstance(m, torch.nn.Linear)]:
        linear.bias = torch.nn.Parameter(torch.randn(len(linear.weight)))
    documents = attention.boundaries(TOKENS, 3) if pattern == "SL" else None
    found = [
        loss_and_gradients(model, run, TOKENS, TOKENS.clone(), documents=documents)
        for run in (model, compiling.compile_parts(model, backend="aot_eager"))
    ]
    for expected, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("depths", "value_tables"), [((4, 6), 1), ((6, 8), 2)])
def test_the_code_does_not_grow_with_the_depth(depths, value_tables):
    graphs = []
    for depth in depths:
        torch.compiler.reset()
        counters.clear()
        model = make_model(depth, 32, 2, 61, 16, value_tables=value_tables)
        loss_and_gradients(model, compiling.compile_parts(model, backend="eager"), TOKENS, TOKENS.clone())
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1]


MICRO_STEP = """
import torch
from torch._dynamo.utils import counters
from nanochat.gpt import GPT, GPTConfig
from nanochat.machine.compiling import compile_parts
model = GPT(GPTConfig(3, 32, 2, 61, 16))
model.init_weights()
tokens = torch.arange(32).view(2, 16)
compile_parts(model)(tokens, tokens.clone()).backward()
found = counters["aot_autograd"]
print(*(found["autograd_cache_" + name] for name in ("hit", "miss", "bypass")))
"""


@pytest.mark.slow
@needs_compiler
def test_the_next_process_finds_all_compiled_code_on_disk(tmp_path):
    counts = []
    for _ in range(2):
        with python(MICRO_STEP, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}) as child:
            printed, errors = child.communicate()
        assert child.returncode == 0, errors
        counts.append([int(n) for n in printed.split()])
    (_, compiled, _), second = counts
    assert compiled > 0 and second == [compiled, 0, 0]
