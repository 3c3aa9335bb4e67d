"""Output lengths and the load to come, held against counting one by one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.forecast import BUCKET_SECONDS, BUCKETS, Ahead, Stay
from moonpool.core.lengths import FAMILIES, SLICES, LengthForecast, Lengths
from moonpool.core.vocabulary import BlockKey, RequestId


def key(n: int) -> BlockKey:
    return BlockKey(n.to_bytes(16, "big"))


# Lengths


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=200))
def test_slices_keep_the_mean_and_rise(tokens: list[int]) -> None:
    lengths = Lengths()
    for length in tokens:
        lengths.observe(length)
    slices = lengths.slices_beyond(0)
    assert len(slices) == SLICES
    assert list(slices) == pytest.approx(sorted(slices))
    assert sum(slices) / SLICES == pytest.approx(sum(tokens) / len(tokens), rel=0.13)


def test_what_has_come_already_is_no_part_of_what_is_expected() -> None:
    lengths = Lengths()
    for length in (10, 10, 10, 1000, 1000):
        lengths.observe(length)
    assert lengths.slices_beyond(0)[0] == pytest.approx(10, rel=0.1)
    assert min(lengths.slices_beyond(100)) == pytest.approx(1000, rel=0.1)
    assert lengths.slices_beyond(5000) == ()


def test_a_family_speaks_for_itself_once_it_has_been_seen_enough() -> None:
    forecast = LengthForecast()
    for _ in range(100):
        forecast.observe("m", [key(1)], 400)
    for n in range(20):
        assert (forecast.expected("m", [key(2)], 0, 4096)[0] > 300) == (n < 8)
        forecast.observe("m", [key(2)], 3)
    assert forecast.expected("m", [key(2), key(3)], 0, 4096) == (3.0,) * SLICES
    # A stranger is expected to be like the rest of its model, in an unknown model like all.
    assert forecast.expected("m", [key(9)], 0, 4096)[-1] == pytest.approx(400, rel=0.1)
    assert forecast.expected("other", [], 0, 4096)[-1] == pytest.approx(400, rel=0.1)


def test_nothing_is_expected_beyond_what_the_client_allows() -> None:
    forecast = LengthForecast()
    assert max(forecast.expected("m", [], 0, 16)) == 16
    assert forecast.expected("m", [], 90, 100) == (100,) * SLICES
    for _ in range(50):
        forecast.observe("m", [], 700)
    assert forecast.expected("m", [], 0, 30) == (30,) * SLICES
    assert min(forecast.expected("m", [], 600, 4096)) > 600


def test_a_change_of_habits_is_followed() -> None:
    lengths = Lengths()
    for length in [20] * 3000 + [900] * 1500:
        lengths.observe(length)
    assert lengths.slices()[1] > 800


def test_families_are_bounded() -> None:
    forecast = LengthForecast()
    for n in range(FAMILIES + 100):
        forecast.observe("m", [key(n)], 5)
    forecast.check_integrity()


# The load to come


def stay(joins_at: float, tokens: int, *rest: float, tbt: float | None = None) -> Stay:
    return Stay(joins_at, tokens, tuple(rest) if len(rest) == SLICES else (rest[0],) * SLICES, tbt)


STEP = 0.05


def test_who_is_there_leaves_and_who_is_coming_comes() -> None:
    ahead = Ahead()
    ahead.book(RequestId("a"), stay(100.0, 1000, 200.0), STEP, 100.0)
    ahead.join(RequestId("a"), STEP, 100.0)
    ahead.book(RequestId("b"), stay(105.0, 3000, 400.0), STEP, 100.0)
    assert ahead.at(104.0, STEP, 100.0).batch == 1
    assert ahead.at(106.0, STEP, 100.0).batch == 2
    assert ahead.at(106.0, STEP, 100.0).tokens == pytest.approx(1000 + 6 / STEP + 3000, rel=0.02)
    assert ahead.at(112.0, STEP, 100.0).batch == 1
    assert ahead.at(130.0, STEP, 100.0).batch == 0
    assert ahead.now(STEP, 104.0).tokens == pytest.approx(1080)
    ahead.leave(RequestId("b"))
    assert ahead.at(106.0, STEP, 100.0).batch == 1
    ahead.check_integrity()


def test_one_that_outlives_its_kin_is_still_there() -> None:
    ahead = Ahead()
    ahead.book(RequestId("a"), stay(0.0, 100, 20.0), STEP, 0.0)
    ahead.join(RequestId("a"), STEP, 0.0)
    assert ahead.at(3.0, STEP, 0.0).batch == 0
    assert ahead.at(60.0, STEP, 50.0).batch == 1
    # One that is late for its join is there from now on, as far as anybody knows.
    ahead.book(RequestId("b"), stay(51.0, 100, 2000.0), STEP, 50.0)
    assert ahead.at(62.0, STEP, 60.0).batch == 2


def test_the_strictest_limit_is_that_of_those_who_are_there() -> None:
    ahead = Ahead()
    for name, tbt in (("a", 0.2), ("b", 0.1), ("c", None)):
        ahead.book(RequestId(name), stay(1.0, 10, 5.0, tbt=tbt), STEP, 0.0)
    assert ahead.strictest() == 0.1
    ahead.leave(RequestId("b"))
    assert ahead.strictest() == 0.2
    assert (ahead.strictest(0.1), ahead.strictest(0.3)) == (0.1, 0.2)
    ahead.leave(RequestId("a"))
    assert ahead.strictest() is None


@settings(max_examples=40)
@given(st.integers(0, 10_000))
def test_the_load_to_come_is_what_counting_gives(seed: int) -> None:
    """Every length is equally likely to be each of its slices; nothing outlives all of them here."""
    rng = random.Random(seed)
    ahead, now, known = Ahead(), 1000.0, {}
    for n in range(60):
        now += rng.uniform(0.0, 1.0)
        one = stay(now + rng.uniform(0, 20), rng.randint(100, 9000), *sorted(rng.uniform(500, 1500) for _ in range(5)))
        known[RequestId(f"r{n}")] = one
        ahead.book(RequestId(f"r{n}"), one, STEP, now)
        if rng.random() < 0.2:
            ahead.leave(gone := rng.choice(list(known)))
            del known[gone]
        for id_ in [id_ for id_ in ahead.coming if ahead.coming[id_].joins_at <= now]:
            ahead.join(id_, STEP, now)
        ahead.check_integrity()
    time = now + rng.uniform(0, 25)
    expected = sum(
        sum(one.joins_at + length * STEP > time for length in one.rest) / SLICES
        for one in known.values()
        if one.joins_at <= time
    )
    assert ahead.at(time, STEP, now).batch == pytest.approx(expected, abs=0.08 * len(known) + 0.5)


def test_what_lies_beyond_the_last_bucket_is_not_lost() -> None:
    ahead, far = Ahead(), BUCKETS * BUCKET_SECONDS
    ahead.book(RequestId("a"), stay(2 * far, 100, 10.0), STEP, 0.0)
    assert ahead.at(1.0, STEP, 0.0).batch == 0
    for now in (0.5 * far, 1.5 * far, 3.0 * far):
        ahead.at(now, STEP, now)
        ahead.check_integrity()
    ahead.join(RequestId("a"), STEP, 3.0 * far)
    ahead.leave(RequestId("a"))
    assert ahead.at(3.1 * far, STEP, 3.1 * far).batch == 0
    ahead.check_integrity()
