"""The Conductor's driver over real control sockets: parts are links held by the test."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import pytest
from msgspec import structs

from moonpool.core import actions as act
from moonpool.core import events as ev
from moonpool.core.conductor import Conductor, ConductorConfig
from moonpool.core.vocabulary import Incarnation, PartId, PartKind, Peer
from moonpool.live import decided
from moonpool.live.conductor import run_conductor
from moonpool.wire.link import Link
from moonpool.wire.messages import Counters, Describe, Description, Message
from moonpool.wire.story import Stories
from tests.core.conductor_scene import arrival, gateway, node, worker

SECONDS = 10.0
T = TypeVar("T")


class Bench:
    """A running Conductor and one link a part."""

    def __init__(self, conductor: Link) -> None:
        self.conductor = conductor
        self.links: dict[str, Link] = {}

    async def join(self, registered: ev.Registered) -> Link:
        link = self.links[registered.peer.id] = Link(registered.peer.id, "127.0.0.1", 0, None)
        await link.send(self.conductor.me, structs.replace(registered, peer=link.me))
        await self.expect(registered.peer.id, act.FleetChanged)
        return link

    async def tell(self, part: str, message: Message) -> None:
        await self.links[part].send(self.conductor.me, message)

    async def expect(self, part: str, kind: type[T]) -> T:
        async with asyncio.timeout(SECONDS):
            while True:
                body = (await self.links[part].receive()).body
                if isinstance(body, kind):
                    return body


@contextlib.asynccontextmanager
async def bench(config: ConductorConfig) -> AsyncIterator[Bench]:
    made = Bench(Link(PartId("conductor"), "127.0.0.1", 0, None))
    task = asyncio.create_task(run_conductor(made.conductor, config, seed=0))
    try:
        yield made
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        for link in (made.conductor, *made.links.values()):
            link.close()


def run(test: Callable[[Bench], Awaitable[None]], config: ConductorConfig | None = None) -> None:
    async def inside() -> None:
        async with bench(config or ConductorConfig()) as made:
            await test(made)

    asyncio.run(asyncio.wait_for(inside(), 3 * SECONDS))


async def cluster(b: Bench) -> None:
    for part in (gateway(), node(0), worker(PartKind.PREFILL, 0), worker(PartKind.DECODE, 0)):
        await b.join(part)


def test_a_request_goes_from_arrival_to_its_end() -> None:
    async def test(b: Bench) -> None:
        await cluster(b)
        await b.tell("gateway-0", structs.replace(arrival("a"), gateway=b.links["gateway-0"].me))
        reserve = await b.expect("node-0", act.ReserveRoom)
        ids = reserve.request, reserve.attempt
        me = b.links["node-0"].me
        await b.tell("node-0", ev.RoomConfirmed(me.id, me.incarnation, *ids, (0, 1)))
        place = await b.expect("gateway-0", act.Place)
        assert place.prefill == b.links["prefill-0"].me
        assert place.decode == b.links["decode-0"].me
        assert place.lacking == (0, 1)
        await b.tell("prefill-0", ev.PrefillDone(*ids, PartId("prefill-0"), 40, 0, 0.0, 0.1))
        await b.tell("decode-0", ev.DecodeJoined(*ids, PartId("decode-0")))
        await b.tell("decode-0", ev.Finished(*ids, PartId("decode-0"), 8, "stop"))
        await b.tell("decode-0", Counters(PartId("decode-0"), b.links["decode-0"].me.incarnation, {"steps": 8.0}))
        await b.tell("decode-0", Describe(b.links["decode-0"].me, 7))
        description = await b.expect("decode-0", Description)
        state = msgspec.json.decode(description.state)
        assert description.serial == 7
        assert state["decisions"]["placed"] == state["decisions"]["finished"] == 1
        assert state["counters"] == {"decode-0": {"steps": 8.0}, "conductor": {"integrity_failures": 0.0}}
        assert not any(state["requests"].values())

    run(test)


def test_the_dashboard_is_told_what_was_weighed_and_which_prefixes_are_hot() -> None:
    async def test(b: Bench) -> None:
        await cluster(b)
        for name in ("a", "b"):
            arrived = structs.replace(
                arrival(name, 200, family="f"), gateway=b.links["gateway-0"].me, label=f"<{name}>"
            )
            await b.tell("gateway-0", arrived)
            reserve = await b.expect("node-0", act.ReserveRoom)
            me = b.links["node-0"].me
            await b.tell("node-0", ev.RoomConfirmed(me.id, me.incarnation, reserve.request, reserve.attempt, ()))
            await b.expect("gateway-0", act.Place)

        async def look(serial: int) -> dict[str, Any]:
            await b.tell("gateway-0", Describe(b.links["gateway-0"].me, serial, live=True))
            state: dict[str, Any] = msgspec.json.decode((await b.expect("gateway-0", Description)).state)
            return state

        first = await look(1)
        newest, oldest = first["decided"]
        assert (newest["label"], oldest["label"], newest["outcome"]) == ("<b>", "<a>", "in prefill")
        assert newest["weighing"]["chosen_prefill"] == "prefill-0"
        assert newest["weighing"]["prefill"][0]["ttft_seconds"] == newest["weighing"]["ttft_seconds"]
        assert (newest["prefill_instances"], newest["decode_instances"]) == (1, 1)
        assert [(p["uses"], p["blocks"]) for p in first["prefixes"]] == [(2, 12)]
        assert "recent" not in first
        assert [d["weighing"] for d in (await look(2))["decided"]] == [newest["weighing"], oldest["weighing"]]

    run(test)


def test_what_is_weighed_anew_for_a_look_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decided, "PAIRS_A_LOOK", 1)
    core, stories = Conductor(ConductorConfig(), 0), Stories()
    registered = (gateway(), node(0), worker(PartKind.PREFILL, 0, on=0), worker(PartKind.DECODE, 0, on=0))
    for event in (*registered, arrival("a"), arrival("b")):
        stories.note(1.0, event, core.handle(event, 1.0))
    memory = decided.Decisions()
    known = [[d.weighing is not None for d in memory.look(stories, core, 2.0)] for _ in range(3)]
    assert known == [[True, False], [True, True], [True, True]]


def test_a_cancelled_request_is_cancelled_at_the_workers_and_its_room_released() -> None:
    async def test(b: Bench) -> None:
        await cluster(b)
        await b.tell("gateway-0", structs.replace(arrival("a"), gateway=b.links["gateway-0"].me))
        reserve = await b.expect("node-0", act.ReserveRoom)
        me = b.links["node-0"].me
        await b.tell("node-0", ev.RoomConfirmed(me.id, me.incarnation, reserve.request, 1, ()))
        await b.expect("gateway-0", act.Place)
        await b.tell("gateway-0", ev.RequestCancelled(reserve.request, "gone"))
        assert (await b.expect("node-0", act.ReleaseRoom)).request == reserve.request
        for worker_ in ("prefill-0", "decode-0"):
            assert (await b.expect(worker_, act.Cancel)).request == reserve.request

    run(test)


def test_an_unknown_heartbeat_is_asked_to_register_at_the_address_it_came_from() -> None:
    async def test(b: Bench) -> None:
        link = b.links["stray"] = Link(PartId("stray"), "127.0.0.1", 0, None)
        await b.tell("stray", ev.Reported(link.me.id, link.me.incarnation))
        assert (await b.expect("stray", act.RegisterAgain)).to.incarnation == link.me.incarnation

    run(test)


def test_a_part_whose_id_another_has_taken_is_told_by_whom() -> None:
    async def test(b: Bench) -> None:
        await b.join(gateway())
        link = b.links["displaced"] = Link(PartId("gateway-0"), "127.0.0.1", 0, None)
        await b.tell("displaced", ev.Reported(link.me.id, link.me.incarnation))
        assert (await b.expect("displaced", act.IdTaken)).by == b.links["gateway-0"].me

    run(test)


def test_timers_fire_without_any_message(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "moonpool.live.conductor")

    async def test(b: Bench) -> None:
        await b.join(gateway())
        await b.join(node(0))
        await b.tell(
            "gateway-0", structs.replace(arrival("a", time_left=0.5), gateway=b.links["gateway-0"].me, label="x-1")
        )
        await b.expect("gateway-0", act.Hold)
        assert (await b.expect("gateway-0", act.Reject)).reason.value == "deadline"
        parts = [{}]
        while parts:
            await b.tell("gateway-0", Describe(b.links["gateway-0"].me, 1))
            parts = msgspec.json.decode((await b.expect("gateway-0", Description)).state)["parts"]

    run(test, ConductorConfig(heartbeat_limit=1.0))
    lines = [r.getMessage() for r in caplog.records]
    assert any("Reject a" in line and "[x-1]" in line and "deadline" in line for line in lines), lines
    assert any(line.startswith("node-0 registered") for line in lines)
    assert "node-0 lost" in lines


def test_a_failure_of_the_core_is_logged_with_its_event_and_ends_the_conductor(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Conductor, event: ev.Event, now: float) -> tuple[act.Action, ...]:
        raise ArithmeticError("a ledger that does not add up")

    monkeypatch.setattr(Conductor, "handle", broken)

    async def test() -> None:
        conductor = Link(PartId("conductor"), "127.0.0.1", 0, None)
        part = Link(PartId("stray"), "127.0.0.1", 0, None)
        task = asyncio.create_task(run_conductor(conductor, ConductorConfig()))
        try:
            await part.send(conductor.me, ev.Lost(PartId("node-9"), Incarnation("x"), "gone"))
            with pytest.raises(ArithmeticError, match="does not add up"):
                await asyncio.wait_for(task, SECONDS)
        finally:
            conductor.close()
            part.close()

    asyncio.run(test())
    assert any("node-9" in r.getMessage() and r.exc_info for r in caplog.records)


def test_a_message_that_is_not_for_a_conductor_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async def test(b: Bench) -> None:
        link = await b.join(gateway())
        await b.tell("gateway-0", act.Cancel(arrival("a").request, 1, Peer(link.me.id, link.me.incarnation, "")))
        await b.tell("gateway-0", Describe(link.me, 1))
        await b.expect("gateway-0", Description)

    run(test)
    assert any("Cancel from gateway-0" in r.getMessage() for r in caplog.records)
