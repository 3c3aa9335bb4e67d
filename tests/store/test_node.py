"""A node with real sockets: rooms, leases, death, directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from moonpool.core.actions import SendSnapshot
from moonpool.core.events import BlocksRemoved, BlocksStored, Reported, RoomConfirmed, RoomRefused, Snapshot
from moonpool.core.vocabulary import BlockKey, Incarnation, KeySpace, NodePeer, RequestId
from moonpool.errors import ConfigError, PoolError
from moonpool.messenger.tcp import TcpMessenger
from moonpool.messenger.transfer import TAIL
from moonpool.store import Client
from moonpool.store.client import NodeClient, awaited
from moonpool.store.server import listen
from moonpool.store.views import RoomContents

from .kit import (
    BLOCK,
    GATEWAY,
    SECONDS,
    SPACE,
    ClientProcess,
    Conductor,
    bytes_of,
    eventually,
    fill,
    keys_of,
    open_descriptors,
    put,
    room_write,
    run_checksums,
)

Join = Callable[..., NodeClient]
R = RequestId("r-1")


def test_a_cached_block_is_leased_by_another_client(node: NodePeer, join: Join) -> None:
    keys = keys_of("a", 3)
    put(join(node), keys)
    with join(node).lease(SPACE, [*keys, *keys_of("b", 1)]).result(SECONDS) as lease:
        assert lease.count == 3
        for key, view in zip(keys, lease.views, strict=True):
            assert np.array_equal(view, bytes_of(key))
            assert not view.flags.writeable


def test_an_incomplete_block_is_not_readable(node: NodePeer, join: Join) -> None:
    writer, reader = join(node), join(node)
    keys = keys_of("a", 2)
    room = writer.open_room(SPACE, keys).result(SECONDS)
    fill(writer, room, 1, bytes_of(keys[1]))
    writer.complete(room, [(0, 0, SPACE.runs - 1)], run_checksums(bytes_of(keys[0]))[:-1])
    writer.stats().result(SECONDS)  # calls of one client are handled in order: `complete` is through
    assert reader.lease(SPACE, keys).result(SECONDS).count == 0
    writer.complete(room, [(0, SPACE.runs - 1, 1)], run_checksums(bytes_of(keys[0]))[-1:])
    writer.stats().result(SECONDS)
    assert reader.lease(SPACE, keys).result(SECONDS).count == 2


def test_hand_over_between_local_processes(conductor: Conductor, node: NodePeer, join: Join) -> None:
    prefill, decode = join(node), join(node)
    keys = keys_of("p", 3)
    put(join(node), keys[:1])
    answer = conductor.reserve(node, R, keys, tail_tokens=5)
    assert isinstance(answer, RoomConfirmed)
    assert answer.lacking == (1, 2)
    waiting = decode.await_room(R, 1, SECONDS)
    room = prefill.join_room(R, 1).result(SECONDS)
    assert room.view(0) is None
    fill(prefill, room, 1, bytes_of(keys[1]))
    fill(prefill, room, 2, bytes_of(keys[2]))
    assert not waiting.done()
    tail = bytes_of(b"tail", SPACE.tail_run_bytes(5) * SPACE.runs)
    fill(prefill, room, TAIL, tail)
    room.close()
    contents = waiting.result(SECONDS)
    assert contents is not None
    assert contents.tail is not None
    assert np.array_equal(contents.tail, tail)
    assert [bytes(block) for block in contents.blocks] == [bytes(bytes_of(key)) for key in keys]
    decode.close_room(contents)
    assert decode.lease(SPACE, keys).result(SECONDS).count == 3
    assert decode.stats().result(SECONDS)["rooms"] == 0


def test_reserving_twice_confirms_the_same_room(conductor: Conductor, node: NodePeer, join: Join) -> None:
    keys = keys_of("p", 2)
    first = conductor.reserve(node, R, keys)
    put(join(node), keys)
    conductor.heard.clear()
    assert conductor.reserve(node, R, keys) == first
    second_attempt = conductor.reserve(node, R, keys, attempt=2)
    assert isinstance(second_attempt, RoomConfirmed)
    assert second_attempt.lacking == ()


@pytest.mark.parametrize(
    ("keys", "space", "reason"),
    [
        (keys_of("big", 65), SPACE, "no room for 65 blocks"),
        ([BlockKey(b"short")], SPACE, "a block key has 16 bytes"),
        (keys_of("x", 1), KeySpace(SPACE.id, 16, 4, 8192), "4 runs of 4096 bytes on this node, not 4 of 8192"),
    ],
    ids=["larger than the arena", "key length", "another layout"],
)
def test_impossible_rooms_are_refused(
    conductor: Conductor, node: NodePeer, join: Join, keys: list[BlockKey], space: KeySpace, reason: str
) -> None:
    put(join(node), keys_of("a", 1))
    answer = conductor.reserve(node, R, keys, space=space)
    assert isinstance(answer, RoomRefused)
    assert reason in answer.reason
    stats = join(node).stats().result(SECONDS)
    assert (stats["blocks"], stats["evictions"]) == (1, 0)


def test_a_room_that_pins_leave_no_place_for_is_refused_for_good(
    conductor: Conductor, node: NodePeer, join: Join
) -> None:
    """The arena has 64 blocks, of which 16 may be pinned."""
    client, pinned, others = join(node), keys_of("pinned", 16), keys_of("others", 49)
    put(client, pinned)
    with Client.connect(node.socket_path, timeout=SECONDS) as pool:
        assert all(pool.space(SPACE).pin(pinned, ttl=600))
        too_large = conductor.reserve(node, "a", others)
        assert isinstance(too_large, RoomRefused)
        assert too_large.is_lasting
        assert f"{49 * BLOCK} bytes of the {64 * BLOCK} that a node has less {16 * BLOCK} that" in too_large.reason
        # What is pinned may be what it begins with.
        assert isinstance(conductor.reserve(node, "b", [*pinned, *others[:48]]), RoomConfirmed)
        conductor.release(node, "b")
        # Beside what others hold it does not fit now.
        assert isinstance(conductor.reserve(node, "c", others[:30]), RoomConfirmed)
        full = conductor.reserve(node, "d", keys_of("more", 30))
        assert isinstance(full, RoomRefused)
        assert not full.is_lasting
        pool.space(SPACE).unpin(pinned)
    conductor.release(node, "c")
    assert isinstance(conductor.reserve(node, "a", others, attempt=2), RoomConfirmed)


def test_a_caching_room_takes_what_fits_and_evicts_what_is_unused(node: NodePeer, join: Join) -> None:
    client = join(node)
    old, leased = keys_of("old", 10), keys_of("leased", 4)
    put(client, old)
    put(client, leased)
    lease = client.lease(SPACE, leased).result(SECONDS)
    new = keys_of("new", 100)
    room = client.open_room(SPACE, new).result(SECONDS)
    has_view = [room.view(index) is not None for index in range(100)]
    assert has_view == [True] * 60 + [False] * 40
    room.close()
    assert client.lease(SPACE, old).result(SECONDS).count == 0
    assert [bytes(view) for view in lease.views] == [bytes(bytes_of(key)) for key in leased]


def test_a_released_room_wakes_its_waiter_and_tells_its_writer(
    conductor: Conductor, node: NodePeer, join: Join
) -> None:
    prefill, decode = join(node), join(node)
    conductor.reserve(node, R, keys_of("p", 2))
    room = prefill.join_room(R, 1).result(SECONDS)
    waiting = decode.await_room(R, 1, 60)
    decode.stats().result(SECONDS)
    conductor.release(node, R)
    assert waiting.result(SECONDS) is None
    eventually(lambda: room.ended, "the writer hears of it")
    # The writer may be in the middle of a copy: its bytes are not given to others before it has closed the room.
    assert prefill.stats().result(SECONDS)["used_bytes"] == 2 * BLOCK
    room.close()
    assert prefill.stats().result(SECONDS)["used_bytes"] == 0
    with pytest.raises(PoolError, match="no room for attempt 1 of r-1"):
        prefill.join_room(R, 1).result(SECONDS)


def test_waiting_ends_with_the_time_and_the_room_with_its_own(conductor: Conductor, node: NodePeer, join: Join) -> None:
    client = join(node)
    conductor.reserve(node, R, keys_of("p", 2), time_left=0.2)
    assert client.await_room(R, 1, 0.01).result(SECONDS) is None
    assert client.await_room(RequestId("unknown"), 1, 60).result(SECONDS) is None
    eventually(lambda: client.stats().result(SECONDS)["rooms"] == 0, "the room expires")


def test_a_room_ends_with_its_gateway_unless_somebody_uses_it(conductor: Conductor, node: NodePeer, join: Join) -> None:
    gone = replace(GATEWAY, incarnation=Incarnation("gone"))
    client = join(node)
    for n, gateway in enumerate((gone, gone, GATEWAY)):
        conductor.reserve(node, f"g-{n}", keys_of(f"g{n}", 1), gateway=gateway)
    writer = client.join_room(RequestId("g-0"), 1).result(SECONDS)
    eventually(lambda: client.stats().result(SECONDS)["rooms"] == 2, "the room that nobody uses ends")
    assert not writer.ended
    assert client.join_room(RequestId("g-2"), 1).result(SECONDS)


def test_two_clients_put_the_same_key(conductor: Conductor, node: NodePeer, join: Join) -> None:
    one, two = join(node), join(node)
    keys = keys_of("same", 2)
    first, second = one.open_room(SPACE, keys).result(SECONDS), two.open_room(SPACE, keys).result(SECONDS)
    for index, key in enumerate(keys):
        fill(one, first, index, bytes_of(key))
        fill(two, second, index, bytes_of(key))
    assert one.stats().result(SECONDS)["used_bytes"] == 4 * BLOCK
    first.close()
    second.close()
    two.stats().result(SECONDS)
    stats = one.stats().result(SECONDS)
    assert (stats["used_bytes"], stats["blocks"]) == (2 * BLOCK, 2)
    with one.lease(SPACE, keys).result(SECONDS) as lease:
        assert [bytes(view) for view in lease.views] == [bytes(bytes_of(key)) for key in keys]

    def announced() -> int:
        return sum(len(stored.keys) for stored in conductor.messages(BlocksStored))

    eventually(lambda: announced() == 2, "both keys are announced")
    conductor.tell(node, SendSnapshot(node))
    conductor.wait_for(Snapshot, lambda s: s.seq > 0)
    assert announced() == 2


def test_the_directory_hears_everything_in_order(conductor: Conductor, node: NodePeer, join: Join) -> None:
    conductor.wait_for(Snapshot, lambda s: s.seq == 0 and s.blocks == ())
    client = join(node)
    known: set[BlockKey] = set()
    for name in "abcdefgh":
        put(client, keys_of(name, 20))
    # A snapshot would stand for what was not told yet.
    conductor.wait_for(BlocksStored, lambda m: keys_of("h", 20)[-1] in m.keys)
    conductor.tell(node, SendSnapshot(node))
    snapshot = conductor.wait_for(Snapshot, lambda s: s.seq > 0)
    changes = conductor.messages((BlocksStored, BlocksRemoved))
    assert [change.seq for change in changes] == list(range(1, snapshot.seq + 1))
    for change in changes:
        if isinstance(change, BlocksStored):
            assert known.isdisjoint(change.keys)
            known.update(change.keys)
        else:
            assert known.issuperset(change.keys)
            known.difference_update(change.keys)
    assert known == set(snapshot.blocks[0][2])
    # Heartbeats say how far it is, never further than what was heard before them.
    conductor.wait_for(Reported, lambda r: r.announced == snapshot.seq)
    heard = 0
    for message in conductor.messages((BlocksStored, BlocksRemoved, Reported)):
        if isinstance(message, Reported):
            assert message.announced <= heard
        else:
            heard = message.seq
    assert len(known) == client.stats().result(SECONDS)["blocks"] <= 64


def test_a_killed_writer_wakes_the_waiter_with_a_miss(conductor: Conductor, node: NodePeer, join: Join) -> None:
    decode = join(node)
    keys = keys_of("p", 2)
    conductor.reserve(node, R, keys)
    writer = ClientProcess(node, "writer", keys)
    waiting = decode.await_room(R, 1, 60)
    decode.stats().result(SECONDS)
    assert not waiting.done()
    writer.kill()
    assert waiting.result(SECONDS) is None
    stats = decode.stats().result(SECONDS)
    assert (stats["rooms"], stats["used_bytes"]) == (0, 0)


@pytest.mark.parametrize("role", ["reader", "cacher"])
def test_a_dead_clients_leases_and_rooms_end(node: NodePeer, join: Join, role: str) -> None:
    client = join(node)
    keys = keys_of("a", 4)
    put(client, keys)
    other = ClientProcess(node, role, keys if role == "reader" else keys_of("b", 4))
    assert client.stats().result(SECONDS)["evictable_bytes"] == (0 if role == "reader" else 4 * BLOCK)
    other.kill()
    eventually(lambda: client.stats().result(SECONDS)["evictable_bytes"] == 4 * BLOCK, "the lease ends")
    eventually(lambda: client.stats().result(SECONDS)["used_bytes"] == 4 * BLOCK, "the room ends")


def test_a_node_gives_up_by_its_policy(conductor: Conductor, join: Join) -> None:
    client = join(conductor.start_node("counting", 8 * BLOCK, eviction="lfu"))
    often = keys_of("often", 2)
    put(client, often)
    for _ in range(3):
        client.lease(SPACE, often).result(SECONDS).close()
    for name in "bcd":
        put(client, keys_of(name, 6))
    with client.lease(SPACE, often).result(SECONDS) as lease:
        assert lease.count == 2
    assert client.stats().result(SECONDS)["holes"] == 0


def test_a_stopped_client_keeps_its_lease(node: NodePeer, join: Join) -> None:
    client = join(node)
    keys = keys_of("a", 4)
    put(client, keys)
    slow = ClientProcess(node, "reader", keys)
    try:
        os.kill(slow.process.pid, signal.SIGSTOP)
        for name in "bcdefg":
            put(client, keys_of(name, 30))
        with client.lease(SPACE, keys).result(SECONDS) as lease:
            assert lease.count == 4
        assert client.stats().result(SECONDS)["evictions"] >= 100
    finally:
        slow.kill()
    eventually(lambda: client.stats().result(SECONDS)["leases"] == 0, "the lease ends with the process")


def test_a_cancelled_call_leaves_no_lease_behind(node: NodePeer, join: Join) -> None:
    client = join(node)
    put(client, keys_of("a", 1))
    leases = [client.lease(SPACE, keys_of("a", 1)) for _ in range(50)]
    rooms = [client.open_room(SPACE, keys_of("b", 1)) for _ in range(50)]
    for future in [*leases, *rooms]:
        if not future.cancel():
            future.result(SECONDS).close()
    eventually(lambda: client.stats().result(SECONDS)["leases"] == 0, "all leases end")
    assert client.stats().result(SECONDS)["rooms"] == 0


def raw(node: NodePeer) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(SECONDS)
    sock.connect(node.socket_path)
    return sock


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 1 << 31) + b"x",
        struct.pack("<I", 3) + b"\xff\xff\xff",
        struct.pack("<I", 5) + b"\x81\xa4typ",
        b"\x01",
    ],
    ids=["http", "length beyond the limit", "not msgpack", "half a message", "half a frame"],
)
def test_garbage_costs_one_connection_and_one_line(
    node: NodePeer, join: Join, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    client = join(node)
    with raw(node) as sock:
        sock.sendall(data)
        if data == b"\x01":
            sock.shutdown(socket.SHUT_WR)
        assert sock.recv(100) == b""
    eventually(lambda: client.stats().result(SECONDS)["clients"] == 1, "the connection is gone")
    put(client, keys_of("a", 1))
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_silence_is_not_waited_for(node: NodePeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.store.session.HELLO_SECONDS", 0.1)
    with raw(node) as sock:
        assert sock.recv(100) == b""


def test_garbage_after_hello_does_not_free_what_the_client_may_still_write(node: NodePeer, join: Join) -> None:
    observer, client = join(node), join(node)
    client.open_room(SPACE, keys_of("a", 3)).result(SECONDS)
    lost: list[bool] = []
    client.on_lost = lambda: lost.append(True)
    client._socket.sendall(struct.pack("<I", 1) + b"\xc1")
    eventually(lambda: bool(lost), "the client is refused")
    eventually(lambda: observer.stats().result(SECONDS)["used_bytes"] == 0, "its room ends when it is gone")


def test_the_client_hears_of_a_killed_node(conductor: Conductor, run_dir: Path) -> None:
    with conductor.process_node("node-9") as (peer, process):
        lost: list[bool] = []
        with NodeClient.connect(peer.socket_path, name="c", incarnation="1") as client:
            client.on_lost = lambda: lost.append(True)
            put(client, keys_of("a", 1))
            lease = client.lease(SPACE, keys_of("a", 1)).result(SECONDS)
            conductor.reserve(peer, R, keys_of("p", 1))
            waiting = client.await_room(R, 1, 60)
            process.kill()
            with pytest.raises(PoolError, match="node-9 is gone"):
                waiting.result(SECONDS)
            eventually(lambda: bool(lost), "on_lost is called")
            with pytest.raises(PoolError, match="node-9 is gone"):
                client.stats()
            assert np.array_equal(lease.views[0], bytes_of(keys_of("a", 1)[0]))  # the memory outlives the node
            lease.release()
    # A node of the same id takes the place that the dead one left.
    with conductor.process_node("node-9") as (again, process):
        assert again.incarnation != peer.incarnation
        with NodeClient.connect(again.socket_path, name="c", incarnation="1") as client:
            assert client.stats().result(SECONDS)["blocks"] == 0
        process.send_signal(signal.SIGINT)
        process.wait(SECONDS)
    assert [path.name for path in run_dir.iterdir()] == []


def test_a_node_that_is_stopped_as_it_joins_stops(conductor: Conductor, run_dir: Path) -> None:
    """Five times: the order must come together with the Conductor's answer to be swallowed."""
    for number in range(5):
        with conductor.process_node(f"node-{number}") as (_, process):
            process.send_signal(signal.SIGINT)
            assert process.wait(SECONDS) == 0
    assert [path.name for path in run_dir.iterdir()] == []


