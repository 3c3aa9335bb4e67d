"""Priority classes in the Conductor: what is kept for whom, who goes first, who makes way."""

from __future__ import annotations

import pytest

from moonpool.core import actions as act
from moonpool.core import events as ev
from moonpool.core.vocabulary import PriorityClass, RejectReason, RequestId, Slo
from tests.core.conductor_scene import GATEWAY, arrival, peer, worker
from tests.core.test_conductor import D0, P0, D, Desk, P, desk, finished, kinds

HIGH = PriorityClass("high", 0, share=0.5)
LOW = PriorityClass("low", 10)


def small(*, slots: int = 0, pages: int = 64, prefill_slots: int = 0, **config: object) -> Desk:
    """One prefill and one decode instance with so much room, the classes high and low."""
    made = desk(prefill=0, decode=0, classes=(HIGH, LOW), batch_ahead=0.0, **config)
    made.tell(worker(P, 0, slots=prefill_slots))
    made.tell(worker(D, 0, slots=slots, pages=pages))
    return made


def rejected(actions: list[act.Action]) -> dict[RequestId, RejectReason]:
    return {a.request: a.reason for a in actions if isinstance(a, act.Reject)}


def test_a_later_rank_does_not_take_the_decode_slots_that_are_kept() -> None:
    d = small(slots=4)
    for name in "ab":
        d.decode(d.place(arrival(name, priority="low")))
    assert kinds(d.tell(arrival("c", priority="low"))) == ["Hold"], "half of four slots is kept"
    for name in "xy":
        d.decode(d.place(arrival(name, priority="high")))
    assert kinds(d.tell(arrival("z", priority="high"))) == ["Hold"], "all four are taken, and nobody here is queued"


def test_what_the_sooner_rank_has_taken_is_not_kept_again() -> None:
    d = small(slots=4)
    for name in "xy":
        d.decode(d.place(arrival(name, priority="high")))
    for name in "ab":
        d.decode(d.place(arrival(name, priority="low")))


def test_a_later_rank_does_not_take_the_pages_that_are_kept() -> None:
    d = small(pages=16)
    for name in "ab":
        d.decode(d.place(arrival(name, priority="low")))  # 40 tokens: 3 pages and one to grow into, at most 3
    actions = d.tell(arrival("c", priority="low"))
    assert kinds(actions) == ["Hold"], "8 of 16 pages are kept"
    d.decode(d.place(arrival("x", priority="high")))


def test_a_later_rank_does_not_take_the_prefill_slots_that_are_kept() -> None:
    d = small(prefill_slots=4)
    d.place(arrival("a", priority="low"))
    d.place(arrival("b", priority="low"))
    assert kinds(d.tell(arrival("c", priority="low"))) == ["Hold"]
    d.place(arrival("x", priority="high"))
    d.place(arrival("y", priority="high"))


def test_the_queue_of_a_later_rank_does_not_count_for_a_sooner_one_but_the_other_way_round_it_does() -> None:
    d = small(slo=Slo(ttft=60.0), pages=640)
    low = [d.place(arrival(f"l{n}", 400, priority="low")) for n in range(3)]
    high = d.place(arrival("h", 400, priority="high"))
    assert high.expected_ttft == pytest.approx(low[0].expected_ttft, rel=0.05)
    last = d.place(arrival("l9", 400, priority="low"))
    # Four are before it, and of the time until then the sooner class may take half.
    assert last.expected_ttft == pytest.approx((4 * 2 + 1) * low[0].expected_ttft, rel=0.05)


def test_the_last_rank_is_refused_first_when_the_queue_is_full() -> None:
    d = small(queue_bound=4)
    for name in "ab":
        d.place(arrival(name, priority="low"))
    assert rejected(d.tell(arrival("c", priority="low"))) == {"c": RejectReason.QUEUE_FULL}, "two of four are kept"
    for name in "xy":
        d.place(arrival(name, priority="high"))
    actions = d.tell(arrival("z", priority="high"))
    assert rejected(actions) == {"b": RejectReason.DISPLACED}, "the newest of the last rank"
    assert "ReserveRoom" in kinds(actions)
    (reject,) = [a for a in actions if isinstance(a, act.Reject)]
    assert "low" in reject.message
    assert "high" in reject.message
    assert (reject.retry_after or 0.0) >= 1.0
    assert {a.to.id for a in actions if isinstance(a, act.Cancel)} == {P0, D0}


def test_queued_work_makes_room_in_the_batch_and_what_has_begun_does_not() -> None:
    d = small(slots=4)
    for name in "xy":
        d.decode(d.place(arrival(name, priority="high")))
    low = [d.place(arrival(name, priority="low")) for name in "ab"]
    actions = d.tell(arrival("z", priority="high"))
    assert rejected(actions) == {"b": RejectReason.DISPLACED}, "the first of the queue is being computed"
    (reserve,) = [a for a in actions if isinstance(a, act.ReserveRoom)]
    d.tell(d.confirm(reserve))
    d.decode(low[0])
    assert kinds(d.tell(arrival("u", priority="high"))) == ["Hold"]


