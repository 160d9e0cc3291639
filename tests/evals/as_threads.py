"""Processes of an evaluation, as threads of this one."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch


def in_processes(world_size: int, work) -> list:
    """What work(machine) returns in each process; the threads meet in machine.all_sum."""
    barrier, values = threading.Barrier(world_size, timeout=300), [[]] * world_size

    def machine(rank: int):
        def all_sum(mine):
            values[rank] = mine
            barrier.wait()
            return [sum(column) for column in zip(*values, strict=True)]

        device = torch.device("cpu")
        return SimpleNamespace(device=device, rank=rank, world_size=world_size, all_sum=all_sum)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(work, map(machine, range(world_size))))
