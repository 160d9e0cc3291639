"""The speed bench says what it measured, in figures that can be checked against each other."""

import json
import subprocess
from pathlib import Path

import pytest
from helpers import python_m

from experiments import generate_speed
from experiments.gpu_speed import PARTS
from nanochat.plan import scaling

SMALL = ["--depth=1", "--max_seq_len=64", "--vocab_size=512", "--rounds=2", "--steps=2"]


def bench(*arguments: str, status: int = 0, how=("scripts.bench",)) -> subprocess.CompletedProcess:
    done = python_m([*how, *arguments])
    assert done.returncode == status, done.stdout + done.stderr
    return done


def results_of(done: subprocess.CompletedProcess) -> dict:
    return next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))["results"]


@pytest.fixture
def texts(tmp_path) -> list[str]:
    """The settings for a folder of small texts, and for a base folder of their own."""
    (tmp_path / "texts").mkdir()
    for i in range(300):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"words {i} about nothing in particular " * (i % 20 + 1))
    return [f"--data={tmp_path / 'texts'}", f"--base_dir={tmp_path / 'base'}", "--vocab_size=300"]


def test_train_runs_base_train_in_each_variant_and_reports_json_on_the_last_line(texts):
    done = bench(
        "--what=train", *SMALL, *texts, "--rounds=1", "--steps=4", "--device_batch_size=2",
        "--variants=float32,bfloat16", "--json",
    )  # fmt: skip
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["what"] == "train" and last["settings"]["depth"] == 1
    for variant in ("float32", "bfloat16"):
        row = last["results"][variant]
        assert row["tok_per_sec"] == pytest.approx(2 * 64 / (row["step_ms"] / 1000))
        assert row["mfu"] > 0 and row["mfu_of_measured_peak"] > 0 and 0.5 < row["first_step_s"] < 100
        assert row["peak_memory_bytes"] / 2**30 == row["peak_memory_gib"] > 0.05
        check_split(row["split"])
    first = last["results"]["float32"]
    assert first["speed_relative_to_first"] == 1
    at_top = ("tok_per_sec", "mfu", "mfu_of_measured_peak", "peak_memory_bytes", "first_step_s")
    assert {name: last[name] for name in at_top} == {name: first[name] for name in at_top}
    dtypes = {
        name: {p["dtype"] for p in last["results"][name]["split"]["products"]}
        for name in last["results"]
        if name not in at_top
    }
    assert dtypes == {"float32": {"float32"}, "bfloat16": {"bfloat16"}}


def check_split(split: dict):
    """The kinds are the whole step, and each kind of work is there."""
    kinds = split["kinds"]
    assert sum(row["ms"] for row in kinds.values()) == pytest.approx(split["step_ms"])
    assert sum(row["share"] for row in kinds.values()) == pytest.approx(1)
    assert all(row["ms"] > 0 for row in kinds.values()), kinds
    assert all(row["could_ms"] > 0 for name, row in kinds.items() if name not in ("data", "log", "rest"))
    # The blocks' 6 products of one layer and its three gates, each forward and two backward
    assert sum(row["count"] for row in split["products"]) == 3 * 9
    sizes = {row["what"] for row in split["products"]}
    assert {"128 x 64 @ 64 x 64", "128 x 64 @ 64 x 256", "256 x 128 @ 128 x 64"} <= sizes


@pytest.mark.slow
def test_train_splits_a_compiled_step_and_names_its_fused_kernels(texts):
    done = bench(
        "--what=train", *SMALL, *texts, "--rounds=1", "--steps=3", "--device_batch_size=2",
        "--variants=float32+compile", "--json",
    )  # fmt: skip
    split = results_of(done)["float32+compile"]["split"]
    check_split(
        split
    )  # compiled code looks tokens up in a fused kernel, so its name was there with its bytes


def test_train_says_why_base_train_failed():
    done = bench("--what=train", *SMALL, "--variants=float32", "--data=nowhere", status=2)
    assert "base_train failed in float32: error: " in done.stderr and "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_start_times_the_first_step_of_a_recipe(texts, tmp_path):
    data, base, _ = texts
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        f"data = {data.partition('=')[2]!r}\n"
        "depth = 1\nmax_seq_len = 32\nvocab_size = 300\ntotal_batch_size = 128\nnum_iterations = 1000\n"
    )
    done = bench("--what=start", f"--recipe={recipe}", base, "--rounds=2", "--json")
    results = results_of(done)
    assert 0.5 < results["median_s"] <= results["slowest_s"] < 100 and results["first_s"] > 0.5
    assert 0 < min(results[name] for name in ("torch_s", "imports_s", "plan_s")) < 100
    assert results["first_s"] < results["full_first_s"] and results["median_s"] < results["full_median_s"]


