"""What happens when memory runs out: before the first step a smaller micro-batch, later a sentence."""

import dataclasses
import functools
import weakref

import pytest
import torch
from helpers import make_plan

from nanochat import UserError, optim
from nanochat.gpt import GPT, GPTConfig
from nanochat.machine import compiling, precision, runtime
from nanochat.ops import attention
from nanochat.plan import planning, trial


@pytest.fixture
def tried(monkeypatch, capsys):
    """A function that tries a plan where a micro-batch of more than so many rows does not fit."""
    plan = make_plan(depth=1, aspect_ratio=16, head_dim=16, max_seq_len=16, device_batch_size=9,
                     total_batch_size=9 * 16 * 4, num_iterations=5)[0]  # fmt: skip
    plan = dataclasses.replace(plan, attention=attention.Attention())
    machine = runtime.Machine(torch.device("cpu"))

    class OnlySoManyRows(GPT):
        def forward(self, idx, *rest, **more):
            if len(idx) > tried.most:
                raise tried.error
            return super().forward(idx, *rest, **more)

    def tried(most, error=None, **changes):
        tried.most, tried.error = most, error or torch.OutOfMemoryError("CUDA out of memory.")
        changed = dataclasses.replace(plan, **changes)
        return trial.with_tried_micro_batch(changed, machine, divided_rows=False, reduction="mean")

    tried.plan, tried.said = plan, lambda: capsys.readouterr().out
    monkeypatch.setattr(trial, "GPT", OnlySoManyRows)
    return tried


def test_a_micro_batch_that_fits_stays_and_one_that_does_not_is_halved_for_the_same_batch(tried):
    assert tried(most=9) == tried.plan and tried.said() == ""
    random = torch.get_rng_state()
    plan = tried(most=2)
    assert (plan.device_batch_size, plan.grad_accum_steps) == (2, 18)
    assert plan.total_batch_size == tried.plan.total_batch_size
    assert plan.resolved["device_batch_size"] == 2
    said = tried.said()
    assert "out of memory with 9 rows" in said and "with 4 rows" in said
    assert torch.equal(random, torch.get_rng_state())


def test_the_optimizers_state_is_in_memory_too_while_a_micro_batch_is_tried(tried, monkeypatch):
    empty, made, seen = torch.empty, [], []

    def spy(*size, **more):
        made.append(weakref.ref(tensor := empty(*size, **more)))
        return tensor

    class Looking(GPT):
        def forward(self, *rest, **more):
            alive = [tensor for ref in made if (tensor := ref()) is not None]
            seen.append(sum(tensor.nbytes for tensor in alive if tensor.dtype == torch.uint8))
            return super().forward(*rest, **more)

    monkeypatch.setattr(torch, "empty", spy)
    monkeypatch.setattr(trial, "GPT", Looking)
    tried(most=9)
    plan = tried.plan
    model = GPT(plan.config)
    optimizer = optim.MuonAdamW(optim.parameter_groups(model, plan.rates, plan.weight_decay))
    state = sum(tensor.nbytes for tensor in optimizer.named_state().values())
    assert len(seen) == 2 and 0.8 * state < seen[0] == seen[1] < 1.2 * state


def test_a_trial_of_compiled_code_leaves_no_weights_in_memory(tried, monkeypatch):
    materialize, weights = runtime.materialize, []

    def spy(model, *rest, **more):
        weights.extend(map(weakref.ref, materialize(model, *rest, **more).parameters()))

    monkeypatch.setattr(runtime, "materialize", spy)
    compile_parts = functools.partial(compiling.compile_parts, backend="aot_eager")
    monkeypatch.setattr(trial, "compile_parts", compile_parts)
    tried(most=9, compiled=True)
    assert weights and [ref() for ref in weights] == [None] * len(weights)


def test_no_row_fits_is_a_sentence(tried):
    with pytest.raises(UserError, match="with one row a micro-batch; lower --max_seq_len"):
        tried(most=0)
    with pytest.raises(RuntimeError, match="shapes"):  # no lack of memory
        tried(most=0, error=RuntimeError("shapes do not fit"))


def test_weights_that_do_not_fit_are_a_sentence_with_what_to_lower(tried, monkeypatch):
    def materialize(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(runtime, "materialize", materialize)
    with pytest.raises(UserError, match="with one row a micro-batch; lower --max_seq_len"):
        tried(most=9)


@pytest.mark.parametrize(
    "device_type, kept, tries", [("cuda", {}, 1), ("cuda", {"device_batch_size": 9}, 0), ("cpu", {}, 0)]
)
def test_a_new_run_on_a_gpu_tries_its_micro_batch_and_a_resumed_one_keeps_it(
    monkeypatch, device_type, kept, tries
):
    calls, plan = [], make_plan(device_batch_size=9, total_batch_size=9 * 512, device_type=device_type)[0]
    monkeypatch.setattr(planning, "choose_attention", lambda *_: attention.Attention())
    monkeypatch.setattr(trial, "with_tried_micro_batch", lambda plan, *_: calls.append(plan) or plan)
    machine = runtime.Machine(torch.device(device_type))
    settings = {"compile": "off", "plan": False, "accept": "epochs"}
    planning.on_machine(plan, settings, machine, kept, divided_rows=False)
    assert len(calls) == tries
    planning.on_machine(plan, settings | {"plan": True}, machine, kept, divided_rows=False)
    assert len(calls) == tries  # the plan alone needs no trial


@pytest.mark.parametrize("reduction, boundaries", [("mean", None), ("sum", attention.attention.boundaries)])
def test_the_training_goes_on_with_the_code_that_the_trial_has_compiled(monkeypatch, reduction, boundaries):
    compile_parts = functools.partial(compiling.compile_parts, backend="eager")
    monkeypatch.setattr(trial, "compile_parts", compile_parts)
    torch.compiler.reset()
    stats = torch._dynamo.utils.counters["stats"]
    config = GPTConfig(1, 16, 1, 64, 16)
    model, machine = GPT(config), runtime.Machine(torch.device("cpu"))
    model.init_weights(torch.Generator().manual_seed(0))
    plan = make_plan()[0]
    hardware = dataclasses.replace(plan.hardware, dtype=torch.bfloat16)
    shape = {"config": config, "device_batch_size": 2, "hardware": hardware}
    plan = dataclasses.replace(plan, compiled=True, **shape)
    assert trial._fits(plan, machine, model, boundaries, reduction)
    compiled_in_trial = stats["unique_graphs"]
    assert compiled_in_trial > 0
    optim.MuonAdamW(optim.parameter_groups(model, plan.rates, plan.weight_decay))
    step = compile_parts(model)
    rows = torch.randint(64, (2, 17), dtype=torch.int32)
    inputs, targets = rows[:, :-1].to(torch.int64), rows[:, 1:].to(torch.int64)  # as TrainLoader does
    documents = boundaries(inputs, 3) if boundaries else None
    with precision.autocast(machine.device, torch.bfloat16):
        loss = step(inputs, targets, reduction, documents=documents)
    loss.backward()
    assert stats["unique_graphs"] == compiled_in_trial
