from __future__ import annotations

import msgspec
import numpy as np
import pytest

from moonpool.core.vocabulary import Slo
from moonpool.report.outcomes import Outcome, Outcomes
from moonpool.report.summary import buckets, intervals_of, summarize

SLO = Slo(2.0, 0.1)
GOOD = Outcome(
    arrived=0.0,
    input_tokens=100,
    output_tokens=10,
    completed=True,
    ttft=1.0,
    slowest_tenth=0.05,
    p90_interval=0.05,
    longest_interval=0.2,
    cached_tokens=40,
    computed_tokens=60,
)


def test_what_attains_is_complete_and_within_both_limits() -> None:
    change = msgspec.structs.replace
    assert GOOD.attains(SLO)
    assert GOOD.attains(Slo())
    assert not change(GOOD, ttft=2.1).attains(SLO)
    assert not change(GOOD, slowest_tenth=0.11).attains(SLO)
    assert not change(GOOD, completed=False).attains(Slo())
    assert not change(GOOD, ttft=None, completed=False, refusal="queue-full").attains(Slo())


def test_a_summary_counts_goodput_and_waste() -> None:
    change = msgspec.structs.replace
    late = change(GOOD, arrived=5.0, ttft=9.0, computed_tokens=80, cached_tokens=20)
    refused = change(
        GOOD, arrived=10.0, completed=False, ttft=None, refusal="ttft-slo", computed_tokens=0, cached_tokens=0
    )
    found = summarize(Outcomes.of([GOOD, late, refused]), SLO)
    assert (found.requests, found.completed, found.attained) == (3, 2, 1)
    assert found.refused == {"ttft-slo": 1}
    assert found.goodput_requests == pytest.approx(0.1)
    assert found.goodput_tokens == pytest.approx(11.0)
    assert found.cached_share == pytest.approx(0.3)
    assert (found.computed_tokens, found.wasted_tokens) == (140, 80)
    assert found.ttft.mean == pytest.approx(5.0)
    with pytest.raises(ValueError, match="no request"):
        summarize(Outcomes(), SLO)


def test_the_slowest_tenth_is_the_mean_of_the_longest() -> None:
    intervals = np.arange(1.0, 21.0)
    assert intervals_of(intervals)[0] == pytest.approx(19.5)
    assert intervals_of(intervals)[2] == 20.0
    assert intervals_of(np.array([3.0]))[0] == 3.0
    assert intervals_of(np.empty(0)) == (0.0, 0.0, 0.0)


def test_small_buckets_are_counted_with_a_neighbour() -> None:
    def of(tokens: int, count: int) -> list[Outcome]:
        return [msgspec.structs.replace(GOOD, input_tokens=tokens)] * count

    many = of(1999, 200) + of(2000, 200) + of(8000, 250) + of(40_000, 200)
    assert [(b.name, b.requests) for b in buckets(Outcomes.of(many), SLO)] == [
        ("0-2k", 200),
        ("2k-8k", 200),
        ("8k-32k", 250),
        ("over 32k", 200),
    ]
    few = of(100, 10) + of(3000, 300) + of(9000, 300) + of(40_000, 3)
    assert [(b.name, b.requests, b.attained) for b in buckets(Outcomes.of(few), SLO)] == [
        ("0-2k + 2k-8k", 310, 310),
        ("8k-32k + over 32k", 303, 303),
    ]
    assert [(b.name, b.requests) for b in buckets(Outcomes.of(of(100, 3)), SLO)] == [
        ("0-2k + 2k-8k + 8k-32k + over 32k", 3)
    ]