def test_an_unknown_variant_is_refused_with_those_there_are():
    done = bench("--variants=int8", status=2)
    assert "int8" in done.stderr and "bfloat16" in done.stderr and "Traceback" not in done.stderr


def test_loader_compares_packing_with_raw_encoding_of_the_same_documents(texts):
    done = bench("--what=loader", *texts, "--shapes=2x16,4x64", "--rounds=3", "--json")
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert len(results.pop("corpus")["fingerprint"]) == 12 and set(results) == {"2x16", "4x64"}
    for row in results.values():
        ratio = row["packed_tok_per_sec"] / row["raw_tok_per_sec"]
        assert row["packed_over_raw"] == pytest.approx(ratio) and 0.05 < ratio < 5


# Stands in for the peer's optimizer: says what it was given, and takes a known time for a step
PEER = """
import json, time, torch

class MuonAdamW:
    def __init__(self, groups):
        assert {p.device.type for g in groups for p in g["params"]} == {"cpu"}
        shapes = [[g["kind"], str(p.dtype), list(p.shape)] for g in groups for p in g["params"]]
        with open("groups.json", "w") as f:
            json.dump(shapes, f)

    def step(self):
        time.sleep(0.5)
"""


def test_evaluate_gives_the_number_of_the_plain_way_and_both_speeds(texts):
    done = bench("--what=evaluate", *SMALL, *texts, "--dtypes=float32", "--rounds=1", "--json")
    row = results_of(done)["float32"]
    assert row["difference_of_bpb"] < 1e-6
    assert row["plain_tok_per_sec"] > 0 and row["ours_tok_per_sec"] > 0 and row["ours_over_plain"] > 0


def test_optimizer_is_timed_in_turns_with_the_peers_on_the_same_shapes(tmp_path):
    (tmp_path / "nanochat").mkdir()
    (tmp_path / "nanochat" / "optim.py").write_text(PEER)
    (tmp_path / "nanochat" / "common.py").write_text("import torch\nCOMPUTE_DTYPE = torch.bfloat16\n")
    done = bench("--what=optimizer", *SMALL, f"--peer={tmp_path}", "--rounds=1", "--dtypes=float32", "--json")
    row = results_of(done)["float32"]
    assert row["peer_ms"] >= 500  # it sleeps that long
    assert row["ours_over_peer"] == pytest.approx(row["ours_ms"] / row["peer_ms"])
    config = scaling.model_config(1, 64, 64, 64, 512, "L")
    ours = {name: list(p.shape) for name, p in scaling.on_meta(config).named_parameters() if p.ndim == 2}
    theirs = json.loads((tmp_path / "groups.json").read_text())
    assert sorted(shape for _, _, shape in theirs) == sorted(ours.values())
    matrices = sorted(shape for name, shape in ours.items() if name.startswith("blocks."))
    assert sorted(shape for kind, _, shape in theirs if kind == "muon") == matrices
    assert ["adamw", "torch.float32", ours["head.weight"]] in theirs
    assert ["adamw", "torch.bfloat16", ours["embedding.weight"]] in theirs


def test_a_folder_that_is_not_the_peers_is_refused(tmp_path):
    done = bench("--what=optimizer", *SMALL, f"--peer={tmp_path}", status=2)
    assert "has no nanochat/optim.py" in done.stderr and "Traceback" not in done.stderr


def test_an_unknown_dtype_of_the_optimizer_is_refused_with_those_there_are():
    done = bench("--what=optimizer", *SMALL, "--dtypes=int8", status=2)
    assert "int8" in done.stderr and "--dtype=bfloat16" in done.stderr and "Traceback" not in done.stderr


def test_checkpoint_compares_the_stall_with_a_blocking_save_and_leaves_nothing(tmp_path):
    done = bench("--what=checkpoint", *SMALL, f"--folder={tmp_path}", "--json")
    (row,) = results_of(done).values()
    assert 0 < row["stall_s"] <= row["background_s"]
    assert row["stall_over_blocking"] == pytest.approx(row["stall_s"] / row["blocking_s"])
    assert row["stall_over_bare_write"] == pytest.approx(row["stall_s"] / row["bare_write_s"])
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/net/dev").exists(), reason="no counter of the loopback's bytes here")
def test_communication_counts_what_two_processes_send_and_hold():
    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "scripts.bench"]
    done = bench("--what=communication", *SMALL, "--json", how=torchrun)
    row = results_of(done)
    weights = row["weights_mb"]  # other programs may use the loopback too, so no upper bound is tight
    assert weights < row["plain_ddp_mb"]
    assert weights / 2 < row["gradients_mb"] and weights / 2 * 0.9 < row["new_weights_mb"]
    ratio = (row["gradients_mb"] + row["new_weights_mb"]) / row["plain_ddp_mb"]
    assert row["bytes_over_plain_ddp"] == pytest.approx(ratio)
    assert json.loads(done.stdout.splitlines()[-1])["bytes_over_plain_ddp"] == row["bytes_over_plain_ddp"]
    assert row["gradients_held_mb"] == pytest.approx(weights)
    assert row["plain_ddp_held_mb"] == pytest.approx(2 * weights)
    alone = bench("--what=communication", *SMALL, status=2)
    assert "start this with torchrun" in alone.stderr


