"""Whatever comes to a control port that is no message of a peer costs that connection and at most one line."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from urllib.parse import urlsplit

import msgspec
import pytest
import zmq

from moonpool.core.events import Lost
from moonpool.core.vocabulary import Incarnation, PartId, Peer
from moonpool.errors import PeerUnavailableError
from moonpool.wire.codec import MAX_MESSAGE_BYTES
from moonpool.wire.link import Link
from moonpool.wire.messages import Envelope

TOKEN = "a-cluster-token-of-enough-length"
HANG = 20.0
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"
RAW = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(200),
    "half a greeting": GREETING[:20],
    "no READY": GREETING + b"\x04\xff" + b"x" * 300,
    "half a frame": GREETING + READY + b"\x00\x50abc",
    "length beyond the limit": GREETING + READY + b"\x02" + struct.pack(">Q", MAX_MESSAGE_BYTES + 1) + b"x" * 100,
    "length of an exbibyte": GREETING + READY + b"\x02" + struct.pack(">Q", 1 << 60) + b"x" * 100,
}


def lost(number: int) -> Lost:
    return Lost(PartId(f"part-{number}"), Incarnation("i"), "test")


async def receive(link: Link) -> Envelope:
    async with asyncio.timeout(HANG):
        return await link.receive()


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
def test_raw_bytes_disturb_nobody(raw: bytes, token: str | None, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        mine, theirs = (Link(PartId(f"part-{i}"), "127.0.0.1", 0, token) for i in range(2))
        try:
            address = urlsplit(mine.me.address)
            with socket.create_connection((address.hostname, address.port), HANG) as stranger:
                stranger.sendall(raw)
                # While it is connected, and after it has gone.
                await theirs.send(mine.me, lost(1))
                assert (await receive(mine)).body == lost(1)
            await theirs.send(mine.me, lost(2))
            assert (await receive(mine)).body == lost(2)
            assert mine.dropped == 0
        finally:
            mine.close()
            theirs.close()

    asyncio.run(run())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


NONSENSE = {
    "nothing": b"",
    "not msgpack": b"\xc1" * 50,
    "half a message": msgspec.msgpack.encode({"sender": {"id": "x"}}),
    "another type": msgspec.msgpack.encode([1, 2, 3]),
    "deeply nested": b"\x91" * 2000,
    "deeply nested in a field that no message has": b"\x81\xa1z" + b"\x91" * 100_000 + b"\xc0",
    "a list that says it has four billion": b"\xdd\xff\xff\xff\xff",
    "text that says it has four billion": b"\xdb\xff\xff\xff\xff" + b"a" * 10,
}


@pytest.mark.parametrize("junk", NONSENSE.values(), ids=NONSENSE)
def test_a_message_that_is_none_costs_one_line(junk: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        mine, theirs = (Link(PartId(f"part-{i}"), "127.0.0.1", 0, None) for i in range(2))
        try:
            with zmq.Context() as context, context.socket(zmq.PUSH) as rogue:
                rogue.linger = 0
                rogue.connect(mine.me.address)
                rogue.send(junk)
                # It cannot be known when it comes: the peer's messages come before and after.
                for number in range(2000):
                    await theirs.send(Peer(mine.me.id, mine.me.incarnation, mine.me.address), lost(number))
                    assert (await receive(mine)).body == lost(number)
                    if mine.dropped:
                        break
                    await asyncio.sleep(0.005)
            assert mine.dropped == 1
        finally:
            mine.close()
            theirs.close()

    asyncio.run(run())
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


@pytest.mark.parametrize("address", ["", "x", "\0", "tcp://", "tcp://127.0.0.1", "ipc:///tmp/x"])
def test_a_peer_that_says_wrongly_where_it_is_cannot_be_reached_and_harms_nobody(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        mine, theirs = (Link(PartId(f"part-{i}"), "127.0.0.1", 0, None) for i in range(2))
        try:
            nowhere = Peer(PartId("nowhere"), Incarnation("i"), address)
            mine.post(nowhere, lost(1))
            with pytest.raises(PeerUnavailableError, match="no address of a peer"):
                await mine.send(nowhere, lost(1))
            await mine.send(theirs.me, lost(2))
            assert (await receive(theirs)).body == lost(2)
        finally:
            mine.close()
            theirs.close()

    asyncio.run(run())
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
