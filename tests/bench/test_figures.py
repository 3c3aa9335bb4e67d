"""What the bench makes of its numbers."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from moonpool.bench.bars import bars
from moonpool.bench.figures import BATCH, KIB, LOCAL, MIB, OURS, PEER, REMOTE, Case, Figures
from moonpool.bench.limits import SHARED_COPY, SOCKETS_SUMMED, SOCKETS_VERIFIED
from moonpool.bench.result import bar
from moonpool.bench.ssd import PLACE, RAW_READ, RAW_WRITE

CASE = Case(REMOTE, "get", MIB, 1)


def filled(ours: float, theirs: float | None) -> Figures:
    """Every case there is: a walk takes `ours` seconds, the peer's `theirs`."""
    figures = Figures(walk_bytes=10**9)
    for place in (REMOTE, LOCAL, PLACE):
        for do in ("put", "get", "exists", "view"):
            for size in (64 * KIB, MIB, 8 * MIB):
                for batch in (1, BATCH):
                    figures.add(Case(place, do, size, batch), OURS, [ours])
                    if theirs is not None:
                        figures.add(Case(place, do, size, batch), PEER, [theirs])
    for limit in (SHARED_COPY, SOCKETS_SUMMED, SOCKETS_VERIFIED, RAW_WRITE, RAW_READ):
        figures.add_limit(limit, 1.0)
    return figures


def test_a_ratio_pairs_each_walk_with_the_other_sides_of_the_same_turn() -> None:
    figures = Figures(10**9)
    # The machine was four times slower in the second turn: every pair says 2.
    for slowness in (1.0, 4.0, 1.0):
        figures.add(CASE, OURS, [slowness, slowness])
        figures.add(CASE, PEER, [4 * slowness])
    assert figures.ratio(CASE) == 2.0
    assert figures.gbs(CASE, OURS) == [0.5, 0.125, 0.5]


def test_without_the_other_side_there_is_no_ratio() -> None:
    figures = Figures(10**9)
    assert figures.ratio(CASE) is None
    figures.add(CASE, OURS, [1.0])
    assert figures.ratio(CASE) is None
    assert figures.share(CASE, "a limit nobody measured") is None


def test_percentiles_are_of_single_calls() -> None:
    figures = Figures(10**9)
    figures.add(CASE, OURS, [n / 1e6 for n in range(1, 101)])
    series = figures.series(CASE, OURS)
    assert series is not None
    assert (series.percentile_us(50), series.percentile_us(99)) == pytest.approx((51, 100))


def test_a_bar_says_whether_it_holds() -> None:
    assert bar("a", 2.0, 2.0)["holds"] is True
    assert bar("a", 1.999, 2.0)["holds"] is False
    assert bar("a", 1.4, 1.5, at_most=True)["holds"] is True
    assert bar("a", None, 2.0, reason="no peer") == {
        "name": "a",
        "value": None,
        "target": 2.0,
        "holds": None,
        "reason": "no peer",
    }


def test_every_bar_is_computed_from_the_right_rows() -> None:
    fast, slow = bars(filled(ours=1.0, theirs=3.0), ""), bars(filled(ours=1.0, theirs=0.5), "")
    assert all(b["holds"] for b in fast)
    failing = [b["name"] for b in slow if not b["holds"]]
    assert failing == [b["name"] for b in slow if "Mooncake" in str(b["name"])]
    assert len(failing) == 14


def test_without_the_peer_its_bars_stay_open_and_say_why() -> None:
    found = bars(filled(ours=2.0, theirs=None), "no wheel for this machine")
    opened = [b for b in found if "Mooncake" in str(b["name"])]
    assert opened
    assert all(b["holds"] is None and b["reason"] == "no wheel for this machine" for b in opened)
    assert [b["holds"] for b in found if "of two sockets" in str(b["name"])] == [False, False]


def test_the_tables_have_a_row_a_case_and_a_row_a_limit() -> None:
    out = StringIO()
    for table in filled(ours=1.0, theirs=2.0).tables():
        Console(file=out, width=160).print(table)
    text = out.getvalue()
    assert text.count("put 8 MiB, batch of 32") == 3
    assert "2.00" in text
    assert RAW_READ in text
