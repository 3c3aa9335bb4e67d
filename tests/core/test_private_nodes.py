"""Nodes whose blocks are for their own workers only: the caches of external instances."""

from __future__ import annotations

from moonpool.core import actions as act
from moonpool.core import events as ev
from moonpool.core.conductor import Conductor, ConductorConfig
from moonpool.core.vocabulary import (
    BlockKey,
    Capacity,
    Chain,
    Incarnation,
    KeySpace,
    KeySpaceId,
    PartId,
    PartKind,
    Peer,
    RejectReason,
    RequestId,
    Tier,
)

SPACE = KeySpace(KeySpaceId("space"), 16, 1, 16)
KEYS = tuple(BlockKey(bytes([at]) * 16) for at in range(4))
GATEWAY = Peer(PartId("gateway"), Incarnation("g"), "tcp://g:1")


def peer(name: str) -> Peer:
    return Peer(PartId(name), Incarnation(f"{name}-life"), f"tcp://{name}:1")


def conductor(*private: bool) -> Conductor:
    """A coupled instance `w0`, `w1`, … on a node of its own each."""
    made = Conductor(ConductorConfig(), seed=1)
    made.handle(ev.Registered(PartKind.GATEWAY, GATEWAY), 0.0)
    for at, is_private in enumerate(private):
        node = peer(f"n{at}")
        made.handle(ev.Registered(PartKind.NODE, node, Capacity(dram_bytes=1 << 20), private=is_private), 0.0)
        made.handle(ev.Snapshot(node.id, node.incarnation, 0, ()), 0.0)
        room = Capacity(pages=1000, slots=1, context_tokens=4096)
        made.handle(ev.Registered(PartKind.COUPLED, peer(f"w{at}"), room, SPACE, node=node.id, model="m"), 0.0)
    return made


def store(made: Conductor, node: str, keys: tuple[BlockKey, ...] = KEYS) -> None:
    made.handle(ev.BlocksStored(PartId(node), peer(node).incarnation, 1, SPACE.id, Tier.DRAM, keys), 0.1)


def arrive(made: Conductor, name: str = "r") -> tuple[act.Action, ...]:
    chain = Chain(SPACE.id, KEYS)
    event = ev.RequestArrived(RequestId(name), 1, GATEWAY, "m", 70, 0, 8, (chain,), 60.0)
    return made.handle(event, 0.2)


def place_in(actions: tuple[act.Action, ...]) -> act.Place:
    return next(action for action in actions if isinstance(action, act.Place))


def test_its_own_worker_hits_what_it_holds() -> None:
    made = conductor(True, True)
    store(made, "n1")
    place = place_in(arrive(made))
    assert (place.prefill.id, place.decode.id, place.hit_blocks, place.fetch) == ("w1", "w1", 4, None)
    made.check_integrity()


def test_nobody_fetches_from_it() -> None:
    """Where the one that has the blocks is full, the other one computes; from a node it would fetch them."""
    for is_private in (True, False):
        made = conductor(is_private, is_private)
        store(made, "n0")
        assert place_in(arrive(made, "first")).prefill.id == "w0"
        place = place_in(arrive(made))
        assert place.prefill.id == "w1"
        assert (place.fetch is None) is is_private
        assert [bool(found) for found in made.holders(SPACE.id, KEYS[:1])] == [not is_private]
        made.check_integrity()


def test_copies_of_its_blocks_are_not_ordered() -> None:
    made = conductor(True, False, False)
    store(made, "n0")
    wanted = ev.ReplicasWanted(GATEWAY, 1, SPACE, KEYS, copies=2, at_most=2)
    assert made.handle(wanted, 0.3) == (act.ReplicasOrdered(GATEWAY, 1, (0, 0, 0, 0)),)
    store(made, "n1")
    orders = [action for action in made.handle(wanted, 0.4) if isinstance(action, act.Replicate | act.DropReplica)]
    assert [(type(o), o.node.id) for o in orders] == [(act.Replicate, "n2")]


def test_a_request_that_is_to_blame_itself_is_refused() -> None:
    made = conductor(True, True)
    place = place_in(arrive(made))
    failed = ev.PrefillFailed(RequestId("r"), 1, place.prefill.id, "status 400", unservable=True)
    (reject,) = [action for action in made.handle(failed, 0.5) if isinstance(action, act.Reject)]
    assert (reject.reason, reject.message, reject.retry_after) == (RejectReason.UNSERVABLE, "status 400", None)
    made.check_integrity()
