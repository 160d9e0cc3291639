"""The measured figures of docs/walkthrough.md: `python -m experiments.measurements` prints them.

Most of them show what gradient accumulation changes and what it does not, with a model that takes seconds.
"""

import argparse
import contextlib
import functools
import inspect
import math
import weakref
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from safetensors.torch import load_file, save_file
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel

from nanochat import muon, optim
from nanochat.engine import generate
from nanochat.files import temporary_folder
from nanochat.gpt import GPT, GPTConfig
from nanochat.machine import precision

CPU = torch.device("cpu")
T = 32  # bytes a row
TEXT = torch.tensor(list(inspect.getsource(argparse).encode()))  # any text: its bytes are the tokens


def byte_rows(n: int, seed: int):
    """(inputs, targets), each (n, T), from random places of the text."""
    start = torch.randint(len(TEXT) - T, (n, 1), generator=torch.Generator().manual_seed(seed))
    rows = TEXT[start + torch.arange(T + 1)]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def new_model() -> GPT:
    model = GPT(GPTConfig(depth=2, width=64, num_heads=2, vocab_size=256, max_seq_len=T))
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def our_optimizer(model):
    rates = {"embedding_lr": 0.05, "unembedding_lr": 0.005, "matrix_lr": 0.01, "scalar_lr": 0.05}
    return optim.MuonAdamW(optim.parameter_groups(model, rates, 0.0))


