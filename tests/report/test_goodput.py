from __future__ import annotations

import pytest

from moonpool.core.settings import Decisions
from moonpool.core.vocabulary import Slo
from moonpool.report.goodput import Search, goodput
from moonpool.report.outcomes import Outcome, Outcomes
from moonpool.report.run import Run, run_of


@pytest.mark.parametrize("capacity", [0.07, 0.9, 1.0, 13.7])
def test_the_search_finds_where_attainment_falls_below_the_wanted_share(capacity: float) -> None:
    search, asked = Search(), []
    while not search.is_over:
        asked.append(search.speed)
        search.tell(1.0 if search.speed <= capacity else 0.5)
    assert search.found == pytest.approx(capacity, rel=0.021)
    assert search.found <= capacity
    assert len(asked) <= 14


def test_a_cluster_that_never_attains_has_no_point() -> None:
    search = Search()
    while not search.is_over:
        search.tell(0.2)
    assert search.found is None


def test_a_line_is_the_mean_over_seeds() -> None:
    def run(seed: int, late: int) -> Run:
        outcomes = [
            Outcome(float(at), 100, 10, True, 9.0 if at < late else 1.0, 0.05, 0.05, 0.05, 0, 100) for at in range(101)
        ]
        return run_of(
            "x", seed, Slo(2.0, 0.1), Outcomes.of(outcomes), [], [], Decisions(), preemptions=0, busy=(0.0, 0.0)
        )

    line = goodput("x", 2.0, [run(1, 10), run(2, 20)])
    assert line.offered.mean == pytest.approx(1.01)
    assert line.attained.mean == pytest.approx(86 / 101)
    assert line.requests.mean == pytest.approx(0.86)
    assert line.tokens.mean == pytest.approx(0.86 * 110)
    assert line.buckets[0].requests == 101
    assert line.buckets[0].attained.half_width == pytest.approx(12.706 * 0.05 / 1.01, rel=1e-3)
    with pytest.raises(ValueError, match="no values"):
        goodput("x", 1.0, [])