def test_nothing_is_left_of_a_node_and_its_clients(run_dir: Path) -> None:
    def once() -> None:
        conductor = Conductor(run_dir)
        node = conductor.start_node("node-0")
        other = conductor.start_node("node-1")
        with NodeClient.connect(node.socket_path, name="c", incarnation="1") as client:
            put(client, keys_of("a", 2))
            with NodeClient.connect(other.socket_path, name="c", incarnation="1") as far:
                assert far.fetch(node, SPACE, keys_of("a", 2), SECONDS).result(SECONDS) == 2
        conductor.close()

    once()
    before = open_descriptors()
    once()
    assert open_descriptors() == before
    assert list(run_dir.iterdir()) == []


def test_one_node_a_socket_path(conductor: Conductor, node: NodePeer, run_dir: Path) -> None:
    from moonpool.store.node import _own

    with pytest.raises(ConfigError, match=r"a node runs at .*node-0\.sock already"), _own(run_dir / "node-0.sock"):
        pass
    with NodeClient.connect(node.socket_path, name="c", incarnation="1") as client:
        client.stats().result(SECONDS)


def test_a_missing_run_directory_is_made_private(run_dir: Path) -> None:
    from moonpool.store.node import _own

    folder = run_dir / "dead-a" / "pool"
    with _own(folder / "node-0.sock"), contextlib.closing(listen(folder / "node-0.sock")):
        assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        listen(folder / "node-0.sock")


