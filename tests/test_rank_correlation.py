"""Two series of runs are compared by how they rank the variants that both have."""

from experiments.rank_correlation import all_series, rows

TABLE = """\
| date | commit | list | variant | depth | tokens | seeds | bits per byte | difference | time | verdict |
|:--|:--|:--|:--|--:|--:|--:|--:|--:|--:|:--|
| 2026-01-01 | abc | parts | today | 4 | 1,000 | 1 | 1.0000 |  |  | baseline |
| 2026-01-01 | abc | parts | a | 4 | 1,000 | 1 | 1.1000 | +0.1000 | 1.00 | one seed |
| 2026-01-01 | abc | parts | b | 4 | 1,000 | 1 | 0.9900 | -0.0100 | 1.00 | one seed |
| 2026-01-02 | abc | parts | b | 4 | 1,000 | 3 | 1.2000 ± 0.1000 | +0.2000 ± 0.1000 | 1.00 | worse |
| 2026-01-02 | abc | parts, width=9 | today | 4 | 5,000 | 1 | 0.9000 |  |  | baseline |
| 2026-01-02 | abc | parts, width=9 | a | 4 | 5,000 | 1 | 1.2000 | +0.3000 | 1.00 | one seed |
| 2026-01-02 | abc | parts, width=9 | b | 4 | 5,000 | 1 | 1.0000 | +0.1000 | 1.00 | one seed |
| 2026-01-02 | abc | parts, width=9 | c | 4 | 5,000 | 1 | 1.0000 | +0.1000 | 1.00 | one seed |
| 2026-01-03 | def | parts | a | 4 | 5,000 | 1 | 1.0000 | +0.1000 | 1.00 | one seed |
"""


def test_a_variant_counts_with_its_newest_row_and_the_baseline_as_no_difference():
    found = all_series(TABLE)
    assert found["abc", "parts", "d4", "1,000"] == {"today": 0.0, "a": 0.1, "b": 0.2}
    assert found["abc", "parts, width=9", "d4", "5,000"] == {"today": 0.0, "a": 0.3, "b": 0.1, "c": 0.1}


def test_only_series_of_one_commit_with_enough_variants_are_compared():
    (row,) = rows(all_series(TABLE), least=3)
    assert row.startswith("| abc | parts, d4, 1,000 tokens | parts, width=9, d4, 5,000 tokens | 3 | 0.50 |")
    assert rows(all_series(TABLE), least=4) == []
