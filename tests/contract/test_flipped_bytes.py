"""One flipped bit anywhere between two nodes, in headers too: a failure or a second try, never wrong data."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable

import numpy as np
import pytest

from moonpool.core.vocabulary import NodePeer, RequestId
from moonpool.errors import TransferError
from moonpool.messenger.seal import seal, unseal
from moonpool.messenger.tcp import TcpMessenger
from moonpool.messenger.transfer import RoomWrite, checksum
from moonpool.store.client import NodeClient
from tests.soak import SOAK

from ..store.kit import BLOCK, SECONDS, SPACE, Conductor, bytes_of, eventually, keys_of, put, room_write
from .test_tcp_faults import Proxy

Join = Callable[..., NodeClient]
HANDSHAKE = 60
HEADERS = 400
"""A request of two blocks, or the answer to one, has fewer bytes than that."""


class Flipper(Proxy):
    """Flips one bit of one byte of all that goes in one direction, once."""

    def flip(self, position: int, backwards: bool) -> None:
        self._position, self._backwards = position, backwards

    def _pump(self, source: socket.socket, sink: socket.socket, _: object) -> None:
        def tamper(proxy: Proxy, data: bytes) -> bytes:
            backwards = bool(self._sockets.index(source) % 2)
            if backwards is not self._backwards:
                return data
            at, self._position = self._position, self._position - len(data)
            if not 0 <= at < len(data):
                return data
            return data[:at] + bytes([data[at] ^ 0x01]) + data[at + 1 :]

        super()._pump(source, sink, tamper)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A length that grew makes the other side wait for bytes that do not come."""
    monkeypatch.setattr("moonpool.messenger.channel.HANDSHAKE_SECONDS", 0.3)
    monkeypatch.setattr("moonpool.messenger.server.FRAME_SECONDS", 0.1)


def positions(seed: int) -> list[int]:
    """Of handshake, headers and payload."""
    if SOAK:
        return [*range(HEADERS), *random.Random(seed).choices(range(2 * BLOCK), k=200)]
    return [3, 40, *range(HANDSHAKE + seed, HEADERS, 3), BLOCK]


@pytest.mark.parametrize("backwards", [False, True])
def test_what_is_written_through_a_bad_wire_is_exact_or_not_there(
    conductor: Conductor, node: NodePeer, join: Join, backwards: bool
) -> None:
    client = join(node)
    done = 0
    for number, position in enumerate(positions(1)):
        request, keys = RequestId(f"r-{number}"), keys_of(f"w{number}", 2)
        conductor.reserve(node, request, keys)
        writes: list[RoomWrite] = [room_write(request, index, bytes_of(key)) for index, key in enumerate(keys)]
        sent = through(node, position, backwards, lambda m, address, w=writes: m.write(address, w, 2.0).result(SECONDS))
        done += sent
        with client.lease(SPACE, keys).result(SECONDS) as lease:
            assert not sent or lease.count == 2
            assert [bytes(view) for view in lease.views] == [bytes(bytes_of(key)) for key in keys[: lease.count]]
        for key in keys:
            with client.lease(SPACE, [key]).result(SECONDS) as lease:
                assert [bytes(view) for view in lease.views] == [bytes(bytes_of(key))] * lease.count
        conductor.release(node, request)
    assert done > len(positions(1)) // 3, "most are tried again, and right"
    eventually(lambda: client.stats().result(SECONDS)["rooms"] == 0, "no room is left")


@pytest.mark.parametrize("backwards", [False, True])
def test_what_is_read_through_a_bad_wire_is_exact_or_not_there(node: NodePeer, join: Join, backwards: bool) -> None:
    keys = keys_of("a", 2)
    put(join(node), [*keys, *keys_of("b", 2)])
    done = 0
    for position in positions(2):
        targets = [np.zeros(BLOCK, np.uint8) for _ in keys]
        good: set[int] = set()

        def on_block(index: int, sums: object, targets: list[np.ndarray] = targets, good: set[int] = good) -> None:
            good.add(index)

        def read(m: TcpMessenger, address: str, targets: list[np.ndarray] = targets) -> None:
            m.read(address, SPACE.id, keys, targets, 2.0, on_block).result(SECONDS)

        done += through(node, position, backwards, read)
        for index in good:
            assert bytes(targets[index]) == bytes(bytes_of(keys[index]))
    if not backwards:
        assert done > len(positions(2)) // 3, "what asked wrongly asks again"


def through(node: NodePeer, position: int, backwards: bool, work: Callable[[TcpMessenger, str], object]) -> bool:
    messenger, between = TcpMessenger(None), Flipper(node.data_address)
    between.flip(position, backwards)
    try:
        work(messenger, between.address)
    except TransferError:
        return False
    else:
        return True
    finally:
        messenger.close()
        between.close()


def test_a_header_is_taken_whole_or_not_at_all() -> None:
    sealed = seal(b"which run of which block")
    assert bytes(unseal(sealed)) == b"which run of which block"
    for position in range(len(sealed)):
        for bit in range(8):
            damaged = bytearray(sealed)
            damaged[position] ^= 1 << bit
            with pytest.raises(TransferError, match="its checksum is wrong"):
                unseal(damaged)
    for length in range(len(sealed)):
        with pytest.raises(TransferError):
            unseal(sealed[:length])
    assert checksum(np.zeros(4, np.uint8)) != checksum(np.ones(4, np.uint8))
