"""Which process updates which weights: ZeRO-1 (arXiv 1910.02054).

A matrix of Muon stays whole and goes to the process with the least work so far. A table of AdamW can be
cut between any two rows; it is cut so that all processes hold about as many bytes of state. No size has
to divide by the number of processes. The result depends only on the shapes and the number of processes,
so every process computes the same one.
"""

import itertools
from collections.abc import Sequence

REPLICATED = 1024  # every process updates a tensor with fewer elements: sending it would take longer
MUON_BYTES, ADAMW_BYTES = 4, 8  # of state for an element: momentum; first and second moment


def is_shared_out(shape: Sequence[int]) -> bool:
    """Whether a tensor of that shape has an owner. Every process updates the other tensors in the same
    way."""
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

    # Put all tables in one line and cut it where each process is full
    room = _room_up_to_a_level(held, ADAMW_BYTES * sum(rows * columns for rows, columns in tables))
    ends = list(itertools.accumulate(room))[:-1]
    start, cuts = 0, []
    for rows, columns in tables:
        row = ADAMW_BYTES * columns
        cuts.append([0, *(min(rows, max(0, round((end - start) / row))) for end in ends), rows])
        start += rows * row
    return owners, cuts


def _room_up_to_a_level(held: list[int], amount: int) -> list[float]:
    """How much of `amount` each process takes, so that all hold about the same in the end."""
    order = sorted(held)
    for count in range(1, len(order) + 1):  # pour over the emptiest `count`
        level = (amount + sum(order[:count])) / count
        if count == len(order) or level <= order[count]:
            break
    return [max(0.0, level - h) for h in held]
