"""Times the optimizer of karpathy/nanochat for `python -m scripts.bench --what=optimizer --peer=FOLDER`.

The bench starts this file in that folder, so `nanochat` is the peer's package here. The first line of stdin
has the device and the shapes of matrices, embeddings and head as JSON. Every further line asks for one step,
and the answer is its time in seconds, until the device has finished it.
"""

import json
import sys
import time

import torch
from nanochat.common import COMPUTE_DTYPE

from nanochat.optim import MuonAdamW

device, matrices, tables, head = json.loads(sys.stdin.readline())


def parameter(shape, dtype=torch.float32):
    p = torch.nn.Parameter(torch.randn(*shape, dtype=dtype, device=device) * 0.02)
    p.grad = torch.randn_like(p) * 1e-3
    return p


def synchronize():
    """Wait until the device has finished all its work."""
    accelerators = {"cuda": torch.cuda, "mps": torch.mps}
    if kind := accelerators.get(torch.device(device).type):
        kind.synchronize()


# Any rates do: a step takes equally long with all of them
adamw = {"kind": "adamw", "lr": 0.001, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.01}
muon = {"kind": "muon", "lr": 0.001, "momentum": 0.95, "ns_steps": 5, "beta2": 0.9, "weight_decay": 0.1}
groups = [{**adamw, "params": [parameter(head)]}]
groups += [{**adamw, "params": [parameter(shape, COMPUTE_DTYPE)]} for shape in tables]  # as in its model
for shape in sorted(set(map(tuple, matrices))):
    groups.append({**muon, "params": [parameter(m) for m in matrices if tuple(m) == shape]})
optimizer = MuonAdamW(groups)
print("ready", flush=True)
for _ in sys.stdin:
    began = time.perf_counter()
    optimizer.step()
    synchronize()
    print(time.perf_counter() - began, flush=True)
