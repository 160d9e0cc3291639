"""The figures of docs/faq.md that no other page has: `python -m experiments.faq_measurements`, half a minute.

Each experiment has the number of its question; `--what=28` runs that one. Numbers 28 to 39 are in
faq_precision.py. Number 41 reads the embedded text, and makes it and its tokenizer if they are missing.
"""

import math
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

import configurator
from experiments import faq_precision as asked
from experiments.autocast_rules import autocast_on
from experiments.faq_precision import CPU, distance, message_of
from nanochat import UserError
from nanochat.data.loader import TrainLoader
from nanochat.data.sources import open_dataset
from nanochat.machine import precision
from nanochat.machine.precision import name_of

what = "all"  # the number of a question, or all
base_dir = "~/.cache/nanochat"  # where the embedded text is (environment: NANOCHAT_BASE_DIR)


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


# ------------------------------------------------------------------------------------------------------
# 51 to 55: autocast inside, dtypes of gradients, long rows


class Seen(torch.autograd.Function):
    """A custom autograd function that notes the dtypes of x and of x @ x inside."""

    seen = ()

    @staticmethod
    def forward(ctx, x):
        Seen.seen = x.dtype, (x @ x).dtype
        return x.clone()


class SeenAndCast(Seen):
    forward = staticmethod(torch.amp.custom_fwd(Seen.forward, device_type="cpu", cast_inputs=torch.float32))


def where_autocast_is() -> dict:
    """Dtypes of a product under bfloat16 autocast: here, in another thread, in custom autograd functions."""
    x, figures = torch.ones(2, 2), {}

    def product(name):
        figures[name] = (x @ x).dtype

    with precision.autocast(CPU, torch.bfloat16):
        product("in this thread")
        thread = threading.Thread(target=product, args=["in a new thread"])
        thread.start()
        thread.join()
        for function in (Seen, SeenAndCast):
            function.apply(x.bfloat16() if function is SeenAndCast else x)
            figures[f"{function.__name__}: x, x @ x"] = Seen.seen
    return figures


def autocast_to_float32() -> dict:
    """The dtype of a product of bfloat16 tensors under autocast(dtype=torch.float32)."""
    with warnings.catch_warnings(record=True) as caught, torch.autocast("cpu", dtype=torch.float32):
        warnings.simplefilter("always")
        x = torch.ones(2, 2, dtype=torch.bfloat16)
        figures = {"CPU": (x @ x).dtype}
    with autocast_on("cuda", torch.float32):
        x = torch.ones(2, 2, dtype=torch.bfloat16, device="cuda")
        figures["CUDA"] = (x @ x).dtype
    return figures | {"the CPU's warning": [str(w.message) for w in caught]}


def gradient_dtypes() -> dict:
    """The dtype of .grad: as it is, assigned in another dtype, and asked for by torch's `grad_dtype`."""
    weight, figures = torch.ones(2, dtype=torch.float16, requires_grad=True), {}

    def assign():
        weight.grad = torch.ones(2)

    with precision.autocast(CPU, torch.bfloat16):
        (weight * 2).sum().backward()
    figures["of a float16 parameter"], weight.grad = weight.grad.dtype, None
    figures["float32 assigned"] = message_of(assign)
    weight.grad_dtype = torch.float32
    weight.float().sum().backward()
    return figures | {"with grad_dtype=torch.float32": weight.grad.dtype}


def probabilities_times_values() -> dict:
    """A product of float32 probabilities and bfloat16 values."""
    a, b = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16)
    with precision.autocast(CPU, torch.bfloat16):
        figures = {"under autocast": (a @ b).dtype}
    return figures | {"without it": message_of(lambda: a @ b)}


def long_rows(lengths=(256, 1024, 4096), D=128, scale=1.2) -> dict:
    """Attention with QK norm in float16: the largest score, the largest sum of exp(score), and how far the
    fused kernel and one by hand are from float64."""
    figures, generator = {}, torch.Generator().manual_seed(0)
    for T in lengths:
        q, k, v = (torch.randn(1, 2, T, D, generator=generator, dtype=torch.float64) for _ in range(3))
        q, k = (scale * math.sqrt(D) * F.normalize(x, dim=-1) for x in (q, k))
        exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = q @ k.mT / math.sqrt(D)
        q, k, v = (x.half() for x in (q, k, v))
        fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        by_hand = (q @ k.mT / math.sqrt(D)).masked_fill(future, -math.inf).softmax(-1) @ v
        figures[f"{T} positions"] = {
            "score": scores.max().item(), "sum": scores.exp().sum(-1).max().item(),
            "fused": distance(fused.double(), exact), "by hand": distance(by_hand.double(), exact),
        }  # fmt: skip
    return figures | {"no score above": scale**2 * math.sqrt(D)}


# ------------------------------------------------------------------------------------------------------


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
    configurator.configure(globals())
    torch.set_num_threads(1)  # sums in the order of the page's figures
    experiments = {
        "28": asked.without_unscale,
        "29": asked.first_bad_operator,
        "31": asked.float32_region,
        "34": asked.default_dtype,
        "37": asked.dtypes_and_bytes,
        "39": asked.scaler_with_bfloat16,
        "41": lambda: prefetch(*embedded(base_dir)),
        "51": where_autocast_is,
        "52": autocast_to_float32,
        "53": gradient_dtypes,
        "54": probabilities_times_values,
        "55": long_rows,
    }
    if what not in {*experiments, "all"}:
        raise UserError(f"no experiment {what}; there are {', '.join(experiments)}, and all")
    print(f"torch {torch.__version__}, one thread")
    for number in experiments if what == "all" else [what]:
        print(f"\n{number}")
        for name, value in experiments[number]().items():
            print(f"  {name}: {show(value)}")
