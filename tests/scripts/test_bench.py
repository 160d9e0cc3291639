"""The speed bench says what it measured, in figures that can be checked against each other."""

import json
import subprocess
import sys
from pathlib import Path

import fake_peer
import pytest
from helpers import ROOT, python_m, run

from experiments import part_speed
from experiments.gpu_speed import NAMES
from nanochat import UserError

SMALL = ["--depth=1", "--max_seq_len=64", "--vocab_size=512", "--rounds=2", "--steps=2"]


def bench(*arguments: str, status: int = 0) -> subprocess.CompletedProcess:
    done = python_m(["scripts.bench", *arguments])
    assert done.returncode == status, done.stdout + done.stderr
    return done


def record_of(done: subprocess.CompletedProcess) -> dict:
    return next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


@pytest.fixture
def texts(corpus) -> list[str]:
    """The settings for small texts and their tokenizer."""
    return [f"--data={corpus}", f"--base_dir={corpus.parent / 'base'}", "--vocab_size=300"]


@pytest.mark.parametrize(
    "variants", ["float32", pytest.param("bfloat16,float32+compile", marks=pytest.mark.slow)]
)
def test_train_runs_base_train_in_each_variant_and_reports_json_on_the_last_line(texts, variants):
    done = bench(
        "--what=train", *SMALL, *texts, "--rounds=1", "--steps=4", "--device_batch_size=2",
        f"--variants={variants}", "--json",
    )  # fmt: skip
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["what"] == "train" and last["settings"]["depth"] == 1
    names = variants.split(",")
    for name in names:
        row = last["results"][name]
        assert row["tok_per_sec"] == pytest.approx(2 * 64 / (row["step_ms"] / 1000))
        assert row["mfu"] > 0 and row["mfu_of_measured_peak"] > 0 and row["first_step_s"] > 0
        assert row["peak_memory_bytes"] / 2**30 == row["peak_memory_gib"] > 0.05
        assert row["planned_memory_gib"] > 0.05 and row["planned_step_ms"] > 0
        split = row["split"]
        assert sum(split["ms"].values()) == pytest.approx(split["step_ms"])
        assert split["ms"]["products of the head"] > 0 and split["ms"]["optimizer"] > 0
    first = last["results"][names[0]]
    assert first["speed_relative_to_first"] == 1
    at_top = ("tok_per_sec", "mfu", "mfu_of_measured_peak", "peak_memory_bytes", "first_step_s")
    assert {name: last[name] for name in at_top} == {name: first[name] for name in at_top}


@pytest.mark.slow
def test_start_times_the_first_step_of_a_recipe(texts, tmp_path):
    data, base, _ = texts
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        f"data = {data.partition('=')[2]!r}\n"
        "depth = 1\nmax_seq_len = 32\nvocab_size = 300\ntotal_batch_size = 128\nnum_iterations = 1000\n"
    )
    results = record_of(bench("--what=start", f"--recipe={recipe}", base, "--rounds=2", "--json"))["results"]
    assert 0.5 < results["median_s"] <= results["slowest_s"] < 100 and results["first_s"] > 0.5
    assert 0 < min(results[name] for name in ("torch_s", "imports_s", "plan_s")) < 100
    assert results["first_s"] < results["full_first_s"] and results["median_s"] < results["full_median_s"]
    assert results["evaluation_second_s"] > 0 and 0 < results["evaluation_first_s"] < 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--variants=int8"], ["int8", "bfloat16"]),
        (["--variants=float32", "--data=nowhere"], ["base_train failed in float32", "nowhere"]),
        (["--what=optimizer", "--peer=runs"], ["--peer is a folder of karpathy/nanochat"]),
        (["--what=race"], ["--peer=FOLDER"]),
        (["--what=race", "--peer=~stranger/x"], ["--peer=~stranger/x begins with a user"]),
        (["--what=optimizer", "--head_dim=3"], ["error: head_dim is 3; "]),
        (["--what=generate", "--max_seq_len=16"], ["a prompt of 16 tokens", "larger --max_seq_len"]),
        (["--what=loader", "--shapes=8by512"], ["--shapes has '8by512'", "8x512"]),
        (["--what=checkpoint", "--folder=README.md/in"], ["--folder=README.md/in cannot be made"]),
        (["--what=communication"], ["start this with torchrun"]),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(arguments, words):
    said = bench(*SMALL, *arguments, status=2).stderr
    assert all(word in said for word in words) and "Traceback" not in said


@pytest.mark.parametrize(
    ("dtypes", "words"), [("float32", "out of memory"), ("float32,int8", "cannot compute in int8")]
)
def test_what_a_side_cannot_do_is_one_sentence_before_the_first_turn(monkeypatch, dtypes, words):
    def side(*_):
        raise MemoryError("CUDA out of memory")

    monkeypatch.setattr(part_speed, "Side", side)
    shape = {"depth": 1, "aspect_ratio": 64, "head_dim": 64, "max_seq_len": 64, "vocab_size": 512}
    more = {"window_pattern": "L", "device_batch_size": 1, "device_type": "cpu", "dtypes": dtypes}
    with pytest.raises(UserError, match=words):
        part_speed.optimizer(shape | more | {"peer": None})


def test_loader_compares_packing_with_raw_encoding_of_the_same_documents(texts):
    done = bench("--what=loader", *texts, "--shapes=2x16,4x64", "--rounds=3", "--json")
    results = record_of(done)["results"]
    assert len(results.pop("corpus")["fingerprint"]) == 12 and set(results) == {"2x16", "4x64"}
    for row in results.values():
        ratio = row["packed_tok_per_sec"] / row["raw_tok_per_sec"]
        assert ratio > 0 and row["packed_over_raw"] == pytest.approx(ratio)


