"""Clients of the pool over the network when something between them and the node is broken, slow or hostile."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from moonpool.core.vocabulary import KeySpace, NodePeer
from moonpool.messenger import asking
from moonpool.messenger.channel import Channel, Header, greet
from moonpool.messenger.questions import (
    NO,
    Checksums,
    DescribeBlocks,
    Exists,
    GetBlocks,
    Marks,
    PutBlocks,
    Refused,
    Verify,
    pack_sums,
    packed,
)
from moonpool.messenger.waiting import RefusedError
from moonpool.store import Client, PoolError, Space, verifying
from moonpool.store.client import NodeClient
from moonpool.wire.security import data_key

from ..store.kit import BLOCK, SECONDS, SPACE, Conductor, bytes_of, eventually, keys_of, put, run_checksums
from .test_tcp_faults import Proxy, proxy

Join = Callable[..., NodeClient]
K = keys_of("k", 4)
DATA = np.full(BLOCK, 7, np.uint8)


@pytest.fixture
def channel(node: NodePeer) -> Iterator[Channel]:
    host, _, port = node.data_address.rpartition(":")
    with socket.create_connection((host, int(port)), SECONDS) as sock:
        channel = Channel(sock)
        greet(channel, data_key(None), until())
        yield channel


def until() -> float:
    return time.monotonic() + SECONDS


def spoil(piece: bytes) -> bytes:
    return piece.replace(bytes([7] * 100), bytes([7] * 99 + [6]), 1)


def test_a_put_that_is_spoilt_on_the_way_is_sent_again(node: NodePeer, join: Join) -> None:
    def spoil_once(between: Proxy, piece: bytes) -> bytes:
        spoilt = piece if between.passed else spoil(piece)
        between.passed += spoilt != piece
        return spoilt

    with proxy(node.data_address, spoil_once) as between, Client.connect(between.address, timeout=SECONDS) as pool:
        assert pool.space(SPACE).put_many(K, [DATA] * 4) == [True] * 4
        assert between.passed == 1
        assert between.connections == 1
        with pool.space(SPACE).get(K) as blocks:
            assert all(np.array_equal(block, DATA) for block in blocks)
    assert join(node).stats().result(SECONDS)["tcp_checksum_failures"] == 1


def test_a_put_that_is_always_spoilt_fails_and_stores_nothing(node: NodePeer, join: Join) -> None:
    with proxy(node.data_address, lambda _, piece: spoil(piece)) as p, Client.connect(p.address) as pool:
        with pytest.raises(PoolError, match="1 blocks did not arrive at node-0 as they were sent"):
            pool.space(SPACE).put(K[0], DATA)
        assert not pool.space(SPACE).exists(K[0])
    assert join(node).stats().result(SECONDS)["used_bytes"] == 0


def test_a_connection_that_breaks_is_replaced_once(node: NodePeer) -> None:
    with proxy(node.data_address, lambda _, piece: piece) as between, Client.connect(between.address) as pool:
        space = pool.space(SPACE)
        space.put(K[0], DATA)
        between.cut()
        assert space.exists(K[0])
        assert between.connections == 2


def test_a_node_that_stands_still_costs_no_more_than_the_time_allowed(
    conductor: Conductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.store.far.SLACK_SECONDS", 0.1)
    monkeypatch.setattr("moonpool.store.near.SLACK_SECONDS", 0.1)
    with conductor.process_node("dead-0") as (node, process):
        pools = [Client.connect(node.data_address, timeout=0.2), Client.connect(node.socket_path, timeout=0.2)]
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        for pool in pools:
            began = time.monotonic()
            for call in (
                lambda space: space.exists(K[0]),
                lambda space: space.get(K),
                lambda space: space.get(K, wait_until=time.monotonic() + 0.1),
                lambda space: space.put(K[0], DATA),
            ):
                with pytest.raises(PoolError, match="did not answer in time"):
                    call(pool.space(SPACE))
            assert time.monotonic() - began < 5
        os.kill(process.pid, signal.SIGCONT)
        # The late answers were leases and rooms: they have been let go, and the connection is good.
        space = pools[1].space(SPACE)
        eventually(lambda: still_works(lambda: space.put(K[1], DATA)), "it works again")
        eventually(lambda: pools[1].stats()["leases"] == 0, "nothing is leased")
        eventually(lambda: pools[1].stats()["rooms"] == 0, "nothing is being written")
        for pool in pools:
            pool.close()


def still_works(call: Callable[[], object]) -> bool:
    try:
        call()
    except PoolError:
        return False
    return True


def test_half_a_put_is_nothing(node: NodePeer, join: Join, channel: Channel) -> None:
    observer = join(node)
    channel.send_header(PutBlocks(SPACE, packed(K[:2]), (), SECONDS), until())
    channel.send(np.concatenate([DATA, DATA[:100]]), until())
    eventually(lambda: observer.stats().result(SECONDS)["rooms"] == 1, "it has begun")
    assert observer.stats().result(SECONDS)["blocks"] == 0
    channel.shut()
    eventually(lambda: observer.stats().result(SECONDS)["used_bytes"] == 0, "its room is freed")


@pytest.mark.parametrize(
    "header",
    [
        GetBlocks(SPACE, packed(K), 3, 2, SECONDS),
        GetBlocks(SPACE, b"short", 0, 1, SECONDS),
        GetBlocks(KeySpace(SPACE.id, 16, 2, 4096), packed(K), 0, 1, SECONDS),
        DescribeBlocks(SPACE.id, b"short"),
        Exists(SPACE.id, b"short", here=True),
    ],
    ids=["runs", "keys", "layout", "keys of a question", "keys of another"],
)
def test_what_makes_no_sense_is_refused_and_the_connection_lives(
    node: NodePeer, join: Join, channel: Channel, header: Header
) -> None:
    with Client.connect(node.socket_path) as pool:
        pool.space(SPACE).put(K[0], DATA)
    channel.send_header(header, until())
    assert isinstance(channel.receive_header(until()), Refused)
    assert asking.ask(channel, Exists(SPACE.id, packed(K[:2])), until()) == Marks(b"\1\0")


@pytest.mark.parametrize(
    "headers",
    [
        [Marks(b"\1")],
        [PutBlocks(SPACE, b"short", (), SECONDS)],
        [PutBlocks(SPACE, b"", (), SECONDS), Checksums(b"short")],
        [PutBlocks(SPACE, b"", (), SECONDS), Checksums(pack_sums([1]))],
        [PutBlocks(SPACE, b"", (), SECONDS), Marks(b"")],
    ],
    ids=["an answer", "keys", "half a checksum", "checksums for nothing", "no checksums"],
)
def test_nonsense_costs_its_connection_and_one_line(
    node: NodePeer, join: Join, channel: Channel, headers: list[Header], caplog: pytest.LogCaptureFixture
) -> None:
    for header in headers:
        channel.send_header(header, until())
    with pytest.raises((EOFError, ConnectionError)):
        channel.receive_header(until())
    eventually(lambda: len([r for r in caplog.records if r.levelname == "WARNING"]) == 1, "one line is logged")
    observer = join(node)
    eventually(lambda: observer.stats().result(SECONDS)["rooms"] == 0, "nothing is left of it")


def test_a_put_for_another_layout_is_refused_after_its_bytes(node: NodePeer, join: Join, channel: Channel) -> None:
    observer = join(node)
    with Client.connect(node.socket_path) as pool:
        pool.space(SPACE).put(K[0], DATA)
    other = KeySpace(SPACE.id, 16, 2, 100)
    channel.send_header(PutBlocks(other, packed(K[1:3]), (), SECONDS), until())
    channel.send(DATA[:400], until())
    channel.send_header(Checksums(pack_sums([0] * 4)), until())
    answer = channel.receive_header(until())
    assert isinstance(answer, Refused)
    assert "has 4 runs of 4096 bytes on this node" in answer.reason
    sums = run_checksums(bytes_of(K[1]))
    channel.send_header(PutBlocks(SPACE, packed(K[1:2]), (), SECONDS), until())
    channel.send(bytes_of(K[1]), until())
    channel.send_header(Checksums(pack_sums(sums)), until())
    assert channel.receive_header(until()) == Marks(b"\1")
    assert observer.stats().result(SECONDS)["blocks"] == 2


LARGE = KeySpace(SPACE.id, 16, 4, 1 << 20)


@pytest.fixture(params=[2])
def large(conductor: Conductor, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Space]:
    """A space of blocks that are worth two connections, over as many as the parameter."""
    monkeypatch.setattr("moonpool.store.spread.Spread.choose", lambda spread: request.param)
    node = conductor.start_node("node-large", 16 * LARGE.block_bytes)
    with Client.connect(node.data_address, timeout=SECONDS) as pool:
        yield pool.space(LARGE)


@pytest.mark.parametrize("large", [1, 2], indirect=True)
def test_large_blocks_and_batches_go_over_one_connection_or_two(large: Space) -> None:
    blocks = [bytes_of(key, LARGE.block_bytes) for key in K]
    assert large.put_many(K, blocks) == [True] * 4
    with large.get([K[2]]) as (block,):
        assert np.array_equal(block, blocks[2])
    with large.get([K[2]], layers=(1, 3)) as (block,):
        assert np.array_equal(block, blocks[2][1 << 20 :])
    # Buffers that end somewhere in the middle of what one connection brings.
    pieces = [bytearray(3), bytearray(1 << 20), bytearray((3 << 20) - 3)]
    assert large.get_into(K[1], pieces)
    assert b"".join(pieces) == blocks[1].tobytes()
    targets = [np.zeros(LARGE.block_bytes, np.uint8) for _ in range(5)]
    assert large.get_into_many([K[3], *K[:2], *keys_of("no", 1), K[2]], [[t] for t in targets]) == [
        *[True] * 3,
        False,
        True,
    ]
    for key, target in zip((3, 0, 1), targets, strict=False):
        assert np.array_equal(target, blocks[key])
    with large.get(keys_of("no", 1)) as missed:
        assert missed.hits == 0


def test_halves_of_two_copies_are_not_taken_for_one_block(large: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes_of(K[0], LARGE.block_bytes)
    large.put(K[0], data)
    asked: list[tuple[int, int]] = []
    real = asking.get

    def replaced_meanwhile(channel: Channel, request: GetBlocks, *rest: Any) -> list[int | None]:
        copies = real(channel, request, *rest)
        asked.append((request.first_run, request.runs))
        return [copy if copy is None else copy + request.first_run for copy in copies]

    monkeypatch.setattr("moonpool.messenger.asking.get", replaced_meanwhile)
    target = bytearray(LARGE.block_bytes)
    assert large.get_into(K[0], [target])
    assert sorted(asked) == [(0, 2), (0, 4), (2, 2)]
    assert target == data.tobytes()


def test_nobody_is_believed_that_a_block_is_damaged(node: NodePeer, join: Join, channel: Channel) -> None:
    client, keys = join(node), keys_of("a", 3)
    put(client, keys)
    asked = Verify(SPACE.id, packed([*keys, *keys_of("no", 1)]))
    assert asking.ask(channel, asked, until()) == Marks(bytes([NO] * 4))
    stats = client.stats().result(SECONDS)
    assert (stats["blocks"], stats["dram_checksum_failures"], stats["leases"]) == (3, 0, 0)
    with pytest.raises(RefusedError, match="at most 64"):
        asking.ask(channel, Verify(SPACE.id, packed(keys_of("many", 65))), until())


def test_false_alarms_do_not_keep_a_node_busy(
    node: NodePeer, join: Join, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, keys = join(node), keys_of("a", 1)
    put(client, keys)
    looked, real = 0, verifying.checksum

    def slow(run: Any) -> int:
        nonlocal looked
        looked += 1
        time.sleep(0.2)
        return real(run)

    monkeypatch.setattr(verifying, "checksum", slow)
    for _ in range(5):
        assert asking.ask(channel, Verify(SPACE.id, packed(keys * 64)), until()) == Marks(bytes([NO] * 64))
    assert looked == SPACE.runs, "each once, and then it rests"
