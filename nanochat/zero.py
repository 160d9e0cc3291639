"""ZeRO-1 (arXiv 1910.02054): which process updates which weights, and keeps the optimizer's state for them.

A matrix of Muon stays whole and goes to the process with the least work so far. A table of AdamW can be
cut between any two rows; it is cut so that all processes hold about as many bytes of state. No size has
to divide by the number of processes. The result depends only on the shapes and the number of processes,
so every process computes the same one.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from nanochat import UserError

REPLICATED = 1024  # every process updates a tensor with fewer elements: sending it would take longer
MUON_BYTES, ADAMW_BYTES = 4, 8  # bytes of state for each element: momentum; first and second moment


def is_shared_out(shape: Sequence[int]) -> bool:
    """Whether a tensor of that shape has an owner. Every process updates all of the others."""
    return len(shape) == 2 and shape[0] * shape[1] >= REPLICATED


def share_out(
    matrices: Sequence[Sequence[int]], tables: Sequence[Sequence[int]], world_size: int
) -> tuple[list[int], list[list[int]]]:
    """Owners of matrices and cuts of tables, given their shapes (rows, columns).

    Returns the process of each matrix, and for each table world_size + 1 row numbers: process r holds the
    rows from number r to number r + 1.
    """
    work = [0] * world_size  # multiplications of the orthogonalization, up to a factor
    held = [0] * world_size  # bytes of state
    owners = [0] * len(matrices)
    costs = [rows * columns * min(rows, columns) for rows, columns in matrices]
    for i in sorted(range(len(matrices)), key=lambda i: -costs[i]):  # the longest job first
        owners[i] = min(range(world_size), key=lambda r: (work[r], held[r]))
        work[owners[i]] += costs[i]
        held[owners[i]] += MUON_BYTES * matrices[i][0] * matrices[i][1]

    # Lay the rows of all tables end to end, and cut where each process is full
    room = _filled_to_a_level(held, ADAMW_BYTES * sum(rows * columns for rows, columns in tables))
    ends = list(accumulate(room))[:-1]
    start, cuts = 0, []
    for rows, columns in tables:
        row = ADAMW_BYTES * columns
        cuts.append([0, *(min(rows, max(0, round((end - start) / row))) for end in ends), rows])
        start += rows * row
    return owners, cuts


def _filled_to_a_level(held: list[int], amount: int) -> list[float]:
    """How much of `amount` each process takes, so that all hold about the same in the end."""
    order = sorted(held)
    for count in range(1, len(order) + 1):  # pour over the emptiest `count`
        level = (amount + sum(order[:count])) / count
        if count == len(order) or level <= order[count]:
            break
    return [max(0.0, level - h) for h in held]


# The name of a tensor of the state in a checkpoint: the parameter, its rows unless it has all, the key
STATE_LABEL = re.compile(r"(?P<name>.+?)(?:\[(?P<first>\d{1,18}):(?P<last>\d{1,18})\])?/(?P<key>\w+)")


class ShardedOptimizer(Optimizer):
    """An optimizer whose work and state are shared out, and whose state is filed under its parameters' names.

    Any number of processes can read what any other number has saved.
    """

    def __init__(self, groups, rank: int, world_size: int):
        super().__init__(groups, {})
        self.rank, self.world_size = rank, world_size
        matrices, tables, rowwise = (
            [p for g in self.param_groups if g["method"] == m for p in g["params"] if is_shared_out(p.shape)]
            for m in ("muon", "adamw", "rowwise")
        )
        owners, cuts = share_out([p.shape for p in matrices], [p.shape for p in tables], world_size)
        self.cuts = dict(zip(tables, cuts, strict=True))  # process r has the rows from cut r to cut r + 1
        self.cuts |= {p: [len(p) * r // world_size for r in range(world_size + 1)] for p in rowwise}
        self.owner_of = dict(zip(matrices, owners, strict=True))

    def sort_by_owner(self, group) -> list[int] | None:
        """Sort a group's parameters by owner; returns cuts (`share_out`), None if all processes have all."""
        if group["params"][0] not in self.owner_of:
            return None
        pairs = zip(group["params"], group["names"], strict=True)
        pairs = sorted(pairs, key=lambda pair: self.owner_of[pair[0]])
        group["params"], group["names"] = map(list, zip(*pairs, strict=True))
        owners = [self.owner_of[p] for p in group["params"]]
        return [bisect_left(owners, r) for r in range(self.world_size + 1)]

    def rows(self, p):
        """The index of the part of a parameter that this process updates: some rows of a table, or all."""
        cuts = self.cuts.get(p)
        return slice(*cuts[self.rank : self.rank + 2]) if cuts else ...

    def owners(self, p) -> list[tuple[int, slice]]:
        """Which process updates which rows of a parameter; empty if every process updates all of it."""
        if p in self.owner_of:
            return [(self.owner_of[p], slice(None))]
        cuts = enumerate(pairwise(self.cuts.get(p, ())))
        return [(r, slice(first, last)) for r, (first, last) in cuts if last > first]

    def send(self, tensor, cuts) -> list:
        """Begin to broadcast each part of a tensor from its owner. All processes do it in the same order."""
        if cuts is None or self.world_size == 1:
            return []
        parts = [(r, tensor[first:last]) for r, (first, last) in enumerate(pairwise(cuts)) if last > first]
        return [dist.broadcast(part, src=r, async_op=True) for r, part in parts]

    def named_parameters(self):
        for group in self.param_groups:
            yield from zip(group["names"], group["params"], strict=True)

    def named_state(self) -> dict[str, torch.Tensor]:
        """The tensors of the state that this process keeps, as {`<parameter's name>/<key>`: tensor}.

        If it keeps only some rows, the name says which: `embedding.weight[0:2048]/exp_avg`. State that all
        processes keep alike comes from the first.
        """
        named = {}
        for name, p in self.named_parameters():
            if p in self.state and (self.rank == 0 or is_shared_out(p.shape)):
                rows = self.rows(p)
                if rows is not ... and (rows.start, rows.stop) != (0, len(p)):
                    name = f"{name}[{rows.start}:{rows.stop}]"
                named |= {f"{name}/{key}": tensor for key, tensor in self.state[p].items()}
        return named

    def needs(self, label: str) -> bool:
        """Whether this process keeps any of the state under that name, whichever process saved it."""
        parsed = STATE_LABEL.fullmatch(label)
        p = parsed and dict(self.named_parameters()).get(parsed["name"])
        if p is None or p not in self.state:
            return False
        rows = self.rows(p)
        if rows is ... or parsed["first"] is None:
            return True
        return max(int(parsed["first"]), rows.start) < min(int(parsed["last"]), rows.stop)

    @torch.no_grad()
    def load_named_state(self, named: dict[str, torch.Tensor]):
        """Restore the `named_state` of any number of processes; UserError if a tensor is missing, or of
        another shape or type."""
        parts: dict[tuple, list] = {}  # by name of parameter and of state: (first row, tensor)
        for label, tensor in named.items():
            if parsed := STATE_LABEL.fullmatch(label):
                found = parts.setdefault((parsed["name"], parsed["key"]), [])
                found.append((int(parsed["first"] or 0), tensor))
        for name, p in self.named_parameters():
            rows = self.rows(p)
            for key, mine in self.state[p].items() if p in self.state else ():
                if not _filled(mine, 0 if rows is ... else rows.start, parts.get((name, key), ())):
                    raise UserError(
                        f"the optimizer's state {name}/{key} is not in the checkpoint, or not whole, or of "
                        "another shape or type; go back to the model that the run began with, or start a "
                        "new run from its weights with --init_from"
                    )


def _filled(mine: torch.Tensor, start: int, parts) -> bool:
    """Fill `mine`, the rows from `start` on, from parts (first row, tensor); whether nothing is missing."""
    missing = mine.numel()
    for first, tensor in parts:
        if (tensor.dtype, tensor.ndim, tensor.shape[1:]) != (mine.dtype, mine.ndim, mine.shape[1:]):
            continue
        if mine.ndim == 0:
            mine.copy_(tensor)
            return True
        low, high = max(first, start), min(first + len(tensor), start + len(mine))
        if low < high:
            part = mine[low - start : high - start]
            missing -= part.copy_(tensor[low - first : high - first]).numel()
    return missing == 0
