"""The recorder sees what ran: compared with dtypes placed by hand, with hooks, and with formulas."""

import pytest
import torch
import torch.nn as nn
from small_model import BF16, CPU, F16, F32, gpt, optimizer_of, record_gpt

import nanochat.gpt
import nanochat.ops.loss
from nanochat.diagnostics import training_step
from nanochat.diagnostics.precision_page import statements
from nanochat.diagnostics.recorder import PHASES, Record, Recorder, record_step
from nanochat.machine import precision
from nanochat.plan.counts import flops_per_token


def recorded(model, x, dtype) -> Record:
    """A forward pass and, if there is something to differentiate, a backward pass of the sum."""
    recorder = Recorder(model)
    with recorder.recording():
        with recorder.at("forward"), precision.autocast(CPU, dtype):
            y = model(x)
        with recorder.at("backward"):
            y.sum().backward()
    return Record(recorder.ops)


def products(record: Record, phase) -> list:
    return [op for op in record.ops if op.flops and op.phase == phase]


# -- Models with a dtype placed by hand in each layer


class ThreeDtypes(nn.Module):
    """(N, 8) float32 -> (N, 8) float16, through a layer of each dtype."""

    def __init__(self):
        super().__init__()
        self.low, self.full, self.float16 = (nn.Linear(8, 8, bias=False, dtype=d) for d in (BF16, F32, F16))

    def forward(self, x):
        x = self.full(self.low(x.bfloat16()).float())
        return self.float16(x.half())


@pytest.mark.parametrize(
    "autocast, expected",
    [
        (F32, {"low": BF16, "full": F32, "float16": F16}),
        (BF16, dict.fromkeys(("low", "full", "float16"), BF16)),
    ],
    ids=["autocast off", "autocast on"],
)
def test_products_are_recorded_in_the_dtypes_that_were_placed(autocast, expected):
    record = recorded(ThreeDtypes(), torch.randn(5, 8), autocast)
    forward, backward = products(record, "forward"), products(record, "backward")
    assert [(op.module, op.inputs, op.outputs) for op in forward] == [
        (module, (dtype, dtype), (dtype,)) for module, dtype in expected.items()
    ]
    # Each layer has two backward products, but the first one needs no gradient of its input
    assert [op.module for op in backward] == ["float16", "float16", "full", "full", "low"]
    assert all(op.inputs == (expected[op.module],) * 2 for op in backward)
    assert {(op.name, op.flops) for op in forward + backward} == {("mm", 2 * 5 * 8 * 8)}
    share = "100 % of forward FLOPs ran in bfloat16."
    if autocast == F32:
        share = "33.3 % of forward FLOPs ran in bfloat16, 33.3 % in float32, 33.3 % in float16."
    same = "Each backward matmul ran in the dtype of its forward matmul (5 of 5, attention included)."
    assert {share, same} <= {*statements(record)}


def test_casts_of_weights_are_named_and_only_those_of_another_dtype_happen():
    by_hand, by_autocast = (recorded(ThreeDtypes(), torch.randn(5, 8), dtype) for dtype in (F32, BF16))
    assert not any(op.parameter for op in by_hand.ops)  # the layers' inputs are cast, no weight is
    forward = [op for op in by_autocast.ops if op.phase == "forward"]
    assert {op.parameter: op.cast for op in forward if op.parameter} == {
        "full.weight": (F32, BF16),
        "float16.weight": (F16, BF16),
    }


# -- The project's model


def test_the_record_agrees_with_what_hooks_see_and_with_the_formula_for_flops():
    seen, model = {}, gpt()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, i, o, name=name: seen.__setitem__(name, o.dtype))
    recorder, idx = Recorder(model), torch.randint(64, (2, 16))
    with recorder.recording(), precision.autocast(CPU, BF16):
        model(idx)
    recorded = {op.module: op.outputs[0] for op in recorder.ops if op.name == "mm"}
    assert recorded == seen and len(seen) == 2 * 8 + 1 + 1  # the layers, two gates each, one more, the head
    assert sum(op.flops for op in recorder.ops) == flops_per_token(model) * idx.numel() // 3


def test_the_loss_begins_after_the_heads_product_and_the_phases_follow_each_other(record):
    assert list(dict.fromkeys(op.phase for op in record.ops)) == list(PHASES)
    (head,) = (
        i for i, op in enumerate(record.ops) if (op.phase, op.module) == ("forward", "head") and op.flops
    )
    assert not any(op.phase == "loss" for op in record.ops[:head])
    loss = [op for op in record.ops if op.phase == "loss" and not op.is_view]
    assert (loss[0].cast, loss[0].module) == ((BF16, F32), "loss")
    products = [(op.name, op.module, op.differentiates) for op in loss if op.flops]
    assert products == [("mm", "head", head)] * 2
    assert (loss[-1].name, loss[-1].inputs) == ("add_", (F32, BF16))  # the weight's gradient, over chunks
    # What the recorder patches for the time of the step is as before
    assert nanochat.gpt.softcapped_cross_entropy is nanochat.ops.loss.softcapped_cross_entropy
    patched = (nanochat.ops.loss.chunk_losses, nanochat.ops.loss.head_gradients)
    assert {function.__module__ for function in patched} == {"nanochat.ops.loss"}


def test_with_several_chunks_each_gradient_belongs_to_the_product_of_its_chunk(monkeypatch):
    monkeypatch.setattr(nanochat.ops.loss, "chunk_rows", lambda *_, **__: 12)
    ops = record_gpt(BF16).ops  # 32 tokens: chunks of 12, 12 and 8
    products = [
        i for i, op in enumerate(ops) if op.module == "head" and op.flops and op.phase in ("forward", "loss")
    ]
    assert [ops[i].phase for i in products] == ["forward", "loss", "loss"] * 3
    assert [ops[i].differentiates for i in products[1::3]] == products[::3]
    assert [ops[i].differentiates for i in products[2::3]] == products[::3]
    assert sum(ops[i].flops for i in products) == 3 * 2 * 32 * 32 * 64


def test_recording_does_not_change_what_is_computed():
    idx = torch.randint(64, (2, 16))
    plain, watched = gpt(), gpt()
    before = plain.blocks[0].mlp.down.weight.clone()
    scaler = precision.make_scaler(CPU, BF16)
    training_step(plain, optimizer_of(plain, BF16), scaler, BF16, idx, idx)
    assert not torch.equal(plain.blocks[0].mlp.down.weight, before)
    record_step(watched, optimizer_of(watched, BF16), scaler, BF16, idx, idx, [1, 2, 3])
    pairs = zip(plain.parameters(), watched.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
