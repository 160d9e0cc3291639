"""The precision report says what ran: against dtypes placed by hand, and with dtypes flipped under it."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import experiments.autocast_rules as rules
import experiments.precision_experiments as experiments
from nanochat import UserError, optim, precision
from nanochat.diagnostics import precision_cost
from nanochat.diagnostics import recorder as recorder_module
from nanochat.diagnostics.precision_page import page, percent, rows, statements, summary
from nanochat.diagnostics.recorder import PHASES, Op, Record, Recorder, record_step
from nanochat.gpt import GPT, GPTConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")
CPU = torch.device("cpu")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
RATES = {"embedding_lr": 0.1, "unembedding_lr": 0.01, "matrix_lr": 0.02, "scalar_lr": 0.3}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------------------
# A model with a dtype placed by hand in each layer


class ThreeDtypes(nn.Module):
    """(N, 8) float32 -> (N, 8) float16, through a layer of each dtype."""

    def __init__(self):
        super().__init__()
        self.low, self.full, self.float16 = (nn.Linear(8, 8, bias=False, dtype=d) for d in (BF16, F32, F16))

    def forward(self, x):
        x = self.full(self.low(x.bfloat16()).float())
        return self.float16(x.half())


def record_three_dtypes(dtype):
    model, rows_in = ThreeDtypes(), 5
    recorder = Recorder(model)
    with recorder.recording():
        with recorder.at("forward"), precision.autocast(CPU, dtype):
            y = model(torch.randn(rows_in, 8))
        with recorder.at("loss"):
            loss = F.cross_entropy(y.float(), torch.zeros(rows_in, dtype=torch.long))
        with recorder.at("backward"):
            loss.backward()
    return Record(recorder.ops)


@pytest.mark.parametrize(
    "autocast, expected",
    [
        (F32, {"low": BF16, "full": F32, "float16": F16}),
        (BF16, dict.fromkeys(("low", "full", "float16"), BF16)),
    ],
    ids=["autocast off", "autocast on"],
)
def test_products_are_recorded_in_the_dtypes_that_were_placed(autocast, expected):
    record = record_three_dtypes(autocast)
    products = [op for op in record.ops if op.flops]
    assert {op.name for op in products} == {"mm"}
    forward, backward = ([op for op in products if op.phase == p] for p in ("forward", "backward"))
    assert [(op.module, op.inputs, op.outputs) for op in forward] == [
        (module, (dtype, dtype), (dtype,)) for module, dtype in expected.items()
    ]
    # two products each for the way back, but none for the gradient of the model's input
    assert [op.module for op in backward] == ["float16", "float16", "full", "full", "low"]
    assert all(op.inputs == (expected[op.module],) * 2 for op in backward)
    assert {op.flops for op in products} == {2 * 5 * 8 * 8}
    share = "100 % of forward FLOPs ran in bfloat16."
    if autocast == F32:
        share = "33.3 % of forward FLOPs ran in float32, 33.3 % in bfloat16, 33.3 % in float16."
    assert share in statements(record)
    assert "Each backward matmul ran in the dtype of its forward matmul (5 of 5, attention included)." in (
        statements(record)
    )


def test_casts_of_weights_are_named_and_only_those_of_another_dtype_happen():
    by_hand = [op for op in record_three_dtypes(F32).ops if op.parameter]
    assert by_hand == []  # the layers' inputs are cast, no weight is
    forward = [op for op in record_three_dtypes(BF16).ops if op.phase == "forward"]
    assert {op.parameter: op.cast for op in forward if op.parameter} == {
        "full.weight": (F32, BF16),
        "float16.weight": (F16, BF16),
    }


class BackwardInFloat32(torch.autograd.Function):
    """x @ w.T in x's dtype, whose backward pass computes in float32 all the same."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return (grad.float() @ w.float()).to(x.dtype), (grad.float().t() @ x.float()).to(w.dtype)


