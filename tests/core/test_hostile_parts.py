"""What parts say that they cannot mean: it changes nothing, and ends nobody."""

from __future__ import annotations

import pytest

from moonpool.core import events as ev
from moonpool.core.conductor import Conductor, ConductorConfig
from moonpool.core.cost import DecodeCoefficients, DecodeCost
from moonpool.core.vocabulary import (
    BlockKey,
    Capacity,
    Incarnation,
    KeySpace,
    KeySpaceId,
    PartId,
    PartKind,
    Peer,
    RequestId,
    Tier,
)

SPACE = KeySpace(KeySpaceId("aa" * 16), 16, 4, 4096)
KEYS = (BlockKey(bytes(16)),)
WORKER = Peer(PartId("worker"), Incarnation("w"), "tcp://w:1")
NODE = Peer(PartId("node"), Incarnation("n"), "tcp://n:1")
R = RequestId("r")


@pytest.mark.parametrize("kind", [PartKind.PREFILL, PartKind.DECODE, PartKind.COUPLED, PartKind.GATEWAY])
@pytest.mark.parametrize(
    "event",
    [
        ev.BlocksStored(WORKER.id, WORKER.incarnation, 1, SPACE.id, Tier.DRAM, KEYS),
        ev.BlocksRemoved(WORKER.id, WORKER.incarnation, 1, SPACE.id, Tier.DRAM, KEYS),
        ev.Snapshot(WORKER.id, WORKER.incarnation, 1, ((SPACE.id, Tier.DRAM, KEYS),)),
        ev.RoomConfirmed(WORKER.id, WORKER.incarnation, R, 1, ()),
        ev.RoomRefused(WORKER.id, WORKER.incarnation, R, 1, "no"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_only_nodes_say_what_nodes_say(kind: PartKind, event: ev.Event) -> None:
    made = Conductor(ConductorConfig(), seed=1)
    made.handle(ev.Registered(PartKind.NODE, NODE, Capacity(dram_bytes=1 << 20)), 0.0)
    made.handle(ev.Registered(kind, WORKER, Capacity(), SPACE, 0, 4, NODE.id, model="m"), 0.0)
    assert made.handle(event, 0.1) == ()
    assert made.holders(SPACE.id, KEYS) == [()]
    made.check_integrity()


def test_a_measurement_beyond_all_others_leaves_the_model_usable() -> None:
    cost = DecodeCost(DecodeCoefficients())
    for _ in range(6):
        cost.observe(1 << 53, 1 << 53, 1e-6)
        cost.observe(1, 100, 0.03)
    for _ in range(3000):
        cost.observe(4, 100, 0.05)
    assert cost.seconds(4, 100) == pytest.approx(0.05, rel=0.2)
