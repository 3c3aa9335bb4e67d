"""What the Conductor believes a prefill instance still has to compute."""

from __future__ import annotations

import pytest

from moonpool.core.conductor import ConductorConfig
from moonpool.core.cost import DecodeCost, PrefillCost
from moonpool.core.events import Registered
from moonpool.core.fleet import Fleet, PrefillLoad
from moonpool.core.vocabulary import Capacity, Incarnation, KeySpace, KeySpaceId, PartId, PartKind, Peer, RequestId

LONG, SHORT, OTHER = RequestId("long"), RequestId("short"), RequestId("other")


@pytest.fixture
def load() -> PrefillLoad:
    peer = Peer(PartId("prefill-0"), Incarnation("1"), "")
    event = Registered(PartKind.PREFILL, peer, Capacity(100, 10, 4096), KeySpace(KeySpaceId("51"), 64, 1, 1024))
    config, fleet = ConductorConfig(), Fleet()
    fleet.add(event, PrefillCost(config.prefill_cost), DecodeCost(config.decode_cost), 0.0)
    return fleet.prefill[peer.id]


def add(load: PrefillLoad, request: RequestId, seconds: float, now: float, rank: int = 0) -> None:
    load.add(request, seconds, 1, (), now, rank)
    load.check_integrity()


def test_what_gave_way_does_not_count_as_computed(load: PrefillLoad) -> None:
    add(load, LONG, 16.0, 0.0, rank=10)
    assert load.seconds(10.0) == pytest.approx(6.0)
    add(load, SHORT, 5.0, 10.0)
    assert load.seconds_before(0, 10.0) == pytest.approx(5.0)
    assert load.seconds_before(0, 12.0) == pytest.approx(3.0)
    assert load.seconds_before(10, 12.0) == pytest.approx(3.0 + 6.0)
    add(load, OTHER, 4.0, 12.0)
    assert load.seconds_before(0, 13.0) == pytest.approx(2.0 + 4.0)
    load.remove(SHORT, 15.0, is_computed=True)
    assert load.seconds_before(0, 16.0) == pytest.approx(3.0)
    load.remove(OTHER, 19.0, is_computed=True)
    load.check_integrity()
    assert load.seconds(20.0) == pytest.approx(5.0)


def test_the_first_was_not_computed_while_another_passed_it(load: PrefillLoad) -> None:
    add(load, LONG, 20.0, 0.0)
    add(load, SHORT, 2.0, 1.0)
    load.remove(SHORT, 5.0, is_computed=True)
    load.check_integrity()
    assert load.seconds(5.0) == pytest.approx(17.0)


def test_what_was_given_up_took_no_time(load: PrefillLoad) -> None:
    add(load, LONG, 20.0, 0.0)
    add(load, SHORT, 2.0, 1.0)
    load.remove(SHORT, 5.0)
    assert load.seconds(5.0) == pytest.approx(15.0)


def test_time_to_come_is_not_gained(load: PrefillLoad) -> None:
    add(load, LONG, 20.0, 0.0)
    add(load, SHORT, 9.0, 1.0)
    load.remove(SHORT, 3.0, is_computed=True)
    assert load.seconds(3.0) == pytest.approx(20.0)