def test_a_backward_product_in_another_dtype_than_its_forward_product_is_told():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd, self.plain = (nn.Linear(8, 8, bias=False, dtype=BF16) for _ in range(2))

        def forward(self, x):
            return self.plain(BackwardInFloat32.apply(x, self.odd.weight))

    model = Model()
    recorder = Recorder(model)
    with recorder.recording():
        y = model(torch.randn(4, 8, dtype=BF16, requires_grad=True))
        with recorder.at("backward"):
            y.sum().backward()
    said = [s for s in statements(Record(recorder.ops)) if "backward matmul" in s]
    assert said == [
        "2 of 4 backward matmuls ran in another dtype than their forward matmul, such as `mm`: bfloat16 "
        "forward, float32 backward."
    ]


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_attention_that_is_not_fused_is_told_with_the_dtype_of_its_softmax(dtype):
    class ByHand(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Linear(8, 8)

        def forward(self, x):
            q = self.query(x)
            return (q @ q.mT).softmax(-1) @ q

    recorder = Recorder(ByHand())
    with recorder.recording(), precision.autocast(CPU, dtype):
        recorder.model(torch.randn(2, 4, 8))
    name = str(dtype).removeprefix("torch.")
    said = statements(Record(recorder.ops))
    assert (
        f"Softmax outside of fused operators took and gave {name}." in said
    )  # on a CPU; on CUDA always float32
    assert not any("fused operator," in s for s in said)


def test_checkpointed_products_are_not_taken_for_gradients():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))
    recorder = Recorder(model)
    with recorder.recording():
        x = torch.randn(4, 8, requires_grad=True)
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        with recorder.at("backward"):
            y.sum().backward()
    products = [op for op in recorder.ops if op.flops]
    assert [(op.phase, op.differentiates is not None) for op in products] == [
        ("forward", False),
        ("forward", False),
        ("backward", False),  # the first layer's product, repeated
        *[("backward", True)] * 4,
    ]


def test_a_second_step_is_matched_with_its_own_forward_pass():
    model = nn.Linear(8, 8, bias=False)
    recorder = Recorder(model)
    torch.ones(3, requires_grad=True).exp()  # nodes from before are no business of the record
    with recorder.recording():
        for dtype in (BF16, F32):
            with recorder.at("forward"), precision.autocast(CPU, dtype):
                y = model(torch.randn(4, 8))
            with recorder.at("backward"):
                y.sum().backward()
    products = [op for op in recorder.ops if op.flops]
    assert [op.dtype for op in products] == [BF16, BF16, F32, F32]
    assert [recorder.ops.index(products[i]) for i in (0, 2)] == [products[i].differentiates for i in (1, 3)]


# ------------------------------------------------------------------------------------------------------
# The project's model


def gpt(depth=2, width=32):
    model = GPT(GPTConfig(depth=depth, width=width, num_heads=2, vocab_size=64, max_seq_len=16))
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def record_gpt(dtype, depth=2, width=32, max_tokens=2):
    model = gpt(depth, width)
    optimizer = optim.MuonAdamW(optim.parameter_groups(model, RATES, 0.1), dtype)
    idx = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    scaler = precision.make_scaler(CPU, dtype)
    return record_step(model, optimizer, scaler, dtype, idx, idx, [1, 2, 3], max_tokens)


