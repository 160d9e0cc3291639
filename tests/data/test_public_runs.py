"""base_train on public data that arrives meanwhile: a small data set on a slow server."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import ROOT, losses, records, wait_for_step
from test_download import Handler, server  # noqa: F401

# The data set has 6 training shards of about 2,500 tokens, and a lane keeps few documents
WRAPPER = """
import runpy
from nanochat.data import streaming_shards as arriving, background_download, download, packing, public

public.PUBLIC["climbmix"] = public.Public("somebody/texts", 7)
public.TOKENS_PER_SHARD = 2500
packing.BUFFER_PIECES = 4
download.FIRST_PAUSE_S, download.CHUNK = 0.01, 256
background_download.LONGEST_PAUSE_S = arriving.LOOK_S = 0.1
arriving.MENTION_S = 0.3
arriving.PATIENCE_S = PATIENCE
runpy.run_module("scripts.base_train", run_name="__main__", alter_sys=True)
"""
SETTINGS = [
    "--data=climbmix", "--depth=2", "--aspect_ratio=16", "--head_dim=16", "--max_seq_len=32",
    "--vocab_size=300", "--total_batch_size=256", "--num_iterations=50", "--dtype=float32", "--compile=off",
    "--eval_every=-1", "--save_every=5", "--sample_every=-1", "--core_metric_every=-1",
]  # fmt: skip


class SlowHandler(Handler):
    """Of a file whose name is in `stuck` it sends half, and nothing more for long. Files in `held` wait."""

    def send(self, status, body, headers=None, length=None):
        name = self.path.rsplit("/", 1)[-1]
        if name in self.server.stuck:
            length, body = len(body), body[: len(body) // 2]
        while name in self.server.held:
            time.sleep(0.05)
        super().send(status, body, headers, length)
        if length:
            time.sleep(30)


def shard(seed: int) -> bytes:
    texts = [hashlib.sha512(b"%d %d" % (seed, i)).hexdigest()[: 40 + i] for i in range(40)]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": texts}), sink, row_group_size=10)
    return sink.getvalue().to_pybytes()


@pytest.fixture
def slow(server):  # noqa: F811
    server.files = {f"shard_{i:05d}.parquet": shard(i) for i in range(7)}
    server.stuck, server.held = set(), set()
    server.RequestHandlerClass = SlowHandler
    return server


def start(server, base: Path, *more: str, patience=60.0, processes=1) -> subprocess.Popen:  # noqa: F811
    wrapper = base.parent / f"wrapper-{patience}.py"
    wrapper.write_text(WRAPPER.replace("PATIENCE\n", f"{patience}\n"))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    arguments = [*(torchrun if processes > 1 else []), str(wrapper), *SETTINGS, f"--base_dir={base}", *more]
    environment = os.environ | {"HF_ENDPOINT": server.url, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment, **pipes)


def end(process: subprocess.Popen, status: int = 0) -> str:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == status and (status == 1 or "Traceback" not in out), out
    return out


def run_of(base: Path) -> Path:
    return base / "base_checkpoints" / "d2"


@pytest.mark.slow
def test_shards_that_come_late_or_after_a_kill_change_no_loss(slow, tmp_path):
    late, early, killed = (tmp_path / name for name in ("late", "early", "killed"))
    slow.held = {"shard_00003.parquet"}
    process = start(slow, late, "--download=on")
    wait_for_step(process, run_of(late), 12)
    time.sleep(1.5)
    slow.held = set()
    out = end(process)
    assert "6 of 6 training shards, 5 of them come while training goes on" in out
    assert "waiting for shard_00003.parquet" in out
    asked = [path.rsplit("/", 1)[-1] for path, _, _ in slow.requests]
    assert asked[2:] == [f"shard_{i:05d}.parquet" for i in range(1, 6)]  # in the order of the stream
    steps = [record for record in records(run_of(late)) if "loss" in record]
    assert sum(record["data_wait_s"] for record in steps) > 0.4

    shutil.copytree(late / "data", early / "data")
    out = end(start(slow, early))
    assert losses(run_of(early)) == losses(run_of(late)) and len(losses(run_of(late))) == 50
    assert "6 of 6 training shards, fingerprint" in out and "waiting" not in out
    assert len(slow.requests) == len(asked)

    slow.stuck = {"shard_00003.parquet"}
    process = start(slow, killed, "--download=on")
    wait_for_step(process, run_of(killed), 12)
    part = killed / "data" / "climbmix" / "shard_00003.parquet.part"
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    size, slow.stuck = part.stat().st_size, set()
    out = end(start(slow, killed, "--download=on"))
    assert "going on from" in out and losses(run_of(killed)) == losses(run_of(late))
    ranges = [headers.get("Range") for path, headers, _ in slow.requests if "00003" in path]
    assert f"bytes={size}-" in ranges  # the part was continued


@pytest.mark.slow
def test_when_no_more_text_comes_all_processes_save_and_the_same_command_goes_on_later(slow, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    end(start(slow, whole, "--download=on"))
    content = slow.files.pop("shard_00003.parquet")
    out = end(start(slow, broken, "--download=on", patience=2.0, processes=2), status=1)  # torchrun's own 1
    assert out.count("warning: shard_00003.parquet cannot be downloaded now (HTTP 404") == 1, out
    steps = int(re.search(r"stopped by (?:missing text|another process) after (\d+) steps and saved", out)[1])
    assert out.count("error: the text ends here: shard_00003.parquet has not come for") == 1
    assert "python -m scripts.download --name=climbmix --num_shards=6" in out and 10 < steps < 40
    assert (run_of(broken) / f"step_{steps:06d}" / "manifest.json").exists()
    out = end(start(slow, broken), status=2)  # the downloads are off
    assert "this run reads 6 training shards of climbmix, and 3 of them are in" in out
    slow.files["shard_00003.parquet"] = content
    end(start(slow, broken, "--download=on"))
    expected, found = losses(run_of(whole)), losses(run_of(broken))
    assert found.keys() == expected.keys()
    assert all(abs(found[step] - expected[step]) < 1e-4 for step in expected)
    assert json.loads((broken / "data/climbmix/checksums.json").read_text()).keys() == slow.files.keys()
