"""When code is compiled, and code that runs eager at first."""

from dataclasses import replace

import torch
from helpers import make_plan

from nanochat.machine import compiling
from nanochat.plan.planning import eager_steps

CPU = torch.device("cpu")


def test_the_setting_decides_about_compiling_then_the_tools_then_the_time_it_saves(monkeypatch):
    assert compiling.decide("on", CPU, 0) == (True, "as asked for")
    assert compiling.decide("off", CPU, 1e9) == (False, "as asked for")
    monkeypatch.setattr(compiling.shutil, "which", lambda name: "/usr/bin/c++" if name == "c++" else None)
    monkeypatch.delenv("CXX", raising=False)
    assert compiling.decide("auto", CPU, 1e6)[0] is True
    assert compiling.decide("auto", CPU, 1)[0] is False
    assert compiling.decide("auto", CPU, 1, before=True) == (True, "as at the run's first start")
    assert compiling.decide("auto", CPU, 1e6, before=False)[0] is False
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    assert compiling.decide("auto", CPU, 1e6) == (False, "no C++ compiler here")
    assert compiling.decide("auto", CPU, 1e6, before=True) == (False, "no C++ compiler here")
    assert compiling.decide("auto", torch.device("mps"), 1e6)[0] is False
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 0))  # a P100
    assert compiling.decide("auto", torch.device("cuda", 0), 1e6) == (
        False,
        "Triton needs CUDA compute capability 7.0",
    )


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
