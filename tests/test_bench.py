"""The speed bench says what it measured, in figures that can be checked against each other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def bench(*arguments: str, status: int = 0) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "scripts.bench", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_train_reports_each_variant_as_json_on_the_last_line():
    small = [
        "--depth=1",
        "--max_seq_len=64",
        "--vocab_size=512",
        "--device_batch_size=2",
        "--rounds=2",
        "--steps=2",
    ]
    done = bench("--what=train", *small, "--variants=float32,bfloat16", "--json")
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["what"] == "train" and last["settings"]["depth"] == 1
    for variant in ("float32", "bfloat16"):
        row = last["results"][variant]
        assert row["tok_per_sec"] == pytest.approx(2 * 64 / (row["step_ms"] / 1000))
        assert 0 < row["optimizer_share"] < 1
        assert row["mfu"] > 0
    assert last["results"]["float32"]["speed_relative_to_first"] == 1


def test_an_unknown_variant_is_refused_with_those_there_are():
    done = bench("--variants=int8", status=2)
    assert "int8" in done.stderr and "bfloat16" in done.stderr and "Traceback" not in done.stderr


def test_loader_compares_packing_with_raw_encoding_of_the_same_documents(tmp_path):
    for i in range(300):
        (tmp_path / f"{i}.txt").write_text(f"words {i} about nothing in particular " * (i % 20 + 1))
    done = bench(
        "--what=loader", f"--data={tmp_path}", f"--base_dir={tmp_path / 'base'}", "--vocab_size=300",
        "--shapes=2x16,4x64", "--rounds=3", "--json",
    )  # fmt: skip
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert len(results.pop("corpus")["fingerprint"]) == 12 and set(results) == {"2x16", "4x64"}
    for row in results.values():
        assert 0.05 < row["packed_over_raw"] < 5 and row["threaded_tok_per_sec"] > 0
