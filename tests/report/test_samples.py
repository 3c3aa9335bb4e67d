"""Load over time, and what is told from it."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest

from moonpool.core.vocabulary import Slo
from moonpool.report.outcomes import Outcome, Outcomes
from moonpool.report.samples import MOST_SAMPLES, Recording, Sample, correlation, loads, swing
from moonpool.report.timeline import curve, timeline

SLO = Slo(10.0, 0.1)


def sample(time: float, prefill: float, decode: float) -> Sample:
    return Sample(time, prefill, prefill, decode, decode, batch=1.0, assigned=1.0)


def waves(shift: float, count: int = 200) -> list[Sample]:
    """Prefill in a wave of 40 s, decode the same `shift` seconds later."""
    return [
        sample(float(at), 5 + 4 * math.sin(at * math.tau / 40), 0.05 + 0.02 * math.sin((at - shift) * math.tau / 40))
        for at in range(count)
    ]


def test_loads_are_shares_of_the_limits() -> None:
    assert loads([sample(0.0, 5.0, 0.08)], SLO) == ([0.5], [pytest.approx(0.8)])
    assert loads([sample(0.0, 5.0, 0.08)], Slo()) == ([5.0], [0.08])


def test_anti_phase_shows_in_the_lagged_correlation_and_the_swing_in_the_deviation() -> None:
    found = swing(waves(20.0), SLO, until=199.0, lags=(10.0, 20.0))
    assert found.correlation == pytest.approx(-1.0, abs=0.02)
    assert found.lagged[1] == (20.0, pytest.approx(1.0, abs=0.02)), "decode follows prefill 20 s later"
    assert found.lagged[0][1] == pytest.approx(0.0, abs=0.05)
    assert found.prefill_deviation == pytest.approx(0.4 / math.sqrt(2), rel=0.02)
    assert found.decode_deviation == pytest.approx(0.2 / math.sqrt(2), rel=0.02)


def test_what_drains_at_the_end_does_not_count() -> None:
    drained = [*waves(20.0), *(sample(200.0 + at, 0.0, 0.0) for at in range(100))]
    assert swing(drained, SLO, until=199.0) == swing(waves(20.0), SLO, until=199.0)


def test_a_load_that_never_changes_has_no_correlation() -> None:
    assert correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) == 0.0
    assert correlation([], []) == 0.0
    assert swing([], SLO, 1.0).correlation == 0.0


def test_a_recording_is_bounded_and_stays_even() -> None:
    recording, time = Recording(1.0), 0.0
    while time < 20 * MOST_SAMPLES:
        time += recording.period
        recording.add(sample(time, 0.0, 0.0))
        assert len(recording.samples) <= MOST_SAMPLES
    times = [each.time for each in recording.samples]
    gaps = {b - a for a, b in itertools.pairwise(times)}
    assert gaps == {recording.period}
    assert len(times) > MOST_SAMPLES / 3


def test_a_timeline_counts_refusals_and_waste_by_arrival() -> None:
    good = Outcome(0.0, 100, 10, True, 1.0, 0.05, 0.05, 0.05, 40, 60, fetched_tokens=30)
    change = msgspec.structs.replace
    late = change(good, arrived=59.0, completed=False, ttft=1.0, refusal="tbt-slo")
    early = change(good, arrived=60.0, completed=False, ttft=None, refusal="ttft-slo", cached_tokens=0)
    early = change(early, computed_tokens=0, fetched_tokens=0)
    bins = timeline(Outcomes.of([good, late, early]), SLO, bins=2)
    assert [b.time for b in bins] == [0.0, 30.0]
    first, second = bins
    assert (first.requests, first.attained, first.wasted_tokens) == (1, 1, 0)
    assert (first.local_tokens, first.fetched_tokens, first.computed_tokens) == (10, 30, 60)
    assert (second.requests, second.attained, second.wasted_tokens) == (2, 0, 60)
    assert (second.refused_early, second.refused_late) == (1, 1)


def test_a_curve_ends_at_the_share_that_has_a_value() -> None:
    found = curve(np.array([1.0, 3.0, 2.0]), 4, points=3)
    assert found.values == (1.0, 2.0, 3.0)
    assert found.share == 0.75
    assert curve(np.empty(0), 4).share == 0.0
