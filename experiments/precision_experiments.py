"""The small experiments of docs/precision.md: `python -m experiments.precision_experiments`, a minute.

Each experiment prints a table; `--what=underflow` runs one of them.
"""

import math

import torch
import torch.nn.functional as F

import configurator
from experiments.autocast_rules import autocast, casts, walk
from experiments.measurements import CPU, byte_rows, distance, flat, flat_grad, our_model
from nanochat import UserError
from nanochat.machine import precision
from nanochat.machine.precision import name_of
from nanochat.terminal import table

what = "all"  # formats autocast walk inside accumulation attention casts underflow scaler updates

FORMATS = (torch.float32, torch.bfloat16, torch.float16)


def percent(flags: torch.Tensor) -> str:
    """The share of True."""
    return f"{100 * flags.double().mean().item():.1f} %"


# ------------------------------------------------------------------------------------------------------
# The formats


def formats() -> str:
    """The bits and limits of each format, and three numbers rounded to it."""
    rows = []
    for dtype in FORMATS:
        info = torch.finfo(dtype)
        mantissa = round(-math.log2(info.eps))
        values = [torch.tensor(x, dtype=torch.float64).to(dtype).item() for x in (1.23456789, 70000.0, 1e-7)]
        limits = info.max, info.smallest_normal, info.smallest_normal * info.eps, info.eps
        bits = f"1 + {info.bits - 1 - mantissa} + {mantissa}"
        rows.append([name_of(dtype), bits, *(f"{x:.3g}" for x in limits), *(f"{x:.9g}" for x in values)])
    head = ["format", "sign + exponent + mantissa", "largest", "smallest normal", "smallest", "eps"]
    return table([[*head, "1.23456789", "70000", "1e-7"], *rows])


# ------------------------------------------------------------------------------------------------------
# Accumulation, and what fusing attention changes


def running_sum(products):
    """The sum of products (..., K). Each partial sum is rounded to their dtype."""
    total = torch.zeros_like(products[..., 0])
    for k in range(products.size(-1)):
        total = total + products[..., k]
    return total


def accumulation() -> str:
    """How many elements of a product of two random (32, 2048) matrices are exact but for one rounding."""
    rows = []
    for dtype in (torch.bfloat16, torch.float16):
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(32, 2048, generator=generator).to(dtype) for _ in range(2))
        exact = a.double() @ b.double().mT
        for what, result in (
            ("`a @ b`", a @ b.mT),
            ("every partial sum rounded", running_sum(a.unsqueeze(1) * b.unsqueeze(0))),
        ):
            right = percent(result == exact.to(dtype))
            rows.append([name_of(dtype), what, right, f"{distance(result, exact):.2g}"])
    return table([["dtype", "sum of 2,048 products", "equal to the exact one, rounded", "distance"], *rows])


def attention() -> str:
    """How far causal attention over 256 positions, with 4 heads of 64, is from float64's."""
    generator, dtype = torch.Generator().manual_seed(0), torch.bfloat16
    q, k, v = (torch.randn(1, 4, 256, 64, generator=generator).to(dtype) for _ in range(3))
    exact = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), is_causal=True)
    mask = torch.full((256, 256), -math.inf).triu(1)

    def by_hand(softmax_dtype):
        scores = (q @ k.mT) / 8 + mask.to(dtype)
        return scores.to(softmax_dtype).softmax(-1).to(dtype) @ v

    found = {
        "exact, rounded once": distance(exact.to(dtype), exact),
        "fused (SDPA)": distance(F.scaled_dot_product_attention(q, k, v, is_causal=True), exact),
        "by hand, softmax in float32": distance(by_hand(torch.float32), exact),
        "by hand, softmax in bfloat16": distance(by_hand(dtype), exact),
    }
    return table([["attention", "distance"], *([name, f"{apart:.2g}"] for name, apart in found.items())])


def inside() -> str:
    """The share of an operator's results that are float32's, rounded once; and the same if it is made of
    bfloat16 steps. The inputs are 64 rows of 2,048 bfloat16 numbers."""
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(64, 2048, generator=generator)).bfloat16()

    def softmax(x):
        e = (x - x.amax(-1, keepdim=True)).exp()
        return e / running_sum(e).unsqueeze(-1)

    def layer_norm(x):
        x = x - (running_sum(x) / x.size(-1)).unsqueeze(-1)
        return x * (running_sum(x.square()) / x.size(-1) + 1e-5).rsqrt().unsqueeze(-1)

    rows = [["of bfloat16 numbers", "the operator", "in bfloat16 steps"]]
    for name, whole, steps in (
        ("softmax", lambda x: x.softmax(-1), softmax),
        ("layer_norm", lambda x: F.layer_norm(x, x.shape[-1:]), layer_norm),
        ("sum", lambda x: x.sum(-1), running_sum),
    ):
        right = whole(x.float()).bfloat16()
        rows.append([name, percent(whole(x) == right), percent(steps(x) == right)])
    return table(rows)


# ------------------------------------------------------------------------------------------------------
# Underflow, and the scaler


