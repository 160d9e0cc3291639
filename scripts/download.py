"""Get data before a run: download public shards or the tasks of CORE, or import your own text.

    python -m scripts.download --name=climbmix --num_shards=8   # public shards: climbmix, fineweb-edu
    python -m scripts.download --name=core                      # the evaluation bundle of CORE's tasks
    python -m scripts.download --data=my_texts/                 # text, JSON and parquet files
    python -m scripts.download --data=hf:OWNER/NAME --num_shards=8  # files of a data set of the Hub

Then train with --data=climbmix or --data=my_texts/. If a download stops, the same command continues it.
docs/data.md says how many shards a model needs, and which documents come out of your files.
"""

import os
import sys

import configurator
from nanochat import UserError
from nanochat.data import download, hub
from nanochat.data.conversations import are_conversations
from nanochat.data.dataset import writing
from nanochat.data.public import PUBLIC
from nanochat.data.sources import open_dataset
from nanochat.evals.bundle import download_bundle
from nanochat.files import user_path
from nanochat.terminal import counted

# Public shards
name: str | None = None  # public data set: climbmix or fineweb-edu; or core, the tasks of CORE
num_shards: int | None = None  # training shards, each 100 MB (none = 8, -1 = all); files of hf: [-1, 1..1e6]
workers = 4  # files downloaded at the same time [1..256]
mirror: str | None = None  # another host with the same paths (none = $HF_ENDPOINT or huggingface.co)

# Your own text
data: str | None = None  # a file or folder of text to import, or hf:OWNER/NAME, as in base_train
val_data: str | None = None  # a file or folder that is the validation split (none = one document in 40)
text_field = "text"  # the field of JSON objects, or the column of parquet files, that holds the text

# Place
base_dir = "~/.cache/nanochat"  # where data are kept (environment: NANOCHAT_BASE_DIR)

settings = configurator.configure(globals())

if (name is None) == (data is None):
    raise UserError(f"give either --name={'|'.join(PUBLIC)}|core to download, or --data=PATH to import text")
if name not in (None, *PUBLIC, "core"):
    raise UserError(f"there is no public data set {name}; choose one of {', '.join(PUBLIC)}, core")
if name is not None and val_data is not None:
    raise UserError(f"--val_data goes with --data; {name} has its own validation shard, so leave it out")
if mirror:
    os.environ["HF_ENDPOINT"] = mirror
    download.endpoint()  # UserError if it is no address

base_path = user_path("base_dir", base_dir)
try:
    if data is not None:
        count = sys.maxsize if num_shards == -1 else num_shards
        on_hub = data.startswith(hub.PREFIX)
        folder, files = hub.local_files(data, base_path, count=count) if on_hub else (None, [])
        if files and are_conversations(files[0], text_field):
            print(f"{counted(len(files), 'file', 'files')} of conversations, for mid_train, in {folder}")
        else:
            dataset = open_dataset(data, val_data, base_dir=base_dir, text_field=text_field, num_shards=count)
            print(f"{dataset.name}: {dataset.note}, fingerprint {dataset.fingerprint[:12]}")
    elif name == "core":
        with writing(base_path):
            download_bundle(base_path, mirror)
    else:
        public = PUBLIC[name]
        num_shards, most = num_shards or 8, public.shards - 1
        if num_shards > most:
            raise UserError(f"{name} has {most} training shards; give --num_shards=-1 for all of them")
        files = [public.validation, *map(public.file, range(most if num_shards == -1 else num_shards))]
        folder = base_path / "data" / name
        download.fetch(public.repo, files, folder, workers=workers, compare=True)
        print(f"{len(files)} files are in {folder}")
except KeyboardInterrupt:
    sys.exit("stopped; the same command goes on")
