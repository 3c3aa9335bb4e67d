"""Coupled instances in the Conductor: one instance serves a request from its first step to its last, without a room."""

from __future__ import annotations

from collections import Counter

import pytest

from moonpool.core import actions as act
from moonpool.core import events as ev
from moonpool.core.conductor import ConductorConfig
from moonpool.core.cost import DecodeCoefficients, PrefillCoefficients
from moonpool.core.placement import PLACEMENT_POLICIES, PlacementPolicy
from moonpool.core.vocabulary import PartId, PartKind, Slo
from tests.core.conductor_scene import arrival, gateway, node, worker
from tests.core.test_conductor import Desk, finished, lost, stored

C = PartKind.COUPLED
C0, C1 = PartId("coupled-0"), PartId("coupled-1")


def desk(count: int, policy: PlacementPolicy = "algorithm-1") -> Desk:
    made = Desk(ConductorConfig(placement=policy))
    made.tell(gateway())
    made.tell(node(0))
    made.tell(stored(0, 0, ()))
    for i in range(count):
        made.tell(worker(C, i, on=0))
    return made


def placed(d: Desk, name: str) -> act.Place:
    (place,) = d.tell(arrival(name))
    assert isinstance(place, act.Place), "no room has to be reserved first"
    return place


@pytest.mark.parametrize("policy", PLACEMENT_POLICIES)
def test_who_prefills_a_request_decodes_it_and_load_is_spread(policy: PlacementPolicy) -> None:
    d = desk(2, policy)
    places = [placed(d, f"r{n}") for n in range(8)]
    assert all(place.prefill == place.decode for place in places)
    assert all(place.lacking == () for place in places)
    if policy != "random":
        assert Counter(place.prefill.id for place in places) == {C0: 4, C1: 4}


def test_it_leaves_every_table_at_its_end() -> None:
    d = desk(1)
    place = placed(d, "a")
    assert d.part(C0).assigned == 1
    assert d.part(C0).queue_seconds > 0
    d.decode(place)
    assert d.phase() == {"decoding": 1}
    assert d.part(C0).queue_seconds == 0
    (expect,) = d.tell(finished(place))
    assert isinstance(expect, act.ExpectEnd)
    assert d.part(C0).assigned == d.part(C0).committed_pages == 0


def test_a_first_token_that_is_the_last_ends_it() -> None:
    d = desk(1)
    place = placed(d, "a")
    d.tell(ev.PrefillDone(place.request, 1, C0, 40, 0, 0.0, 0.1))
    d.tell(finished(place, tokens=1))
    assert d.phase() == {}


def test_a_lost_one_is_replaced_by_the_other_and_a_cancel_is_sent_once() -> None:
    d = desk(2)
    place = placed(d, "a")
    gone, other = (C0, C1) if place.prefill.id == C0 else (C1, C0)
    again = d.tell(lost(gone))
    assert any(isinstance(action, act.Resubmit) for action in again)
    (second,) = [a for a in d.tell(arrival("a", attempt=2)) if isinstance(a, act.Place)]
    assert second.prefill.id == second.decode.id == other
    cancelled = d.tell(ev.RequestCancelled(second.request, "gone"))
    assert [a.to.id for a in cancelled if isinstance(a, act.Cancel)] == [other]


def test_separate_instances_come_first_where_there_are_both() -> None:
    d = desk(1)
    d.tell(worker(PartKind.PREFILL, 0, on=0))
    assert placed(d, "a").prefill.id == C0, "nobody else decodes"
    d.tell(worker(PartKind.DECODE, 0, on=0))
    place = d.place(arrival("b"))
    assert (place.prefill.id, place.decode.id) == (PartId("prefill-0"), PartId("decode-0"))


PREFILL_SECONDS = PrefillCoefficients(0.0, 0.001, 0.0)
STEP_SECONDS = DecodeCoefficients(0.02, 0.0, 0.0)


def inline_desk(tbt: float | None = 0.1) -> Desk:
    """One of each kind; 48 tokens fit beside decoding; a prompt token takes 1 ms, a decode step 20 ms."""
    costs = {"prefill_cost": PREFILL_SECONDS, "decode_cost": STEP_SECONDS}
    made = Desk(ConductorConfig(slo=Slo(None, tbt), **costs))  # type: ignore[arg-type]
    made.tell(gateway())
    made.tell(node(0))
    made.tell(stored(0, 0, ()))
    made.tell(worker(PartKind.PREFILL, 0))
    made.tell(worker(PartKind.DECODE, 0))
    made.tell(worker(C, 0, step=48))
    return made


def computes(d: Desk, event: ev.RequestArrived) -> PartId:
    """Who does, wherever it decodes."""
    (order,) = d.tell(event)
    if isinstance(order, act.ReserveRoom):
        (order,) = d.tell(d.confirm(order))
    assert isinstance(order, act.Place)
    return order.prefill.id


def computed(d: Desk, place: act.Place, tokens: int) -> None:
    """In the time that was expected; it decodes now."""
    seconds = tokens * PREFILL_SECONDS.per_token
    d.tell(ev.PrefillDone(place.request, 1, place.prefill.id, tokens, 0, 0.0, seconds))
    d.tell(ev.DecodeJoined(place.request, 1, place.decode.id))


def test_a_prompt_that_fits_into_a_step_is_inlined() -> None:
    d = inline_desk()
    place = placed(d, "a")
    assert (place.prefill.id, place.decode.id) == (C0, C0)
    assert computes(d, arrival("b", tokens=40)) == "prefill-0", "the first prompt is still to be computed there"
    computed(d, place, 40)
    assert computes(d, arrival("c", tokens=40)) == C0


def test_one_that_needs_chunks_is_not() -> None:
    d = inline_desk()
    assert computes(d, arrival("a", tokens=60)) == "prefill-0"
    # What is cached need not be computed: 28 tokens are left.
    d.tell(stored(0, 1, arrival("a", tokens=32).chains[0].keys))
    assert computes(d, arrival("a2", tokens=60, family="a")) == C0


@pytest.mark.parametrize(
    ("of_all", "own", "expected"),
    [(0.1, None, C0), (0.05, None, "prefill-0"), (0.1, 0.05, "prefill-0"), (0.05, 0.1, C0), (None, None, "prefill-0")],
)
def test_one_that_would_make_a_step_too_long_is_not(of_all: float | None, own: float | None, expected: str) -> None:
    """Its step takes 60 ms; without a limit nobody says how long a step may be."""
    assert computes(inline_desk(of_all), arrival("a", tokens=40, slo=Slo(None, own))) == expected


def test_the_strictest_limit_of_who_decodes_there_counts() -> None:
    d = inline_desk()
    strict = d.tell(arrival("a", tokens=20, slo=Slo(None, 0.05)))[0]
    assert isinstance(strict, act.Place)
    assert strict.decode.id == C0
    computed(d, strict, 20)
    assert computes(d, arrival("b", tokens=40)) == "prefill-0"
    assert computes(d, arrival("c", tokens=25)) == C0


def test_without_a_prefill_pool_all_prompts_go_to_coupled_instances() -> None:
    d = inline_desk()
    d.tell(lost(PartId("prefill-0")))
    assert computes(d, arrival("a", tokens=200)) == C0
