"""A profiled step is split by kind of work; all kinds and the rest together are the step."""

import gzip
import json

import pytest
import torch

from experiments import step_floors, step_split
from experiments.step_floors import attention_flops, bytes_of
from nanochat.gpt import GPTConfig
from nanochat.plan.scaling import on_meta

CONFIG = GPTConfig(depth=1, width=64, num_heads=1, vocab_size=512, max_seq_len=8)
CPU = torch.device("cpu")


def event(
    name: str, start: float, end: float, *sizes: list[int], cat: str = "", tid: int = 1, **more
) -> dict:
    """An event of a trace in microseconds; `sizes` are those of an operator's float32 inputs."""
    strides = [[torch.empty(size, device="meta").stride(i) for i in range(len(size))] for size in sizes]
    inputs = {"Input Dims": list(sizes), "Input Strides": strides, "Input type": ["float"] * len(sizes)}
    cat = cat or ("cpu_op" if "::" in name or "Backward" in name else "user_annotation")
    timed = {"ph": "X", "name": name, "ts": start, "dur": end - start}
    return timed | {"cat": cat, "tid": tid, "args": inputs | more}


STEP = [
    event("aten::mm", -50, -10, [16, 64], [64, 64]),  # before the step
    event("step 3", 0, 1000),
    event("data", 0, 10),
    event("aten::embedding", 20, 30, [512, 64], [2, 8]),
    event("aten::index_select", 22, 28, [512, 64], [16]),
    event("aten::linear", 30, 80, [2, 8, 64], [64, 64]),
    event("aten::mm", 40, 75, [16, 64], [64, 64]),
    event("aten::scaled_dot_product_attention", 100, 150),
    event("aten::_scaled_dot_product_flash_attention_for_cpu", 102, 148),
    event("aten::mul", 160, 170, [16, 64], [16, 64]),
    event("nanochat::attention_in_blocks", 180, 186),
    event("GeneratedBackwardFor_nanochat_attention_in_blocks_default", 181, 185),
    event("aten::baddbmm", 182, 184, [1], [1, 8, 64], [1, 64, 8]),
    event("aten::mm", 190, 198, [512, 64], [64, 64]),  # as many tokens as the vocabulary has
    event("HeadAndLoss", 200, 260, cat="cpu_op"),
    event("aten::mm", 205, 255, [16, 64], [64, 512]),
    event("nanochat::head_and_loss", 300, 350),
    event("aten::mm", 310, 340, [16, 64], [64, 256]),
    event("autograd::engine::evaluate_function: CompiledFunctionBackward", 400, 600),
    event("cpp_fused_add_1 [8192 bytes]", 410, 430),
    event("nanochat::attention_in_blocks_backward", 440, 500),
    event("cpp_fused_exp_sub_0 [64 bytes]", 442, 448),
    event("aten::bmm", 450, 490, [1, 8, 64], [1, 64, 8]),
    event("aten::softmax", 491, 499, [1, 8, 512]),
    event("aten::mm", 510, 560, [64, 16], [16, 64]),
    event("cpp_fused__scaled_dot_product_flash_attention_for_cpu_transpose_2 [8192 bytes]", 570, 580),
    event("clip", 610, 630),
    event("aten::_foreach_norm", 612, 628),
    event("Optimizer.step#MuonAdamW.step", 640, 740),
    event("aten::bmm", 650, 700, [2, 64, 64], [2, 64, 64]),
    event("log", 750, 760),
    event("aten::mm", 30, 900, [9, 9], [9, 9], tid=2),  # another thread
]
SPENT = {  # microseconds, added up by hand
    "data": 10, "embedding": 10, "products": 50 + 8 + 50, "attention forward": 50 + 6,
    "attention backward": 60, "norms and element-wise": 10 + 20 + 10, "head and loss": 60 + 50, "clip": 20,
    "optimizer": 100, "log": 10,
}  # fmt: skip


def test_each_kind_has_the_time_of_its_operators_and_the_kinds_are_the_step(tmp_path):
    path = tmp_path / "profile_3.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": STEP}).encode()))
    found = step_floors.split(path, on_meta(CONFIG), 16, CPU, peak_flops=1e9)
    milliseconds = {kind: row["ms"] for kind, row in found["kinds"].items()}
    expected = {kind: spent / 1000 for kind, spent in SPENT.items()}
    assert milliseconds == pytest.approx(expected | {"rest": 1 - sum(expected.values())})
    assert found["step_ms"] == 1 and sum(row["share"] for row in found["kinds"].values()) == pytest.approx(1)
    products = {row["what"]: (row["count"], row["ms"]) for row in found["products"]}
    assert products == {
        "16 x 64 @ 64 x 64": (1, pytest.approx(0.035)), "512 x 64 @ 64 x 64": (1, pytest.approx(0.008)),
        "64 x 16 @ 16 x 64": (1, pytest.approx(0.05)),
    }  # fmt: skip
    could = {kind: row["could_ms"] for kind, row in found["kinds"].items()}
    assert could["products"] == pytest.approx(sum(row["alone_ms"] for row in found["products"]))
    assert could["attention forward"] == pytest.approx(1000 * 4 * 64 * 2 * (8 * 9 / 2) / 1e9)
    assert could["attention backward"] == 2 * could["attention forward"]
    assert could["rest"] == could["data"] == could["log"] == 0 < could["head and loss"]
    with pytest.raises(ValueError, match="has no step"):
        path.write_bytes(gzip.compress(b'{"traceEvents": []}'))
        step_split.read(path)