@pytest.fixture(scope="module")
def record():
    return record_gpt(BF16)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_the_statements_about_our_model_in_each_precision(dtype):
    low, muon = str(dtype)[6:], "bfloat16" if dtype == BF16 else "float32"
    said = statements(record_gpt(dtype))
    expected = [
        f"100 % of forward FLOPs ran in {low}.",
        f"100 % of backward FLOPs ran in {low}.",
        f"100 % of optimizer FLOPs ran in {muon}.",
        f"100 % of generation FLOPs ran in {low}.",
        f"100 % of chat FLOPs ran in {low}.",
        "Norms (the mean of squares and its root) ran in float32.",
        f"The residual stream (sums in `blocks.*`) ran in {low}.",
        "Cross-entropy ran in float32.",
        "The loss came out in float32.",
        "Each backward matmul ran in the dtype of its forward matmul (30 of 30, attention included).",
        "Parameters, `.grad` and optimizer state: float32.",
        "The gradient's norm, for clipping, was computed in float32.",
        "AdamW's update (`_fused_adamw_`) ran in float32.",
        "GradScaler multiplied the loss by 65,536." if dtype == F16 else "No GradScaler was at work.",
    ]
    if dtype == F32:
        off = "off in forward, off in loss, off in backward, off in generation, off in chat"
        expected += [f"Autocast was {off}."]
        whiles = ("the forward pass", "generation, for 2 tokens", "chat, for 2 tokens")
        expected += [f"No parameter was cast in {what}." for what in whiles]
    else:
        expected += [
            f"Autocast was on in forward ({low}), on in loss ({low}), off in backward, "
            f"on in generation ({low}), off in chat."
        ]
        way = f"computed in {low} and cast to float32 on their way to `.grad`"
        expected += [f"18 gradients of cast parameters were {way}."]
    assert [s for s in expected if s not in said] == []


def test_the_record_agrees_with_what_hooks_see_and_with_the_formula_for_flops():
    seen, model = {}, gpt()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, i, o, name=name: seen.__setitem__(name, o.dtype))
    recorder, idx = Recorder(model), torch.randint(64, (2, 16))
    with recorder.recording(), precision.autocast(CPU, BF16):
        model(idx)
    recorded = {op.module: op.outputs[0] for op in recorder.ops if op.name == "mm"}
    assert recorded == seen and len(seen) == 2 * 6 + 1 + 1  # the layers, one gate, the head
    assert sum(op.flops for op in recorder.ops) == model.flops_per_token() * idx.numel() // 3


def test_the_loss_begins_after_the_heads_product_and_the_phases_follow_each_other(record):
    phases = list(dict.fromkeys(op.phase for op in record.ops))
    assert phases == ["forward", "loss", "backward", "clip", "optimizer", "generation", "chat"]
    forward = [op for op in record.ops if op.phase == "forward"]
    assert (forward[-1].name, forward[-1].module) == ("mm", "head")
    loss = [op.name for op in record.ops if op.phase == "loss" and not op.is_view and op.name != "detach"]
    assert loss == ["_to_copy", "div", "tanh", "mul", "_log_softmax", "nll_loss_forward"]
    assert nothing_is_patched_any_more()


def nothing_is_patched_any_more() -> bool:
    import nanochat.gpt
    import nanochat.loss

    return (
        nanochat.gpt.softcapped_cross_entropy is nanochat.loss.softcapped_cross_entropy
        and nanochat.gpt.softcap is nanochat.loss.softcap
    )


