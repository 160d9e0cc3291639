"""Get data before a run: download public shards, or import text of your own.

    python -m scripts.download --name=climbmix --num_shards=8   # public shards: climbmix, fineweb-edu
    python -m scripts.download --data=my_texts/                 # text files, JSON, parquet; once

A download that is stopped goes on where it was. docs/data.md says what becomes a document.
"""

import sys
from pathlib import Path

import configurator
from nanochat import UserError
from nanochat.data.dataset import PUBLIC, open_dataset
from nanochat.data.download import download
from nanochat.data.imported import writing
from nanochat.data.parquet import footer_digest

# Public shards
name: str | None = None  # public data to download: climbmix, fineweb-edu
num_shards = 8  # training shards; the validation shard always comes too (-1 = all there are)
workers = 4  # files downloaded at once
mirror = "https://huggingface.co"  # another host with the same paths, /datasets/REPO/resolve/main/FILE
timeout = 30.0  # seconds without a byte before a connection counts as broken
retries = 8  # times in a row that a file may fail without any progress before it is given up

# Your own text
data: str | None = None  # instead of a download: text to import, as in base_train
val_data: str | None = None  # with data: a file or folder that is the validation split
text_field = "text"  # with data: field of JSON objects, or column of parquet files, with the text

# Place
base_dir = "~/.cache/nanochat"  # where data lie (environment: NANOCHAT_BASE_DIR)

settings = configurator.configure(globals())

if (name is None) == (data is None):
    raise UserError(f"give either --name={'|'.join(PUBLIC)} to download, or --data=PATH to import text")
if data is not None:
    opened = open_dataset(data, val_data, base_dir=base_dir, text_field=text_field)
    print(f"{opened.name}: {opened.note}, fingerprint {opened.fingerprint[:12]}")
    sys.exit(0)
if name not in PUBLIC:
    raise UserError(f"there is no public data set {name}; choose one of {', '.join(PUBLIC)}")
public = PUBLIC[name]
if not -1 <= num_shards < public.shards or num_shards == 0:
    raise UserError(f"num_shards {num_shards} is not -1 (all) or 1 to {public.shards - 1}")

numbers = range(public.shards - 1 if num_shards == -1 else num_shards)
files = [public.validation, *(public.file(number) for number in numbers)]
root = f"{mirror.rstrip('/')}/datasets/{public.repo}/resolve/main"
folder = Path(base_dir).expanduser() / "data" / name
try:
    with writing(folder):
        missing = download(
            {f: f"{root}/{f}" for f in files}, folder, footer_digest, workers, timeout, retries
        )
except KeyboardInterrupt:
    sys.exit("stopped; the same command goes on where it was")
sys.exit(1 if missing else 0)