def gradient(dtype, scale=1.0, rows=64):
    """The gradient of our small model (measurements.py) on rows of 32 bytes, divided by the scale."""
    model = our_model()
    with precision.autocast(CPU, dtype):
        loss = model(*byte_rows(rows, 99))
    (loss * scale).backward()
    return flat_grad(model) / scale


def underflow_figures(rows: int) -> dict[str, tuple[float, float]]:
    """(share of the gradients that become 0 and are not 0 in float32, distance from float32's)."""
    exact, figures = gradient(torch.float32, rows=rows), {}
    for name, dtype, scale in (
        ("bfloat16", torch.bfloat16, 1),
        ("float16", torch.float16, 1),
        ("float16, loss x 1,024", torch.float16, 1024),
        ("float16, loss x 65,536", torch.float16, 65536),
    ):
        grad = gradient(dtype, scale, rows)
        lost = ((grad == 0) & (exact != 0)).sum() / (exact != 0).sum()
        figures[name] = lost.item(), distance(grad, exact)
    return figures


def underflow() -> str:
    few, many = underflow_figures(64), underflow_figures(512)
    rows = [["forward pass in", "2,048 tokens: lost", "distance", "16,384 tokens: lost", "distance"]]
    for name in few:
        cells = [(f"{100 * lost:.2f} %", f"{apart:.2g}") for lost, apart in (few[name], many[name])]
        rows.append([name, *cells[0], *cells[1]])
    return table(rows)


def scaler_steps() -> list[dict]:
    """What GradScaler does, step by step, in a float16 run whose scale is too large at first.

    By default it raises the scale after 2,000 good steps; here after 4.
    """
    model = our_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**23, growth_interval=4)
    records = []
    for step in range(16):
        before, scale = flat(model.parameters()), scaler.get_scale()
        with precision.autocast(CPU, torch.float16):
            loss = model(*byte_rows(8, step))
        scaler.scale(loss).backward()
        scaled = flat_grad(model).norm().item()
        scaler.unscale_(optimizer)
        norm = flat_grad(model).norm().item()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = not torch.equal(before, flat(model.parameters()))
        record = {"step": step, "scale": scale, "loss": loss.item()}
        records.append(record | {"scaled": scaled, "norm": norm, "moved": moved})
    return records


def scaler() -> str:
    rows = []
    for record in scaler_steps():
        norms = (f"{record[key]:.3g}" for key in ("scaled", "norm"))
        exponent, changed = math.log2(record["scale"]), "yes" if record["moved"] else "no"
        rows.append([record["step"], f"2^{exponent:.0f}", f"{record['loss']:.3f}", *norms, changed])
    head = ["step", "scale", "loss", "norm before `unscale_`", "norm after", "weights changed"]
    defaults = torch.amp.GradScaler("cpu")
    words = (
        f"The defaults of torch {torch.__version__}: scale {defaults.get_scale():,.0f}, "
        f"x {defaults.get_growth_factor():g} after {defaults.get_growth_interval():,} good steps, "
        f"x {defaults.get_backoff_factor():g} after an overflow."
    )
    return f"{words}\n\n{table([head, *rows])}"


# ------------------------------------------------------------------------------------------------------
# Why weights stay float32


def storing(weights, what):
    """A function that writes numbers to a format and reads them back: a dtype, or integers of so many bits.
    Integers have one scale for each row, which is that of `weights` and stays, as in a quantised matrix."""
    if isinstance(what, torch.dtype):
        return lambda x: x.to(what).float()
    largest = 2 ** (what - 1) - 1
    scale = weights.abs().amax(-1, keepdim=True).clamp_min(1e-12) / largest
    return lambda x: (x / scale).round() * scale


def updates() -> str:
    """By the format that keeps them: the share of the matrices' weights that a small update does not change,
    and of the squared gradients that become 0, whose mean AdamW keeps.

    The update is the first of AdamW: 3e-4, the rate, against the sign of the gradient.
    """
    model = our_model()
    model(*byte_rows(64, 99)).backward()
    pairs = [(p.data, -3e-4 * p.grad.sign()) for p in model.blocks.parameters() if p.ndim == 2]
    grad = flat_grad(model)
    squares = grad[grad != 0].square()
    rows = [["kept in", "weights that do not change", "squared gradients that become 0"]]
    for what in (*FORMATS, 8, 4):
        same = []
        for weights, update in pairs:
            store = storing(weights, what)
            kept = store(weights)
            same.append((store(kept + update) == kept)[update != 0])
        if what in FORMATS:
            rows.append([name_of(what), percent(flat(same)), percent(storing(squares, what)(squares) == 0)])
        else:
            rows.append([f"int{what}", percent(flat(same)), ""])
    return table(rows)


if __name__ == "__main__":
    configurator.configure(globals())
    functions = formats, autocast, walk, inside, accumulation, attention, casts, underflow, scaler, updates
    experiments = {function.__name__: function for function in functions}
    if what not in {*experiments, "all"}:
        raise UserError(f"no experiment {what}; there are {', '.join(experiments)}, and all")
    for name in experiments if what == "all" else [what]:
        print(f"\n{name}\n\n{experiments[name]()}")
