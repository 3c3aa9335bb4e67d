"""What a node asks the Conductor, and when it stops asking."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from moonpool.core.actions import FleetChanged
from moonpool.core.vocabulary import Incarnation, NodePeer, PartId, Peer
from moonpool.messenger.tcp import TcpMessenger
from moonpool.store.neighbours import Neighbours
from moonpool.wire.link import Link
from moonpool.wire.messages import Locate

from .kit import SPACE, keys_of

ME = Peer(PartId("node-0"), Incarnation("a"), "tcp://127.0.0.1:1")
OTHER = NodePeer(PartId("node-1"), Incarnation("b"), "tcp://127.0.0.1:2", "127.0.0.1:3", "")
K = keys_of("k", 1)


class SilentLink:
    """Whoever is at its other end says nothing."""

    me = ME

    def __init__(self) -> None:
        self.questions = 0

    def post(self, to: Peer, body: object) -> None:
        assert isinstance(body, Locate)
        self.questions += 1


def test_a_silent_conductor_is_left_alone_until_another_one_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.store.neighbours.LOCATE_SECONDS", 0.01)
    conductor = Peer(PartId("conductor"), Incarnation("first"), "tcp://127.0.0.1:4")
    fleet = FleetChanged(ME, (), (OTHER,), (), 0)
    link = SilentLink()
    neighbours = Neighbours(cast(Link, link), cast(TcpMessenger, cast(Any, None)), lambda: fleet, lambda: conductor)

    async def asked() -> int:
        before = link.questions
        assert await neighbours.holders(SPACE.id, K, 1.0) == [()]
        return link.questions - before

    assert asyncio.run(asked()) == 1
    assert asyncio.run(asked()) == 0, "it is asked though it was silent a moment ago"
    neighbours.conductor_is_new()
    assert asyncio.run(asked()) == 1

    # One that is replaced while it is asked: its silence says nothing of the next.
    neighbours.conductor_is_new()

    async def asked_across_a_restart() -> None:
        nonlocal conductor
        question = asyncio.ensure_future(asked())
        await asyncio.sleep(0)
        conductor = Peer(conductor.id, Incarnation("second"), conductor.address)
        assert await question == 1
        assert await asked() == 1

    asyncio.run(asked_across_a_restart())
