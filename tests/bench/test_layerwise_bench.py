"""The figures of bench-layerwise: ratios within a repetition, and bars that can fail."""

from __future__ import annotations

from moonpool.bench.gaps import APART, COUPLED, Gaps, gap_bars, gap_table
from moonpool.bench.layerwise import (
    DRAM,
    LAYERWISE,
    LOAD_REMOTE,
    NOTHING,
    REMOTE,
    Rows,
    first_bars,
    overhead_bars,
    paired,
    table,
)


def test_overhead_is_the_median_of_pairs_and_not_of_all() -> None:
    rows: Rows = {(512, NOTHING): [1.0, 10.0, 2.0], (512, LAYERWISE): [1.02, 10.1, 2.2]}
    assert abs(paired(rows, 512, LAYERWISE, NOTHING) - 1.02) < 1e-9
    (bar,) = overhead_bars(rows)
    assert bar["holds"] is True
    rows[512, LAYERWISE] = [1.1, 10.1, 2.2]
    (bar,) = overhead_bars(rows)
    assert bar["holds"] is False
    assert table("t", rows, NOTHING).row_count == 2


def test_a_first_token_that_loads_before_it_computes_does_not_hold() -> None:
    rows: Rows = {(512, DRAM): [1.0], (512, REMOTE): [1.2], (512, LOAD_REMOTE): [0.5]}
    (bar,) = first_bars(rows)
    assert (bar["value"], bar["holds"]) == (0.8, True)
    rows[512, REMOTE] = [1.6]
    assert first_bars(rows)[0]["holds"] is False


def test_gaps_are_compared_by_the_longest_of_each_repetition() -> None:
    gaps: Gaps = {APART: [[0.1, 0.2], [0.1, 0.4], [0.3]], COUPLED: [[0.9], [0.6, 0.1], [0.1]]}
    (bar,) = gap_bars(gaps)
    assert (bar["value"], bar["holds"]) == (2.0, True)
    assert gap_table(gaps).row_count == 2
