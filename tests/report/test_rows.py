from __future__ import annotations

import math
from typing import cast

import pytest

from moonpool.report.estimates import estimate, paired_difference
from moonpool.report.rows import ATTAINED, GOODPUT, Difference, Row, share, show_difference
from moonpool.report.run import Run


def test_an_interval_is_students() -> None:
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.half_width == pytest.approx(2.776 * 1.5811 / 5**0.5, rel=1e-3)
    assert estimate([2.0]).half_width is None
    with pytest.raises(ValueError, match="no values"):
        estimate([])


def test_what_all_seeds_share_cancels_out() -> None:
    base = [1.0, 50.0, 7.0, 20.0]
    found = paired_difference([value + 0.5 for value in base], base)
    assert found.mean == pytest.approx(0.5)
    assert found.half_width == pytest.approx(0.0, abs=1e-9)
    assert found.is_clear
    assert not paired_difference([1.0, -1.0], [0.0, 0.0]).is_clear
    with pytest.raises(ValueError, match="zip"):
        paired_difference([1.0], [1.0, 2.0])


def test_what_may_be_chance_is_in_brackets() -> None:
    clear = Difference("b", GOODPUT.name, "a", paired_difference([2.0, 2.1], [1.0, 1.1]), 0.95)
    assert show_difference(GOODPUT, clear) == "+1.000 ± 0.000 (+95.0%)"
    chance = Difference("b", ATTAINED.name, "a", paired_difference([0.2, 0.9], [0.9, 0.4]), None)
    assert show_difference(ATTAINED, chance).startswith("[-10.0% ± ")


def test_what_a_run_does_not_know_is_a_dash() -> None:
    assert Row("a", lambda run: math.nan, share).cell([cast("Run", None)]) == "-"
