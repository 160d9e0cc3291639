"""bench --what=train: medians, and ratios of runs that belong together."""

import pytest
import torch

from experiments import peer_run, train_speed
from nanochat import UserError
from nanochat.machine import runtime
from nanochat.plan.counts import flops_per_token

SETTINGS = {"depth": 1, "aspect_ratio": 64, "head_dim": 64, "max_seq_len": 100, "vocab_size": 512}
SETTINGS |= {"window_pattern": "L", "device_batch_size": 2}


def turn(*step_s: float, **more) -> dict:
    records = [{"step_time_s": seconds, "mfu": seconds, "loss": seconds} for seconds in step_s]
    planned = {"seconds": 8, "num_iterations": 20, "memory": 2**32}
    return {"records": records, "planned": planned, "peak_memory_bytes": 2**30, "first_step_s": 5.0} | more


def test_a_variants_figures_are_of_all_its_steps_and_its_largest_memory():
    slow_start = turn(0.3, 0.4, first_step_s=9.0, peak_memory_bytes=2**31)
    turns = [turn(0.5, 0.1, 0.2), slow_start, turn(first_step_s=6.0)]
    found = train_speed.figures(SETTINGS, turns, {"float32": 1e9}, "float32+compile")
    assert found["step_ms"] == 300 and found["mfu"] == 0.3  # the median of five steps
    assert found["tok_per_sec"] == pytest.approx(200 / 0.3)
    flops = flops_per_token(train_speed.model_of(SETTINGS))
    assert found["mfu_of_measured_peak"] == pytest.approx(200 / 0.3 * flops / 1e9)
    assert found["peak_memory_gib"] == 2 and found["first_step_s"] == 6
    assert found["loss"] == 0.4 and found["planned_memory_gib"] == 4 and found["planned_step_ms"] == 400


def test_ours_over_the_peers_is_of_the_same_round():
    def run(speed: float, memory: int, first_step_s: float) -> peer_run.Run:
        done = [first_step_s, first_step_s + 1]
        return peer_run.Run(0, 60, memory, [], 0.0, step_tok_per_sec=[speed] * 3, step_done_s=done)

    runs = [run(100, 10, 3.0), run(200, 40, 5.0), run(50, 20, 4.0)]
    found = train_speed.over_peer(runs, [150, 200, 100], {"peak_memory_bytes": 30})
    assert found["of_each_round"] == [1.5, 1, 2] and found["ours_over_peer"] == 1.5
    assert found["tok_per_sec"] == 100 and found["first_step_s"] == 4
    assert found["peak_memory_bytes"] == 40 and found["our_memory_over_peers"] == 0.75


def test_a_gpu_is_not_set_beside_the_peer_on_a_cpu(monkeypatch):
    monkeypatch.setattr(runtime, "start", lambda *_, **__: runtime.Machine(torch.device("cuda")))
    with pytest.raises(UserError, match="--device_type=cpu, or --what=gpu"):
        train_speed.bench({"variants": "float32", "device_type": "auto", "peer": "FOLDER"})
