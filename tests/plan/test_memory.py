"""The estimate of memory: against counts of autograd and of the compiler's partitioner, against runs on a
CPU, and what follows."""

import json
import re
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, command, make_plan, needs_bfloat16, python_m, records
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import memory_count
from nanochat.plan import scaling
from nanochat.plan.counts import on_meta, parameter_counts
from nanochat.plan.memory import advice, training_bytes


def config(depth, aspect_ratio=64, max_seq_len=512, vocab_size=4096):
    return scaling.model_config(depth, aspect_ratio, 128, max_seq_len, vocab_size, "L")


def of_d12(dtype, is_compiled):
    return pytest.param(config(12, 64, 2048, 32768), 8, dtype, is_compiled, marks=pytest.mark.slow)


@pytest.mark.parametrize(("model", "rows", "dtype", "is_compiled"), [
    (config(2), 2, torch.float32, False), (config(2), 2, torch.float16, False),
    of_d12(torch.float32, True), of_d12(torch.bfloat16, True), of_d12(torch.bfloat16, False),
])  # fmt: skip
def test_the_estimate_is_what_autograd_and_the_partitioner_keep(model, rows, dtype, is_compiled):
    found = memory_count.compare(model, rows, dtype, is_compiled)
    assert 0.95 < found["ratio"] < 1.1, found


def test_lasting_memory_by_kind_is_counted_in_bytes_a_parameter():
    model = config(4)
    counts = parameter_counts(on_meta(model))
    total, matrices, shared_rows = counts["total"], counts["matrices"], counts["bigrams"]
    alone = training_bytes(model, 2048, torch.float32, compiled=False)
    assert alone["weights"] == alone["gradients"] == 4 * total
    # Muon keeps one moment of its matrices, AdamW two of all else; of shared rows one number a row is kept
    assert alone["optimizer state"] == 4 * matrices + 8 * (total - matrices - shared_rows)
    assert alone["save copies"] == alone["gradient exchange"] == 0
    shared = training_bytes(model, 2048, torch.float32, compiled=False, world_size=4, on_cpu=True)
    assert shared["optimizer state"] == alone["optimizer state"] // 4
    assert shared["save copies"] == shared["weights"] + shared["optimizer state"]
    assert shared["gradient exchange"] > 0


def test_a_small_micro_batch_needs_the_memory_of_the_update_instead():
    model = config(4, vocab_size=10240)
    counts = parameter_counts(on_meta(model))
    # The second of all gradients; one process adds those of tables but the head's to the first at once
    for processes, twice in ((1, counts["matrices"] + counts["head"]), (2, counts["total"])):
        needed = training_bytes(model, 1, torch.float32, compiled=True, world_size=processes)
        assert needed["update"] + needed["activations"] + needed["logits"] == 4 * twice
    assert training_bytes(config(4), 2**16, torch.float32, compiled=True)["update"] == 0


@settings(max_examples=40)
@given(st.integers(1, 96), st.floats(0, 12), st.sampled_from(["cpu", "cuda"]))
def test_the_automatic_device_batch_divides_the_rows_and_is_the_largest_that_fits(rows, log_bytes, device):
    memory, most_tokens = int(2**log_bytes * 1e7), 2**16 if device == "cuda" else 2**12
    plan = make_plan(memory=memory, device_type=device, num_iterations=10, total_batch_size=rows * 512)[0]
    picked = plan.device_batch_size
    assert rows % picked == 0 and picked * plan.grad_accum_steps == rows

    def fits(n):
        share = 0.9 if device == "cuda" else 0.8
        return n * 512 <= most_tokens and plan.with_rows(n).expected_bytes <= share * memory

    assert not any(fits(n) for n in range(picked + 1, rows + 1) if rows % n == 0)
    assert fits(picked) or picked == 1


# -- What to lower when a run does not fit


def plan_of(**changes):
    given = {"num_iterations": 10, "depth": 6, "device_batch_size": 12, "total_batch_size": 24 * 512}
    return make_plan(**given | changes)[0]


