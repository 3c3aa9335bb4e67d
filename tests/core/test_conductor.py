"""One request's way through the Conductor, step by step, and every turn it may take (docs/protocol.md)."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from msgspec import structs

from moonpool.core import actions as act
from moonpool.core import events as ev
from moonpool.core.conductor import Conductor, ConductorConfig
from moonpool.core.directory import IndexHealth
from moonpool.core.state import PartState
from moonpool.core.vocabulary import (
    Incarnation,
    PartId,
    PartKind,
    Peer,
    PriorityClass,
    RejectReason,
    RequestId,
    Slo,
    Tier,
)
from tests.core.conductor_scene import GATEWAY, SPACE, arrival, gateway, node, peer, worker

P, D, N = PartKind.PREFILL, PartKind.DECODE, PartKind.NODE
P0, P1, D0, D1, N0, N1 = map(PartId, ("prefill-0", "prefill-1", "decode-0", "decode-1", "node-0", "node-1"))


@dataclass
class Desk:
    """A Conductor and what it was told; `tell` returns its orders without timers and fleet news."""

    config: ConductorConfig = field(default_factory=ConductorConfig)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.conductor = Conductor(self.config, 0)
        self.wakes: list[float] = []
        self.news: list[act.FleetChanged] = []

    def tell(self, event: ev.Event, after: float = 0.0) -> list[act.Action]:
        self.now += after
        actions = self.conductor.handle(event, self.now)
        self.conductor.check_integrity()
        self.wakes += [a.at for a in actions if isinstance(a, act.WakeAt)]
        self.news += [a for a in actions if isinstance(a, act.FleetChanged)]
        return [a for a in actions if not isinstance(a, act.WakeAt | act.FleetChanged)]

    def wait(self, seconds: float) -> list[act.Action]:
        """Lets time pass with heartbeats of all parts and every `Woke` that was asked for."""
        actions: list[act.Action] = []
        end = self.now + seconds
        while self.wakes and self.wakes[-1] <= end:
            self.now = max(self.now, self.wakes[-1])
            actions += self.heartbeats()
            actions += self.tell(ev.Woke())
        self.now = end
        return actions

    def heartbeats(self) -> list[act.Action]:
        actions: list[act.Action] = []
        for part in self.conductor.describe(self.now).parts:
            id_, incarnation = PartId(part.id), Incarnation(part.incarnation)
            actions += self.tell(ev.Reported(id_, incarnation, pages_free=part.capacity.pages))
        return actions

    def place(self, event: ev.RequestArrived) -> act.Place:
        """Arrival, room, placement; fails where any of it does not come."""
        (reserve,) = self.tell(event)
        assert isinstance(reserve, act.ReserveRoom)
        (placed,) = self.tell(self.confirm(reserve))
        assert isinstance(placed, act.Place)
        return placed

    def decode(self, place: act.Place) -> None:
        ids = place.request, place.attempt
        assert not self.tell(ev.PrefillDone(*ids, place.prefill.id, 40, 0, 0.0, 0.1))
        assert not self.tell(ev.DecodeJoined(*ids, place.decode.id))

    @staticmethod
    def confirm(reserve: act.ReserveRoom, lacking: tuple[int, ...] = ()) -> ev.RoomConfirmed:
        where = reserve.node
        return ev.RoomConfirmed(where.id, where.incarnation, reserve.request, reserve.attempt, lacking)

    @staticmethod
    def refuse(reserve: act.ReserveRoom, *, is_lasting: bool = False) -> ev.RoomRefused:
        where = reserve.node
        return ev.RoomRefused(where.id, where.incarnation, reserve.request, reserve.attempt, "full", is_lasting)

    def phase(self) -> dict[str, int]:
        return {name: n for name, n in self.conductor.describe(self.now).requests.items() if n}

    def part(self, id_: PartId) -> PartState:
        return next(p for p in self.conductor.describe(self.now).parts if p.id == id_)


def desk(prefill: int = 1, decode: int = 1, nodes: int = 1, *, dram: int = 1 << 30, **config: object) -> Desk:
    made = Desk(ConductorConfig(**config))  # type: ignore[arg-type]
    made.tell(gateway())
    for i in range(nodes):
        made.tell(node(i, dram_bytes=dram))
        made.tell(stored(i, 0, ()))
    for i in range(prefill):
        made.tell(worker(P, i, on=i % nodes))
    for i in range(decode):
        made.tell(worker(D, i, on=i % nodes))
    return made


def stored(on: int, seq: int, keys: tuple[bytes, ...]) -> ev.Snapshot:
    who = peer(f"node-{on}")
    blocks = ((SPACE.id, Tier.DRAM, keys),)
    return ev.Snapshot(who.id, who.incarnation, seq, blocks)  # type: ignore[arg-type]


def kinds(actions: list[act.Action]) -> list[str]:
    return [type(a).__name__ for a in actions]


def lost(id_: PartId, life: int = 1) -> ev.Lost:
    return ev.Lost(id_, peer(id_, life).incarnation, "killed")


def finished(place: act.Place, by: PartId | None = None, tokens: int = 8) -> ev.Finished:
    return ev.Finished(place.request, place.attempt, by or place.decode.id, tokens, "length")


# The straight way


def test_room_is_confirmed_before_the_request_is_placed() -> None:
    d = desk()
    (reserve,) = d.tell(arrival("a", tokens=40))
    assert isinstance(reserve, act.ReserveRoom)
    assert reserve.node.id == N0
    assert len(reserve.keys) == 2
    assert reserve.tail_tokens == 8
    assert reserve.time_left == pytest.approx(60)
    (place,) = d.tell(d.confirm(reserve, lacking=(1,)), after=0.5)
    assert isinstance(place, act.Place)
    assert (place.prefill.id, place.decode.id, place.hit_blocks, place.fetch) == (P0, D0, 0, None)
    assert place.lacking == (1,)
    assert place.time_left == pytest.approx(59.5)
    assert place.expected_ttft > 0.5
    assert d.part(P0).assigned == d.part(D0).assigned == 1


def test_a_finished_request_leaves_every_table() -> None:
    d = desk()
    place = d.place(arrival("a"))
    d.decode(place)
    assert d.phase() == {"decoding": 1}
    assert d.part(P0).assigned == d.part(N0).rooms == 0
    (expect,) = d.tell(finished(place))
    assert expect == act.ExpectEnd(place.request, 1, peer(GATEWAY)), "the gateway is not to wait for ever"
    assert d.phase() == {}
    assert d.part(D0).assigned == d.part(D0).committed_pages == 0


def test_load_counts_from_placement_on() -> None:
    d = desk(prefill=2, decode=2)
    reserves = [d.tell(arrival(name))[0] for name in "ab"]
    places = [d.tell(d.confirm(r))[0] for r in reserves if isinstance(r, act.ReserveRoom)]
    assert {p.prefill.id for p in places if isinstance(p, act.Place)} == {P0, P1}
    assert {p.decode.id for p in places if isinstance(p, act.Place)} == {D0, D1}


def test_decode_joined_may_overtake_prefill_done() -> None:
    d = desk()
    place = d.place(arrival("a"))
    d.tell(ev.DecodeJoined(place.request, 1, D0))
    d.tell(ev.PrefillDone(place.request, 1, P0, 40, 0, 0.0, 0.1))
    assert d.phase() == {"decoding": 1}
    d.tell(finished(place))
    assert d.phase() == {}


def test_a_request_that_prefill_finished_gives_its_room_back() -> None:
    d = desk()
    place = d.place(arrival("a", output=1))
    _, release = d.tell(finished(place, by=P0, tokens=1))
    assert release == act.ReleaseRoom(place.decode_node, place.request, 1)
    assert d.phase() == {}


def test_a_hit_leaves_one_token_to_compute() -> None:
    d = desk()
    event = arrival("a", tokens=48)
    d.tell(stored(0, 1, event.chains[0].keys))
    assert d.place(event).hit_blocks == 2


def test_a_long_prefix_elsewhere_is_fetched() -> None:
    d = desk(prefill=1, decode=1, nodes=2)
    event = arrival("a", tokens=100)
    d.tell(stored(1, 1, event.chains[0].keys))
    place = d.place(event)
    assert place.fetch is not None
    assert (place.fetch.source.id, place.fetch.first, place.fetch.count) == (N1, 0, 6)
    assert place.hit_blocks == 6


def test_a_fetch_from_a_node_that_died_meanwhile_is_dropped() -> None:
    d = desk(prefill=1, decode=1, nodes=2)
    event = arrival("a", tokens=100)
    d.tell(stored(1, 1, event.chains[0].keys))
    (reserve,) = d.tell(event)
    d.tell(lost(N1))
    assert isinstance(reserve, act.ReserveRoom)
    (place,) = d.tell(d.confirm(reserve))
    assert isinstance(place, act.Place)
    assert (place.fetch, place.hit_blocks) == (None, 0)


# Room refused, late, missing


def test_another_node_is_asked_after_a_refusal() -> None:
    d = desk(decode=2, nodes=2)
    (first,) = d.tell(arrival("a"))
    assert isinstance(first, act.ReserveRoom)
    (second,) = d.tell(d.refuse(first))
    assert isinstance(second, act.ReserveRoom)
    assert {first.node.id, second.node.id} == {N0, N1}
    (place,) = d.tell(d.confirm(second))
    assert isinstance(place, act.Place)
    assert place.attempt == 1


def test_without_room_anywhere_the_request_is_held_once_and_served_when_room_comes_free() -> None:
    d = desk(decode=1)
    placed = d.place(arrival("first"))
    d.decode(placed)
    (reserve,) = d.tell(arrival("a"))
    assert isinstance(reserve, act.ReserveRoom)
    assert kinds(d.tell(d.refuse(reserve))) == ["Hold"]
    assert d.phase() == {"decoding": 1, "held": 1}
    assert kinds(d.tell(finished(placed))) == ["ExpectEnd", "ReserveRoom"]


def test_what_no_node_will_have_room_for_is_refused_at_once() -> None:
    d = desk(decode=2, nodes=2)
    d.decode(d.place(arrival("first")))
    (first,) = d.tell(arrival("a"))
    assert isinstance(first, act.ReserveRoom)
    (second,) = d.tell(d.refuse(first, is_lasting=True))
    assert isinstance(second, act.ReserveRoom)
    (reject,) = d.tell(d.refuse(second, is_lasting=True))
    assert isinstance(reject, act.Reject)
    assert (reject.reason, reject.message, reject.retry_after) == (RejectReason.KV_ROOM, "full", None)
    assert d.phase() == {"decoding": 1}


def test_a_node_that_is_only_full_is_waited_for_beside_one_that_has_no_room_for_good() -> None:
    d = desk(decode=2, nodes=2)
    placed = d.place(arrival("first"))
    d.decode(placed)
    (first,) = d.tell(arrival("a"))
    assert isinstance(first, act.ReserveRoom)
    (second,) = d.tell(d.refuse(first, is_lasting=True))
    assert isinstance(second, act.ReserveRoom)
    assert kinds(d.tell(d.refuse(second))) == ["Hold"]
    again = [a for a in d.wait(0.6) if isinstance(a, act.ReserveRoom)]
    assert {a.node.id for a in again} == {second.node.id}


def test_what_was_accepted_waits_for_room_that_pins_take() -> None:
    d = desk()
    place = d.place(arrival("a"))
    d.decode(place)
    assert kinds(d.tell(ev.Preempted(place.request, 1, D0))) == ["Resubmit"]
    (reserve,) = d.tell(arrival("a", attempt=2))
    assert isinstance(reserve, act.ReserveRoom)
    assert kinds(d.tell(d.refuse(reserve, is_lasting=True))) == ["Hold"]
    assert kinds(d.wait(0.6))[0] == "ReserveRoom"


def test_a_held_request_is_tried_again_every_quarter_second() -> None:
    d = desk()
    (reserve,) = d.tell(arrival("a"))
    assert isinstance(reserve, act.ReserveRoom)
    d.tell(d.refuse(reserve))
    assert d.wakes[-1] - d.now <= 0.25
    assert kinds(d.wait(0.6))[0] == "ReserveRoom"


def test_a_node_that_does_not_answer_has_refused() -> None:
    d = desk(decode=2, nodes=2)
    (first,) = d.tell(arrival("a"))
    assert isinstance(first, act.ReserveRoom)
    release, second = d.wait(2.1)
    assert release == act.ReleaseRoom(first.node, first.request, 1)
    assert isinstance(second, act.ReserveRoom)
    assert second.node.id != first.node.id
    assert d.tell(d.confirm(first)) == [release], "a room that nobody waits for is released"
    assert kinds(d.tell(d.confirm(second))) == ["Place"]


def test_a_second_confirmation_changes_nothing() -> None:
    d = desk()
    (reserve,) = d.tell(arrival("a"))
    assert isinstance(reserve, act.ReserveRoom)
    d.tell(d.confirm(reserve))
    assert not d.tell(d.confirm(reserve))


def test_a_dead_prefill_instance_before_the_answer_does_not_cost_an_attempt() -> None:
    d = desk(prefill=2)
    (reserve,) = d.tell(arrival("a"))
    assert isinstance(reserve, act.ReserveRoom)
    actions = d.tell(lost(P0))
    assert kinds(actions) == ["ReleaseRoom", "ReserveRoom"]
    (place,) = d.tell(d.confirm(reserve))
    assert isinstance(place, act.Place)
    assert (place.prefill.id, place.attempt) == (P1, 1)


# Attempts that fail


def test_a_refused_decode_is_placed_again_elsewhere() -> None:
    d = desk(decode=2)
    place = d.place(arrival("a"))
    d.tell(ev.PrefillDone(place.request, 1, P0, 40, 0, 0.0, 0.1))
    actions = d.tell(ev.DecodeRefused(place.request, 1, place.decode.id, "late"))
    assert kinds(actions) == ["ReleaseRoom", "Cancel", "Resubmit"]
    assert isinstance(actions[1], act.Cancel)
    assert actions[1].to.id == P0, "the one who refused knows"
    again = d.place(arrival("a", tokens=41, attempt=2, output_tokens=1))
    assert again.attempt == 2
    assert again.decode.id != place.decode.id


def test_a_failed_prefill_cancels_both_workers() -> None:
    d = desk()
    place = d.place(arrival("a"))
    actions = d.tell(ev.PrefillFailed(place.request, 1, P0, "unreachable"))
    assert kinds(actions) == ["ReleaseRoom", "Cancel", "Cancel", "Resubmit"]
    assert d.phase() == {"resubmitted": 1}


def test_preemptions_are_no_failures_and_book_the_whole_output() -> None:
    d = desk(max_failed_attempts=2)
    for attempt in range(1, 8):
        place = d.place(arrival("a", tokens=40, output=80, attempt=attempt))
        d.decode(place)
        assert d.part(D0).committed_pages == (4 if attempt == 1 else 8)
        assert kinds(d.tell(ev.Preempted(place.request, attempt, D0))) == ["Resubmit"]


def test_too_many_failed_attempts_end_the_request() -> None:
    d = desk(max_failed_attempts=2)
    place = d.place(arrival("a"))
    d.tell(ev.PrefillFailed(place.request, 1, P0, "x"))
    d.place(arrival("a", attempt=2))
    actions = d.tell(ev.PrefillFailed(place.request, 2, P0, "broken pipe"))
    assert isinstance(actions[-1], act.Reject)
    assert actions[-1].reason is RejectReason.ATTEMPTS
    assert "broken pipe" in actions[-1].message
    assert d.phase() == {}


def test_repeated_failures_wait_before_they_are_tried_again() -> None:
    d = desk()
    for attempt in (1, 2):
        d.place(arrival("a", attempt=attempt))
        d.tell(ev.PrefillFailed(RequestId("a"), attempt, P0, "x"))
    assert kinds(d.tell(arrival("a", attempt=3))) == ["Hold"]
    assert kinds(d.wait(0.6))[0] == "ReserveRoom"


@pytest.mark.parametrize("victim", [P0, D0])
def test_a_lost_worker_resubmits_its_requests(victim: PartId) -> None:
    d = desk()
    place = d.place(arrival("a"))
    actions = d.tell(lost(victim))
    survivor = D0 if victim == P0 else P0
    assert kinds(actions) == ["ReleaseRoom", "Cancel", "Resubmit"]
    assert isinstance(actions[1], act.Cancel)
    assert actions[1].to.id == survivor
    assert kinds(d.tell(arrival("a", attempt=2))) == ["Hold"]
    assert kinds(d.tell(worker(P if victim == P0 else D, 0, life=2))) == ["ReserveRoom"]
    assert place.attempt == 1


def test_a_prefill_worker_that_dies_after_its_request_joined_decode_does_no_harm() -> None:
    d = desk()
    place = d.place(arrival("a"))
    d.decode(place)
    assert not d.tell(lost(P0))
    d.tell(finished(place))
    assert d.phase() == {}


def test_a_lost_node_takes_its_workers_and_blocks() -> None:
    d = desk(nodes=2, prefill=2, decode=2)
    event = arrival("a", tokens=100)
    d.tell(stored(0, 1, event.chains[0].keys))
    place = d.place(event)
    assert place.decode_node.id == N0
    actions = d.tell(lost(N0))
    assert "Resubmit" in kinds(actions)
    assert {a.to.id for a in actions if isinstance(a, act.Cancel)} == {P0, D0}, "they may still live"
    assert "ReleaseRoom" not in kinds(actions)
    assert {p.id for p in d.conductor.describe(d.now).parts} == {GATEWAY, N1, P1, D1}
    again = d.place(arrival("a", tokens=100, attempt=2))
    assert (again.fetch, again.hit_blocks, again.decode_node.id) == (None, 0, N1)


def test_a_new_incarnation_ends_the_old_one() -> None:
    d = desk()
    d.place(arrival("a"))
    assert kinds(d.tell(worker(D, 0, life=2))) == ["ReleaseRoom", "Cancel", "Resubmit"]
    assert d.part(D0).incarnation == "decode-0.2"
    assert not d.tell(lost(D0, life=1)), "the loss of the old one is old news"


def test_silence_is_loss_and_the_silent_are_told() -> None:
    d = desk()
    d.place(arrival("a"))
    actions: list[act.Action] = []
    for _ in range(14):
        d.now += 0.5
        for id_ in (GATEWAY, N0, D0):
            d.tell(ev.Reported(id_, peer(id_).incarnation, pages_free=64))
        actions += d.tell(ev.Woke())
    assert {p.id for p in d.conductor.describe(d.now).parts} == {GATEWAY, N0, D0}
    assert {a.to.id for a in actions if isinstance(a, act.Cancel)} == {P0, D0}
    again = d.tell(ev.Reported(P0, peer(P0).incarnation))
    assert kinds(again) == ["RegisterAgain"]


def test_a_conductor_that_was_stopped_itself_blames_nobody() -> None:
    d = desk()
    d.wait(3.0)
    d.tell(ev.Woke(), after=30.0)
    assert len(d.conductor.describe(d.now).parts) == 4


def test_the_process_that_registered_last_keeps_its_id() -> None:
    d = desk()
    d.tell(worker(D, 0, life=2))
    displaced = Peer(D0, peer(D0, 1).incarnation, "")
    assert d.tell(ev.Reported(D0, displaced.incarnation)) == [act.IdTaken(displaced, peer(D0, 2))]


# Late copies and ends


def test_facts_of_other_attempts_and_parts_are_ignored() -> None:
    d = desk(prefill=2, decode=2)
    place = d.place(arrival("a"))
    other = D1 if place.decode.id == D0 else D0
    name = place.request
    for event in (
        arrival("a"),
        ev.PrefillFailed(name, 2, place.prefill.id, "x"),
        ev.PrefillFailed(name, 0, place.prefill.id, "x"),
        ev.DecodeRefused(name, 1, other, "x"),
        ev.Preempted(name, 1, other),
        ev.Finished(name, 2, place.decode.id, 1, "stop"),
        ev.PrefillDone(RequestId("unknown"), 1, P0, 1, 0, 0.0, 0.1),
        ev.RequestCancelled(RequestId("unknown"), "x"),
    ):
        assert not d.tell(event), event
    assert d.phase() == {"prefill": 1}


def test_a_late_arrival_of_a_request_that_is_over_is_ignored_but_a_new_attempt_is_not() -> None:
    d = desk()
    place = d.place(arrival("a"))
    d.tell(finished(place, by=P0))
    assert not d.tell(arrival("a"))
    assert kinds(d.tell(arrival("a", attempt=2))) == ["ReserveRoom"]


def test_the_gateway_may_go_on_to_the_next_attempt_by_itself() -> None:
    d = desk()
    d.place(arrival("a"))
    actions = d.tell(arrival("a", attempt=2))
    assert kinds(actions) == ["ReleaseRoom", "Cancel", "Cancel", "ReserveRoom"]


@pytest.mark.parametrize("until", ["room", "prefill", "decoding", "resubmitted", "held"])
def test_a_cancelled_request_leaves_nothing(until: str) -> None:
    d = desk()
    if until == "held":
        d.tell(lost(P0))
        d.tell(arrival("a"))
    elif until == "room":
        d.tell(arrival("a"))
    else:
        place = d.place(arrival("a"))
        if until == "decoding":
            d.decode(place)
        if until == "resubmitted":
            d.tell(ev.PrefillFailed(place.request, 1, P0, "x"))
    assert d.phase() == {until: 1}
    actions = d.tell(ev.RequestCancelled(RequestId("a"), "client went away"))
    expected = {
        "room": ["ReleaseRoom"],
        "prefill": ["ReleaseRoom", "Cancel", "Cancel"],
        "decoding": ["Cancel"],
    }
    assert kinds(actions) == expected.get(until, [])
    assert d.phase() == {}


def test_nothing_is_held_past_its_deadline() -> None:
    d = desk(prefill=0)
    d.tell(arrival("a", time_left=3.0))
    (reject,) = d.wait(3.5)
    assert isinstance(reject, act.Reject)
    assert reject.reason is RejectReason.DEADLINE
    assert d.phase() == {}


# Refusals


def test_what_can_never_fit_is_refused_at_once_with_both_numbers() -> None:
    d = desk(dram=8 * SPACE.block_bytes)
    cases = (
        (arrival("context", 1000, 100), RejectReason.CONTEXT, ("1000", "100", "1024")),
        (arrival("pages", 900, 124), None, ()),
        (arrival("bytes", 200, 8), RejectReason.NEVER_FITS, (str(8 * SPACE.block_bytes),)),
    )
    for event, reason, words in cases:
        (reject,) = d.tell(event)
        assert isinstance(reject, act.Reject)
        assert reason is None or reject.reason is reason
        assert all(word in reject.message for word in words), reject.message
        assert reject.retry_after is None


def test_more_pages_than_any_instance_has_are_refused() -> None:
    d = desk(decode=0)
    d.tell(worker(D, 0, pages=5))
    (reject,) = d.tell(arrival("a", 70, 20))
    assert isinstance(reject, act.Reject)
    assert reject.reason is RejectReason.NEVER_FITS
    assert "6" in reject.message
    assert "5" in reject.message
    assert kinds(d.tell(arrival("b", 70, 10))) == ["ReserveRoom"], "it fits exactly"


def test_the_queue_bound_gives_429_at_once_with_a_computed_wait() -> None:
    d = desk(queue_bound=3, decode=3)
    for i in range(3):
        d.place(arrival(f"r{i}", tokens=900))
    (reject,) = d.tell(arrival("late"))
    assert isinstance(reject, act.Reject)
    assert reject.reason is RejectReason.QUEUE_FULL
    assert reject.retry_after is not None
    assert 1.0 < reject.retry_after < 10.0
    assert "3" in reject.message
    assert kinds(d.tell(arrival("known", attempt=2))) == ["ReserveRoom"], "an accepted request always has a place"


def test_the_wait_follows_how_fast_a_long_queue_has_gone_down() -> None:
    """Prompts that share a chunk each take all of its time, and yet leave together."""
    d = desk(queue_bound=8, decode=3)
    places = [d.place(arrival(f"r{i}", tokens=100)) for i in range(8)]
    for turn in range(10):
        d.wait(4.0)
        for i, place in enumerate(places):
            d.tell(ev.PrefillDone(place.request, place.attempt, place.prefill.id, 100, 0, 0.0, 4.0))
            d.tell(finished(place))
            places[i] = d.place(arrival(f"r{turn}-{i}", tokens=100))
    (reject,) = d.tell(arrival("late", tokens=100))
    assert isinstance(reject, act.Reject)
    assert reject.retry_after is not None
    assert 2.0 <= reject.retry_after < 6.0, "half of the queue leaves in 2 s; one by one it would take 16"


def test_early_rejection_by_ttft_and_by_tbt() -> None:
    d = desk(slo=Slo(ttft=2.0), decode=2, admission="early")
    d.place(arrival("a", tokens=800))
    (reject,) = d.tell(arrival("b", tokens=800))
    assert isinstance(reject, act.Reject)
    assert reject.reason is RejectReason.TTFT_SLO
    assert reject.retry_after is not None
    (reject,) = d.tell(arrival("c", tokens=10, slo=Slo(tbt=0.001)))
    assert isinstance(reject, act.Reject)
    assert reject.reason is RejectReason.TBT_SLO
    assert kinds(desk(slo=Slo(ttft=0.1), admission="none").tell(arrival("b", tokens=800))) == ["ReserveRoom"]


def test_a_newcomer_that_is_held_past_its_ttft_limit_is_told_at_once() -> None:
    d = desk(prefill=0, slo=Slo(ttft=2.0))
    d.tell(arrival("a"))
    (reject,) = d.wait(2.5)
    assert isinstance(reject, act.Reject)
    assert reject.reason is RejectReason.TTFT_SLO


def test_no_slo_refuses_what_was_placed_once() -> None:
    d = desk(slo=Slo(ttft=0.5))
    d.place(arrival("a", tokens=20))
    d.tell(ev.PrefillFailed(RequestId("a"), 1, P0, "x"), after=3.0)
    assert kinds(d.tell(arrival("a", tokens=20, attempt=2))) == ["ReserveRoom"]


def test_missing_instances_are_waited_for_only_while_they_are_expected() -> None:
    d = desk(prefill=0)
    assert kinds(d.tell(arrival("a", time_left=600.0))) == ["Hold"]
    assert not d.wait(50.0)
    (reject,) = d.wait(15.0)
    assert isinstance(reject, act.Reject)
    assert reject.reason is RejectReason.NO_INSTANCE
    assert kinds(d.tell(arrival("b"))) == ["Reject"]
    d.tell(worker(P, 0))
    assert kinds(d.tell(arrival("c"))) == ["ReserveRoom"]


def test_a_worker_without_its_node_is_not_used() -> None:
    d = desk(prefill=0, decode=0)
    d.tell(worker(P, 0, on=7))
    d.tell(worker(D, 0))
    assert kinds(d.tell(arrival("a"))) == ["Hold"]
    assert kinds(d.tell(node(7))) == ["SendSnapshot", "ReserveRoom"]


# Overcommitment and order


def test_decode_is_not_overcommitted_but_an_empty_instance_takes_what_fits_alone() -> None:
    d = desk(decode=0)
    d.tell(worker(D, 0, pages=10))
    first = d.place(arrival("a", tokens=100, output=60))
    assert d.part(D0).committed_pages == 8
    assert kinds(d.tell(arrival("b", tokens=40, output=60))) == ["Hold"], "8 pages and 4 do not fit in 10"
    small = d.place(arrival("c", tokens=10, output=60))
    assert small.request == "c", "what fits may overtake for a while"
    d.decode(first)
    d.tell(finished(first, tokens=60))
    assert d.phase()["room"] == 1


@pytest.mark.parametrize(("share", "pages"), [(0.0, 4), (0.5, 6), (1.0, 8)])
def test_a_share_of_the_output_is_booked_as_configured(share: float, pages: int) -> None:
    d = desk(output_share=share)
    d.place(arrival("a", tokens=40, output=80))
    assert d.part(D0).committed_pages == pages


def test_a_request_that_waited_long_is_not_overtaken_any_more() -> None:
    d = desk(decode=0)
    d.tell(worker(D, 0, pages=10))
    d.place(arrival("a", tokens=100, output=60))
    d.tell(arrival("b", tokens=100, output=60))
    d.wait(1.5)
    assert kinds(d.tell(arrival("c", tokens=10, output=6))) == ["Hold"]


def test_growth_that_was_reported_counts() -> None:
    d = desk(decode=0)
    d.tell(worker(D, 0, pages=10))
    place = d.place(arrival("a", tokens=20, output=100))
    d.decode(place)
    d.tell(ev.Reported(D0, peer(D0).incarnation, running=1, pages_free=2))
    assert kinds(d.tell(arrival("b", tokens=20, output=100))) == ["Hold"]
    d.tell(finished(place, tokens=100))
    assert d.part(D0).committed_pages == 3


def test_load_of_requests_that_this_conductor_never_placed_counts() -> None:
    d = desk(decode=2)
    d.tell(ev.Reported(D0, peer(D0).incarnation, running=5, pages_free=10, context_tokens=900))
    assert d.place(arrival("a")).decode.id == D1


def test_held_requests_are_served_in_order_of_arrival() -> None:
    d = desk(prefill=0)
    for name in "abc":
        d.tell(arrival(name))
    reserves = d.tell(worker(P, 0))
    assert [r.request for r in reserves if isinstance(r, act.ReserveRoom)] == ["a", "b", "c"]


# Fleet news and the directory


@pytest.mark.parametrize(("dram_blocks", "pages", "blocks"), [(20, 30, 20), (40, 30, 30), (90, 90, 64)])
def test_the_context_is_no_longer_than_arena_and_pages(dram_blocks: int, pages: int, blocks: int) -> None:
    d = desk(decode=0, dram=dram_blocks * SPACE.block_bytes)
    d.tell(worker(D, 0, pages=pages))
    assert d.news[-1].context_tokens == blocks * SPACE.block_tokens


def test_everyone_hears_of_every_change_and_a_newcomer_of_all() -> None:
    d = desk()
    d.news.clear()
    d.tell(worker(D, 1))
    assert {n.to.id for n in d.news} == {GATEWAY, N0, P0, D0, D1}
    assert all(n == d.news[0] or n.parts == d.news[0].parts for n in d.news)
    assert [p.peer.id for p in d.news[0].parts] == [D0, D1, GATEWAY, N0, P0]
    assert (d.news[0].context_tokens, d.news[0].spaces) == (1024, (SPACE,))
    d.news.clear()
    d.tell(worker(D, 1))
    assert [n.to.id for n in d.news] == [D1], "registered again: an answer, no news"
    d.news.clear()
    d.tell(lost(D1))
    assert {n.to.id for n in d.news} == {GATEWAY, N0, P0, D0}


def test_a_gap_in_a_nodes_announcements_asks_for_one_snapshot() -> None:
    d = desk()
    who, keys = peer(N0), arrival("a", tokens=64).chains[0].keys

    def announce(seq: int, n: int) -> list[act.Action]:
        return d.tell(ev.BlocksStored(N0, who.incarnation, seq, SPACE.id, Tier.DRAM, keys[:n]))

    assert not announce(1, 1)
    assert kinds(announce(3, 2)) == ["SendSnapshot"]
    assert not announce(5, 3)
    assert d.part(N0).index == "degraded"
    d.tell(stored(0, 5, keys))
    assert (d.part(N0).index, d.part(N0).blocks) == ("exact", {"dram": 4, "ssd": 0})
    assert not announce(4, 1)
    assert not announce(6, 1)


def test_a_placement_says_how_well_the_directory_knew_its_nodes() -> None:
    d = desk()
    who, keys = peer(N0), arrival("a", tokens=64).chains[0].keys
    assert d.place(arrival("a", tokens=64)).index is IndexHealth.EXACT
    for seq in (1, 3):
        d.tell(ev.BlocksStored(N0, who.incarnation, seq, SPACE.id, Tier.DRAM, keys[:1]))
    place = d.place(arrival("b", tokens=64))
    assert N0 in (place.prefill_node.id, place.decode_node.id)
    assert place.index is IndexHealth.DEGRADED
    d.tell(stored(0, 3, keys))
    assert d.place(arrival("c", tokens=64)).index is IndexHealth.EXACT


def test_a_last_announcement_that_was_lost_is_missed_at_the_next_heartbeat() -> None:
    d = desk()
    who, keys = peer(N0), arrival("a", tokens=64).chains[0].keys

    def beat(announced: int) -> list[act.Action]:
        return d.tell(ev.Reported(N0, who.incarnation, announced=announced))

    assert not d.tell(ev.BlocksStored(N0, who.incarnation, 1, SPACE.id, Tier.DRAM, keys[:1]))
    assert not beat(1)
    assert kinds(beat(2)) == ["SendSnapshot"]
    assert d.part(N0).index == "degraded"
    assert not beat(2), "it was asked for"
    d.tell(stored(0, 2, keys))
    assert not beat(2)
    assert (d.part(N0).index, d.part(N0).blocks) == ("exact", {"dram": 4, "ssd": 0})


def test_a_snapshot_that_does_not_come_is_asked_for_again() -> None:
    d = desk(nodes=0, prefill=0, decode=0)
    assert kinds(d.tell(node(0))) == ["SendSnapshot"]
    assert kinds(d.wait(12.0)) == ["SendSnapshot", "SendSnapshot"]


def test_a_worker_without_a_key_space_is_not_let_in() -> None:
    d = desk(prefill=0)
    bad = ev.Registered(P, peer(P0), node=N0, model="tiny")
    assert not d.tell(bad)
    assert P0 not in {p.id for p in d.conductor.describe(d.now).parts}


def test_measured_times_correct_the_prediction() -> None:
    d = desk()
    slow = d.part(P0).queue_seconds
    for i in range(40):
        tokens = 100 + 13 * i
        place = d.place(arrival(f"r{i}", tokens=tokens))
        d.tell(ev.PrefillDone(place.request, 1, P0, tokens, 0, 0.0, tokens / 10_000))
        d.tell(finished(place, by=P0))
    assert slow == 0.0
    assert d.place(arrival("a", tokens=500)).expected_ttft == pytest.approx(0.05, rel=0.2)


@pytest.mark.parametrize(
    "field", ["threshold", "queue_bound", "heartbeat_limit", "room_timeout", "max_failed_attempts"]
)
def test_impossible_settings_are_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=field.replace("_", "-")):
        ConductorConfig(**{field: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("counted", [True, False])
def test_blocks_that_are_being_computed_count_where_workers_wait_for_them(counted: bool) -> None:
    d = desk(prefill=2, decode=2, count_coming_blocks=counted)
    first = d.place(arrival("a", tokens=500, family="f"))
    d.now += 0.5
    second = d.place(arrival("b", tokens=505, family="f"))
    assert (second.prefill.id == first.prefill.id) == counted
    assert second.hit_blocks == (31 if counted else 0)
    assert second.awaits == (("a", 1) if counted else None)


def test_who_is_cancelled_meanwhile_is_not_waited_for() -> None:
    d = desk(prefill=1, decode=2)
    first = d.place(arrival("a", tokens=500, family="f"))
    (reserve,) = d.tell(arrival("b", tokens=505, family="f"))
    d.tell(ev.RequestCancelled(first.request, "gone"))
    assert isinstance(reserve, act.ReserveRoom)
    (second,) = d.tell(d.confirm(reserve))
    assert isinstance(second, act.Place)
    assert (second.awaits, second.hit_blocks) == (None, 0)


def test_a_source_that_is_sending_already_is_spared() -> None:
    d = desk(prefill=1, decode=1, nodes=3)
    keys = sum((arrival("a", tokens=400, family=family).chains[0].keys for family in "fgh"), ())
    for i in (1, 2):
        d.tell(stored(i, 1, keys))
    places = [d.place(arrival(name, tokens=400, family=name)) for name in "fg"]
    assert [p.fetch.source.id for p in places if p.fetch] == ["node-1", "node-2"]
    for place in places:
        d.tell(finished(place, place.prefill.id))
    d.now += 30.0
    third = d.place(arrival("h", tokens=400, family="h"))
    assert third.fetch is not None
    assert third.fetch.source.id == "node-1", "its fetch is over"


def test_a_decode_instance_gets_some_requests_ahead_of_its_slots() -> None:
    d = desk(decode=0)
    d.tell(worker(D, 0, slots=2))
    for name in "abc":
        d.place(arrival(name))
    assert kinds(d.tell(arrival("d"))) == ["Hold"]


# After an earlier Conductor


OLD = RequestId("old")


@pytest.mark.parametrize(
    "event", [ev.Preempted(OLD, 3, D0), ev.DecodeRefused(OLD, 3, D0, "x"), ev.PrefillFailed(OLD, 3, P0, "x")]
)
def test_a_failed_attempt_that_an_earlier_conductor_placed_is_asked_of_the_gateways(event: ev.Event) -> None:
    d = desk()
    (resubmit,) = d.tell(event)
    assert isinstance(resubmit, act.Resubmit)
    assert (resubmit.attempt, resubmit.gateway.id) == (3, GATEWAY)
    assert not d.tell(event), "repeated"
    assert not d.tell(ev.RequestCancelled(OLD, "it has ended"))
    assert kinds(d.tell(arrival("old", attempt=4))) == ["ReserveRoom"]
    d.tell(ev.RequestCancelled(OLD, "client went away"))
    assert not d.tell(ev.Preempted(OLD, 4, D0)), "what is over is known"


def placed_before(place: act.Place, tokens: int, **more: object) -> ev.PlacedBefore:
    given = {"attempt": place.attempt, "output_tokens": tokens, **more}
    return ev.PlacedBefore(arrival(place.request, 40 + tokens, 8 - tokens, **given), place, tokens)  # type: ignore[arg-type]


def an_earlier_place(**more: object) -> act.Place:
    return desk(prefill=2, decode=2, nodes=2).place(arrival("old", 40, attempt=3, **more))


@pytest.mark.parametrize(
    ("tokens", "phase", "victims"),
    [(0, "prefill", (P0, D0, N0)), (1, "moving", (P0, D0, N0)), (2, "decoding", (D0, N0))],
)
def test_what_was_placed_before_is_placed_again_when_its_worker_dies(
    tokens: int, phase: str, victims: tuple[PartId, ...]
) -> None:
    place = an_earlier_place()
    assert (place.prefill.id, place.decode.id) == (P0, D0)
    for victim in victims:
        d = desk(prefill=2, decode=2, nodes=2)
        assert not d.tell(placed_before(place, tokens))
        assert not d.tell(placed_before(place, tokens)), "told twice"
        assert d.phase() == {phase: 1}
        actions = d.tell(lost(victim))
        assert act.Resubmit(OLD, 3, peer(GATEWAY), f"{victim} is gone") in actions
        assert kinds(d.tell(arrival("old", 42, attempt=4))) == ["ReserveRoom"]


def test_what_was_placed_before_counts_as_load_until_it_ends() -> None:
    d = desk()
    d.tell(ev.Reported(D0, peer(D0).incarnation, running=1, pages_free=60))
    place = an_earlier_place()
    d.tell(placed_before(place, 0))
    assert d.part(P0).queue_seconds
    assert (d.part(D0).assigned, d.part(N0).rooms) == (1, 1)
    d.tell(ev.DecodeJoined(OLD, 3, D0))
    assert (d.part(P0).queue_seconds, d.part(N0).rooms, d.phase()) == (0.0, 0, {"decoding": 1})
    assert kinds(d.tell(finished(place))) == ["ExpectEnd"]
    assert (d.part(D0).assigned, d.phase()) == (0, {})
    assert kinds(d.tell(placed_before(place, 5))) == ["ExpectEnd"], "its last token may be lost"
    assert d.phase() == {}


def test_a_stranger_in_a_report_becomes_known() -> None:
    d = desk(decode=0)
    d.tell(worker(D, 0, slots=2, pages=8))
    d.tell(ev.Reported(D0, peer(D0).incarnation, running=1, pages_free=5))
    d.tell(placed_before(an_earlier_place(), 2))
    assert (d.part(D0).assigned, d.part(D0).committed_pages) == (1, 3)
    d.place(arrival("a", tokens=16))
    d.place(arrival("b", tokens=16))
    assert kinds(d.tell(arrival("c", tokens=16))) == ["Hold"], "two slots and one ahead"


@pytest.mark.parametrize("missing", [P0, D0, N0])
def test_what_lacks_a_worker_is_not_taken_over(missing: PartId) -> None:
    place = an_earlier_place()
    d = desk(prefill=2, decode=2, nodes=2)
    d.tell(lost(missing))
    assert not d.tell(placed_before(place, 0))
    assert d.phase() == {}
    if missing == P0:
        d.tell(worker(P, 0, life=2))
        assert not d.tell(placed_before(place, 0))
        assert d.phase() == {}, "another process of that name"
        d.tell(placed_before(place, 2))
        assert d.phase() == {"decoding": 1}, "prefill is not needed any more"


def test_an_end_that_this_conductor_does_not_know_is_told_to_the_gateways() -> None:
    d = desk()
    place = an_earlier_place()
    assert d.tell(finished(place)) == [act.ExpectEnd(OLD, 3, peer(GATEWAY))]
    assert not d.tell(finished(place))
    assert kinds(d.tell(placed_before(place, 5))) == ["ExpectEnd"]
    assert kinds(d.tell(arrival("old", attempt=4))) == ["ReserveRoom"], "the gateway went on"


def test_a_place_carries_the_class_and_how_long_the_first_token_may_take() -> None:
    classes = (PriorityClass("high", slo=Slo(ttft=3.0)), PriorityClass("low", 5))
    d = desk(classes=classes, slo=Slo(ttft=20.0))
    (reserve,) = d.tell(arrival("a", priority="high"))
    assert isinstance(reserve, act.ReserveRoom)
    (place,) = d.tell(d.confirm(reserve), after=0.5)
    assert isinstance(place, act.Place)
    assert (place.priority, place.rank, place.ttft_left) == ("high", 0, pytest.approx(2.5))
    assert place.compute_seconds > 0
    low = d.place(arrival("b"))
    assert (low.priority, low.rank, low.ttft_left) == ("low", 5, pytest.approx(20.0))
    assert "Resubmit" in kinds(d.tell(ev.PrefillFailed(low.request, 1, P0, "broken")))
    again = d.place(arrival("b", 42, attempt=2, output_tokens=2))
    assert again.ttft_left is None, "what was accepted once is not refused for being late"


# Pipelines


def test_a_pipeline_is_one_instance_that_is_expected_to_be_faster() -> None:
    d = desk(prefill=1)
    d.tell(structs.replace(worker(P, 1), stages=4))
    alone, group = d.part(P0), d.part(P1)
    assert (alone.stages, group.stages) == (None, 4)
    assert alone.cost is not None
    assert group.cost == (alone.cost[0], alone.cost[1] / 4, alone.cost[2] / 4)
    assert d.place(arrival("a", 400)).prefill.id == P1


def test_the_further_stages_of_a_pipeline_get_nothing_to_do() -> None:
    d = desk(prefill=0)
    stage = structs.replace(worker(PartKind.STAGE, 0), first_layer=2, last_layer=4)
    d.tell(stage)
    assert kinds(d.tell(arrival("a"))) == ["Hold"], "no prefill instance is there"
    assert d.part(stage.peer.id).layers == (2, 4)
    assert stage.peer in [part.peer for part in d.news[-1].parts], "its leader finds it in the fleet"
    d.tell(ev.Lost(stage.peer.id, stage.peer.incarnation, "killed"))
    assert stage.peer not in [part.peer for part in d.news[-1].parts]