def test_a_fetch_brings_the_leading_blocks_that_the_source_has(conductor: Conductor, join: Join) -> None:
    near, far = conductor.start_node("node-0"), conductor.start_node("node-1")
    keys = keys_of("a", 6)
    here, there = join(near), join(far)
    put(here, keys[:1])
    put(there, keys[:4])
    assert here.fetch(far, SPACE, keys, SECONDS).result(SECONDS) == 4
    with here.lease(SPACE, keys).result(SECONDS) as lease:
        assert [bytes(view) for view in lease.views] == [bytes(bytes_of(key)) for key in keys[:4]]
    stats, source = here.stats().result(SECONDS), there.stats().result(SECONDS)
    assert stats["bytes_in"] == source["bytes_out"] == 3 * BLOCK
    assert stats["rooms"] == source["leases"] == 0
    assert here.fetch(near, SPACE, keys, SECONDS).result(SECONDS) == 4


def test_a_fetch_from_a_dead_node_is_no_error(conductor: Conductor, join: Join) -> None:
    near = conductor.start_node("node-0")
    keys = keys_of("a", 2)
    with conductor.process_node("node-8") as (far, process):
        client = join(near)
        put(client, keys[:1])
        process.kill()
        process.wait(SECONDS)
        assert client.fetch(far, SPACE, keys, SECONDS).result(SECONDS) == 1
    for path in Path(near.socket_path).parent.glob("node-8.*"):
        path.unlink()