def test_what_moves_numbers_could_take_as_long_as_a_copy_of_as_many_bytes(tmp_path, monkeypatch):
    """Here a copy takes a millisecond for each byte, and a product 1e9."""
    monkeypatch.setattr(step_floors, "copy_ms", lambda size, device: size)
    monkeypatch.setattr(step_floors, "product_ms", lambda name, operands, device: 1e9)
    path, model = tmp_path / "trace.json", on_meta(CONFIG)
    path.write_text(json.dumps({"traceEvents": STEP}))
    kinds = step_floors.split(path, model, 16, CPU, peak_flops=1e9)["kinds"]
    could = {kind: row["could_ms"] for kind, row in kinds.items()}
    weights = sum(p.numel() for p in model.parameters())
    gates = sum(p.numel() for name, p in model.named_parameters() if "gate" in name)
    matrices = 12 * 64 * 64 + gates
    assert could["norms and element-wise"] == 4 * 3 * 16 * 64 + 8192 + 8192  # a product of two, two kernels
    assert could["embedding"] == 4 * (512 * 64 + 16 + 512 * 64)
    assert could["products"] == 3e9 and could["head and loss"] == 3e9
    # Muon: weight and momentum read and written, gradient read. AdamW: weight and two moments, gradient
    assert could["optimizer"] == 1e9 + 4 * (5 * matrices + 7 * (weights - matrices))
    assert could["clip"] == 4 * 3 * weights


def test_a_kernel_of_a_gpu_has_the_kind_of_what_launched_it_also_if_it_runs_later(tmp_path):
    """Two steps in 1000 us."""
    launch = {"cat": "cuda_runtime"}
    kernel = {"cat": "kernel", "tid": 7}
    events = [
        event("cudaLaunchKernel", -50, -45, **launch, correlation=9),
        event("nvjet_before", 5, 20, **kernel, correlation=9),  # launched before: not counted
        event("profiled steps", 0, 1000),
        event("profiled steps", 0, 1000, cat="gpu_user_annotation", tid=7),
        event("aten::mm", 9, 13, [16, 64], [64, 64]),
        event("cudaLaunchKernelExC", 10, 12, **launch, correlation=1),
        event("nvjet_hsh_1", 50, 250, **kernel, correlation=1),
        event("autograd::engine::evaluate_function: CompiledFunctionBackward", 20, 80, tid=2),
        event("cudaLaunchKernel", 30, 31, **launch, correlation=2, tid=2),
        event("cudnn_generated_native_sdpa_sm90_flash_bprop", 250, 300, **kernel, correlation=2),
        event("clip", 90, 95),
        event("cudaLaunchKernel", 92, 93, **launch, correlation=3),
        event("reduce_kernel_norm", 300, 350, **kernel, correlation=3),
        event("Optimizer.step#MuonAdamW.step", 100, 150),
        event("cuLaunchKernelEx", 120, 121, cat="cuda_driver", correlation=4),
        event("nvjet_hsh_2", 400, 600, **kernel, correlation=4),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = step_split.time_split(path, steps=2)
    spent = {"products": 200, "attention backward": 50, "clip": 50, "optimizer": 200, "rest": 500}
    assert {kind: ms for kind, ms in found["ms"].items() if ms} == {k: v / 2000 for k, v in spent.items()}
    assert found["share"]["rest"] == 0.5 and found["step_ms"] == 0.5 and found["kernels"] == 2
    assert found["longest_ms"]["nvjet_hsh_1"] == 0.1


def test_an_operator_moves_its_inputs_and_as_much_as_the_largest_of_them():
    assert bytes_of(event("aten::mul", 0, 1, [16, 64], [64])) == 4 * (16 * 64 + 64 + 16 * 64)
    expanded = event("aten::mul", 0, 1, [16, 64])
    expanded["args"]["Input Strides"] = [[0, 1]]  # sixteen times the same row
    assert bytes_of(expanded) == 4 * (64 + 64)
    assert bytes_of(event("cpp_fused_add_1 [98304 bytes]", 0, 1)) == 98304
    assert (
        bytes_of(event("aten::view", 0, 1, [16, 64])) == bytes_of(event("autograd::engine", 0, 1, [9])) == 0
    )


def test_attention_counts_the_pairs_that_see_each_other():
    config = GPTConfig(depth=2, width=32, num_heads=2, vocab_size=9, max_seq_len=8, window_pattern="S")
    pairs = sum(
        q - w < k <= q for w in (2, 8) for q in range(8) for k in range(8)
    )  # S is 2, the last layer 8
    # Two products for each pair: 2 * D multiplications and additions in each of H heads; 3 rows
    assert attention_flops(config, 3 * 8) == 3 * pairs * 2 * (2 * 16) * 2