@pytest.mark.parametrize("share", [0.99, 0.9, 0.8, 0.7])
def test_fewer_rows_are_named_first_the_most_that_fit(share):
    plan = plan_of(max_seq_len=2048, total_batch_size=24 * 2048)
    memory = int(share * plan.expected_bytes)
    fitting = [n for n in (8, 6, 4, 3, 2, 1) if plan.with_rows(n).expected_bytes <= memory]
    assert advice(plan, memory) == f"lower --device_batch_size to {fitting[0]}"


def test_where_one_row_does_not_fit_shorter_rows_or_a_smaller_depth_are_named():
    plan = plan_of(depth=16, device_batch_size=1)
    memory = plan.expected_bytes // 3
    depth = int(re.search(r"--depth to (\d+)", advice(plan, memory))[1])
    fits, too_deep = (plan_of(depth=d, device_batch_size=1).expected_bytes for d in (depth, depth + 1))
    assert fits <= memory < too_deep
    deep = plan_of(depth=60, aspect_ratio=64, device_batch_size=1)
    assert "--depth to" in advice(deep, 8 * 2**30)
    longer = plan_of(max_seq_len=4096, total_batch_size=24 * 4096, device_batch_size=12)
    memory = longer.with_rows(1).expected_bytes * 95 // 100
    assert re.fullmatch(
        r"lower --max_seq_len to 2048 or .* and --device_batch_size to 1", advice(longer, memory)
    )
    assert "--max_seq_len and --depth" in advice(plan, 1000)


def test_fewer_rows_of_ngrams_are_named_the_most_that_fit():
    plan = plan_of(bigrams=600, device_batch_size=1)
    memory = plan.expected_bytes * 2 // 3
    bigrams = int(re.search(r"--bigrams to (\d+)", advice(plan, memory))[1])
    fits, too_many = (plan_of(bigrams=n, device_batch_size=1).expected_bytes for n in (bigrams, bigrams + 1))
    assert fits <= memory < too_many


LIMITED = f"""
import resource, runpy, sys
sys.path.insert(0, {str(ROOT)!r})
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = size + 3 * 2**28  # threads fit, a matrix does not
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
runpy.run_module("scripts.base_train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_a_model_whose_weights_do_not_fit_is_a_sentence_with_what_to_lower(corpus, tmp_path):
    (tmp_path / "limited.py").write_text(LIMITED)
    sizes = ["--depth=2", "--aspect_ratio=4096", "--head_dim=256", "--accept=memory"]  # matrices of a GiB
    done = python_m(["limited", *command(corpus, tmp_path / "out", *sizes)[1:]], folder=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "error: out of memory with 2 rows" in done.stderr and "--device_batch_size=1" in done.stderr


# Shapes that the constants for CPUs were not fitted to (docs/benchmarks.md names those)
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's memory as Linux tells it")
@pytest.mark.parametrize(
    ("depth", "aspect_ratio", "rows", "positions", "dtype", "compiled"),
    [
        (7, 32, 6, 384, "float32", "off"),
        pytest.param(2, 256, 3, 1024, "bfloat16", "off", marks=needs_bfloat16),
        (1, 320, 12, 384, "float32", "on"),
    ],
)
def test_the_plan_says_what_a_run_on_a_cpu_holds_at_its_peak(
    corpus, tmp_path, depth, aspect_ratio, rows, positions, dtype, compiled
):
    shape = {"depth": depth, "aspect_ratio": aspect_ratio, "head_dim": 64, "max_seq_len": positions}
    steps = {"device_batch_size": rows, "total_batch_size": rows * positions, "num_iterations": 2}
    how = {"dtype": dtype, "compile": compiled, "save_every": 1, "sample_prompts": ""}
    more = (f"--{name}={value}" for name, value in (shape | steps | how).items())
    # Not by helpers.python_m, whose processes begin with the memory of their parent
    run = [sys.executable, "-m", *command(corpus, tmp_path / "run", *more)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    planned = json.loads((tmp_path / "run" / "config.json").read_text())["derived"]["memory"]
    peak = max(record.get("peak_memory", 0) for record in records(tmp_path / "run"))
    assert peak > 0.4 * 10**9 and abs(planned / peak - 1) <= 0.2, (planned / 1e6, peak / 1e6)
