"""When requests of a replay are due, and which of them is whose next turn."""

from __future__ import annotations

import itertools

import pytest

from moonpool.bench.turns import Pace, turns
from moonpool.trace.request import TraceRequest

BLOCK = 10


def asked(arrival: float, tokens: int, *blocks: int) -> TraceRequest:
    return TraceRequest(arrival, tokens, 1, blocks)


def test_arrivals_are_the_traces_or_drawn_by_rate() -> None:
    requests = [asked(0.5 * at, 5, at) for at in range(2000)]
    assert [turn.due for turn in turns(requests, Pace(), BLOCK, 0)] == [request.arrival for request in requests]
    drawn = [turn.due for turn in turns(requests, Pace(rate=20.0), BLOCK, 1)]
    assert all(a < b for a, b in itertools.pairwise(drawn))
    assert drawn[-1] == pytest.approx(100.0, rel=0.1)
    assert [turn.due for turn in turns(requests, Pace(rate=20.0), BLOCK, 1)] == drawn
    assert [turn.due for turn in turns(requests, Pace(rate=20.0), BLOCK, 2)] != drawn


def test_a_prompt_that_goes_on_from_another_is_its_next_turn() -> None:
    requests = [
        asked(0.0, 25, 1, 2, 3),
        asked(1.0, 30, 7, 8, 9),
        asked(2.0, 45, 1, 2, 4, 5, 6),
        asked(3.0, 60, 1, 2, 4, 5, 10, 11),
    ]
    found = list(turns(requests, Pace(sessions=True), BLOCK, 0))
    assert [turn.after and turn.after.number for turn in found] == [None, None, 0, 2]
    assert all(turn.after is None for turn in turns(requests, Pace(), BLOCK, 0))


def test_a_shared_beginning_alone_is_no_conversation() -> None:
    """The second prompt is nothing but a preamble that the first had, too: a third with it follows neither."""
    requests = [asked(0.0, 35, 1, 2, 3, 4), asked(1.0, 25, 1, 2, 5), asked(2.0, 38, 1, 2, 6, 7)]
    assert [turn.after for turn in turns(requests, Pace(sessions=True), BLOCK, 0)] == [None] * 3
    twice = [asked(0.0, 30, 1, 2, 3), asked(1.0, 30, 1, 2, 3)]
    assert [turn.after for turn in turns(twice, Pace(sessions=True), BLOCK, 0)] == [None] * 2


def test_think_times_have_their_mean() -> None:
    requests = [asked(0.0, 10 * (at + 1), *range(at + 1)) for at in range(400)]
    drawn = [turn.think for turn in turns(requests, Pace(sessions=True, think=3.0), BLOCK, 0)]
    assert drawn[0] == 0.0
    assert sum(drawn[1:]) / 399 == pytest.approx(3.0, rel=0.25)
