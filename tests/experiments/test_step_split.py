"""A profiled step is split by kind of work; all kinds and the rest together are the step."""

import gzip
import json

import pytest

from experiments import step_split


def event(name: str, start: float, end: float, cat: str = "", tid: int = 1, **arguments) -> dict:
    """An event of a trace; times in microseconds."""
    cat = cat or ("cpu_op" if "::" in name or "Backward" in name else "user_annotation")
    timed = {"ph": "X", "name": name, "ts": start, "dur": end - start}
    return timed | {"cat": cat, "tid": tid, "args": arguments}


STEP = [
    event("aten::mm", -50, -10),  # before the step
    event("step 3", 0, 1000),
    event("data", 0, 10),
    event("aten::embedding", 20, 30),
    event("aten::index_select", 22, 28),
    event("aten::linear", 30, 80),
    event("aten::mm", 40, 75),
    event("aten::scaled_dot_product_attention", 100, 150),
    event("aten::_scaled_dot_product_flash_attention_for_cpu", 102, 148),
    event("aten::mul", 160, 170),
    event("nanochat::attention_in_blocks", 180, 186),
    event("GeneratedBackwardFor_nanochat_attention_in_blocks_default", 181, 185),
    event("aten::baddbmm", 182, 184),
    event("aten::mm", 190, 198),  # as many tokens as the vocabulary has
    event("HeadAndLoss", 200, 260, cat="cpu_op"),
    event("aten::mm", 205, 255),
    event("nanochat::head_and_loss", 300, 350),
    event("aten::mm", 310, 340),
    event("autograd::engine::evaluate_function: CompiledFunctionBackward", 400, 600),
    event("cpp_fused_add_1 [8192 bytes]", 410, 430),
    event("nanochat::attention_in_blocks_backward", 440, 500),
    event("cpp_fused_exp_sub_0 [64 bytes]", 442, 448),
    event("aten::bmm", 450, 490),
    event("aten::softmax", 491, 499),
    event("aten::mm", 510, 560),
    event("cpp_fused__scaled_dot_product_flash_attention_for_cpu_transpose_2 [8192 bytes]", 570, 580),
    event("clip", 610, 630),
    event("aten::_foreach_norm", 612, 628),
    event("Optimizer.step#MuonAdamW.step", 640, 740),
    event("aten::bmm", 650, 700),
    event("log", 750, 760),
    event("aten::mm", 30, 900, tid=2),  # another thread
]
SPENT = {  # microseconds, added up by hand
    "data": 10, "embedding": 10, "products": 50 + 8 + 50, "products of the head": 50 + 30,
    "attention forward": 50 + 6, "attention backward": 60, "loss": 10 + 20, "element-wise forward": 10,
    "element-wise backward": 20 + 10, "clip": 20, "optimizer": 100, "log": 10,
}  # fmt: skip


def written(events: list[dict], path, pack=bytes):
    path.write_bytes(pack(json.dumps({"traceEvents": events}).encode()))
    return path


def test_each_kind_has_the_time_of_its_operators_and_the_kinds_are_the_step(tmp_path):
    found = step_split.time_split(written(STEP, tmp_path / "profile_3.json.gz", gzip.compress))
    expected = dict.fromkeys(step_split.KINDS, 0) | {kind: spent / 1000 for kind, spent in SPENT.items()}
    assert found["ms"] == pytest.approx(expected | {"rest": 1 - sum(expected.values())})
    assert found["step_ms"] == 1 and sum(found["share"].values()) == pytest.approx(1)
    with pytest.raises(ValueError, match="has no step"):
        step_split.read(written([], tmp_path / "empty.json"))


def test_a_kernel_of_a_gpu_has_the_kind_of_what_launched_it_also_if_it_runs_later(tmp_path):
    """Two steps in 1000 us."""
    launch = {"cat": "cuda_runtime"}
    kernel = {"cat": "kernel", "tid": 7}
    events = [
        event("cudaLaunchKernel", -50, -45, **launch, correlation=9),
        event("nvjet_before", 5, 20, **kernel, correlation=9),  # launched before: not counted
        event("profiled steps", 0, 1000),
        event("profiled steps", 0, 1000, cat="gpu_user_annotation", tid=7),
        event("aten::mm", 9, 13, **{"Input Dims": [[4096, 768], [768, 3072]]}),
        event("cudaLaunchKernelExC", 10, 12, **launch, correlation=1),
        event("nvjet_hsh_1", 50, 250, **kernel, correlation=1),
        event("aten::mm", 14, 16, **{"Input Dims": [[768, 4096], [4096, 512]]}),
        event("cudaLaunchKernelExC", 14, 15, **launch, correlation=5),
        event("nvjet_hsh_1", 600, 640, **kernel, correlation=5),
        event("aten::addmm", 17, 19, **{"Input Dims": [[6], [4096, 768], [768, 6], [], []]}),
        event("cudaLaunchKernelExC", 17, 18, **launch, correlation=6),
        event("nvjet_hsh_3", 640, 650, **kernel, correlation=6),
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
    found = step_split.time_split(written(events, tmp_path / "trace.json"), 2, head=(4096, 512), most=2)
    spent = {"products": 200, "products of the head": 40, "products of gates": 10, "attention backward": 50}
    spent |= {"clip": 50, "optimizer": 200, "rest": 450}
    assert {kind: ms for kind, ms in found["ms"].items() if ms} == pytest.approx(
        {k: v / 2000 for k, v in spent.items()}
    )
    assert found["share"]["rest"] == pytest.approx(0.45) and found["step_ms"] == 0.5
    first, second = found["longest"]
    assert first == {"ms": 0.1, "launches": 0.5, "kind": "products", "name": "nvjet_hsh_1"}
    assert found["kernels"] == 3 and second["name"] == "nvjet_hsh_2"


# As the profiles of an H200 and of other cards have them
KERNELS = {
    "products": ["nvjet_sm90_tst_192x192_64x3_1x2_h_bz_coopB_splitK_NTN", "triton_tem_fused_mm_3"],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, cutlass::bfloat16_t>>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
    ],
    "loss": [
        "triton_poi_fused__to_copy_arange_clamp_min_copy_copy__div_eq_exp_mul_rsub_sigmoid_sub_unsqueeze_1",
        "triton_red_fused__to_copy_clamp_min_eq_exp_gather_log_mul_scalar_tensor_sigmoid_squeeze_sub_sum_unsque",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>",
    ],
    "activation": ["triton_poi_fused__unsafe_view_add_leaky_relu_leaky_relu_backward_mul_view_2"],
    "casts": ["triton_poi_fused__to_copy_t_9"],
    "additions and copies": [
        "Memcpy HtoD (Pinned -> Device)",
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array>",
    ],
    "element-wise": ["triton_poi_fused__scaled_dot_product_cudnn_attention_add_cat_mul_5"],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous na"
    ],
}


@pytest.mark.parametrize("kind", KERNELS)
def test_kernels_are_sorted_by_their_names(kind):
    assert {step_split.kind_of(name) for name in KERNELS[kind]} == {kind}