def test_recording_does_not_change_what_is_computed():
    idx = torch.randint(64, (2, 16))
    plain, recorded = gpt(), gpt()
    optimizers = [optim.MuonAdamW(optim.parameter_groups(m, RATES, 0.1), BF16) for m in (plain, recorded)]
    with precision.autocast(CPU, BF16):
        loss = plain(idx, idx)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    before = plain.blocks[0].mlp.down.weight.clone()
    optimizers[0].step()
    assert not torch.equal(plain.blocks[0].mlp.down.weight, before)
    record_step(recorded, optimizers[1], precision.make_scaler(CPU, BF16), BF16, idx, idx, [1, 2, 3])
    pairs = zip(plain.parameters(), recorded.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_backward_pass_inside_of_autocast_is_told():
    model = gpt()
    recorder, idx = Recorder(model), torch.randint(64, (2, 16))
    with recorder.recording(), precision.autocast(CPU, BF16):
        loss = model(idx, idx)
        loss.register_hook(recorder.note_autocast)
        with recorder.at("backward"):
            loss.backward()
    said = statements(Record(recorder.ops, autocast=dict(recorder.autocast)))
    assert "Autocast was on in forward (bfloat16), on in backward (bfloat16)." in said


def test_the_linear_operators_of_mps_are_counted_like_the_products_they_stand_for():
    x, weight, grad = torch.ones(2, 3, 8), torch.ones(5, 8), torch.ones(2, 3, 5)
    one = 2 * 6 * 8 * 5
    linear, backward = torch.ops.aten.linear.default, torch.ops.aten.linear_backward.default
    assert recorder_module._flops(linear, (x, weight), {}, grad) == one
    for wanted, products in (([True, True, False], 2), ([False, True, False], 1)):
        assert recorder_module._flops(backward, (x, grad, weight, wanted), {}, ()) == products * one


def test_a_cast_by_copying_into_memory_is_one_of_its_source():
    model = nn.Linear(8, 8, bias=False)
    recorder = Recorder(model)
    with recorder.recording(), torch.no_grad():
        torch.empty(8, 8, dtype=BF16).copy_(model.weight)
        model.weight.copy_(torch.ones(8, 8, dtype=BF16))
    assert [(op.cast, op.parameter) for op in recorder.ops if op.cast] == [
        ((F32, BF16), "weight"),
        ((BF16, F32), ""),
    ]


# ------------------------------------------------------------------------------------------------------
# Every sentence comes from the record: flip a dtype and it changes


def swapped(dtype):
    return {BF16: F32, F32: BF16}.get(dtype, dtype)


def swap_op(op):
    return replace(op, inputs=tuple(map(swapped, op.inputs)), outputs=tuple(map(swapped, op.outputs)))


def swap_words(sentence):
    return sentence.replace("bfloat16", "?").replace("float32", "bfloat16").replace("?", "float32")


def test_with_all_dtypes_swapped_every_sentence_says_the_other_dtype(record):
    other = Record(
        [swap_op(op) for op in record.ops],
        *({k: swapped(d) for k, d in n.items()} for n in (record.parameters, record.gradients, record.state)),
        {phase: {swapped(d) for d in seen} for phase, seen in record.autocast.items()},
        swapped(record.loss_dtype),
        record.loss_scale,
        record.generated,
    )
    said = statements(record)
    assert statements(other) == [swap_words(s) for s in said]
    with_dtypes = [s for s in said if re.search("float", s)]
    assert len(with_dtypes) >= 15 and not set(with_dtypes) & set(statements(other))


FLIPS = [  # the phase and operators whose dtype is flipped, and what a sentence then says
    ("loss", lambda op: op.name == "_log_softmax", "Cross-entropy ran in bfloat16 and float32."),
    ("forward", lambda op: op.name == "rsqrt", "its root) ran in float32 and bfloat16."),
    ("forward", lambda op: op.module == "head" and op.flops, "of forward FLOPs ran in"),
    ("forward", lambda op: "attention" in op.name, "q, k, v in float32"),
    ("forward", lambda op: (op.name, op.module) == ("add", "blocks.1"), "ran in bfloat16 and float32."),
    (
        "backward",
        lambda op: op.module == "head" and op.flops,
        "2 of 30 backward matmuls ran in another dtype",
    ),
    ("backward", lambda op: op.module == "head" and op.flops, "`head`: bfloat16 forward, float32 backward."),
    ("clip", lambda op: "norm" in op.name, "The gradient's norm, for clipping, was computed in bfloat16."),
    ("optimizer", lambda op: "adamw" in op.name, "AdamW's update (`_fused_adamw_`) ran in bfloat16."),
    ("optimizer", lambda op: op.name == "bmm", "of optimizer FLOPs ran in"),
]


@pytest.mark.parametrize("phase, chosen, says", FLIPS)
def test_a_flipped_dtype_flips_its_sentence_and_leaves_the_others(record, phase, chosen, says):
    before = statements(record)
    flipped = [op.phase == phase and bool(chosen(op)) for op in record.ops]
    assert any(flipped)
    ops = [swap_op(op) if flip else op for op, flip in zip(record.ops, flipped, strict=True)]
    changed = [s for s in statements(replace(record, ops=ops)) if s not in before]
    assert any(says in s for s in changed)
    assert len(changed) <= 4  # a forward product stands in those on FLOPs and, twice, on the way back too
    for shares in (re.findall(r"([\d.]+) %", s) for s in changed if "FLOPs ran" in s):
        assert len(shares) == 2 and sum(map(float, shares)) == pytest.approx(100, abs=0.2)


def test_a_parameter_gradient_or_state_in_another_dtype_is_told(record):
    for what, name in (("parameters", "Parameters"), ("gradients", ".grad"), ("state", "optimizer state")):
        named = dict(getattr(record, what))
        named[next(iter(named))] = F16
        said = next(s for s in statements(replace(record, **{what: named})) if s.startswith("Parameters"))
        parts = said.rstrip(".").split("; ")
        assert [p for p in parts if "float16" in p] == [f"{name}: float16 and float32"]
    assert set(record.parameters.values()) == set(record.state.values()) == {F32}
    assert record.parameters.keys() == record.gradients.keys() == dict(gpt().named_parameters()).keys()


def test_casts_are_counted_and_a_product_without_its_forward_product_is_not_passed_over(record):
    twice = [op for op in record.ops for _ in range(2 if op.parameter == "head.weight" else 1)]
    said = [s for s in statements(Record(twice, record.parameters)) if "forward pass, each" in s]
    assert said[0].startswith(
        "18 of 20 parameters were cast to bfloat16 in the forward pass, each 1 to 2 times"
    )
    orphan = Op("backward", "", "mm", (BF16, BF16), (BF16,), flops=8)
    assert "1 backward matmuls belong to no recorded forward matmul." in statements(Record([orphan]))


def test_only_all_and_none_are_said_to_be_all_and_none():
    assert [percent(n, 10_000_000) for n in (0, 1, 5_000_000, 9_999_999, 10_000_000)] == [
        "0 %", "0.1 %", "50.0 %", "99.9 %", "100 %",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------
# The page


def test_tables_hold_every_call_that_computes_once(record):
    for phase in PHASES:
        ops = [op for op in record.ops if op.phase == phase and not op.is_view]
        assert sum(row["calls"] for row in rows(record, phase)) == len(ops) > 0
        assert sum(row["flops"] for row in rows(record, phase)) == sum(op.flops for op in ops)
        assert re.search(rf"^\| {phase} \| {len(ops)} \|", summary(record), re.MULTILINE)
    up = [row for row in rows(record, "forward") if row["module"] == "blocks.*.mlp.up" and row["flops"]]
    assert [(row["operation"], row["inputs"], row["output"], row["calls"]) for row in up] == [
        ("mm", "bfloat16", "bfloat16", 2)
    ]
    text = page(record, "Title", ["a fact"])
    for phase in PHASES:
        assert f"\n## {phase.capitalize()}\n" in text
    assert all(f"- {s}\n" in text for s in statements(record))


def report(*arguments: str, status: int = 0) -> subprocess.CompletedProcess:
    small = ["--depth=1", "--head_dim=32", "--max_seq_len=32", "--vocab_size=300", "--device_batch_size=2"]
    command = [sys.executable, "-m", "scripts.precision_report", *small, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.slow
def test_the_script_prints_the_page_writes_it_and_measures_what_each_precision_costs(tmp_path):
    for i in range(200):
        (tmp_path / f"{i}.txt").write_text(f"words {i} about nothing in particular " * (i % 20 + 1))
    out = tmp_path / "page" / "report.md"
    done = report(
        "--dtype=bfloat16", f"--out={out}", f"--base_dir={tmp_path / 'base'}", f"--data={tmp_path}",
        "--measure", "--precisions=float32,bfloat16", "--measure_steps=4", "--measure_rounds=2",
        "--measure_tokens=4",
    )  # fmt: skip
    text = out.read_text(encoding="utf-8")
    assert done.stdout.startswith(text)
    assert "100 % of forward FLOPs ran in bfloat16." in text and "## Backward\n" in text
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    training = [row for row in cells if len(row) == 8 and row[2].startswith("x")]
    assert [row[0] for row in training] == ["float32", "bfloat16", "float32, other initial weights"]
    assert training[0][2] == training[0][5] == "x 1.00" and training[0][7] == "+0.0000"
    assert abs(float(training[1][6]) - float(training[0][6])) < 0.1 and float(training[0][6]) > 1
    inference = [row for row in cells if len(row) == 10 and row[2].startswith("x")]
    assert [row[0] for row in inference] == ["float32", "bfloat16, autocast", "bfloat16, weights cast once"]
    off = [float(row[8]) for row in inference]
    assert off[0] == 0 and all(0 < x < 0.2 for x in off[1:])


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--depth=0"], "depth is 0"),
        (["--measure", "--precisions=int8"], "use bfloat16, float16, float32"),
        (["--out=/dev/null/page.md"], "cannot write"),
        (["--seed=-1"], "seed is -1; give a number from 0"),
        (["--depth=99", "--aspect_ratio=1000"], "are free; lower --device_batch_size"),
        (["--measure", "--measure_steps=41"], "use 40"),
        (["--measure", "--measure_tokens=17"], "lower --measure_tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_can(arguments, words, tmp_path):
    assert words in report(f"--base_dir={tmp_path}", *arguments, status=2).stderr


def test_a_measuring_process_that_is_killed_between_turns_ends_the_measurement_with_a_sentence(tmp_path):
    job = {"kind": "training", "config": vars(gpt().config), "device_type": "cpu", "seed": 0}
    job |= {"dtype": "float32", "tokens": str(tmp_path / "tokens")}
    precision_cost.save_file({"tokens": torch.randint(64, (1, 2, 17))}, job["tokens"])
    with (
        pytest.raises(UserError, match="the process that measures one ended with status -9"),
        precision_cost.working([("one", job)]) as (worker,),
    ):
        worker.process.kill()
        worker.process.wait()
        worker.turn(steps=1, seconds=1)


def test_a_measuring_process_that_dies_ends_the_measurement_with_a_sentence(capfd):
    with pytest.raises(UserError, match="the process that measures nothing ended with status 1"):
        precision_cost.Worker("nothing", kind="unheard of", device_type="cpu", seed=0).wait()


def test_inference_with_cast_weights_holds_them_in_that_dtype_and_gives_float32_logits(tmp_path):
    config, machine = gpt().config, precision_cost.runtime.Machine(CPU)
    paths = {key: str(tmp_path / key) for key in ("tokens", "weights")}
    precision_cost.save_file({"tokens": torch.randint(64, (1, 2, 17))}, paths["tokens"])
    model = gpt()
    nn.init.normal_(model.head.weight)
    precision_cost.save_file(model.state_dict(), paths["weights"])
    logits = {}
    for cast in (False, True):
        job = precision_cost.Inference(machine, config, {"dtype": "bfloat16", "cast": cast, **paths})
        assert {p.dtype for p in job.model.parameters() if p.ndim == 2} == {BF16 if cast else F32}
        logits[cast] = job.read(job.rows)
    exact = model(job.rows)
    for result in logits.values():
        assert result.dtype == F32 and 0 < (result - exact).abs().max() < 0.1 * exact.abs().max()


# ------------------------------------------------------------------------------------------------------
# The experiments and docs/precision.md


def test_bfloat16_has_float32s_range_and_float16_more_digits():
    table = {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in experiments.formats().splitlines()}
    assert [table[d][0] for d in ("float32", "bfloat16", "float16")] == [
        "1 + 8 + 23",
        "1 + 8 + 7",
        "1 + 5 + 10",
    ]
    assert table["float16"][6] == "inf" and table["bfloat16"][6] == "70144"
    for line in experiments.formats().splitlines():
        assert line in PAGE


def test_autocasts_lists_asked_of_fake_tensors_are_those_of_the_real_cpu():
    probes = [probe for group in rules.PROBES.values() for probe in group]
    for low in (BF16, F16):
        for probe in probes:
            assert rules.policy(probe, "cpu", low) == rules.policy(probe, "cpu", low, fake=False)
    assert not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")
    assert torch.get_autocast_dtype("cpu") == BF16  # torch's default, though float16 was asked last
    cuda = {name: rules.policy(group[0], "cuda") for name, group in rules.PROBES.items()}
    cpu = {name: rules.policy(group[0], "cpu") for name, group in rules.PROBES.items()}
    assert (cuda["softmax, log_softmax"], cpu["softmax, log_softmax"]) == ("float32", "as its input")
    assert cuda["linear, matmul, bmm"] == cpu["linear, matmul, bmm"] == "low"
    assert cuda["gelu, relu, tanh, sigmoid"] == cpu["gelu, relu, tanh, sigmoid"] == "as its input"


def test_products_add_up_in_more_than_their_dtype_and_fused_attention_rounds_less():
    table = [line.split(" | ") for line in experiments.accumulation((BF16,)).splitlines()[2:]]
    shares = {row[1]: float(row[2].rstrip(" %")) for row in table}
    assert shares["`a @ b`"] > 98 and shares["every partial sum rounded"] < 20
    errors = experiments.attention_errors()
    assert errors["exact, rounded once"] < errors["fused (SDPA)"] < errors["by hand, softmax in float32"]


def test_operators_of_bfloat16_numbers_compute_in_float32_inside():
    for name, (operator, steps) in experiments.inside().items():
        assert operator > 0.999 > 0.5 > steps, name


def test_a_weight_is_cast_once_in_a_context_unless_the_cache_is_off():
    counted = rules.casts()
    assert counted["one call"] == counted["three calls in one context"] == 1
    assert counted["three contexts of one call"] == 3
    assert counted["three calls in one context, `cache_enabled=False`"] == 3
    for name, count in counted.items():
        assert f"| {name} | {count} |" in PAGE


def test_gradients_underflow_in_float16_without_scaling_and_in_nothing_else():
    figures = experiments.underflow_figures(64)
    lost, distance = ({name: f[i] for name, f in figures.items()} for i in (0, 1))
    assert lost["float16"] > 0.005 > 100 * lost["bfloat16"]
    assert lost["float16, loss x 65,536"] < lost["float16"] / 100
    assert distance["float16, loss x 65,536"] < distance["float16"] / 3
    assert distance["float16, loss x 65,536"] < distance["bfloat16"] / 3  # three more bits


def test_small_updates_are_lost_in_short_formats():
    lost = experiments.lost_updates()
    assert lost["float32"] == 0 and 0.02 < lost["bfloat16"] < 0.5 < lost["int8"] < lost["int4"]
    squares = experiments.vanished_squares()
    assert squares["float32"] == squares["bfloat16"] == 0 and squares["float16"] > 0.1


def test_the_walk_differs_between_devices_where_the_lists_do():
    cuda, cpu = rules.stages("cuda"), rules.stages("cpu")
    assert cpu == rules.stages("cpu", fake=False)
    assert {stage for stage in cuda if cuda[stage] != cpu[stage]} == {
        "`n = layer_norm(h)`",
        "`p = softmax(scores)`",
    }


def test_an_overflow_changes_no_weight_and_halves_the_scale():
    records = experiments.scaler_steps()
    overflowed = [not r["norm"] < float("inf") for r in records]
    assert any(overflowed) and not all(overflowed)
    for record, bad, following in zip(records, overflowed, [*records[1:], None], strict=True):
        assert record["moved"] != bad
        if following and bad:
            assert following["scale"] == record["scale"] / 2
        elif following:
            assert following["scale"] in (record["scale"], 2 * record["scale"])
            assert record["scaled"] == pytest.approx(record["norm"] * record["scale"], rel=1e-3)


def test_the_page_quotes_what_the_report_says_of_such_a_model():
    for sentence in statements(record_gpt(BF16, depth=4, width=64)):
        assert f"- {sentence}\n" in PAGE, sentence


@pytest.mark.slow
def test_the_command_of_the_experiments_prints_the_tables_of_the_page():
    command = [sys.executable, "-m", "experiments.precision_experiments"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) > 70
    quoted = {line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| ")}
    assert {row[0] for row in rows} <= quoted  # figures differ between machines
