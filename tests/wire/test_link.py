"""Control messages between processes: order, incarnations, tokens, unreachable peers, garbage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq

from moonpool.core.actions import FleetChanged, IdTaken, RegisterAgain
from moonpool.core.events import Lost, Registered, Reported
from moonpool.core.vocabulary import Incarnation, PartId, PartKind, Peer
from moonpool.errors import ConfigError, PeerUnavailableError
from moonpool.wire.link import Link
from moonpool.wire.membership import ABSENCE_SECONDS, Absences, Membership
from moonpool.wire.messages import Envelope

TOKEN = "a-cluster-token-of-enough-length"
HANG = 20.0


@asynccontextmanager
async def links(*tokens: str | None) -> AsyncIterator[list[Link]]:
    opened = [Link(PartId(f"part-{i}"), "127.0.0.1", 0, token) for i, token in enumerate(tokens)]
    try:
        yield opened
    finally:
        for link in opened:
            link.close()


async def receive(link: Link) -> Envelope:
    return await asyncio.wait_for(link.receive(), HANG)


def lost(n: int) -> Lost:
    return Lost(PartId(f"p{n}"), Incarnation("i"), "test")


@pytest.mark.parametrize("token", [None, TOKEN])
def test_messages_to_one_peer_keep_their_order(token: str | None) -> None:
    async def run() -> None:
        async with links(token, token) as (a, b):
            for n in range(500):
                if n % 50 == 0:
                    await a.send(b.me, lost(n))
                else:
                    a.post(b.me, lost(n))
            got = [(await receive(b)).body for _ in range(500)]
            assert got == [lost(n) for n in range(500)]

    asyncio.run(run())


def test_a_message_for_another_incarnation_is_dropped_and_counted() -> None:
    async def run() -> None:
        async with links(None, None) as (a, b):
            await a.send(Peer(b.me.id, Incarnation("an-earlier-life"), b.me.address), lost(1))
            await a.send(Peer(b.me.id, Incarnation(""), b.me.address), lost(2))
            assert (await receive(b)).body == lost(2)
            assert b.dropped == 1

    asyncio.run(run())


@pytest.mark.parametrize(("mine", "theirs"), [(None, TOKEN), (TOKEN, None), (TOKEN, TOKEN + "x")])
def test_without_the_same_token_no_message_passes(mine: str | None, theirs: str | None) -> None:
    async def run() -> None:
        async with links(mine, theirs) as (a, b):
            with pytest.raises(PeerUnavailableError, match="took no message"):
                await a.send(b.me, lost(1))
            a.post(b.me, lost(2))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(b.receive(), 0.5)

    asyncio.run(run())


def test_a_peer_that_is_not_there_is_an_answer() -> None:
    async def run() -> None:
        async with links(None) as (a,):
            with pytest.raises(PeerUnavailableError):
                await a.send(Peer(PartId("x"), Incarnation(""), "tcp://127.0.0.1:9"), lost(1))

    asyncio.run(run())


def test_garbage_costs_one_log_line_and_nothing_else() -> None:
    async def run() -> None:
        async with links(None, None) as (a, b):
            with zmq.Context() as context, context.socket(zmq.PUSH) as rogue:
                rogue.linger = 0
                rogue.connect(b.me.address)
                for junk in (b"", b"\x00" * 10, b"\xff" * 1000, b"\x81\xa2to\xa0"):
                    rogue.send(junk)
                await a.send(b.me, lost(1))
                while b.dropped < 4:
                    envelope = asyncio.ensure_future(receive(b))
                    await asyncio.wait({envelope}, timeout=0.2)
                    envelope.cancel()
            assert b.dropped == 4

    asyncio.run(run())


def test_off_loopback_a_token_is_required() -> None:
    async def run() -> None:
        with pytest.raises(ConfigError, match="cluster token"):
            Link(PartId("a"), "0.0.0.0", 0, None)
        with pytest.raises(ConfigError, match="at least 16"):
            Link(PartId("a"), "127.0.0.1", 0, "short")

    asyncio.run(run())


def test_a_taken_port_is_named() -> None:
    async def run() -> None:
        async with links(None) as (a,):
            port = int(a.me.address.rsplit(":", 1)[1])
            with pytest.raises(ConfigError, match=str(port)):
                Link(PartId("b"), "127.0.0.1", port, None)

    asyncio.run(run())


def membership(link: Link, conductor: Link) -> Membership:
    return Membership(
        link,
        conductor.me.address,
        lambda: Registered(PartKind.NODE, link.me),
        lambda: Reported(link.me.id, link.me.incarnation),
        lambda: {"beats": 1.0},
    )


def test_a_part_joins_beats_and_registers_again_when_asked() -> None:
    async def run() -> None:
        async with links(TOKEN, TOKEN) as (part, conductor):
            m = membership(part, conductor)

            async def listen() -> None:
                while True:
                    m.heard(await part.receive())

            ears = asyncio.create_task(listen())
            joining = asyncio.create_task(m.join())
            first = await receive(conductor)
            assert isinstance(first.body, Registered)
            await conductor.send(first.sender, FleetChanged(first.sender, (), (), (), 100))
            await asyncio.wait_for(joining, HANG)
            assert m.conductor.incarnation == conductor.me.incarnation
            beating = asyncio.create_task(m.run())
            assert isinstance((await receive(conductor)).body, Reported)
            # One for each message that had waited for it.
            for _ in range(20):
                await conductor.send(first.sender, RegisterAgain(first.sender))
            while not isinstance((await receive(conductor)).body, Registered):
                pass
            kinds = [type((await receive(conductor)).body) for _ in range(3)]
            assert kinds.count(Registered) < 2, "it has registered already"
            # As long as it is not answered it is told again.
            await conductor.send(first.sender, RegisterAgain(first.sender))
            while not isinstance((await receive(conductor)).body, Registered):
                pass
            ears.cancel()
            beating.cancel()

    asyncio.run(run())


def test_who_has_taken_ones_id_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with links(None, None) as (part, conductor):
            m, other = membership(part, conductor), Peer(part.me.id, Incarnation("other"), "tcp://10.0.0.9:9001")
            before = Peer(part.me.id, Incarnation("before"), part.me.address)
            assert m.heard(Envelope(conductor.me, part.me.incarnation, IdTaken(before, part.me)))
            assert not caplog.records, "that was for the process that was here before"
            for _ in range(3):
                assert m.heard(Envelope(conductor.me, part.me.incarnation, IdTaken(part.me, other)))

    asyncio.run(run())
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "at tcp://10.0.0.9:9001, has joined as part-0" in record.message


def test_joining_nobody_ends_with_a_reason() -> None:
    async def run() -> None:
        async with links(TOKEN, None) as (part, stranger):
            m = membership(part, stranger)
            with pytest.raises(ConfigError, match="token is another one"):
                await m.join(timeout=1.5)

    asyncio.run(run())


def gateway(n: int) -> Peer:
    return Peer(PartId("gateway-0"), Incarnation(str(n)), "tcp://127.0.0.1:1")


def test_a_gateway_is_gone_only_after_an_unbroken_absence() -> None:
    absences = Absences()
    assert absences.over({gateway(1)}, 0.0) == []
    assert absences.over(set(), ABSENCE_SECONDS - 1) == [], "it came back"
    assert absences.over({gateway(1)}, ABSENCE_SECONDS + 1) == []
    assert absences.over({gateway(1), gateway(2)}, 2 * ABSENCE_SECONDS + 1) == [gateway(1)]


def test_what_cannot_be_sent_is_not_delivered_and_ends_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with links(None, None) as (a, b):
            endless = Reported(PartId("p"), Incarnation("i"), queued=1 << 70)
            a.post(b.me, endless)
            with pytest.raises(PeerUnavailableError, match="Reported for part-1 cannot be sent"):
                await a.send(b.me, endless)
            a.post(b.me, lost(1))
            assert (await receive(b)).body == lost(1)

    asyncio.run(run())
    assert "Reported not delivered" in caplog.text