def full() -> Desk:
    """Two high ones decode, two low ones are on their way, and the forecast tells of the room: four slots, 64 pages."""
    d = small(slots=4, slo=Slo(2.0, 1.0), admission="forecast")
    for name in "xy":
        d.decode(d.place(arrival(name, output=150, priority="high")))
    for name in "ab":
        d.place(arrival(name, output=150, priority="low"))
    return d


def test_queued_work_makes_way_for_whom_admission_would_refuse() -> None:
    d = full()
    actions = d.tell(arrival("z", output=150, priority="high"))
    assert rejected(actions) == {"b": RejectReason.DISPLACED}, "the first of the queue is being computed"
    assert "ReserveRoom" in kinds(actions)


def test_queued_work_stays_where_admission_would_refuse_in_any_case() -> None:
    d = full()
    assert rejected(d.tell(arrival("z", 900, output=100, priority="high"))) == {"z": RejectReason.KV_ROOM}
    assert d.phase()["prefill"] == 2
    assert rejected(d.tell(arrival("c", output=150, priority="low"))) == {"c": RejectReason.KV_ROOM}


def test_nobody_is_turned_away_where_it_would_not_be_enough() -> None:
    d = small(pages=16, slots=9)
    d.decode(d.place(arrival("x", 100, priority="high")))
    d.place(arrival("a", priority="low"))
    d.place(arrival("b", priority="low"))
    assert kinds(d.tell(arrival("z", 200, priority="high"))) == ["Hold"], "13 pages cannot come free"
    assert d.phase()["prefill"] == 2


def test_those_that_are_held_are_served_by_rank_and_then_by_their_slack() -> None:
    d = small(slots=1)
    first = d.place(arrival("first", priority="high"))
    d.decode(first)
    for name, priority, ttft in (("l", "low", None), ("h", "high", None), ("urgent", "high", 30.0)):
        assert kinds(d.tell(arrival(name, priority=priority, slo=Slo(ttft=ttft)))) == ["Hold"]
    order = []
    placed: act.Place = first
    for _ in range(3):
        (reserve,) = [a for a in d.tell(finished(placed)) if isinstance(a, act.ReserveRoom)]
        order.append(reserve.request)
        (found,) = [a for a in d.tell(d.confirm(reserve)) if isinstance(a, act.Place)]
        placed = found
        d.decode(placed)
    assert order == ["urgent", "h", "l"]


def test_a_late_order_is_refused_and_not_placed_again() -> None:
    d = small(slo=Slo(ttft=60.0))
    place = d.place(arrival("a", priority="low"))
    actions = d.tell(ev.PrefillFailed(place.request, 1, P0, "it has waited too long", late=True))
    assert rejected(actions) == {"a": RejectReason.TTFT_SLO}
    assert d.phase() == {}


# Batch work


def test_batch_work_is_held_while_others_are_and_fills_what_is_idle() -> None:
    d = small(slots=4)
    placed = [d.place(arrival(name, priority="high")) for name in "wxyz"]
    for place in placed:
        d.decode(place)
    assert kinds(d.tell(arrival("h", priority="high"))) == ["Hold"]
    assert kinds(d.tell(arrival("b", priority="batch"))) == ["Hold"]
    (reserve,) = [a for a in d.tell(finished(placed[0])) if isinstance(a, act.ReserveRoom)]
    assert reserve.request == "h"
    found = [a for place in placed[1:] for a in d.tell(finished(place)) if isinstance(a, act.ReserveRoom)]
    assert not found, "something is to be prefilled"
    (place,) = [a for a in d.tell(d.confirm(reserve)) if isinstance(a, act.Place)]
    found = [a for a in d.tell(ev.PrefillDone(*ids(place), P0, 40, 0, 0.0, 0.1)) if isinstance(a, act.ReserveRoom)]
    assert [a.request for a in found] == ["b"]


def test_batch_work_makes_way_wherever_it_is_and_goes_on_later() -> None:
    d = small(slots=4)
    batch = d.place(arrival("b", priority="batch"))
    d.decode(batch)
    for name in "wxy":
        d.decode(d.place(arrival(name, priority="high")))
    actions = d.tell(arrival("z", priority="high"))
    assert act.Resubmit("b", 1, peer(GATEWAY), "it made way for a request of class high") in actions
    assert not rejected(actions)
    assert kinds(d.tell(arrival("b", 44, attempt=2, output_tokens=4, priority="batch"))) == ["Hold"]


def ids(place: act.Place) -> tuple[RequestId, int]:
    return place.request, place.attempt
