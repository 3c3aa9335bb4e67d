"""A client of a node that was let in and then talks nonsense: one connection, one line, and nobody else notices."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from moonpool.core.vocabulary import NodePeer
from moonpool.store.client import NodeClient
from moonpool.store.messages import PROTOCOL

from .kit import SECONDS, SPACE, bytes_of, eventually, keys_of, put

Join = Callable[..., NodeClient]


def framed(call: dict[str, object]) -> bytes:
    data = msgspec.msgpack.encode(call)
    return struct.pack("<I", len(data)) + data


NONSENSE = {
    "length beyond the limit": struct.pack("<I", (16 << 20) + 1) + b"x",
    "length of nothing": struct.pack("<I", 0),
    "not msgpack": struct.pack("<I", 3) + b"\xc1\xc1\xc1",
    "another type": struct.pack("<I", 4) + msgspec.msgpack.encode([1, 2, 3]),
    "text that says it has four billion": struct.pack("<I", 5) + b"\xdb\xff\xff\xff\xff",
    "a field that no call has, deeply nested": struct.pack("<I", 100_004) + b"\x81\xa1z" + b"\x91" * 100_000 + b"\xc0",
    "a checksum below zero": framed({"type": "Complete", "room": 1, "runs": [[0, 0, 1]], "checksums": [-1]}),
    "half a frame": struct.pack("<I", 100) + b"abc",
    "half a length": b"\x05\x00",
}


def greeted(node: NodePeer) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(SECONDS)
    sock.connect(node.socket_path)
    hello = msgspec.msgpack.encode({"type": "Hello", "protocol": PROTOCOL, "name": "odd", "incarnation": "1"})
    sock.sendall(struct.pack("<I", len(hello)) + hello)
    data, descriptors, _, _ = socket.recv_fds(sock, 4096, 1)
    assert data
    for descriptor in descriptors:
        socket.close(descriptor)
    return sock


@pytest.mark.parametrize("data", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_after_hello_costs_one_connection_and_one_line(
    node: NodePeer, join: Join, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    client, keys = join(node), keys_of("a", 2)
    put(client, keys)
    with client.lease(SPACE, keys).result(SECONDS) as lease, greeted(node) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(100) == b""
        eventually(lambda: client.stats().result(SECONDS)["clients"] == 1, "the connection is gone")
        assert [bytes(view) for view in lease.views] == [bytes(bytes_of(key)) for key in keys]
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    put(client, keys_of("b", 1))


def test_a_client_that_says_nothing_after_hello_may_stay_and_disturbs_nobody(node: NodePeer, join: Join) -> None:
    client = join(node)
    with greeted(node):
        put(client, keys_of("a", 2))
        with client.lease(SPACE, keys_of("a", 2)).result(SECONDS) as lease:
            assert np.array_equal(lease.views[0], bytes_of(keys_of("a", 2)[0]))
        assert client.stats().result(SECONDS)["clients"] == 2
    eventually(lambda: client.stats().result(SECONDS)["clients"] == 1, "it is gone")


def test_a_hundred_strangers_at_once_leave_room_for_a_client(node: NodePeer, join: Join) -> None:
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(100)]
    try:
        for sock in strangers:
            sock.settimeout(SECONDS)
            sock.connect(node.socket_path)
            sock.sendall(b"\x05")
        put(join(node), keys_of("a", 1))
    finally:
        for sock in strangers:
            sock.close()
    client = join(node)
    eventually(lambda: client.stats().result(SECONDS)["clients"] == 2, "they are gone")
