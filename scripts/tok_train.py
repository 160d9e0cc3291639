"""Train a tokenizer on a data set, and compare its bytes a token with those of GPT-2's and GPT-4's.

    python -m scripts.tok_train --vocab_size=4096                        # on the embedded text
    python -m scripts.tok_train --data=my_texts/ --vocab_size=16384

Without --out the file is written where base_train looks for a tokenizer of this data and size. The tokenizers
of GPT-2 and GPT-4 are compared only if tiktoken has their files on this machine: they are not downloaded.
"""

import itertools
import json as json_module
import sys
import time
from pathlib import Path

import configurator
from nanochat import UserError
from nanochat.data.parquet import Documents
from nanochat.data.sources import open_dataset
from nanochat.data.tokenizer import from_tiktoken, place_for, tokenizer_path, train
from nanochat.files import user_path
from nanochat.terminal import table

# Text
data = "embedded"  # embedded (Python's library), a file or folder, climbmix, fineweb-edu, hf:OWNER/NAME
val_data: str | None = None  # a file or folder that is the validation split (none = what the data set pins)
text_field = "text"  # the field of JSON objects, or the column of parquet files, that holds the text
max_chars = 500_000_000  # characters to train on (-1 = all; of public data, the first shard) [-1, 1..1e12]

# Tokenizer
vocab_size = -1  # tokens, special ones too (-1 = to suit the amount of text) [-1, 265..2**20]
base_dir = "~/.cache/nanochat"  # where data and tokenizers are kept (environment: NANOCHAT_BASE_DIR)
out: str | None = None  # the JSON file to write (none = where base_train looks for it)

# Report
sample_chars = 1_000_000  # characters of each kind of text in the comparison [1..1e9]
json = False  # print one JSON object as the last line

settings = configurator.configure(globals())

OTHER_SCRIPTS = (
    "Сегодня утром шёл дождь, и мы остались дома. Το βιβλίο είναι πάνω στο τραπέζι. 今天早上下雨了，"  # noqa: RUF001
    "所以我们留在家里。本は机の上にあります。오늘 아침에는 비가 왔습니다. आज सुबह बारिश हो रही थी। "
    "كان الكتاب على الطاولة. הספר על השולחן. วันนี้ฝนตกตอนเช้า Heute Morgen regnete es. 🌧️📚\n"
)


def samples() -> dict[str, str]:
    """{kind: text} for the comparison; all of them are on this machine."""
    import argparse
    import pydoc_data.topics

    validation = itertools.chain.from_iterable(Documents(dataset.val_shards))  # its characters
    english = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    return {
        "validation split": "".join(itertools.islice(validation, sample_chars)),
        "English (Python's manual)": english[:sample_chars],
        "code (argparse.py)": Path(argparse.__file__).read_text("utf-8")[:sample_chars],
        "digits (squares)": " ".join(str(n * n) for n in range(20_000))[:sample_chars],
        "other scripts": OTHER_SCRIPTS,
    }


# ------------------------------------------------------------------------------------------------------
# Train

base_path = user_path("base_dir", base_dir)
dataset = open_dataset(data, val_data, base_dir=base_path, text_field=text_field)
exact = vocab_size != -1  # a size that you give is an error if the text yields fewer tokens
size = vocab_size if exact else dataset.suggested_vocab_size
path = user_path("out", out) if out is not None else tokenizer_path(dataset.tokenizer_folder(base_path), size)
print(f"data: {dataset.name}, {dataset.note}")
began = time.perf_counter()
try:
    with place_for(path) as file:
        tokenizer = train(dataset.train_texts(), size, max_chars=max_chars, exact=exact)
        file.write(tokenizer.to_bytes())
except KeyboardInterrupt:
    sys.exit("stopped; no tokenizer is written")
seconds = time.perf_counter() - began
print(f"trained {tokenizer.vocab_size:,} tokens in {seconds:.1f} s, fingerprint {tokenizer.fingerprint[:12]}")
print(f"written: {path}\n")

# ------------------------------------------------------------------------------------------------------
# Compare bytes a token: more is better

tokenizers, missing = {"this one": tokenizer}, []
for name in ("gpt2", "cl100k_base"):
    try:
        tokenizers[name] = from_tiktoken(name, network=False)
    except UserError:
        missing.append(name)
results = {
    kind: {name: len(text.encode()) / len(each.encode(text)) for name, each in tokenizers.items()}
    for kind, text in samples().items()
    if text  # validation may be empty
}
heads = [f"{name} ({each.vocab_size:,})" for name, each in tokenizers.items()]
rows = [[kind, *(f"{value:.2f}" for value in values.values())] for kind, values in results.items()]
print(table([["bytes a token", *heads], *rows]))
if missing:
    print(f"\nnot compared, because their files are not on this machine: {', '.join(missing)}")
if json:
    record = {"path": str(path), "vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint}
    print(json_module.dumps({**record, "seconds": seconds, "bytes_per_token": results}))
