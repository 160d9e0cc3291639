"""What autocast does with each operator on each device, found by running it.

Part of `python -m experiments.precision_experiments`.
"""

import contextlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from nanochat.diagnostics.recorder import Recorder
from nanochat.machine.precision import name_of
from nanochat.terminal import table

# ------------------------------------------------------------------------------------------------------
# Autocast's lists

DEVICES = "cuda", "cpu", "mps"
# Each maps x and y (8, 8) to the results of its operators
PROBES = {
    "linear, matmul, bmm": lambda x, y: [F.linear(x, y), x @ y, torch.bmm(x.unsqueeze(0), y.unsqueeze(0))],
    "conv1d": lambda x, y: [F.conv1d(x.unsqueeze(0), y.unsqueeze(-1))],
    "scaled_dot_product_attention": lambda x, y: [
        F.scaled_dot_product_attention(*(t.unsqueeze(0).unsqueeze(0) for t in (x, y, y)))
    ],
    "softmax, log_softmax": lambda x, y: [x.softmax(-1), x.log_softmax(-1)],
    "layer_norm": lambda x, y: [F.layer_norm(x, (8,))],
    "rms_norm": lambda x, y: [F.rms_norm(x, (8,))],
    "exp, log, pow, rsqrt": lambda x, y: [x.exp(), x.log(), x.pow(2), x.rsqrt()],
    "sum, cumsum, vector_norm": lambda x, y: [x.sum(), x.cumsum(-1), torch.linalg.vector_norm(x)],
    "prod": lambda x, y: [x.prod(-1)],
    "mean": lambda x, y: [x.mean()],
    "nll_loss": lambda x, y: [F.nll_loss(x, torch.zeros(8, dtype=torch.long, device=x.device))],
    "mse_loss, BCE with logits": lambda x, y: [F.mse_loss(x, y), F.binary_cross_entropy_with_logits(x, y)],
    "gelu, relu, tanh, sigmoid": lambda x, y: [F.gelu(x), F.relu(x), x.tanh(), x.sigmoid()],
    "add, mul": lambda x, y: [x + y, x * y],
    "add, cat of one float32 and one low": lambda x, y: [x.float() + y, torch.cat((x.float(), y))],
}


@contextlib.contextmanager
def autocast_on(device_type: str, dtype):
    """Switch on the autocast of a device that may be absent, for the fake tensors made inside.

    A fake tensor has a device and a dtype but no memory. It passes through the real autocast of its device.
    autocast's context manager refuses an absent device, so autocast is switched on by hand.
    """
    before = torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
    with FakeTensorMode():
        torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_enabled(device_type, True)
        try:
            yield
        finally:
            torch.set_autocast_dtype(device_type, before[0])
            torch.set_autocast_enabled(device_type, before[1])
            torch.clear_autocast_cache()


def policy(probe, device_type: str) -> str:
    """What autocast does with operators, found by running them on float32 and on bfloat16 tensors."""
    results, low = [], torch.bfloat16
    for dtype in (torch.float32, low):
        with autocast_on(device_type, low):
            x, y = (torch.ones(8, 8, device=device_type, dtype=dtype) for _ in range(2))
            try:
                results.append([result.dtype for result in probe(x, y)])
            except RuntimeError:  # a few operators need the device itself
                return "-"
    words = {(low, low): "low", (torch.float32,) * 2: "float32", (torch.float32, low): "as its input"}
    return " / ".join(dict.fromkeys(words.get(pair, str(pair)) for pair in zip(*results, strict=True)))


def autocast() -> str:
    """One row for each group of operators: what autocast does with it on each device."""
    rows = [[name, *(policy(probe, device) for device in DEVICES)] for name, probe in PROBES.items()]
    return table([["operator", "CUDA", "CPU", "MPS"], *rows])


def stages(device_type: str) -> dict[str, str]:
    """The dtype of each result when a float32 x goes through LayerNorm(Linear(x)) and attention by hand."""
    with autocast_on(device_type, torch.bfloat16):
        x, weight = (torch.ones(8, 8, device=device_type) for _ in range(2))
        results = {"`x`": x, "`h = linear(x)`": (h := F.linear(x, weight))}
        results["`n = layer_norm(h)`"] = n = F.layer_norm(h, (8,))
        results["`q = linear(n)`; `k`, `v` alike"] = q = F.linear(n, weight)
        results["`scores = q @ k.T`"] = scores = q @ q.T
        results["`p = softmax(scores)`"] = p = scores.softmax(-1)
        results["`y = p @ v`"] = y = p @ q
        results["`x + linear(y)`"] = x + F.linear(y, weight)
        return {name: name_of(t.dtype) for name, t in results.items()}


def walk() -> str:
    columns = [stages(device_type) for device_type in DEVICES]
    return table([["stage", "CUDA", "CPU", "MPS"], *([s, *(c[s] for c in columns)] for s in columns[0])])


# ------------------------------------------------------------------------------------------------------
# Who casts the weights, and how often


def casts() -> str:
    """How often a recorder sees the weight of one layer cast."""
    layer, x = nn.Linear(8, 8, bias=False), torch.ones(1, 8)

    def count(contexts=1, calls=1, grad=torch.enable_grad, **options):
        recorder = Recorder(layer)
        with recorder.recording(), grad():
            for _ in range(contexts):
                with torch.autocast("cpu", torch.bfloat16, **options):
                    for _ in range(calls):
                        layer(x)
        return sum(op.parameter == "weight" for op in recorder.ops)

    found = {
        "one call": count(),
        "three calls in one context": count(calls=3),
        "three contexts of one call": count(contexts=3),
        "three calls in one context, `cache_enabled=False`": count(calls=3, cache_enabled=False),
        "three calls in one context under `no_grad`": count(calls=3, grad=torch.no_grad),
        "three calls in one context under `inference_mode`": count(calls=3, grad=torch.inference_mode),
    }
    return table([["a layer under autocast", "casts of its weight"], *found.items()])