def test_a_hand_over_over_tcp(conductor: Conductor, node: NodePeer, join: Join) -> None:
    decode = join(node)
    keys = keys_of("p", 2)
    conductor.reserve(node, R, keys, tail_tokens=3)
    waiting = decode.await_room(R, 1, 60)
    messenger = TcpMessenger(None)
    try:
        tail = bytes_of(b"t", SPACE.tail_run_bytes(3) * SPACE.runs)
        writes = [room_write(R, index, bytes_of(key)) for index, key in enumerate(keys)] + [room_write(R, TAIL, tail)]
        messenger.write(node.data_address, writes, SECONDS).result(SECONDS)
        contents = waiting.result(SECONDS)
    finally:
        messenger.close()
    assert isinstance(contents, RoomContents)
    assert [bytes(block) for block in contents.blocks] == [bytes(bytes_of(key)) for key in keys]
    assert contents.tail is not None
    assert np.array_equal(contents.tail, tail)
    contents.close()


def test_a_cancelled_coroutine_leaves_no_lease_behind(node: NodePeer, join: Join) -> None:
    client = join(node)
    put(client, keys_of("a", 1))

    async def cancel_as_the_answer_comes() -> None:
        future = client.lease(SPACE, keys_of("a", 1))
        task = asyncio.create_task(awaited(future))
        await asyncio.sleep(0)
        assert future.result(SECONDS).count == 1  # the loop stands still meanwhile: the task has not heard of it
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_as_the_answer_comes())
    eventually(lambda: client.stats().result(SECONDS)["leases"] == 0, "all leases end")
