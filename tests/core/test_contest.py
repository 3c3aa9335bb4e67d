"""Two processes that say they are one node: the one that lives is it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from moonpool.core import actions as act
from moonpool.core import events as ev
from moonpool.core.conductor import Conductor
from moonpool.core.contest import PROOF_SECONDS, QUIET_SECONDS, TRIAL_SECONDS
from moonpool.core.vocabulary import PartId, Peer
from tests.core.conductor_scene import node, peer
from tests.core.test_conductor import Desk, desk, kinds, lost

N0 = PartId("node-0")
FIRST, SECOND = peer(N0, 1), peer(N0, 2)


def elsewhere(life: int, host: str = "10.0.0.2") -> ev.Registered:
    """With another socket and another port."""
    return replace(node(0, life), data_address=f"{host}:{life}", socket_path=f"/run/{life}/node-0")


def beat(d: Desk, who: Peer, after: float = 0.0) -> list[act.Action]:
    return d.tell(ev.Reported(who.id, who.incarnation), after=after)


def there(d: Desk) -> str:
    return d.part(N0).incarnation


def living() -> Desk:
    """A node that was heard of just now."""
    d = desk()
    d.tell(elsewhere(1))
    beat(d, FIRST)
    return d


@pytest.mark.parametrize("mine", ["socket_path", "data_address"])
def test_a_node_that_has_its_old_socket_or_port_is_let_in_at_once(mine: str) -> None:
    d = desk()
    beat(d, FIRST)
    again = replace(
        node(0, 2), **{"socket_path": "/run/other", "data_address": "127.0.0.1:2", mine: getattr(node(0), mine)}
    )
    d.tell(again)
    assert there(d) == SECOND.incarnation


@pytest.mark.parametrize("where", ["10.0.0.3:1", "0.0.0.0:1"])
def test_equal_paths_and_ports_on_hosts_that_may_differ_prove_nothing(where: str) -> None:
    d = desk()
    d.tell(lost(N0))
    d.tell(replace(node(0), data_address=where.replace("10.0.0.3", "10.0.0.2")))
    assert not d.tell(replace(node(0, 2), data_address=where))
    assert there(d) == FIRST.incarnation


def test_a_node_whose_last_life_is_quiet_is_let_in_at_once() -> None:
    d = living()
    d.tell(elsewhere(2), after=QUIET_SECONDS)
    assert there(d) == SECOND.incarnation


def test_a_second_node_beside_a_living_one_is_refused_and_disturbs_nothing() -> None:
    d = living()
    assert not d.tell(elsewhere(2), after=0.1)
    assert not beat(d, FIRST, after=PROOF_SECONDS / 2), "it may have been sent before it died"
    assert beat(d, FIRST, after=PROOF_SECONDS) == [act.IdTaken(SECOND, FIRST)]
    assert not beat(d, FIRST, after=0.5), "it is said once"
    assert there(d) == FIRST.incarnation
    assert [part.id for part in d.conductor.describe(d.now).parts].count(N0) == 1
    assert beat(d, SECOND) == [act.IdTaken(replace(SECOND, address=""), FIRST)]


def test_a_node_waits_no_longer_than_its_last_life_is_quiet() -> None:
    d = living()
    began = d.now
    assert not d.tell(elsewhere(2), after=0.1)
    while there(d) == FIRST.incarnation:
        assert d.wakes[-1] - d.now <= QUIET_SECONDS
        d.now = d.wakes[-1]
        d.tell(ev.Woke())
    assert there(d) == SECOND.incarnation
    assert d.now - began <= QUIET_SECONDS + 0.01


def test_a_death_that_is_reported_lets_the_next_life_in_at_once() -> None:
    d = living()
    assert not d.tell(elsewhere(2), after=0.1)
    d.tell(lost(N0))
    assert there(d) == SECOND.incarnation


def test_who_waited_and_died_does_not_come() -> None:
    d = living()
    assert not d.tell(elsewhere(2), after=0.1)
    d.tell(lost(N0, life=2))
    d.tell(ev.Woke(), after=QUIET_SECONDS)
    assert there(d) == FIRST.incarnation


def test_a_node_that_was_only_slow_has_its_place_back() -> None:
    d = living()
    d.tell(elsewhere(2), after=QUIET_SECONDS)
    actions = beat(d, FIRST, after=1.0)
    assert kinds(actions)[-2:] == ["IdTaken", "RegisterAgain"]
    assert actions[-2] == act.IdTaken(SECOND, FIRST)
    d.tell(elsewhere(1))
    assert there(d) == FIRST.incarnation


@pytest.mark.parametrize("after", [PROOF_SECONDS / 2, TRIAL_SECONDS], ids=["on its way", "too late"])
def test_but_not_by_what_was_on_its_way_or_after_silence(after: float) -> None:
    d = living()
    d.tell(elsewhere(2), after=QUIET_SECONDS)
    beat(d, SECOND)
    assert beat(d, FIRST, after=after) == [act.IdTaken(replace(FIRST, address=""), SECOND)]
    assert there(d) == SECOND.incarnation


def test_who_waits_is_in_a_snapshot() -> None:
    d = living()
    assert not d.tell(elsewhere(2), after=0.1)
    d.conductor, before = Conductor.restored(d.conductor.snapshot()[0], ()), d.conductor
    before.end_dump()
    assert beat(d, FIRST, after=0.5) == [act.IdTaken(SECOND, FIRST)]
