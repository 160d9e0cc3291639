"""Get data before a run: download public shards or the tasks of CORE, or import your own text.

    python -m scripts.download --name=climbmix --num_shards=8   # public shards: climbmix, fineweb-edu
    python -m scripts.download --name=core                      # the evaluation bundle of CORE's tasks
    python -m scripts.download --data=my_texts/                 # text, JSON and parquet files

Then train with --data=climbmix or --data=my_texts/. If a download stops, the same command continues it.
docs/data.md says how many shards a model needs, and which documents come out of your files.
"""

import os
import re
import sys
from urllib.parse import urlsplit

import configurator
from nanochat import UserError
from nanochat.data.dataset import writing
from nanochat.data.download import download
from nanochat.data.parquet import footer_digest
from nanochat.data.public import HOST, PUBLIC
from nanochat.data.sources import open_dataset
from nanochat.evals.bundle_download import HOST as CORE_HOST
from nanochat.evals.bundle_download import download_bundle
from nanochat.files import user_path

# Public shards
name: str | None = None  # public data set: climbmix or fineweb-edu; or core, the tasks of CORE
num_shards = 8  # training shards; each has 47 million tokens and takes 100 MB (-1 = all) [-1, 1..1e6]
workers = 4  # files downloaded at the same time [1..256]
mirror: str | None = None  # another host with the same paths (none = $HF_ENDPOINT or huggingface.co)
timeout = 30.0  # seconds without a byte after which a connection counts as broken [0.1..1e5]
retries = 8  # failures in a row, without a new byte, after which a file is given up [0..1e4]

# Your own text
data: str | None = None  # a file or folder of text to import, as in base_train
val_data: str | None = None  # a file or folder that is the validation split (none = one document in 40)
text_field = "text"  # the field of JSON objects, or the column of parquet files, that holds the text

# Place
base_dir = "~/.cache/nanochat"  # where data are kept (environment: NANOCHAT_BASE_DIR)

settings = configurator.configure(globals())

if (name is None) == (data is None):
    raise UserError(f"give either --name={'|'.join(PUBLIC)}|core to download, or --data=PATH to import text")
if data is not None:
    dataset = open_dataset(data, val_data, base_dir=base_dir, text_field=text_field)
    print(f"{dataset.name}: {dataset.note}, fingerprint {dataset.fingerprint[:12]}")
    sys.exit(0)
if val_data is not None:
    raise UserError(f"--val_data goes with --data; {name} has its own validation shard, so leave it out")
if name not in (*PUBLIC, "core"):
    raise UserError(f"there is no public data set {name}; choose one of {', '.join(PUBLIC)}, core")
mirror = mirror or (CORE_HOST if name == "core" else os.environ.get("HF_ENDPOINT") or HOST)
try:
    address = urlsplit(mirror)
    good = address.scheme in ("http", "https") and address.hostname and (address.port or 1)
except ValueError:
    good = False
if not good or re.search(r"\s", mirror):
    raise UserError(f"mirror {mirror!r} is no address of a server; use one like https://huggingface.co")

base_path = user_path("base_dir", base_dir)
try:
    if name == "core":
        with writing(base_path):
            missing = download_bundle(base_path, mirror, timeout, retries)
    else:
        public = PUBLIC[name]
        if num_shards >= public.shards:
            most = public.shards - 1
            raise UserError(f"{name} has {most} training shards; give --num_shards=-1 for all of them")
        training_shards = public.shards - 1 if num_shards == -1 else num_shards
        files = [public.validation, *(public.file(number) for number in range(training_shards))]
        folder = base_path / "data" / name
        with writing(folder):
            urls = public.urls(files, mirror)
            missing = download(urls, folder, footer_digest, workers, timeout, retries)
except KeyboardInterrupt:
    sys.exit("stopped; the same command continues the download")
sys.exit(1 if missing else 0)
