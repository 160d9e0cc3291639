"""How small a run still ranks variants as a large one does, from the table of scripts/ablate.py.

    python -m experiments.rank_correlation       # nothing is trained

Rows of the table are one series if commit, list, depth and tokens are the same. A variant counts with its
newest row, the baseline as no difference. Two series of a commit that share enough variants are compared:
Spearman's correlation of their differences, and Pearson's, which one large difference can decide.
"""

import itertools
from pathlib import Path

import numpy as np

import configurator
from nanochat import UserError

table = "experiments/results/ablations.md"  # that scripts/ablate.py wrote
least = 5  # variants that two series have to share [3..1000]

Series = dict[str, float]  # by variant: its difference to the baseline, in bits per byte


def all_series(text: str) -> dict[tuple[str, ...], Series]:
    """By (commit, list, depth, tokens)."""
    found: dict[tuple[str, ...], Series] = {}
    for line in text.splitlines():
        if line.startswith("| 2"):
            cells = [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]
            _, commit, of_list, variant, depth, tokens, _, _, difference, *_ = cells
            series = found.setdefault((commit, of_list, f"d{depth}", tokens), {})
            series[variant] = float(difference.split()[0]) if difference else 0.0
    return found


def ranks_of(values: np.ndarray) -> np.ndarray:
    """Of each value, from 1; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def correlations(one: Series, other: Series) -> tuple[int, float, float]:
    """How many variants both have; Spearman's and Pearson's correlation over these."""
    shared = [variant for variant in one if variant in other]
    values = np.array([[series[variant] for variant in shared] for series in (one, other)])
    ranks = [ranks_of(row) for row in values]
    return len(shared), *(float(np.corrcoef(pair)[0, 1]) for pair in (ranks, values))


def rows(found: dict[tuple[str, ...], Series], least: int) -> list[str]:
    """A row for each two series of a commit that have so many variants in common."""
    lines = []
    for (key, one), (other_key, other) in itertools.combinations(found.items(), 2):
        if key[0] == other_key[0] and len(one.keys() & other.keys()) >= least:
            count, ranks, values = correlations(one, other)
            names = [f"{name[1]}, {name[2]}, {name[3]} tokens" for name in (key, other_key)]
            cells = [key[0], *names, str(count), f"{ranks:.2f}", f"{values:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    configurator.configure(globals())
    try:
        text = Path(table).read_text("utf-8")
    except OSError as error:
        raise UserError(f"--table={table}: {error.strerror}; name a table of scripts/ablate.py") from None
    print("| commit | one series | the other | variants | rank correlation | correlation |")
    print("|:--|:--|:--|--:|--:|--:|")
    print("\n".join(rows(all_series(text), least)))
