from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.cost import (
    DecodeCoefficients,
    DecodeCost,
    Fit,
    PrefillCoefficients,
    PrefillCost,
    TransferCost,
)


def truth(fixed: float, per_token: float, squared: float, n: int, p: int) -> float:
    return fixed + per_token * (n - p) + squared * (n * n - p * p)


def test_initial_values_are_those_of_a_small_model_on_a_cpu() -> None:
    assert 440 / PrefillCost(PrefillCoefficients()).seconds(440, 0) == pytest.approx(440, rel=0.1)
    assert DecodeCost(DecodeCoefficients()).seconds(1, 100) == pytest.approx(0.035, rel=0.1)


def test_cached_tokens_cost_nothing_but_their_attention() -> None:
    cost = PrefillCost(PrefillCoefficients(0.0, 1.0, 0.5))
    assert cost.seconds(10, 0) == 10 + 50
    assert cost.seconds(10, 8) == 2 + 0.5 * (100 - 64)


@pytest.mark.parametrize("true", [(0.1, 1 / 50, 2e-6), (0.005, 1 / 4000, 1e-9), (0.5, 1 / 20_000, 1e-7)])
def test_a_machine_ten_times_off_is_learned_within_tens_of_observations(true: tuple[float, float, float]) -> None:
    rng = random.Random(1)
    cost = PrefillCost(PrefillCoefficients())

    def draw() -> tuple[int, int]:
        n = int(rng.choice((50, 500, 3000, 8000)) * rng.uniform(0.5, 1))
        return n, int(n * rng.choice((0, 0, 0.5)))

    for _ in range(30):
        n, p = draw()
        cost.observe(n, p, truth(*true, n, p) * rng.uniform(0.9, 1.1))
    worst = max(abs(cost.seconds(n, p) / truth(*true, n, p) - 1) for n, p in (draw() for _ in range(200)))
    assert worst < 0.2


def test_a_change_of_speed_is_followed() -> None:
    cost = DecodeCost(DecodeCoefficients())
    for factor in (1.0, 3.0):
        for i in range(80):
            batch, context = 1 + i % 8, 100 + 37 * i
            cost.observe(batch, context, factor * (0.02 + 0.004 * batch + 1e-6 * context))
    assert cost.seconds(4, 1000) == pytest.approx(3 * 0.037, rel=0.1)


def test_hours_of_the_same_observation_do_not_spoil_the_rest() -> None:
    cost = DecodeCost(DecodeCoefficients())
    for _ in range(5000):
        cost.observe(1, 500, 0.02)
    assert cost.seconds(1, 500) == pytest.approx(0.02, rel=0.05)
    assert 0.02 < cost.seconds(8, 4000) < 0.2


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_one_wild_measurement_moves_little(factor: float) -> None:
    cost = PrefillCost(PrefillCoefficients())
    for i in range(50):
        n = 100 + 50 * i
        cost.observe(n, 0, truth(0.02, 1 / 440, 1e-7, n, 0))
    before = cost.seconds(1000, 0)
    cost.observe(1000, 0, before * factor)
    assert cost.seconds(1000, 0) == pytest.approx(before, rel=0.2)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 100_000), st.floats(0, 1), st.floats(0, 1e4, allow_nan=False)),
        max_size=40,
    )
)
def test_a_prediction_is_always_a_positive_time_and_never_falls_with_more_work(
    seen: list[tuple[int, float, float]],
) -> None:
    cost = PrefillCost(PrefillCoefficients())
    for n, share, seconds in seen:
        cost.observe(n, int(n * share * 0.99), seconds)
    times = [cost.seconds(n, 0) for n in (1, 10, 100, 10_000, 100_000)]
    assert 0 < times[0] < float("inf")
    assert times == sorted(times)
    assert cost.seconds(1000, 500) <= cost.seconds(1000, 0)
    assert all(c >= 0 for c in cost.fit.coefficients)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_measurements_are_not_learned(seconds: float) -> None:
    fit = Fit((1.0, 1.0, 1.0))
    fit.observe(1.0, 2.0, 3.0, seconds)
    assert (fit.observations, fit.coefficients) == (0, (1.0, 1.0, 1.0))


def test_a_transfer_waits_for_what_its_source_sends_already() -> None:
    transfer = TransferCost(latency=0.5, bytes_per_second=100.0)
    assert transfer.seconds(100) == 1.5
    assert transfer.seconds(100, queued_bytes=200) == 3.5
