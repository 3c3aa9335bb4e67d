"""Quotas by themselves: what a minute allows, whatever the order and the time that things come at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.gateway.keys.quota import GRAIN, Allowance, Bucket, Quota

MINUTE = 60.0


def test_a_minutes_worth_comes_at_once_and_then_evenly() -> None:
    quota = Quota(Allowance(requests_per_minute=6), now=100.0)
    for _ in range(6):
        assert quota.over(100.0, requests=1) is None
        quota.take(100.0, requests=1)
    over = quota.over(103.0, requests=1)
    assert over is not None
    assert (over.quota, over.limit) == ("requests-per-minute", 6)
    assert over.wait == pytest.approx(7.0)
    assert quota.over(110.0, requests=1) is None
    quota.take(110.0, requests=1)
    assert quota.over(110.0, requests=1) is not None
    assert quota.over(1e6, requests=6) is None
    assert quota.over(1e6, requests=7) is None, "more than a minute's worth waits for a full one"
    quota.take(1e6, requests=1)
    assert quota.over(1e6, requests=7) is not None


def test_what_is_known_at_the_end_only_is_a_debt() -> None:
    quota = Quota(Allowance(tokens_per_minute=600), now=0.0)
    quota.take(0.0, tokens=100)
    quota.take(0.0, tokens=800)
    over = quota.over(0.0, tokens=1)
    assert over is not None
    assert (over.quota, over.wait) == ("tokens-per-minute", pytest.approx(30.1))
    quota.take(0.0, tokens=-800)
    assert quota.over(0.0, tokens=500) is None
    assert quota.over(0.0, tokens=501) is not None


def test_streams_are_given_back_and_the_wait_is_what_they_last() -> None:
    quota = Quota(Allowance(streams=4), now=0.0)
    for _ in range(100):
        quota.take(0.0, streams=4)
        quota.close(4, seconds=20.0)
    quota.take(0.0, streams=4)
    over = quota.over(0.0, streams=2)
    assert over is not None
    assert (over.quota, over.limit) == ("streams", 4)
    assert over.wait == pytest.approx(10.0, rel=0.01)
    quota.close(2, seconds=20.0)
    assert quota.over(0.0, streams=2) is None
    assert quota.over(0.0, streams=3) is not None
    quota.check_integrity()


def test_of_several_quotas_the_one_that_lasts_is_named() -> None:
    quota = Quota(Allowance(requests_per_minute=60, tokens_per_minute=60, streams=1), now=0.0)
    quota.take(0.0, requests=60, tokens=70, streams=1)
    named = [quota.over(at, requests=1, tokens=1, streams=1) for at in (0.0, 10.5)]
    assert [over.quota if over else None for over in named] == ["tokens-per-minute", "streams"]
    assert quota.over(0.0, requests=1) == quota.over(0.0, requests=1), "asking changes nothing"
    assert quota.over(0.0) is None


def test_without_limits_everything_is_allowed() -> None:
    quota = Quota(Allowance(), now=0.0)
    quota.take(0.0, requests=10**9, tokens=10**12, streams=10**6)
    assert quota.over(0.0, requests=10**9, tokens=10**12, streams=10**6) is None


def test_other_limits_leave_those_who_wait_waiting_as_long() -> None:
    quota = Quota(Allowance(tokens_per_minute=60), now=0.0)
    quota.take(0.0, tokens=90)
    before = quota.over(0.0, tokens=6)
    quota.change(Allowance(tokens_per_minute=600, requests_per_minute=1), 0.0)
    after = quota.over(0.0, tokens=60)
    assert before is not None
    assert after is not None
    assert (after.wait, after.limit) == (pytest.approx(before.wait), 600)
    assert quota.over(0.0, requests=1) is None, "a new limit begins with a full minute"
    quota.change(Allowance(), 0.0)
    assert quota.over(0.0, tokens=10**9, requests=10**9) is None


AMOUNTS = st.integers(1, 5000)


@given(st.integers(1, 1000), st.lists(st.tuples(AMOUNTS, st.floats(0, 200)), min_size=1, max_size=40))
def test_who_waits_as_told_is_served_then_and_not_much_sooner(per_minute: int, asked: list[tuple[int, float]]) -> None:
    bucket, now, taken, largest = Bucket(per_minute, 0.0), 0.0, 0, 0
    for amount, pause in asked:
        now += pause
        wait = bucket.wait(amount, now)
        assert 0 <= wait < 1e9
        if wait > 1e-3:
            assert bucket.wait(amount, now + wait / 2) > 0
        now += wait
        assert bucket.wait(amount, now) <= GRAIN * (1 + now)
        bucket.take(amount, now)
        taken, largest = taken + amount, max(largest, amount)
        assert taken <= per_minute * (1 + now / MINUTE) + largest + 1e-6 * taken
