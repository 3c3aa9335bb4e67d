"""Which holdings are overdue, on a clock of the test's own."""

from __future__ import annotations

import pytest

from moonpool.store.overdue import Holding, Kind, Overdue
from moonpool.store.rooms import ClientId

WORKER, OTHER, STRANGER = ClientId(1), ClientId(2), ClientId(3)
HEARD = {WORKER: 0.0, OTHER: 0.0}
"""The stranger is not among those that may be killed."""


@pytest.fixture
def overdue() -> Overdue:
    return Overdue(lease_seconds=100.0, grace=10.0)


def test_a_lease_is_overdue_by_its_age_from_the_first_look(overdue: Overdue) -> None:
    lease = Holding(Kind.LEASE, 7, (WORKER,))
    assert overdue.look([lease], HEARD, 50.0) == {}
    assert overdue.look([lease], {WORKER: 149.0}, 150.0) == {}
    assert overdue.look([lease], {WORKER: 150.0}, 150.5) == {WORKER: "lease 7"}


def test_each_lease_has_its_own_age(overdue: Overdue) -> None:
    overdue.look([Holding(Kind.LEASE, 1, (WORKER,))], HEARD, 0.0)
    overdue.look([], HEARD, 50.0)
    assert overdue.look([Holding(Kind.LEASE, 2, (WORKER,))], HEARD, 101.0) == {}
    assert overdue.look([Holding(Kind.LEASE, 1, (WORKER,))], HEARD, 101.0) == {}, "it was gone in between"


def test_a_hand_over_room_is_overdue_after_its_deadline_and_the_grace(overdue: Overdue) -> None:
    room = Holding(Kind.HAND_OVER_ROOM, 5, (WORKER, OTHER, STRANGER), expires=30.0)
    assert overdue.look([room], HEARD, 40.0) == {}
    assert overdue.look([room], HEARD, 40.5) == {WORKER: "hand-over room 5", OTHER: "hand-over room 5"}


def test_a_caching_room_is_overdue_only_where_its_client_is_silent(overdue: Overdue) -> None:
    room = Holding(Kind.CACHING_ROOM, 5, (WORKER,))
    overdue.look([room], HEARD, 0.0)
    assert overdue.look([room], {WORKER: 900.0}, 950.0) == {}
    assert overdue.look([room], {WORKER: 900.0}, 1001.0) == {WORKER: "caching room 5"}


def test_who_may_not_be_killed_is_never_overdue(overdue: Overdue) -> None:
    lease = Holding(Kind.LEASE, 7, (STRANGER,))
    overdue.look([lease], HEARD, 0.0)
    assert overdue.look([lease], HEARD, 1e6) == {}
