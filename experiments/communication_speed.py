"""Counts the bytes that processes send each other in a step, and those that gradients take in memory, for
`torchrun --nproc_per_node=N -m scripts.bench --what=communication`.

Bytes are read off the loopback interface, so all processes run on this machine and nothing else should use
it. Plain DDP, with an optimizer that updates all weights in every process, is measured beside ours.
"""

import copy
import math
import re
from pathlib import Path

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from experiments.sides import SHAPE
from nanochat import UserError, gradients, optim
from nanochat.gpt import GPT
from nanochat.machine import runtime
from nanochat.plan import scaling

RATES = {"embedding_lr": 0.1, "unembedding_lr": 0.01, "matrix_lr": 0.02, "scalar_lr": 0.1}  # any will do


def bench(values: dict) -> dict:
    """Megabytes that a process sends in a step, and that its gradients take; {} but in the first process."""
    machine = runtime.start("cpu", seed=0)
    if machine.world_size == 1:
        raise UserError("one process sends nothing; start this with torchrun --nproc_per_node=2 or more")
    model = GPT(scaling.model_config(*(values[name] for name in SHAPE)))
    model.init_weights()
    twin = copy.deepcopy(model)
    tokens = torch.randint(values["vocab_size"], (1, values["max_seq_len"] + 1))
    batch, steps = (tokens[:, :-1], tokens[:, 1:]), values["steps"]

    plain = DistributedDataParallel(twin, **runtime.DDP_OPTIONS)
    plain_buckets = watch_buckets(plain)
    plain.register_comm_hook(None, allreduce_hook)  # what DDP does without a hook
    plain_sent = sent(lambda: step(plain, twin, batch, set_to_none=True), steps, machine)
    plain_held = held(plain, twin, batch, plain_buckets, set_to_none=True)

    groups = optim.parameter_groups(model, RATES, weight_decay=0.1)
    optimizer = optim.MuonAdamW(groups, rank=machine.rank, world_size=machine.world_size)
    ours = DistributedDataParallel(model, **runtime.DDP_OPTIONS)
    buckets = watch_buckets(ours)
    gradients.exchange_gradients(ours, optimizer, values["gradient_dtype"])

    def exchange():
        step(ours, model, batch, set_to_none=False)
        gradients.clip_grad_norm_(model, optimizer, math.inf)

    gradients_sent = sent(exchange, steps, machine)
    weights_sent = sent(optimizer.step, steps, machine)
    ours_held = held(ours, model, batch, buckets, set_to_none=False)
    machine.close()
    megabytes = {
        "weights_mb": sum(p.nbytes for p in model.parameters()),
        "plain_ddp_mb": plain_sent,
        "gradients_mb": gradients_sent,
        "new_weights_mb": weights_sent,
        "plain_ddp_held_mb": plain_held,
        "gradients_held_mb": ours_held,
        "largest_bucket_mb": max(buckets.values()),
    }
    result = {name: size / 1e6 for name, size in megabytes.items()}
    result["bytes_over_plain_ddp"] = (gradients_sent + weights_sent) / plain_sent
    return result if machine.is_main else {}


def watch_buckets(ddp) -> dict[int, int]:
    """{address: bytes} of the buckets that the hook of the last exchange was called with."""
    buckets, register = {}, ddp.register_comm_hook

    def watched(state, hook):
        def watching(state, bucket):
            if bucket.index() == 0:
                buckets.clear()
            buckets[bucket.buffer().data_ptr()] = bucket.buffer().nbytes
            return hook(state, bucket)

        register(state, watching)

    ddp.register_comm_hook = watched
    return buckets


def held(ddp, model, batch, buckets: dict, set_to_none: bool) -> int:
    """Bytes of gradients in memory when the last of several micro-steps begins."""
    step(ddp, model, batch, set_to_none)
    model.zero_grad(set_to_none)
    with ddp.no_sync():
        ddp(*batch).backward()
    own = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in model.parameters()}
    return sum((own | buckets).values())


def step(ddp, model, batch, set_to_none: bool):
    """One backward pass that exchanges, with the gradients cleared as base_train clears them."""
    model.zero_grad(set_to_none=set_to_none)
    ddp(*batch).backward()


def sent(action, steps: int, machine) -> float:
    """Bytes a process sends in one call, after a call that does not count."""
    action()
    machine.all_gather(None)
    before = loopback_bytes()
    for _ in range(steps):
        action()
    machine.all_gather(None)
    return (loopback_bytes() - before) / steps / machine.world_size


def loopback_bytes() -> int:
    """Bytes sent over the loopback interface since the machine started (Linux)."""
    return int(re.search(r"^ *lo:(.*)", Path("/proc/net/dev").read_text(), re.MULTILINE)[1].split()[8])