@pytest.fixture
def peer(tmp_path) -> str:
    return f"--peer={fake_peer.checkout(tmp_path)}"


@pytest.mark.slow
def test_optimizer_is_timed_in_turns_with_the_peers(peer):
    done = bench("--what=optimizer", *SMALL, peer, "--rounds=1", "--dtypes=float32", "--json")
    row = record_of(done)["results"]["float32"]
    assert row["peer_ms"] >= 500  # it sleeps that long
    assert row["ours_over_peer"] == pytest.approx(row["ours_ms"] / row["peer_ms"])


@pytest.mark.slow
def test_generate_takes_turns_with_the_peers_engine(peer):
    done = bench("--what=generate", *SMALL, peer, "--rounds=1", "--dtypes=bfloat16", "--json")
    for rows in (1, 8):
        row = record_of(done)["results"][f"batch {rows}, bfloat16"]
        assert 0 < row["peer_tok_per_sec"] < rows / 0.01  # it sleeps that long for each token
        ratio = row["ours_tok_per_sec"] / row["peer_tok_per_sec"]  # of one round: their median
        assert row["speed_relative_to_peer"] == pytest.approx(ratio)


def test_checkpoint_compares_the_stall_with_a_blocking_save_and_leaves_nothing(tmp_path):
    done = bench("--what=checkpoint", *SMALL, f"--folder={tmp_path}", "--json")
    (row,) = record_of(done)["results"].values()
    assert 0 < row["stall_s"] <= row["background_s"]
    assert row["stall_over_blocking"] == pytest.approx(row["stall_s"] / row["blocking_s"])
    assert row["stall_over_bare_write"] == pytest.approx(row["stall_s"] / row["bare_write_s"])
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/net/dev").exists(), reason="no counter of the loopback's bytes here")
def test_communication_counts_what_two_processes_send_and_hold():
    printed = run(["scripts.bench", "--what=communication", *SMALL, "--json"], processes=2)
    record = next(json.loads(line) for line in printed.splitlines() if line.startswith("{"))
    row = record["results"]
    weights = row["weights_mb"]  # other programs may use the loopback too, so no upper bound is tight
    assert weights < row["plain_ddp_mb"]
    assert weights / 2 < row["gradients_mb"] and weights / 2 * 0.9 < row["new_weights_mb"]
    ratio = (row["gradients_mb"] + row["new_weights_mb"]) / row["plain_ddp_mb"]
    assert row["bytes_over_plain_ddp"] == record["bytes_over_plain_ddp"] == pytest.approx(ratio)
    assert row["gradients_held_mb"] == pytest.approx(weights)
    assert row["plain_ddp_held_mb"] == pytest.approx(2 * weights)


def test_gpu_gives_an_object_with_each_part_on_the_last_line():
    done = bench("--what=gpu", "--parts=base_train_d12,fp8", "--device_type=cpu", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    last = lines.pop()
    assert list(last["parts"]) == ["machine", "fp8", "base_train_d12"] and last["what"] == "gpu"
    assert [{"part": name} | row for name, row in last["parts"].items()] == lines
    assert last["parts"]["base_train_d12"] == {"ok": True, "seconds": 0.0, "skipped": "needs cuda"}


def test_the_record_names_the_gpu_that_was_measured():
    """CUDA is a stand-in, so the parts fail; no time is left for most."""
    code = (
        "import runpy, sys, torch\n"
        "torch.cuda.is_available = lambda: True; torch.cuda.device_count = lambda: 1\n"
        "torch.cuda.get_device_name = lambda device: 'Imagined 9000'; torch.cuda.set_device = id\n"
        "sys.argv = ['bench', '--what=gpu', '--json', '--minutes=0.01']\n"
        "runpy.run_module('scripts.bench', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["machine"]["device"] == "Imagined 9000"
    assert all("not run" in part["error"] for part in record["parts"].values() if "variants" not in part)


@pytest.mark.slow
def test_gpu_runs_every_part_small_on_a_cpu(texts, tmp_path):
    done = bench("--what=gpu", *texts, "--device_type=cpu", "--json", f"--folder={tmp_path / 'tables'}")
    parts = json.loads(done.stdout.splitlines()[-1])["parts"]
    assert list(parts) == list(NAMES)
    assert all(row["ok"] for row in parts.values())
    skipped = {name: row["skipped"] for name, row in parts.items() if "skipped" in row}
    assert skipped.keys() - {"levers"} == {"fp8", "base_train_d12"}
    assert list(parts["waits"]["waits"].values()) == [parts["waits"]["steps"]]  # a CPU waits once a step
    assert parts["resume"]["bit_for_bit"]
    speed = parts["d12"]["variants"]["ours"]
    assert speed["tok_per_sec"] == pytest.approx(256 / speed["step_s"], rel=2e-3) and 0 < speed["mfu"] < 5
    split = speed["time_split"]
    assert sum(split["share"].values()) == pytest.approx(1, abs=0.01) and split["ms"]["products"] > 0
    tables = {path.name for path in (tmp_path / "tables").iterdir()}
    assert tables == {"step-ours-d12.md", "step-ours-d24.md"}
    one, eight = (parts["save_evaluate_sample"]["sample"][f"tok_per_sec_batch_{n}"] for n in (1, 8))
    assert 0 < one < eight
    assert set(parts["ceilings"]["products"]) == {"copy_gb_per_s", "d12", "d24"}
