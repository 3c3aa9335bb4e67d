"""What workers remember of requests, and that they are there while they wait for their node."""

from __future__ import annotations

import asyncio

from moonpool.core.actions import FleetChanged
from moonpool.core.events import Registered, Reported
from moonpool.core.vocabulary import PartId, PartKind, RequestId
from moonpool.live.worker import REMEMBERED_ENDINGS, Endings, WorkerLife
from moonpool.wire.link import Link


def test_an_attempt_that_ended_covers_the_earlier_ones() -> None:
    endings = Endings()
    endings.add(RequestId("a"), 2)
    endings.add(RequestId("a"), 1)
    assert endings.has(RequestId("a"), 1)
    assert endings.has(RequestId("a"), 2)
    assert not endings.has(RequestId("a"), 3)
    assert not endings.has(RequestId("b"), 1)


def test_memory_of_endings_is_bounded() -> None:
    endings = Endings()
    for n in range(REMEMBERED_ENDINGS + 1):
        endings.add(RequestId(str(n)), 1)
    assert not endings.has(RequestId("0"), 1)
    assert endings.has(RequestId(str(REMEMBERED_ENDINGS)), 1)


def test_a_worker_that_waits_for_its_node_is_there_meanwhile() -> None:
    """Else it is lost after some seconds, and never hears that the node has come."""

    async def run() -> None:
        part, conductor = (Link(PartId(name), "127.0.0.1", 0, None) for name in ("decode-0", "conductor"))
        reported = Reported(part.me.id, part.me.incarnation)
        life = WorkerLife(
            *(part, conductor.me.address, None, Registered(PartKind.DECODE, part.me)),
            *(lambda: reported, lambda: {}),
        )
        living = asyncio.create_task(life.run(lambda envelope: None, set, lambda gateway: None, lambda: None))
        try:
            async with asyncio.timeout(20.0):
                first = await conductor.receive()
                assert isinstance(first.body, Registered)
                await conductor.send(first.sender, FleetChanged(first.sender, (), (), (), 100))
                while (await conductor.receive()).body != reported:
                    pass
        finally:
            living.cancel()
            await asyncio.wait([living])
            part.close()
            conductor.close()

    asyncio.run(run())