PEER_ENGINE = """
import time

class Engine:
    def __init__(self, model, tokenizer):
        assert tokenizer.get_bos_token_id() == -1

    def generate(self, tokens, num_samples, max_tokens, temperature, top_k):
        for _ in range(max_tokens):
            time.sleep(0.01)
            yield [0] * num_samples, [1] * num_samples
"""
PEER_GPT = """
import torch

class GPTConfig(dict):
    pass

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config["n_layer"] == 1 and config["n_embd"] == 64 and config["vocab_size"] == 512

    def init_weights(self):
        pass
"""


@pytest.mark.slow
def test_generate_takes_turns_with_the_peers_engine(tmp_path):
    (tmp_path / "nanochat").mkdir()
    (tmp_path / "nanochat" / "engine.py").write_text(PEER_ENGINE)
    (tmp_path / "nanochat" / "gpt.py").write_text(PEER_GPT)
    done = bench("--what=generate", *SMALL, f"--peer={tmp_path}", "--rounds=1", "--dtypes=float32", "--json")
    for rows in (1, 8):
        row = results_of(done)[f"batch {rows}, float32"]
        assert 0 < row["peers_tok_per_sec"] < rows / 0.01  # it sleeps that long for each token
        ratio = row["ours_tok_per_sec"] / row["peers_tok_per_sec"]  # of one round: their median
        assert row["speed_relative_to_peer"] == pytest.approx(ratio)


def test_generate_compares_turn_by_turn_and_takes_medians():
    row = generate_speed.row_of({"ours": [1.0, 2.0, 4.0], "peers": [3.0, 4.0, 80.0]}, tokens=8)
    assert row == {"ours_tok_per_sec": 4.0, "peers_tok_per_sec": 2.0, "speed_relative_to_peer": 3.0}


def test_generate_refuses_a_folder_that_is_not_the_peers(tmp_path):
    done = bench("--what=generate", *SMALL, f"--peer={tmp_path}", status=2)
    assert "has no nanochat/engine.py" in done.stderr and "Traceback" not in done.stderr


def test_a_race_needs_the_peer():
    done = bench("--what=race", status=2)
    assert "--peer=FOLDER" in done.stderr and "Traceback" not in done.stderr


def test_gpu_gives_an_object_with_each_part_on_the_last_line():
    done = bench("--what=gpu", "--parts=peer_d12,speed_d24", "--device_type=cpu", "--json")
    first, last = json.loads(done.stdout.splitlines()[0]), json.loads(done.stdout.splitlines()[-1])
    assert list(last["parts"]) == ["speed_d24", "peer_d12"] and last["what"] == "gpu"
    assert first == {"part": "speed_d24"} | last["parts"]["speed_d24"]
    assert last["parts"]["speed_d24"] == {"ok": True, "seconds": 0.0, "skipped": "needs CUDA"}


@pytest.mark.slow
def test_gpu_runs_every_part_small_on_a_cpu(texts):
    done = bench("--what=gpu", *texts, "--device_type=cpu", "--json")
    parts = json.loads(done.stdout.splitlines()[-1])["parts"]
    assert list(parts) == [part.name for part in PARTS]
    assert all(row["ok"] for row in parts.values())
    skipped = {name: row["skipped"] for name, row in parts.items() if "skipped" in row}
    needs = {part.name for part in PARTS if part.needs} | {"waits"}
    assert set(skipped) == needs and all("CUDA" in why or "--peer" in why for why in skipped.values())
    assert parts["resume"]["bit_for_bit"]
    speed = parts["speed_d12"]
    assert speed["tok_per_sec"] == pytest.approx(256 / speed["step_s"], rel=2e-3) and 0 < speed["mfu"] < 5
    split = speed["time_split"]
    assert sum(split["share"].values()) == pytest.approx(1, abs=0.01) and split["ms"]["products"] > 0
    one, eight = (parts["save_evaluate_sample"]["sample"][f"tok_per_sec_batch_{n}"] for n in (1, 8))
    assert 0 < one < eight
    assert set(parts["ceilings"]["products"]) == {"copy_gb_per_s", "d12", "d20", "d24"}
