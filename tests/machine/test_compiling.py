"""Code that begins eager and is compiled later."""

import pytest
import torch

from nanochat.machine import compiling
from nanochat.machine.compiling import compile_after


@pytest.mark.parametrize("calls", [None, 0, 1, 3])
def test_a_module_is_compiled_after_so_many_calls_and_what_exists_is_frozen_once(calls, monkeypatch):
    ran, frozen = [], []

    def compile(function, **options):
        def compiled(*args):
            ran.append("compiled")
            return function(*args)

        return compiled

    module = torch.nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: ran.append("eager"))
    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(compiling, "freeze_garbage", lambda: frozen.append(ran.count("compiled")))
    function = compile_after(module, calls)
    x = torch.ones(1, 2)
    for _ in range(6):
        assert torch.equal(function(x), module.forward(x))
    eager = 6 if calls is None else calls
    assert ran == ["eager"] * eager + ["compiled", "eager"] * (6 - eager)
    assert frozen == ([2] if calls else [])


@pytest.mark.slow
def test_compiled_and_eager_calls_compute_the_same():
    function = compile_after(lambda x: x.sin() * 2, 1)
    x = torch.linspace(0, 1, 7)
    torch.testing.assert_close(function(x), function(x))
