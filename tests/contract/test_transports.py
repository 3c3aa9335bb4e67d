"""What a writer and a reader may rely on, whichever way the bytes go: through shared memory or over tcp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import pytest

from moonpool.core.vocabulary import BlockKey, NodePeer, RequestId
from moonpool.errors import PoolError, TransferError
from moonpool.messenger.tcp import TcpMessenger
from moonpool.messenger.transfer import TAIL, Bytes
from moonpool.store.client import NodeClient

from ..store.kit import SECONDS, SPACE, Conductor, bytes_of, keys_of, put, room_write, run_checksums

Join = Callable[..., NodeClient]
R = RequestId("r-1")


class Transport(Protocol):
    def write(self, index: int, data: Bytes, first_run: int, runs: int) -> None:
        """Put runs of a block into the room of attempt 1 of R. Raises TransferError or PoolError."""
        ...

    def read(self, keys: list[BlockKey]) -> list[Bytes]:
        """Copies of the leading readable blocks."""
        ...

    def leave(self) -> None:
        """Give the room up."""
        ...


class Shm:
    def __init__(self, client: NodeClient) -> None:
        self._client = client

    def write(self, index: int, data: Bytes, first_run: int, runs: int) -> None:
        room = self._client.join_room(R, 1).result(SECONDS)
        view = room.view(index)
        if view is not None:
            size = view.nbytes // SPACE.runs
            view[first_run * size : (first_run + runs) * size] = data
            self._client.complete(room, [(index, first_run, runs)], run_checksums(data, runs))
        self._client.stats().result(SECONDS)

    def read(self, keys: list[BlockKey]) -> list[Bytes]:
        with self._client.lease(SPACE, keys).result(SECONDS) as lease:
            return [view.copy() for view in lease.views]

    def leave(self) -> None:
        self._client.close()


class Tcp:
    def __init__(self, messenger: TcpMessenger, node: NodePeer) -> None:
        self._messenger = messenger
        self._address = node.data_address

    def write(self, index: int, data: Bytes, first_run: int, runs: int) -> None:
        write = room_write(R, index, data, first_run, runs)
        self._messenger.write(self._address, [write], SECONDS).result(SECONDS)

    def read(self, keys: list[BlockKey]) -> list[Bytes]:
        targets = [np.zeros(SPACE.block_bytes, np.uint8) for _ in keys]
        count = self._messenger.read(self._address, SPACE.id, keys, targets, SECONDS).result(SECONDS)
        assert not any(target.any() for target in targets[count:])
        return targets[:count]

    def leave(self) -> None:
        self._messenger.close()


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest, node: NodePeer, join: Join) -> Iterator[Transport]:
    if request.param == "shm":
        yield Shm(join(node))
    else:
        messenger = TcpMessenger(None)
        yield Tcp(messenger, node)
        messenger.close()


def test_a_room_filled_run_by_run_is_what_was_written(
    conductor: Conductor, node: NodePeer, join: Join, transport: Transport
) -> None:
    keys = keys_of("p", 3)
    conductor.reserve(node, R, keys, tail_tokens=7)
    waiting = join(node).await_room(R, 1, 60)
    tail = bytes_of(b"tail", SPACE.tail_run_bytes(7) * SPACE.runs)
    blocks = [*((index, bytes_of(key)) for index, key in enumerate(keys)), (TAIL, tail)]
    for run in range(SPACE.runs):
        for index, data in blocks:
            assert not waiting.done()
            transport.write(index, data.reshape(SPACE.runs, -1)[run], run, 1)
    contents = waiting.result(SECONDS)
    assert contents is not None
    assert contents.tail is not None
    assert np.array_equal(contents.tail, tail)
    for key, block in zip(keys, contents.blocks, strict=True):
        assert np.array_equal(block, bytes_of(key))
    contents.close()


def test_a_read_gives_the_leading_complete_blocks(node: NodePeer, join: Join, transport: Transport) -> None:
    keys = keys_of("a", 5)
    client = join(node)
    put(client, keys[:3])
    put(client, [*keys_of("other", 4), keys[4]])
    blocks = transport.read(keys)
    assert len(blocks) == 3
    for key, block in zip(keys, blocks, strict=False):
        assert np.array_equal(block, bytes_of(key))
    assert transport.read(keys_of("unknown", 2)) == []
    assert transport.read([]) == []


def test_a_run_written_twice_counts_once(
    conductor: Conductor, node: NodePeer, join: Join, transport: Transport
) -> None:
    keys = keys_of("p", 1)
    conductor.reserve(node, R, keys)
    waiting = join(node).await_room(R, 1, 60)
    runs = bytes_of(keys[0]).reshape(SPACE.runs, -1)
    transport.write(0, runs[0], 0, 1)
    transport.write(0, bytes_of(keys[0])[: 2 * SPACE.run_bytes], 0, 2)
    assert not waiting.done()
    transport.write(0, bytes_of(keys[0])[2 * SPACE.run_bytes :], 2, 2)
    contents = waiting.result(SECONDS)
    assert contents is not None
    assert np.array_equal(contents.blocks[0], bytes_of(keys[0]))
    contents.close()


def test_a_block_that_is_readable_already_is_left_as_it_is(
    conductor: Conductor, node: NodePeer, join: Join, transport: Transport
) -> None:
    keys = keys_of("p", 1)
    client = join(node)
    put(client, keys)
    conductor.reserve(node, R, keys)
    transport.write(0, np.zeros(SPACE.block_bytes, np.uint8), 0, SPACE.runs)
    with client.lease(SPACE, keys).result(SECONDS) as lease:
        assert np.array_equal(lease.views[0], bytes_of(keys[0]))


def test_there_is_no_writing_without_a_room(conductor: Conductor, node: NodePeer, transport: Transport) -> None:
    data = bytes_of(b"x")
    with pytest.raises((PoolError, TransferError), match="no room for attempt 1 of r-1"):
        transport.write(0, data, 0, SPACE.runs)
    conductor.reserve(node, R, keys_of("p", 1), attempt=2)
    with pytest.raises((PoolError, TransferError), match="no room for attempt 1 of r-1"):
        transport.write(0, data, 0, SPACE.runs)


def test_a_writer_that_leaves_completes_nothing(
    conductor: Conductor, node: NodePeer, join: Join, transport: Transport
) -> None:
    keys = keys_of("p", 1)
    reader = join(node)
    conductor.reserve(node, R, keys)
    transport.write(0, bytes_of(keys[0])[: SPACE.run_bytes], 0, 1)
    transport.leave()
    conductor.release(node, R)
    assert reader.await_room(R, 1, 60).result(SECONDS) is None
    assert reader.lease(SPACE, keys).result(SECONDS).count == 0
