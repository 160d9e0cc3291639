"""Ablations: each variant is trained once for each seed, and what was trained is not trained again."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def ablate(tmp_path: Path, *arguments: str) -> tuple[dict, str]:
    text = "".join(json.dumps(f"document {i} " + "word and word " * (i % 90)) + "\n" for i in range(400))
    (tmp_path / "texts.jsonl").write_text(text)
    command = [sys.executable, "-m", "scripts.ablate", "--what=packing", "--json", "--dtype=float32"]
    command += ["--depth=1", "--max_seq_len=32", "--vocab_size=300", "--total_batch_size=128"]
    command += ["--num_iterations=3", "--eval_tokens=500", "--device_type=cpu"]
    os.utime(tmp_path / "texts.jsonl", (1, 1))  # the same file as before
    command += [f"--data={tmp_path / 'texts.jsonl'}", f"--base_dir={tmp_path / 'base'}", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def test_packing_is_compared_over_seeds_and_goes_on_where_it_was(tmp_path):
    first, out = ablate(tmp_path, "--seeds=1")
    assert [run["variant"] for run in first["results"]] == [
        "best fit, remainders kept",
        "best fit, cropped",
        "concatenation",
    ]
    assert len({run["val_bpb"] for run in first["results"]}) == 3  # the variants differ
    assert all(0 < run["first_window_bpb"] < 9 and run["loss"] > 0 for run in first["results"])
    assert out.count("seed 0: ") == 3
    kept = tmp_path / "base" / "ablations" / "packing.jsonl"
    kept.write_text(kept.read_text() + '{"cut off')  # as a stopped machine leaves it
    again, out = ablate(tmp_path, "--seeds=2")
    assert out.count("seed 0: ") == 0 and out.count("seed 1: ") == 3
    assert [run for run in again["results"] if run["seed"] == 0] == first["results"]
    table = (tmp_path / "base" / "ablations" / "packing.md").read_text()
    assert table in out and table.count("±") == 6 and "2 seeds" in table
