"""What several test modules share."""

import os
import random
import runpy
import signal
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, settings
from watch import Watch

# One thread for torch, here and in children: two files of tests run at a time, sums have one order, and a
# tiny model has no work for a second thread. OpenMP reads this when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell's background jobs begin with SIGINT ignored, and the processes that tests start would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)

# An example may take any time: other programs may hold the cores
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_collection_modifyitems(items):
    """Files of whole runs are long and begin first: the last file that begins keeps one process waiting."""
    items.sort(key=lambda item: "scripts" not in item.path.parts)


@pytest.fixture(scope="session", autouse=True)
def base_dir(tmp_path_factory):
    """No test reads or writes the user's base folder."""
    os.environ["NANOCHAT_BASE_DIR"] = str(tmp_path_factory.mktemp("base-dir"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Shards of random sentences, and a base folder in which all runs share a tokenizer."""
    folder, draw = tmp_path_factory.mktemp("corpus"), random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "print", "return", "def", "\n", "(x)", "="]
    texts = [" ".join(draw.choices(words, k=draw.randint(5, 120))) for _ in range(400)]
    pq.write_table(pa.table({"text": texts[:380]}), folder / "train.parquet", row_group_size=20)
    pq.write_table(pa.table({"text": texts[380:]}), folder / "val.parquet")
    return folder


@pytest.fixture
def clock(monkeypatch):
    """The clock of the console and of its bars; a test moves it on."""
    clock = Watch()
    for module in ("run.console", "terminal"):
        monkeypatch.setattr(f"nanochat.{module}.time", clock)
    return clock


@pytest.fixture
def run_script(monkeypatch, capsys):
    """run_script("report", "d4") runs a script in this process; returns what it wrote to (stdout, stderr)."""

    def run_script(name: str, *arguments: str):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_module(f"scripts.{name}", run_name="__main__")
        return capsys.readouterr()

    # Scripts change these
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    hook = sys.excepthook
    yield run_script
    for number, handler in handlers.items():
        signal.signal(number, handler)
    sys.excepthook = hook


@pytest.fixture
def first_process(monkeypatch):
    """The test is the first process of a machine, without a base folder, and may change sys.excepthook."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for name in ("NANOCHAT_BASE_DIR", "LOCAL_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def tree(tmp_path) -> Path:
    """A copy of the sources to edit."""
    from helpers import copy_sources  # it imports torch

    return copy_sources(tmp_path / "tree")
