"""Real text for the tests of the loader and of the validation batches, and a small Hub."""

import json
from pathlib import Path

import pytest
from hub_server import hub  # noqa: F401 (a fixture)
from shards import write_shard

from nanochat.data.tokenizer import train


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """(shards, tokenizer, texts): 300 texts from source files, and a tokenizer trained on them."""
    folder = tmp_path_factory.mktemp("real")
    texts = [path.read_text("utf-8") for path in sorted(Path(json.__file__).parent.parent.glob("[a-h]*.py"))]
    texts = [text[i : i + 3000] for text in texts for i in range(0, len(text), 3000)][:300]
    shards = [write_shard(folder / f"{i}.parquet", texts[i::2], row_group_size=16) for i in range(2)]
    return shards, train(texts, 600), texts
