"""The figures of docs/faq.md that no other page has: `python -m experiments.faq_measurements`, half a minute.

Each experiment belongs to the question of its number; `--what=28` runs that one. Those about precision are in
faq_precision.py. 41 and 42 read the embedded text; they make it and its tokenizer if they are missing.
"""

import time
from pathlib import Path

import torch

import configurator
from experiments import faq_precision as asked
from nanochat import UserError, scaling
from nanochat.data.dataset import open_dataset
from nanochat.data.loader import TrainLoader
from nanochat.data.tokenizer import open_tokenizer
from nanochat.diagnostics.precision_page import name_of


def embedded(base_dir: str):
    base = Path(base_dir).expanduser()
    dataset = open_dataset("embedded", base_dir=base)
    folder = dataset.tokenizer_folder(base)
    return dataset, open_tokenizer("auto", 4096, folder, dataset.train_texts, exact=False)


def prefetch(dataset, tokenizer, rows=4, max_seq_len=512, step_s=0.03, steps=100) -> dict:
    """Milliseconds a step of 2,048 tokens waits for its batch: asked for at once, and after a step's work."""
    figures = {}
    for name, pause in (("at once", 0), (f"after {1e3 * step_s:.0f} ms of other work", step_s)):
        with TrainLoader(dataset.train_shards, tokenizer, rows, max_seq_len, rows) as loader:
            for _ in range(20):  # the first steps fill the buffers of the lanes
                next(loader)
            before = loader.wait_s
            for _ in range(steps):
                time.sleep(pause)
                next(loader)
            figures[name] = 1e3 * (loader.wait_s - before) / steps
    return figures


def tokens_needed(depth: int, vocab_size: int) -> float:
    """12 tokens for each parameter of matrices and head, base_train.py's horizon."""
    return 12 * scaling.scaling_parameters(scaling.model_config(depth, 64, 128, 2048, vocab_size, "L"))


def epochs(dataset, tokenizer) -> dict:
    """The tokens of the embedded text, and for some depths the tokens needed and how often it is read."""
    there = sum(len(tokenizer.encode(text)) for text in dataset.train_texts())
    figures = {"tokens of the embedded text": there}
    for depth in (4, 8, 12, 20, 26):
        small, large = (tokens_needed(depth, vocab_size) for vocab_size in (4096, 32768))
        figures[f"d{depth}"] = {"vocabulary 4,096": small, "times": small / there, "vocabulary 32,768": large}
    return figures


def show(value) -> str:
    """A figure as text: numbers to five digits, dtypes by their names."""
    if isinstance(value, dict):
        return "; ".join(f"{key} {show(item)}" for key, item in value.items())
    if isinstance(value, list | tuple | set):
        return ", ".join(show(item) for item in value)
    if isinstance(value, torch.dtype):
        return name_of(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,.5g}" if isinstance(value, float) and value < 1e4 else f"{value:,.0f}"
    return str(value)


if __name__ == "__main__":
    what = "all"  # the number of a question from 28 to 42 (or all)
    base_dir = "~/.cache/nanochat"  # where the embedded text is (environment: NANOCHAT_BASE_DIR)

    configurator.configure(globals())
    torch.set_num_threads(1)  # sums in the order of the page's figures
    experiments = {
        "28": asked.without_unscale,
        "29": asked.first_bad_operator,
        "30": asked.old_names,
        "31": asked.float32_region,
        "32": asked.ranges,
        "34": asked.default_dtype,
        "36": asked.capabilities,
        "37": asked.dtypes_and_bytes,
        "38": asked.integer_targets,
        "39": asked.scaler_with_bfloat16,
        "40": asked.lists,
        "41": lambda: prefetch(*embedded(base_dir)),
        "42": lambda: epochs(*embedded(base_dir)),
    }
    if what not in {*experiments, "all"}:
        raise UserError(f"no experiment {what}; there are {', '.join(experiments)}, and all")
    print(f"torch {torch.__version__}, one thread")
    for number in experiments if what == "all" else [what]:
        print(f"\n{number}")
        for name, value in experiments[number]().items():
            print(f"  {name}: {show(value)}")
