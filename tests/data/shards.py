"""What the tests of the data share that need no torch: shards are written and read, and the split by hash."""

import hashlib
import itertools
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.data.parquet import Documents


def write_shard(path: Path, texts, **options) -> Path:
    """A parquet file with a column `text`; `options` are those of pyarrow's write_table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = texts if isinstance(texts, pa.Array) else pa.array(texts, pa.string())
    pq.write_table(pa.table({"text": texts}), path, **options)
    return path


def documents(dataset) -> tuple[list[str], list[str]]:
    """The training documents and the validation documents of a data set."""
    return list(Documents(dataset.train_shards)), list(Documents(dataset.val_shards))


def is_validation(text: str) -> bool:
    """The rule of docs/data.md, by hand."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 40 == 0


def flat(lists) -> list:
    return list(itertools.chain.from_iterable(lists))
