"""Puts over the network by a peer that was let in and then lies, or stands still."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from moonpool.core.vocabulary import BlockKey, BlockMeta, NodePeer, RequestId
from moonpool.messenger.channel import Arriving, Channel, Done, Write, framed, greet
from moonpool.messenger.questions import DAMAGED, NO, YES, Checksums, GetBlocks, Marks, PutBlocks, Refused, TakeStock
from moonpool.messenger.questions import pack_sums as packed_sums
from moonpool.store import Client
from moonpool.store.client import NodeClient
from moonpool.wire.security import data_key

from .kit import BLOCK, SECONDS, SPACE, Conductor, bytes_of, eventually, keys_of, run_checksums

Connect = Callable[..., Client]
K = keys_of("k", 4)


def until() -> float:
    return time.monotonic() + SECONDS


def sums_of(*keys: BlockKey) -> bytes:
    return packed_sums([value for key in keys for value in run_checksums(bytes_of(key))])


@contextmanager
def let_in(node: NodePeer) -> Iterator[Channel]:
    host, _, port = node.data_address.rpartition(":")
    with closing(Channel(socket.create_connection((host, int(port)), SECONDS))) as channel:
        greet(channel, data_key(None), until())
        yield channel


def put_begun(channel: Channel, *keys: BlockKey, metas: tuple[BlockMeta, ...] = (), time_left: float = 3600.0) -> None:
    channel.send_header(PutBlocks(SPACE, b"".join(keys), metas, time_left), until())


HONEST = framed(Checksums(sums_of(K[0])))
LIES = {
    "one sum too few": framed(Checksums(sums_of(K[0])[:-8])),
    "half a sum": framed(Checksums(sums_of(K[0])[:-3])),
    "three times as many sums": framed(Checksums(sums_of(K[0]) * 3)),
    "none": framed(Checksums(b"")),
    "a frame that says it is shorter": struct.pack("<I", len(HONEST) - 20) + HONEST[4:],
    "a frame that says it has four billion": struct.pack("<I", 0xFFFFFFFF) + HONEST[4:],
    "another frame": framed(TakeStock()),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_put_that_lies_about_its_sums_costs_one_connection_and_one_line(
    node: NodePeer, connect: Connect, lie: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(node, "near")
    with let_in(node) as channel:
        put_begun(channel, K[0])
        channel.send(bytes_of(K[0]), until())
        channel.send(lie, until())
        with pytest.raises((EOFError, ConnectionResetError)):
            channel.receive_header(until())
    eventually(lambda: client.stats()["used_bytes"] == 0, "its room is free again")
    assert not client.space(SPACE).exists(K[0])
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_what_a_put_says_wrongly_of_its_blocks_harms_those_blocks_alone(node: NodePeer, connect: Connect) -> None:
    space = connect(node, "near").space(SPACE)
    with let_in(node) as channel:
        put_begun(channel, K[0], K[1], K[0], K[2])
        for key in (K[0], K[1], K[0]):
            channel.send(bytes_of(key), until())
        channel.send(bytes(BLOCK), until())
        channel.send_header(Checksums(sums_of(K[0], K[1], K[0], K[2])), until())
        assert channel.receive_header(until()) == Marks(bytes([YES, YES, YES, DAMAGED]))
        put_begun(channel, K[0], K[3], metas=(BlockMeta(),))
        channel.send(bytes(2 * BLOCK), until())
        channel.send_header(Checksums(sums_of(K[0], K[3])), until())
        assert isinstance(channel.receive_header(until()), Refused)
        put_begun(channel, K[0])
        channel.send(bytes(BLOCK), until())
        channel.send_header(Checksums(sums_of(K[3])), until())
        assert channel.receive_header(until()) == Marks(bytes([NO]))
    with space.get(K) as blocks:
        assert [None if block is None else bytes(block) for block in blocks] == [
            bytes(bytes_of(K[0])),
            bytes(bytes_of(K[1])),
            None,
            None,
        ]


def test_a_put_that_stands_still_does_not_keep_its_room(
    conductor: Conductor, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("moonpool.messenger.pace.STALL_SECONDS", 0.5)
    node = conductor.start_node("node-0", dram_bytes=4 * BLOCK)
    client = connect(node, "near")
    with let_in(node) as channel:
        put_begun(channel, K[0])
        channel.send(bytes_of(K[0])[: BLOCK // 2], until())
        eventually(lambda: client.stats()["used_bytes"] == BLOCK, "it has a room")
        eventually(lambda: client.stats()["used_bytes"] == 0, "the room is free again")
        with pytest.raises((EOFError, ConnectionResetError)):
            channel.receive_header(until())
    assert "stands still" in caplog.text


def test_runs_for_a_room_that_stand_still_let_another_transfer_write_them(
    conductor: Conductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.messenger.pace.STALL_SECONDS", 0.5)
    node = conductor.start_node("node-0")
    conductor.reserve(node, "r-1", K[:1])
    data = bytes_of(K[0])
    header = Write((Arriving(RequestId("r-1"), 1, 0, 0, SPACE.runs, BLOCK, tuple(run_checksums(data))),), 3600.0)
    with let_in(node) as slow, let_in(node) as quick:
        slow.send_header(header, until())
        slow.send(data[: BLOCK // 2], until())
        quick.send_header(header, until())
        quick.send(data, until())
        assert quick.receive_header(until()) == Done()
        with pytest.raises((EOFError, ConnectionResetError)):
            slow.receive_header(until())


def test_who_waits_for_a_writer_and_leaves_is_not_waited_with(node: NodePeer, connect: Connect) -> None:
    client = connect(node, "near")
    with NodeClient.connect(node.socket_path, name="writer", incarnation="1") as writer:
        room = writer.open_room(SPACE, K[:1]).result(SECONDS)
        with let_in(node) as channel:
            channel.send_header(GetBlocks(SPACE, K[0], 0, SPACE.runs, 1e9, waits=True), until())
            eventually(lambda: client.stats()["watches"] == 1, "it waits")
        eventually(lambda: client.stats()["watches"] == 0, "nobody waits any more")
        room.close()
