"""The figures of docs/faq.md that no other page has: `python -m experiments.faq_measurements`, half a minute.

Each experiment has the number of its question; `--what=28` runs that one. Most are in faq_precision.py
and faq_autocast.py. Number 41 reads the embedded text, and makes it and its tokenizer if they are missing.
Number 15 compiles for a minute, so it runs only if you ask for it.
"""

import time
from pathlib import Path

import torch
import torch._functorch.config as functorch

import configurator
from experiments import faq_autocast
from experiments import faq_precision as asked
from experiments.measurements import byte_rows, flat_grad, our_model
from nanochat import UserError
from nanochat.data.loader import TrainLoader
from nanochat.data.sources import open_dataset
from nanochat.machine import precision
from nanochat.machine.compiling import compile_parts
from nanochat.machine.precision import name_of


def embedded(base_dir: str):
    base = Path(base_dir).expanduser()
    dataset = open_dataset("embedded", base_dir=base)
    return dataset, dataset.open_tokenizer("auto", -1, base)


def prefetch(dataset, tokenizer, rows=4, max_seq_len=512, step_s=0.03, steps=100) -> dict:
    """Milliseconds that a step of 2,048 tokens waits for its batch: at once, and after other work."""
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


def compiled_backward() -> dict:
    """torch.compile traces the backward pass under the autocast of the forward pass, unless a setting says
    "off". Does our small model get the same gradient, bit for bit, either way?"""
    before, grads = functorch.backward_pass_autocast, []
    for mode in ("same_as_forward", "off"):
        torch._dynamo.reset()
        functorch.backward_pass_autocast, model = mode, our_model()
        try:
            with precision.autocast(torch.device("cpu"), torch.bfloat16):
                loss = compile_parts(model)(*byte_rows(64, 99))
            loss.backward()
        finally:
            functorch.backward_pass_autocast = before
        grads.append(flat_grad(model))
    return {"default": before, "equal in every bit": torch.equal(*grads)}


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
    what = "all"  # the number of a question, or all
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
        "51": faq_autocast.where_autocast_is,
        "52": faq_autocast.autocast_to_float32,
        "53": faq_autocast.gradient_dtypes,
        "54": faq_autocast.probabilities_times_values,
        "55": faq_autocast.long_rows,
    }
    if what not in {*experiments, "15", "all"}:
        raise UserError(f"no experiment {what}; there are 15, {', '.join(experiments)}, and all (but 15)")
    print(f"torch {torch.__version__}, one thread")
    for number in experiments if what == "all" else [what]:
        print(f"\n{number}")
        for name, value in (experiments | {"15": compiled_backward})[number]().items():
            print(f"  {name}: {show(value)}")
