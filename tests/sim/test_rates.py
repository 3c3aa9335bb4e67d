"""The search for the 90 % point against a look at every point of the grid."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.sim.rates import highest_rate, one_by_one


@given(
    st.integers(0, 400), st.integers(1, 300), st.sampled_from([0.01, 0.25, 1.0]), st.integers(1, 5), st.floats(0.1, 400)
)
def test_it_finds_what_looking_everywhere_finds(limit: int, last: int, step: float, width: int, start: float) -> None:
    asked: list[list[float]] = []

    def attainments(rates: Sequence[float]) -> list[float]:
        asked.append(list(rates))
        return [1.0 if rate <= (limit + 0.5) * step else 0.5 for rate in rates]

    point = highest_rate(attainments, step, last * step, start=start * step, width=width)
    assert point.rate == pytest.approx(min(limit, last) * step)
    assert point.is_open == (limit >= last)
    assert all(0 < len(rates) <= width for rates in asked)
    assert sum(len(rates) for rates in asked) == len(point.tried), "no rate is looked at twice"
    assert width > 1 or len(point.tried) <= 20, "of 300"


def test_a_share_that_is_not_monotone_counts_up_to_its_first_failure() -> None:
    shares = {1: 0.95, 2: 0.92, 3: 0.89, 4: 0.91, 5: 0.2}
    point = highest_rate(one_by_one(lambda rate: shares[round(rate)]), 1.0, 5.0, width=5)
    assert (point.rate, point.attained) == (2.0, 0.92)


def test_a_grid_without_points_is_refused() -> None:
    with pytest.raises(ValueError, match="no rate lies on a grid of 2 up to 1"):
        highest_rate(one_by_one(lambda rate: 1.0), 2.0, 1.0)
