"""The figures of docs/faq.md that no other page has: `python -m experiments.faq_measurements`, half a minute.

Each experiment has the number of its question; `--what=28` runs that one.
"""

import math
import warnings
from typing import Literal

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import configurator
from experiments.measurements import (
    CPU,
    byte_rows,
    compare,
    distance,
    flat,
    flat_grad,
    our_model,
    our_optimizer,
    saved_for_backward,
)
from nanochat.gpt import GPT, GPTConfig
from nanochat.machine import precision
from nanochat.machine.precision import name_of

what: Literal["all", "28", "29", "31", "34", "37", "39", "55"] = "all"  # the number of a question

# That of runs/laptop.py at width 192
LAPTOP = GPTConfig(4, 192, 3, 4096, max_seq_len=512, spelled=True, value_tables=0, bigrams=8)


def message_of(function) -> str:
    """The first line of the error that a call raises."""
    try:
        function()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "no error"


# ------------------------------------------------------------------------------------------------------
# 28, 29, 31: the scaler without unscale_, the first NaN, a float32 region


def scaled_step(make_optimizer, call_unscale: bool):
    """One float16 step at a scale of 1,024: gradient norms before and after `scaler.step`, and the update."""
    model = our_model()
    optimizer, scaler = make_optimizer(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = flat(model.parameters())
    with precision.autocast(CPU, torch.float16):
        loss = model(*byte_rows(8, 0))
    scaler.scale(loss).backward()
    if call_unscale:
        scaler.unscale_(optimizer)
    norm = flat_grad(model).norm().item()
    scaler.step(optimizer)
    return norm, flat_grad(model).norm().item(), flat(model.parameters()) - before


def without_unscale() -> dict:
    """Per optimizer: the norm of .grad before and after `scaler.step` where nobody called `unscale_`, and how
    far the update is from the one with `unscale_`."""
    makers = {
        "SGD": lambda model: torch.optim.SGD(model.parameters(), 0.1),
        "AdamW(fused=True)": lambda model: torch.optim.AdamW(model.parameters(), 1e-3, fused=True),
        "ours (MuonAdamW)": our_optimizer,
    }
    figures = {}
    for name, make in makers.items():
        right = scaled_step(make, call_unscale=True)[2]
        before, after, update = scaled_step(make, call_unscale=False)
        figures[name] = {"before": before, "after": after, "update apart": distance(update, right)}
    return figures


class FirstBad(TorchDispatchMode):
    """Remembers the first operator whose result is inf or NaN. Slow: it looks at every result."""

    def __init__(self):
        super().__init__()
        self.found = "none"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if self.found != "none" or "empty" in name or func.is_view:  # new memory may hold anything
            return result
        for tensor in (t for t in tree_leaves(result) if isinstance(t, torch.Tensor)):
            if tensor.is_floating_point() and not tensor.isfinite().all():
                kind = "NaN" if tensor.isnan().any() else "inf"
                self.found = f"{name}, {kind} in {name_of(tensor.dtype)}"
        return result


def anomaly(loss) -> str:
    """What anomaly detection says of the backward pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow
        with torch.autograd.detect_anomaly():
            return message_of(loss.backward)


def overflow(dtype) -> dict:
    """A model with an MLP whose weights are 1,000 times too large: who names the operator that overflowed?"""
    model, operator, modules = our_model(), FirstBad(), []
    model.blocks[1].mlp.up.weight.data *= 1000

    def note(name, output):  # a block gives two tensors
        if not all(tensor.isfinite().all() for tensor in tree_leaves(output)):
            modules.append(name)

    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, inputs, output, name=name: note(name, output))
    with operator, precision.autocast(CPU, dtype):
        loss = model(*byte_rows(8, 0))
    return {
        "loss": loss.item(),
        "first operator": operator.found,
        "first module by a hook": modules[0] if modules else "none",
        "detect_anomaly": anomaly(loss),
    }


def first_bad_operator() -> dict:
    """An overflow in each 16-bit format; and a NaN of the backward pass alone, whose loss is 0."""
    x = torch.zeros(2, requires_grad=True)
    figures = {name_of(dtype): overflow(dtype) for dtype in (torch.float16, torch.bfloat16)}
    return figures | {"a square root at 0": anomaly(x.square().sum().sqrt())}


def float32_region() -> dict:
    """A product inside of autocast, and in a region without it: result's dtype and distance from float64."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(64, 1024, generator=generator) for _ in range(2))
    exact = x.double() @ weight.double().mT
    with precision.autocast(CPU, torch.bfloat16):
        low = F.linear(x, weight)
        with torch.autocast("cpu", enabled=False):
            lifted = F.linear(x.float(), weight)
            mixed = message_of(lambda: F.linear(low, torch.ones(8, 64)))
    return {
        "under autocast": (low.dtype, distance(low, exact)),
        "enabled=False": (lifted.dtype, distance(lifted, exact)),
        "enabled=False, input left in bfloat16": mixed,
    }


# ------------------------------------------------------------------------------------------------------
# 34: the default dtype


def loss_after(dtype, compute_dtype, steps=100) -> float:
    """Of our small model on rows that it has not seen, after some more steps of AdamW. Weights, gradients and
    state are kept in `dtype`."""
    model = our_model(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, betas=(0.9, 0.95))
    for step in range(steps):
        with precision.autocast(CPU, compute_dtype):
            loss = model(*byte_rows(16, 1000 + step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return model.float()(*byte_rows(256, 7)).item()


def default_dtype() -> dict:
    """The default dtype under autocast, and why it is not bfloat16."""
    with precision.autocast(CPU, torch.bfloat16):
        here = torch.get_default_dtype(), torch.ones(2).dtype
    return {
        "under autocast, the default and a new tensor": here,
        "loss at the start": loss_after(torch.float32, torch.float32, steps=0),
        "weights and products in float32": loss_after(torch.float32, torch.float32),
        "weights in float32, products in bfloat16": loss_after(torch.float32, torch.bfloat16),
        "weights and products in bfloat16": loss_after(torch.bfloat16, torch.float32),  # without autocast
    }


# ------------------------------------------------------------------------------------------------------
# 37, 39: dtypes and bytes, the scaler with bfloat16


def dtypes_and_bytes(rows: int = 4) -> dict:
    """Of one step of runs/laptop.py's model: dtypes and bytes of what lasts, and of what the forward pass
    keeps."""
    model = GPT(LAPTOP)
    model.init_weights(torch.Generator().manual_seed(0))
    optimizer = our_optimizer(model)
    tokens = torch.randint(4096, (rows, 513), generator=torch.Generator().manual_seed(0))
    batch, kept = (tokens[:, :-1], tokens[:, 1:]), {}
    for dtype in (torch.float32, torch.bfloat16):
        optimizer.zero_grad()
        with saved_for_backward(model) as saved, precision.autocast(CPU, dtype):
            model(*batch).backward()
        kept[f"kept for the backward pass, {name_of(dtype)}"] = saved.most
    optimizer.step()
    state = [t for states in optimizer.state.values() for t in states.values()]
    lasting = {"parameters": list(model.parameters()), "gradients": [p.grad for p in model.parameters()]}
    lasting["optimizer state"] = state
    summary = {
        name: (len(tensors), {t.dtype for t in tensors}, sum(t.nbytes for t in tensors))
        for name, tensors in lasting.items()
    }
    return summary | kept


def scaler_with_bfloat16() -> dict:
    """A bfloat16 gradient through an enabled scaler, against the same without one."""
    grads = []
    for enabled in (False, True):
        model = our_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        with precision.autocast(CPU, torch.bfloat16):
            loss = model(*byte_rows(64, 99))
        scaler.scale(loss).backward()
        before = flat_grad(model).norm().item()
        scaler.unscale_(optimizer)
        grads.append(flat_grad(model))
    return {"equal in every bit": compare(*grads)[0], "norm": grads[0].norm().item(), "scaled norm": before}


# ------------------------------------------------------------------------------------------------------
# 55: long rows


def long_rows(lengths=(256, 1024, 4096), D=128, scale=1.2) -> dict:
    """Attention with QK norm in float16: the largest score, the largest sum of exp(score), and how far the
    fused kernel is from float64."""
    figures, generator = {}, torch.Generator().manual_seed(0)
    for T in lengths:
        q, k, v = (torch.randn(1, 2, T, D, generator=generator, dtype=torch.float64) for _ in range(3))
        q, k = (scale * math.sqrt(D) * F.normalize(x, dim=-1) for x in (q, k))
        exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = q @ k.mT / math.sqrt(D)
        fused = F.scaled_dot_product_attention(*(x.half() for x in (q, k, v)), is_causal=True)
        figures[f"{T} positions"] = {
            "score": scores.max().item(),
            "sum": scores.exp().sum(-1).max().item(),
            "fused": distance(fused, exact),
        }
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
    return f"{value:,.5g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


if __name__ == "__main__":
    configurator.configure(globals())
    torch.set_num_threads(1)  # sums in the order of the page's figures
    experiments = {
        "28": without_unscale,
        "29": first_bad_operator,
        "31": float32_region,
        "34": default_dtype,
        "37": dtypes_and_bytes,
        "39": scaler_with_bfloat16,
        "55": long_rows,
    }
    print(f"torch {torch.__version__}, one thread")
    for number in experiments if what == "all" else [what]:
        print(f"\n{number}")
        for name, value in experiments[number]().items():
            print(f"  {name}: {show(value)}")