@functools.cache
def weights_in_training() -> dict:
    """Parameters after 20 updates, because many gradients are zero before the first."""
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)  # not ours: so a change of ours changes no figure
    for step in range(20):
        model(*byte_rows(16, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def our_model(dtype=torch.float32) -> GPT:
    model = new_model()
    model.load_state_dict(weights_in_training())
    return model.to(dtype)


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


def flat_grad(model):
    return flat(p.grad for p in model.parameters())


def accumulate(model, inputs, targets, rows: int, compute_dtype=torch.float32, divide=True) -> float:
    """Run the inner loop over micro-batches of `rows` rows and return the sum of the losses."""
    steps, total = len(inputs) // rows, 0.0
    for x, y in zip(inputs.split(rows), targets.split(rows), strict=True):
        with precision.autocast(x.device, compute_dtype):
            loss = model(x, y) / (steps if divide else 1)
        loss.backward()
        total += loss.item()
    return total


def gradient(inputs, targets, rows: int, compute_dtype=torch.float32, dtype=torch.float32):
    """The accumulated gradient of a model whose parameters have `dtype`, as one vector."""
    model = our_model(dtype)
    accumulate(model, inputs, targets, rows, compute_dtype)
    return flat_grad(model)


def compare(a, b) -> tuple[float, float]:
    """(share of equal elements, without those that are 0 in both; distance |a - b| / |b|)."""
    some, a64, b64 = (a != 0) | (b != 0), a.double(), b.double()
    return (a == b)[some].double().mean().item(), ((a64 - b64).norm() / b64.norm()).item()


def distance(a, b) -> float:
    """|a - b| / |b|."""
    return compare(a, b)[1]


def accumulation() -> dict[str, tuple[float, float]]:
    """`compare` of gradients of 64 rows made in several ways, mostly with that of one batch of 64 rows."""
    inputs, targets = byte_rows(64, 99)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    results = {}
    for name, dtypes in (  # compute dtype, dtype of the parameters
        ("float64", (torch.float32, torch.float64)),
        ("float32", (torch.float32, torch.float32)),
        ("bfloat16", (torch.bfloat16, torch.float32)),
    ):
        big = gradient(inputs, targets, 64, *dtypes)
        four, many = (gradient(inputs, targets, rows, *dtypes) for rows in (16, 1))
        results[f"{name}, 4 micro-steps"] = compare(four, big)
        results[f"{name}, 64 micro-steps"] = compare(many, big)
        shuffled = gradient(inputs[order], targets[order], 64, *dtypes)
        results[f"{name}, rows in another order"] = compare(shuffled, big)
        results[f"{name}, again"] = compare(gradient(inputs, targets, 64, *dtypes), big)
    exact = gradient(inputs, targets, 64, torch.float32, torch.float64)
    for what, other in (("one batch", big), ("4 micro-steps", four), ("64 micro-steps", many)):
        results[f"bfloat16, {what} against float64"] = compare(other, exact)
    results["float64, 64 other rows"] = compare(gradient(*byte_rows(64, 100), 64), exact)
    return results


def ddp_worker(rank: int, folder: Path):
    """One of two processes. It takes its 32 rows in one, two and four micro-steps, as base_train does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    inputs, targets = (rows[rank::2] for rows in byte_rows(64, 99))
    results = {}
    for compute_dtype in (torch.float32, torch.bfloat16):
        for rows in (32, 16, 8):
            model, steps = our_model(), 32 // rows
            ddp = DistributedDataParallel(model)
            for i, (x, y) in enumerate(zip(inputs.split(rows), targets.split(rows), strict=True)):
                with contextlib.nullcontext() if i == steps - 1 else ddp.no_sync():
                    with precision.autocast(x.device, compute_dtype):
                        loss = ddp(x, y) / steps
                    loss.backward()
            results[f"{precision.name_of(compute_dtype)}, {steps}"] = flat_grad(model)
    if rank == 0:
        save_file(results, folder / "gradients.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def two_processes() -> dict[str, tuple[float, float]]:
    """`compare` of two processes with one that makes twice the micro-steps, on the same micro-batches."""
    with temporary_folder() as folder:
        multiprocessing.spawn(ddp_worker, [folder], nprocs=2)
        together = load_file(folder / "gradients.safetensors")
    inputs, targets = (torch.cat([rows[0::2], rows[1::2]]) for rows in byte_rows(64, 99))
    results = {}
    for name, both in together.items():
        dtype, steps = name.split(", ")
        alone = gradient(inputs, targets, 32 // int(steps), getattr(torch, dtype))
        results[f"{dtype}, 2 x {steps} against {2 * int(steps)}"] = compare(both, alone)
    return results


def on_the_way() -> list[float]:
    """How far .grad is from the gradient of all 64 rows, after each of 4 micro-steps."""
    inputs, targets = byte_rows(64, 99)
    big, model, distances = gradient(inputs, targets, 64), our_model(), []
    for x, y in zip(inputs.split(16), targets.split(16), strict=True):
        (model(x, y) / 4).backward()
        distances.append(distance(flat_grad(model), big))
    return distances


def one_update(make_optimizer, clip: float, divide: bool):
    """An update from the same weights: (change of all parameters, norm before clipping, logged loss)."""
    model = our_model()
    before, optimizer = flat(model.parameters()), make_optimizer(model)
    loss = accumulate(model, *byte_rows(64, 99), 16, divide=divide)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item()
    optimizer.step()
    return flat(model.parameters()) - before, norm, loss


def undivided() -> dict[str, tuple[float, float, float, float]]:
    """A step whose losses are not divided: its (update's size, norm, loss) over the right step's; and the
    distance of the two updates."""
    results = {}
    for name, make in (("SGD", lambda m: torch.optim.SGD(m.parameters(), 0.1)), ("ours", our_optimizer)):
        for clip in (math.inf, 1.0):
            right, wrong = one_update(make, clip, True), one_update(make, clip, False)
            size = (wrong[0].norm() / right[0].norm()).item()
            apart = distance(wrong[0], right[0])
            results[f"{name}, clip {clip}"] = size, wrong[1] / right[1], wrong[2] / right[2], apart
    return results


@contextlib.contextmanager
def saved_for_backward(model):
    """Yields an object whose `most` is the most bytes that autograd holds at a time, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    live, found = weakref.WeakValueDictionary(), SimpleNamespace(most=0)

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() in parameters:
            return tensor
        held = tensor.detach()
        live[id(held)] = held
        storages = [one.untyped_storage() for one in live.values()]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}  # one may hold several
        found.most = max(found.most, sum(sizes.values()))
        return held

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def saved_bytes(rows: int, backward_inside: bool) -> int:
    """The most bytes that autograd holds for backward passes over 64 rows, without parameters."""
    model, (inputs, targets), total = our_model(), byte_rows(64, 99), 0
    with saved_for_backward(model) as saved:
        for x, y in zip(inputs.split(rows), targets.split(rows), strict=True):
            loss = model(x, y) / (64 // rows)
            if backward_inside:
                loss.backward()
            else:
                total = total + loss
        if not backward_inside:
            total.backward()
    return saved.most


def leak() -> list[tuple[float, str]]:
    """(last loss, what the model writes) after 60 steps: with the inputs as targets, with the right ones."""
    results = []
    for leaked in (True, False):
        model = our_model()
        optimizer = our_optimizer(model)
        for step in range(60):
            inputs, targets = byte_rows(16, 500 + step)
            loss = model(inputs, inputs if leaked else targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        written = generate(model, list(b"def parse"), 20, temperature=0)
        results.append((loss.item(), bytes(written).decode(errors="replace")))
    return results


def directions() -> dict[str, float]:
    """How equal the singular values of an MLP matrix's gradient are, before and after Muon."""
    model = our_model()
    model(*byte_rows(64, 99)).backward()
    grad = model.blocks[0].mlp.up.weight.grad  # 256 x 64: 64 singular values
    before = torch.linalg.svdvals(grad.double())
    after = torch.linalg.svdvals(muon.orthogonalize(grad[None], torch.float32)[0].double())
    return {
        "largest over median before": (before[0] / before.median()).item(),
        "largest over median after": (after[0] / after.median()).item(),
    }


def main():
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name, (equal, apart) in (accumulation() | two_processes()).items():
        print(f"{name:42} {equal:6.1%} equal, distance {apart:.2g}")
    print("distance after each micro-step:", ", ".join(f"{x:.2g}" for x in on_the_way()))
    for name, (size, norm, loss, apart) in undivided().items():
        print(
            f"undivided, {name}: update x {size:.4f}, norm x {norm:.3f}, loss x {loss:.3f}, apart {apart:.2g}"
        )
    for what, rows, inside in (("one batch", 64, True), ("inside", 16, True), ("after", 16, False)):
        print(f"kept for the backward pass, {what}: {saved_bytes(rows, inside) / 1e6:.1f} MB")
    for what, (loss, text) in zip(("leaked", "right"), leak(), strict=True):
        print(f"{what} targets: loss {loss:.2f}, writes {text!r}")
    for name, figure in directions().items():
        print(f"{name}: {figure:.3g}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
