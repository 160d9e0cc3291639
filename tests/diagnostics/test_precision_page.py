"""The page says what the record holds: flip a dtype in the record, and its sentence changes."""

import re
from dataclasses import replace

import pytest
from helpers import disk, names_in, run
from small_model import BF16, F16, F32, gpt, record_gpt

from nanochat.diagnostics.precision_page import page, percent, rows, statements, summary
from nanochat.diagnostics.recorder import PHASES, Op, Record
from nanochat.machine.precision import name_of


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_the_statements_about_our_model_in_each_precision(dtype):
    low, said = name_of(dtype), statements(record_gpt(dtype))
    for words, expected in (
        ("of forward FLOPs ran", low),
        ("of loss FLOPs ran", low),
        ("of backward FLOPs ran", low),
        ("of optimizer FLOPs ran", "bfloat16" if dtype == BF16 else "float32"),
        ("of generation FLOPs ran", low),
        ("of chat FLOPs ran", low),
        ("Norms", "float32"),
        ("residual stream", low),
        ("Cross-entropy", "float32"),
        ("loss came out", "float32"),
        ("with the loss because", f"`head`) ran with the loss, in {low}"),
        ("Each backward matmul", "38 of 38"),
        ("optimizer state", "float32"),
        ("for clipping", "float32"),
        ("AdamW's update", "float32"),
        ("GradScaler", "65,536" if dtype == F16 else "No "),
        ("cast in the forward pass" if dtype == F32 else "cast to", "No " if dtype == F32 else low),
        ("Autocast was", "off in forward" if dtype == F32 else f"on in forward ({low}), off in loss, off in"),
    ):
        found = [sentence for sentence in said if set(words.split()) <= set(re.split(r"[ ,.:]+", sentence))]
        assert found and all(expected in sentence for sentence in found), (words, found)
    assert not any("16" in sentence for sentence in said) or dtype != F32


# -- Every sentence comes from the record


def swap_op(op):
    other = {BF16: F32, F32: BF16}
    inputs, outputs = (tuple(other.get(d, d) for d in dtypes) for dtypes in (op.inputs, op.outputs))
    return replace(op, inputs=inputs, outputs=outputs)


FLIPS = [  # phase, the operators whose dtype is flipped, and what a sentence then says
    ("loss", lambda op: op.name == "softmax", "Cross-entropy ran in bfloat16 and float32."),
    ("forward", lambda op: op.module == "head" and op.flops, "of forward FLOPs ran in"),
    ("forward", lambda op: "attention" in op.name, "q, k and v in float32"),
    ("loss", lambda op: op.module == "head" and op.flops, "`head`: bfloat16 forward, float32 backward."),
    ("optimizer", lambda op: "adamw" in op.name, "(`_fused_adamw_`) ran in bfloat16."),
]


@pytest.mark.parametrize("phase, chosen, says", FLIPS)
def test_a_flipped_dtype_flips_its_sentence_and_leaves_the_others(record, phase, chosen, says):
    before = statements(record)
    flipped = [op.phase == phase and bool(chosen(op)) for op in record.ops]
    assert any(flipped)
    ops = [swap_op(op) if flip else op for op, flip in zip(record.ops, flipped, strict=True)]
    changed = [s for s in statements(replace(record, ops=ops)) if s not in before]
    assert any(says in s for s in changed)
    assert len(changed) <= 4  # a forward product also has its part in three sentences about others
    for shares in (re.findall(r"([\d.]+) %", s) for s in changed if "FLOPs ran" in s):
        assert len(shares) == 2 or phase == "loss"  # all its products are of the head
        assert sum(map(float, shares)) == pytest.approx(100, abs=0.2)


def test_a_parameter_gradient_or_state_in_another_dtype_is_told(record):
    for what, name in (("parameters", "Parameters"), ("gradients", "`.grad`"), ("state", "optimizer state")):
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
    cast, number = len(record.parameters) - 1, len(record.parameters)  # the embedding is looked up in float32
    assert said[0].startswith(
        f"{cast} of {number} parameters were cast to bfloat16 in the forward pass, each 1 to 2 times"
    )
    orphan = Op("backward", "", "mm", (BF16, BF16), (BF16,), flops=8)
    assert "1 backward matmuls have no recorded forward matmul." in statements(Record([orphan]))


def test_only_all_and_none_are_said_to_be_all_and_none():
    assert [percent(n, 10_000_000) for n in (0, 1, 5_000_000, 9_999_999, 10_000_000)] == [
        "0 %", "0.1 %", "50.0 %", "99.9 %", "100 %",
    ]  # fmt: skip


# -- The page and its script


def test_tables_hold_every_call_that_computes_once(record):
    for phase in PHASES:
        ops = [op for op in record.ops if op.phase == phase and not op.is_view]
        calls, flops = ([row[i] for row in rows(record, phase)] for i in (-2, -1))
        assert sum(calls) == len(ops) > 0 and sum(flops) == sum(op.flops for op in ops)
        assert re.search(rf"^\| {phase} +\| +{len(ops)} \|", summary(record), re.MULTILINE)
    up = [row[:5] for row in rows(record, "forward") if row[1] == "blocks.*.mlp.up" and row[-1]]
    assert up == [["mm", "blocks.*.mlp.up", "bfloat16", "bfloat16", 2]]
    text = page(record, "Title", ["a fact"])
    assert all(f"\n## {phase.capitalize()}\n" in text for phase in PHASES)
    assert all(f"- {s}\n" in text for s in statements(record))


def report(*arguments: str, status: int = 0) -> str:
    small = ["--depth=1", "--head_dim=32", "--max_seq_len=32", "--vocab_size=300", "--device_batch_size=2"]
    return run(["scripts.precision_report", *small, *arguments], status)


@pytest.mark.slow
def test_the_script_prints_the_page_writes_it_and_measures_what_each_precision_costs(tmp_path):
    for i in range(200):
        (tmp_path / f"{i}.txt").write_text(f"words {i} about nothing in particular " * (i % 20 + 1))
    out = tmp_path / "my page" / "report.md"
    output = report(
        "--dtype=bfloat16", f"--out={out}", f"--base_dir={tmp_path / 'base'}", f"--data={tmp_path}",
        "--measure", "--precisions=float32,bfloat16", "--measure_steps=4", "--measure_rounds=2",
        "--measure_tokens=4",
    )  # fmt: skip
    text = out.read_text(encoding="utf-8")
    assert output.startswith(text) and f" '--out={out}' " in text
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
        (["--measure", "--precisions=int8"], "use bfloat16, float16, float32"),
        (["--out=/dev/null/page.md"], "cannot write"),
        (["--measure", "--measure_steps=41"], "use 40"),
        (["--measure", "--measure_tokens=17"], "lower --measure_tokens or raise --max_seq_len"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_can(arguments, words, tmp_path):
    output = report(f"--base_dir={tmp_path}", *arguments, status=2)
    assert words in output and "Traceback" not in output


def test_a_full_disk_costs_the_new_page_and_not_the_old_one(tmp_path):
    with disk(tmp_path / "disk", "16k") as folder:
        (folder / "report.md").write_text("the old one")
        (folder / "filler").write_bytes(bytes(12_288))
        output = report(f"--base_dir={tmp_path}", f"--out={folder / 'report.md'}", status=2)
        assert "cannot write" in output and (folder / "report.md").read_text() == "the old one"
        assert names_in(folder) == ["filler", "report.md"]
