"""What several test modules share."""

import os
import random
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, settings

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
def tree(tmp_path) -> Path:
    """A copy of the sources to edit."""
    from helpers import copy_sources  # it imports torch

    return copy_sources(tmp_path / "tree")
