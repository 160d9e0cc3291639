"""What happens when memory runs out: before the first step a smaller micro-batch, later a sentence."""

import dataclasses
import functools
import subprocess
import sys
import types

import pytest
import torch
from helpers import make_plan

from nanochat import UserError
from nanochat.gpt import GPT, GPTConfig
from nanochat.machine import precision, runtime
from nanochat.ops.attention import attention
from nanochat.plan import memory_trial
from tests.helpers import ROOT


class OnlySoManyRows(GPT):
    most = 2

    def forward(self, idx, *rest, **more):
        if len(idx) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return super().forward(idx, *rest, **more)


@pytest.fixture
def trial(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    plan = make_plan(depth=1, aspect_ratio=16, head_dim=16, max_seq_len=16, device_batch_size=9,
                     total_batch_size=9 * 16 * 4, num_iterations=5)[0]  # fmt: skip
    model = OnlySoManyRows(GPTConfig(1, 16, 1, 4096, 16))
    model.init_weights(torch.Generator().manual_seed(0))

    def shrink(most):
        model.most = most
        return memory_trial.shrink(plan, runtime.Machine(torch.device("cpu")), model, torch.bfloat16)

    return types.SimpleNamespace(shrink=shrink, plan=plan, model=model, said=lambda: capsys.readouterr().out)


def test_a_micro_batch_that_does_not_fit_is_halved_and_the_batch_stays(trial):
    before = {name: p.clone() for name, p in trial.model.state_dict().items()}
    random = torch.get_rng_state()
    plan = trial.shrink(most=2)
    assert (plan.device_batch_size, plan.grad_accum_steps) == (2, 18)
    assert plan.total_batch_size == trial.plan.total_batch_size
    assert plan.resolved["device_batch_size"] == 2
    said = trial.said()
    assert "out of memory with 9 rows a micro-batch; going on with 4" in said and "with 4 rows" in said
    assert all(torch.equal(p, before[name]) for name, p in trial.model.state_dict().items())
    assert all(p.grad is None for p in trial.model.parameters())
    assert torch.equal(random, torch.get_rng_state())


def test_a_micro_batch_that_fits_stays_and_nothing_is_said(trial):
    assert trial.shrink(most=9) == trial.plan and trial.said() == ""


def test_a_resumed_run_keeps_its_micro_batch_and_a_cpu_tries_nothing(trial):
    trial.model.most = 0
    for device_type, kept in (("cuda", {"device_batch_size": 9}), ("cpu", {})):
        machine = runtime.Machine(torch.device(device_type))
        assert memory_trial.fit_micro_batch(trial.plan, machine, trial.model, None, kept) == trial.plan


@pytest.mark.parametrize("reduction, boundaries", [("mean", None), ("sum", attention.boundaries)])
def test_the_training_goes_on_with_the_code_that_the_trial_has_compiled(monkeypatch, reduction, boundaries):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    stats = torch._dynamo.utils.counters["stats"]
    config = GPTConfig(1, 16, 1, 64, 16)
    model, machine = GPT(config), runtime.Machine(torch.device("cpu"))
    model.init_weights(torch.Generator().manual_seed(0))
    plan = dataclasses.replace(make_plan()[0], config=config, device_batch_size=2, compiled=True)
    assert memory_trial._fits(plan, machine, model, torch.bfloat16, boundaries, reduction)
    compiled_in_trial = stats["unique_graphs"]
    assert compiled_in_trial > 0
    step = torch.compile(model, dynamic=False)
    rows = torch.randint(64, (2, 17), dtype=torch.int32)
    inputs, targets = rows[:, :-1].to(torch.int64), rows[:, 1:].to(torch.int64)  # as TrainLoader does
    documents = boundaries(inputs, 3) if boundaries else None
    with precision.autocast(machine.device, torch.bfloat16):
        step(inputs, targets, reduction, documents=documents).backward()
    assert stats["unique_graphs"] == compiled_in_trial


def test_no_row_fits_is_a_sentence(trial):
    with pytest.raises(UserError, match="with one row a micro-batch; lower --max_seq_len and --depth"):
        trial.shrink(most=0)


def test_other_errors_are_not_taken_for_a_lack_of_memory(trial):
    trial.model.forward = lambda *a, **more: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trial.shrink(most=9)


PROGRAM = """
import resource, sys, types
import configurator, torch
from nanochat.plan import memory_trial
depth = 1  # layers
configurator.configure(globals())
memory_trial.explain(types.SimpleNamespace(device_batch_size=8, grad_accum_steps=1))
resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36))
torch.empty(2**40)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_running_out_of_memory_later_is_a_sentence_with_the_next_smaller_size(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "error: out of memory with 8 rows" in done.stderr and "--device_batch_size=4" in done.stderr
