"""Parts of `python -m scripts.bench --what=gpu`: how fast products, attention and memory can be at all.

The products and the attention of a training step bound its MFU from above. What a step takes beyond them is
what code can still gain.
"""

import functools

import torch
from torch.utils import benchmark

from experiments.gpu_parts import DEPTHS, each, model_job
from nanochat.machine import hardware, runtime
from nanochat.ops import attention_backends as backends
from nanochat.ops.attention import BACKENDS, every_backend, function_of


def ceilings(job: dict) -> dict:
    """Products, a copy, attention."""
    return each(products=lambda: products(job), attention=lambda: attention_speed(job))


def seconds_of(action) -> float:
    """The median time of a call, in seconds."""
    timer = benchmark.Timer("action()", globals={"action": action}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.05).median


# ------------------------------------------------------------------------------------------------------
# Matrix products and memory


def products(job: dict) -> dict:
    """TFLOP/s of the products of a micro-batch, forward and both backward, by model.

    The products of one kind are weighted by how often a micro-batch has them. `mfu_ceiling` is their TFLOP/s
    as a share of the peak that MFU is measured against. by_layer: forward, input gradient, weight gradient.
    """
    device = runtime.start(job["device"], seed=0).device
    dtype = torch.float32 if job["small"] else torch.bfloat16
    peak, _ = hardware.peak_flops(device, dtype)
    result = {"copy_gb_per_s": copy_speed(device, 2**20 if job["small"] else 2**30)}
    for depth in DEPTHS:
        rows = linear_layers(model_job(job, depth))
        found = {name: product_speeds(*shape, dtype, device) for name, (shape, _) in rows.items()}
        spent = sum(count * sum(found[name]) for name, (_, count) in rows.items())
        work = sum(count * 6 * N * K * M for (N, K, M), count in rows.values())
        tflops = work / spent / 1e12
        by_layer = {
            name: [2 * N * K * M / s / 1e12 for s in found[name]] for name, ((N, K, M), _) in rows.items()
        }
        result[f"d{depth}"] = {"tflops": tflops, "mfu_ceiling": tflops * 1e12 / peak, "by_layer": by_layer}
    return result


def linear_layers(shape: dict) -> dict[str, tuple[tuple[int, int, int], int]]:
    """{layer: ((tokens, inputs, outputs), how many a micro-batch has)} of a model; 16 rows, as many do."""
    width, depth = shape["depth"] * shape["aspect_ratio"], shape["depth"]
    tokens = (2 if shape["rows"] == 2 else 16) * shape["max_seq_len"]
    return {
        "query, key, value, out": ((tokens, width, width), 4 * depth),
        "up": ((tokens, width, 4 * width), depth),
        "down": ((tokens, 4 * width, width), depth),
        "head": ((tokens, width, shape["vocab_size"]), 1),
    }


def product_speeds(N: int, K: int, M: int, dtype, device) -> list[float]:
    """Seconds of the three products of a linear layer with K inputs and M outputs on N tokens: forward, those
    of the input's gradient, and of the weight's."""
    x, grad = (torch.randn(N, size, device=device).to(dtype) for size in (K, M))
    weight = torch.randn(M, K, device=device).to(dtype)
    actions = (lambda: x @ weight.t(), lambda: grad @ weight, lambda: grad.t() @ x)
    return [seconds_of(action) for action in actions]


def copy_speed(device: torch.device, size: int) -> float:
    """GB/s of a copy of `size` bytes within the device, bytes read and bytes written."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source)) / 1e9


# ------------------------------------------------------------------------------------------------------
# Attention


def attention_speed(job: dict) -> dict:
    """Milliseconds of each way to compute attention at d12's micro-batch, forward, and forward and backward.

    TFLOP/s count the scores that a token sees, not the whole T x T: half for a full layer.
    """
    device, small = torch.device(job["device"]), job["small"]
    B, H, T, D = (1, 2, 64, 32) if small else (16, 6, 2048, 128)
    dtype = torch.float32 if small else torch.bfloat16
    result: dict = {}
    for label, name, why in every_backend(device, dtype, compiled=not small):
        for kind, window in {"full": T, "window": T // 4}.items():
            if kind in BACKENDS[name][1]:
                row = result.setdefault(kind, {})
                try:
                    row[label] = why or time_attention(name, (B, H, T, D), window, dtype, device)
                except Exception as error:  # the next way is timed all the same
                    row[label] = backends.error_in_a_line(error)
    return result


def time_attention(name: str, shape, window: int, dtype, device) -> dict:
    """The times of one way."""
    B, H, T, D = shape
    way = function_of(name, T, window, device)
    q, k, v = (torch.randn(B, T, H, D, device=device).to(dtype).transpose(1, 2) for _ in range(3))
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    grad = torch.randn(B, H, T, D, device=device).to(dtype)

    def both():
        torch.autograd.grad(way(*inputs, window), inputs, grad)

    forward, whole = seconds_of(functools.partial(way, *inputs, window)), seconds_of(both)
    seen = T * window - window * (window - 1) // 2  # pairs of a query and a key that it sees
    work = 4 * B * H * D * seen
    return {"forward_ms": 1000 * forward, "both_ms": 1000 * whole, "tflops": 3.5 * work / whole / 1e12}
