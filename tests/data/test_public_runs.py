"""base_train on public data that arrives meanwhile: a small data set on a Hub that holds shards back."""

import hashlib
import re
from pathlib import Path

import pytest
from helpers import losses, run
from hub_server import parquet

# The data set has 6 training shards of about 2,500 tokens, and a lane keeps few documents
WRAPPER = """
import runpy
from nanochat.data import streaming_shards, download, packing, public

public.PUBLIC["climbmix"] = public.Public("somebody/texts", 7)
public.TOKENS_PER_SHARD = 2500
packing.BUFFER_PIECES = 4
download.PAUSE_S = download.LONGEST_PAUSE_S = streaming_shards.LOOK_S = 0.1
streaming_shards.PATIENCE_S = PATIENCE
runpy.run_module("scripts.base_train", run_name="__main__", alter_sys=True)
"""
SETTINGS = [
    "--data=climbmix", "--depth=2", "--aspect_ratio=16", "--head_dim=16", "--max_seq_len=32",
    "--vocab_size=300", "--total_batch_size=256", "--num_iterations=50", "--dtype=float32", "--compile=off",
    "--eval_every=-1", "--save_every=5", "--sample_every=-1", "--core_metric_every=-1",
]  # fmt: skip


@pytest.fixture
def shards(hub):
    for seed in range(7):
        texts = [hashlib.sha512(b"%d %d" % (seed, i)).hexdigest()[: 40 + i] for i in range(40)]
        hub.files[f"shard_{seed:05d}.parquet"] = parquet(texts, row_group_size=10)
    return hub


def train(base: Path, *more: str, patience=60.0, **how) -> str:
    wrapper = base.parent / f"wrapper-{patience}.py"
    wrapper.write_text(WRAPPER.replace("PATIENCE\n", f"{patience}\n"))
    out = run([str(wrapper), *SETTINGS, f"--base_dir={base}", *more], **how)
    assert "Traceback" not in out, out
    return out


def run_of(base: Path) -> Path:
    return base / "base_checkpoints" / "d2"


@pytest.mark.slow
def test_when_no_more_text_comes_all_processes_save_and_the_same_command_goes_on_later(shards, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(whole, "--download=on")
    content = shards.files.pop("shard_00003.parquet")
    out = train(broken, "--download=on", patience=2.0, processes=2, status=2)
    assert "6 of 6 training shards, 5 of them come while training goes on" in out, out
    assert out.count("warning: shard_00003.parquet cannot be downloaded now") == 1 and "404" in out, out
    steps = int(re.search(r"stopped by (?:missing text|another process) after (\d+) steps and saved", out)[1])
    assert out.count("error: the text ends here: shard_00003.parquet has not come for") == 1
    assert "python -m scripts.download --name=climbmix --num_shards=6" in out and 10 < steps < 40
    assert (run_of(broken) / f"step_{steps:06d}" / "manifest.json").exists()
    out = train(broken, status=2)  # the downloads are off
    assert "this run reads 6 training shards of climbmix, and 3 of them are in" in out
    shards.files["shard_00003.parquet"] = content
    train(broken, "--download=on")
    expected, found = losses(run_of(whole)), losses(run_of(broken))
    assert found.keys() == expected.keys()
    assert all(abs(found[step] - expected[step]) < 1e-4 for step in expected)
    assert {path.name for path in (broken / "data" / "climbmix").glob("*.parquet")} == shards.files.keys()


def test_a_plan_needs_neither_a_shard_nor_the_hub(shards, tmp_path):
    out = train(tmp_path / "base", "--plan", "--download=on")
    assert re.search(r"about \d of 6 training shards, not here yet", out) and "300 tokens" in out, out
    assert shards.requests == [] and not (tmp_path / "base" / "data").exists()
