"""Messenger over tcp when the other side is hostile, broken, slow or gone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from moonpool.core.vocabulary import KeySpace, KeySpaceId, NodePeer, RequestId
from moonpool.errors import ConfigError, TransferError
from moonpool.messenger.channel import Arriving, Channel, Write, greet
from moonpool.messenger.server import TcpServer
from moonpool.messenger.tcp import TcpMessenger
from moonpool.messenger.transfer import RoomWrite
from moonpool.store.client import NodeClient
from moonpool.wire.security import data_key

from ..store.kit import BLOCK, SECONDS, SPACE, Conductor, bytes_of, eventually, keys_of, put, room_write

Join = Callable[..., NodeClient]
R = RequestId("r-1")
TOKEN = "a token of the cluster"


@pytest.fixture
def messenger() -> Iterator[TcpMessenger]:
    messenger = TcpMessenger(None)
    yield messenger
    messenger.close()


class Proxy:
    """Stands between Messenger and a node; `tamper` sees every piece on its way to the node."""

    def __init__(self, target: str, tamper: Callable[[Proxy, bytes], bytes] = lambda proxy, data: data) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._tamper = tamper
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.passed = 0

    def cut(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(SECONDS)
        self.cut()
        for thread in self._threads:
            thread.join(SECONDS)
        for sock in [*self._sockets, self._listener]:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            for source, sink, tamper in ((near, far, self._tamper), (far, near, lambda proxy, data: data)):
                thread = threading.Thread(target=self._pump, args=(source, sink, tamper))
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, tamper: Callable[[Proxy, bytes], bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(tamper(self, data))
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def proxy(target: str, tamper: Callable[[Proxy, bytes], bytes]) -> Iterator[Proxy]:
    between = Proxy(target, tamper)
    try:
        yield between
    finally:
        between.close()


def test_a_payload_changed_on_the_way_is_a_failure_and_no_run(
    conductor: Conductor, node: NodePeer, join: Join, messenger: TcpMessenger
) -> None:
    keys = keys_of("p", 2)
    data = np.full(BLOCK, 7, np.uint8)
    reader = join(node)
    conductor.reserve(node, R, keys)
    with proxy(node.data_address, lambda _, piece: piece.replace(bytes([7] * 100), bytes([7] * 99 + [6]), 1)) as p:
        with pytest.raises(TransferError, match=r"of block 0 of r-1 attempt 1 arrived with a wrong checksum"):
            messenger.write(p.address, [room_write(R, 0, data)], SECONDS).result(SECONDS)
        assert p.connections == 1
    assert messenger.counters()["failures"] == 1
    assert reader.stats().result(SECONDS)["checksum_failures"] >= 1
    waiting = reader.await_room(R, 1, 60)
    # The same block once more, and right: the room is still good.
    writes = [room_write(R, 0, data), room_write(R, 1, data)]
    messenger.write(node.data_address, writes, SECONDS).result(SECONDS)
    contents = waiting.result(SECONDS)
    assert contents is not None
    assert np.array_equal(contents.blocks[0], data)
    contents.close()


def test_a_block_corrupted_in_its_source_is_not_fetched(conductor: Conductor, join: Join) -> None:
    near, far = conductor.start_node("node-0"), conductor.start_node("node-1")
    keys = keys_of("a", 3)
    here, there = join(near), join(far)
    put(there, keys)
    with there.lease(SPACE, keys).result(SECONDS) as lease:
        there.arena[lease.offsets[1] + 5] ^= 1
    assert here.fetch(far, SPACE, keys, SECONDS).result(SECONDS) == 1
    stats = here.stats().result(SECONDS)
    assert (stats["checksum_failures"], stats["messenger_failures"], stats["blocks"]) == (1, 1, 1)
    eventually(lambda: there.stats().result(SECONDS)["dram_checksum_failures"] == 1, "its source has heard of it")
    assert there.stats().result(SECONDS)["blocks"] == 2


def test_a_broken_connection_is_replaced_once(
    conductor: Conductor, node: NodePeer, join: Join, messenger: TcpMessenger
) -> None:
    def cut_the_first(p: Proxy, piece: bytes) -> bytes:
        p.passed += len(piece)
        if p.connections == 1 and p.passed > BLOCK:
            p.cut()
        return piece

    keys = keys_of("p", 8)
    conductor.reserve(node, R, keys)
    writes = [room_write(R, index, bytes_of(key)) for index, key in enumerate(keys)]
    with proxy(node.data_address, cut_the_first) as p:
        messenger.write(p.address, writes, SECONDS).result(SECONDS)
        assert p.connections == 2
    contents = join(node).await_room(R, 1, SECONDS).result(SECONDS)
    assert contents is not None
    assert [bytes(block) for block in contents.blocks] == [bytes(bytes_of(key)) for key in keys]
    contents.close()


def test_a_connection_that_breaks_again_fails_the_transfer(
    conductor: Conductor, node: NodePeer, messenger: TcpMessenger
) -> None:
    def cut(p: Proxy, piece: bytes) -> bytes:
        if len(piece) > 1000:
            p.cut()
        return piece

    conductor.reserve(node, R, keys_of("p", 1))
    with proxy(node.data_address, cut) as p:
        with pytest.raises(TransferError, match="broke"):
            messenger.write(p.address, [room_write(R, 0, bytes_of(b"x"))], 60).result(SECONDS)
        assert p.connections == 2


def test_a_peer_that_dies_fails_its_transfers_at_once(conductor: Conductor, messenger: TcpMessenger) -> None:
    with conductor.process_node("node-9") as (peer, process):
        conductor.reserve(peer, R, keys_of("p", 1))
        os.kill(process.pid, signal.SIGSTOP)
        big = KeySpace(SPACE.id, 16, SPACE.runs, 32 << 20)
        future = messenger.write(peer.data_address, [room_write(R, 0, np.zeros(big.block_bytes, np.uint8))], 600)
        queued = [messenger.write(peer.data_address, [room_write(R, 0, bytes_of(b"x"))], 600) for _ in range(3)]
        in_time = messenger.write(peer.data_address, [room_write(R, 0, bytes_of(b"x"))], 0.2)
        with pytest.raises(TransferError, match="deadline"):
            in_time.result(SECONDS)
        assert not future.done()
        killed = time.monotonic()
        process.kill()
        for pending in (future, *queued):
            with pytest.raises(TransferError, match=f"{peer.data_address} broke"):
                pending.result(SECONDS)
        assert time.monotonic() - killed < 5
    for path in Path(peer.socket_path).parent.glob("node-9.*"):
        path.unlink()


def test_a_silent_peer_costs_no_more_than_the_deadline(messenger: TcpMessenger) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(TransferError, match="not over by its deadline"):
            messenger.read(address, SPACE.id, keys_of("a", 1), [np.empty(BLOCK, np.uint8)], 0.1).result(SECONDS)
        assert time.monotonic() - start < 2


def test_closing_fails_what_is_under_way(messenger: TcpMessenger) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        reads = [messenger.read(address, SPACE.id, keys_of("a", 1), [np.empty(BLOCK, np.uint8)], 600) for _ in range(5)]
        messenger.close()
        for read in reads:
            with pytest.raises(TransferError):
                read.result(SECONDS)
        late = messenger.read(address, SPACE.id, keys_of("a", 1), [np.empty(BLOCK, np.uint8)], 600)
        with pytest.raises(TransferError, match="Messenger is closed"):
            late.result(SECONDS)


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        (TOKEN, None, "has a cluster token, this one has none"),
        (None, TOKEN, "has no cluster token, this one has"),
        (TOKEN, TOKEN + "!", "has another cluster token"),
    ],
)
def test_another_token_is_refused(run_dir: Path, ours: str | None, theirs: str | None, reason: str) -> None:
    conductor = Conductor(run_dir, token=ours)
    messenger = TcpMessenger(theirs)
    try:
        node = conductor.start_node("node-0")
        with pytest.raises(TransferError, match=reason):
            messenger.read(node.data_address, SPACE.id, keys_of("a", 1), [np.empty(BLOCK, np.uint8)], 5).result(SECONDS)
        with NodeClient.connect(node.socket_path, name="c", incarnation="1") as client:
            eventually(lambda: client.stats().result(SECONDS)["tcp_refused_connections"] == 1, "it is counted")
    finally:
        messenger.close()
        conductor.close()


def test_the_same_token_is_let_in(run_dir: Path) -> None:
    conductor = Conductor(run_dir, token=TOKEN)
    messenger = TcpMessenger(TOKEN)
    try:
        node = conductor.start_node("node-0")
        with NodeClient.connect(node.socket_path, name="c", incarnation="1") as client:
            put(client, keys_of("a", 1))
        target = np.empty(BLOCK, np.uint8)
        assert messenger.read(node.data_address, SPACE.id, keys_of("a", 1), [target], 5).result(SECONDS) == 1
        assert np.array_equal(target, bytes_of(keys_of("a", 1)[0]))
    finally:
        messenger.close()
        conductor.close()


def connect(node: NodePeer) -> socket.socket:
    host, _, port = node.data_address.rpartition(":")
    return socket.create_connection((host, int(port)), SECONDS)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a" * 100, b"\0" * 48], ids=["http", "zeros"])
def test_a_stranger_is_refused(node: NodePeer, join: Join, data: bytes) -> None:
    with connect(node) as sock:
        sock.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1000) == b""
    client = join(node)
    eventually(lambda: client.stats().result(SECONDS)["tcp_refused_connections"] == 1, "it is counted")


def test_a_proof_without_the_key_is_refused(node: NodePeer) -> None:
    with connect(node) as sock:
        channel = Channel(sock)
        until = time.monotonic() + SECONDS
        channel.send(b"moonpool data 1\n" + b"n" * 32, until)
        answer = np.empty(64, np.uint8)
        channel.receive_into(answer, until)
        # The node's own proof, sent back, is of the other role.
        channel.send(answer[32:], until)
        with pytest.raises(ConnectionError):
            channel.receive_into(np.empty(1, np.uint8), until)


def test_silence_in_the_handshake_and_in_a_frame_is_not_waited_for(
    node: NodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.messenger.channel.HANDSHAKE_SECONDS", 0.2)
    monkeypatch.setattr("moonpool.messenger.server.FRAME_SECONDS", 0.2)
    with connect(node) as sock:
        assert sock.recv(10) == b""
    with connect(node) as sock:
        channel = Channel(sock)
        greet(channel, data_key(None), time.monotonic() + SECONDS)
        channel.send(b"\x05\x00", time.monotonic() + SECONDS)
        sock.settimeout(SECONDS)
        assert sock.recv(10) == b""


def test_a_connection_that_only_rests_is_closed_without_a_warning(
    node: NodePeer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("moonpool.messenger.server.IDLE_SECONDS", 0.2)
    with connect(node) as sock:
        greet(Channel(sock), data_key(None), time.monotonic() + SECONDS)
        sock.settimeout(SECONDS)
        assert sock.recv(10) == b""
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"\x03\x00\x00\x00\xc1\xc1\xc1", b"\x05\x00\x00\x00\x81\xa4typ"],
    ids=["length beyond the limit", "not msgpack", "half a message"],
)
def test_garbage_after_the_handshake_costs_one_connection(
    conductor: Conductor,
    node: NodePeer,
    join: Join,
    messenger: TcpMessenger,
    data: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with connect(node) as sock:
        channel = Channel(sock)
        greet(channel, data_key(None), time.monotonic() + SECONDS)
        channel.send(data, time.monotonic() + SECONDS)
        sock.settimeout(SECONDS)
        assert sock.recv(10) == b""
    eventually(lambda: len([r for r in caplog.records if r.levelname == "WARNING"]) == 1, "one line is logged")
    put(join(node), keys_of("a", 1))
    target = np.empty(BLOCK, np.uint8)
    assert messenger.read(node.data_address, SPACE.id, keys_of("a", 1), [target], 5).result(SECONDS) == 1


@pytest.mark.parametrize(
    ("block", "first_run", "runs", "nbytes", "reason"),
    [
        (0, 0, 4, BLOCK - 4, "bytes came for 4 runs"),
        (0, 3, 2, 2 * SPACE.run_bytes, "not runs 3 to 4"),
        (9, 0, 1, SPACE.run_bytes, "no block 9"),
        (-1, 0, 1, SPACE.run_bytes, "has no tail"),
    ],
)
def test_a_write_that_does_not_fit_its_room_is_refused_and_the_connection_lives(
    conductor: Conductor,
    node: NodePeer,
    messenger: TcpMessenger,
    block: int,
    first_run: int,
    runs: int,
    nbytes: int,
    reason: str,
) -> None:
    conductor.reserve(node, R, keys_of("p", 1))
    write = RoomWrite(R, 1, block, first_run, runs, [np.zeros(nbytes, np.uint8)], [0] * runs)
    with proxy(node.data_address, lambda _, piece: piece) as p:
        with pytest.raises(TransferError, match=reason):
            messenger.write(p.address, [write], SECONDS).result(SECONDS)
        messenger.write(p.address, [room_write(R, 0, bytes_of(b"x"))], SECONDS).result(SECONDS)
        assert p.connections == 1


def test_destinations_of_the_wrong_size_are_refused(node: NodePeer, join: Join, messenger: TcpMessenger) -> None:
    put(join(node), keys_of("a", 1))
    with pytest.raises(TransferError, match=f"have {BLOCK} bytes, the room here 100"):
        messenger.read(node.data_address, SPACE.id, keys_of("a", 1), [np.empty(100, np.uint8)], SECONDS).result(SECONDS)


def test_released_while_it_arrives(conductor: Conductor, node: NodePeer, join: Join) -> None:
    """The bytes of a released room are freed only when the transfer into it has ended."""
    client = join(node)
    conductor.reserve(node, R, keys_of("p", 2))
    with connect(node) as sock:
        channel = Channel(sock)
        greet(channel, data_key(None), time.monotonic() + SECONDS)
        until = time.monotonic() + SECONDS
        data = bytes_of(b"x")
        item = Arriving(R, 1, 0, 0, SPACE.runs, BLOCK, tuple(room_write(R, 0, data).checksums))
        channel.send_header(Write((item,), SECONDS), until)
        channel.send(data[:100], until)
        eventually(lambda: client.stats().result(SECONDS)["transfers"] == 1, "the transfer has begun")
        conductor.release(node, R)
        eventually(lambda: client.stats().result(SECONDS)["rooms"] == 0, "the room is released")
        assert client.stats().result(SECONDS)["used_bytes"] == BLOCK
    eventually(lambda: client.stats().result(SECONDS)["used_bytes"] == 0, "the bytes are freed")


def test_large_transfers_use_all_connections(conductor: Conductor, join: Join, messenger: TcpMessenger) -> None:
    space = KeySpace(KeySpaceId("cc" * 16), 64, 2, 1 << 20)
    node = conductor.start_node("node-big", 16 * space.block_bytes)
    keys = keys_of("big", 6)
    client = join(node)
    conductor.reserve(node, R, keys, space=space)
    blocks = [bytes_of(key, space.block_bytes) for key in keys]
    with proxy(node.data_address, lambda _, piece: piece) as p:
        writes = [room_write(R, index, data, runs=2) for index, data in enumerate(blocks)]
        messenger.write(p.address, writes, SECONDS).result(SECONDS)
        assert p.connections == 2
        contents = client.await_room(R, 1, SECONDS).result(SECONDS)
        assert contents is not None
        contents.close()
        targets = [np.empty(space.block_bytes, np.uint8) for _ in range(7)]
        wanted = [*keys, *keys_of("unknown", 1)]
        assert messenger.read(p.address, space.id, wanted, targets, SECONDS).result(SECONDS) == 6
        assert p.connections == 2
    for block, target in zip(blocks, targets, strict=False):
        assert np.array_equal(block, target)


def test_one_large_block_is_striped_and_only_its_wanted_layers_are_read(
    conductor: Conductor, join: Join, messenger: TcpMessenger
) -> None:
    space = KeySpace(KeySpaceId("cc" * 16), 64, 8, 1 << 20)
    node = conductor.start_node("node-big", 2 * space.block_bytes)
    keys = keys_of("big", 1)
    client = join(node)
    conductor.reserve(node, R, keys, space=space)
    waiting = client.await_room(R, 1, 60)
    data = bytes_of(keys[0], space.block_bytes)
    messenger.write(node.data_address, [room_write(R, 0, data, runs=8)], SECONDS).result(SECONDS)
    contents = waiting.result(SECONDS)
    assert contents is not None
    contents.close()
    stats = client.stats().result(SECONDS)
    assert stats["tcp_writes"] == 2
    target = np.empty(space.block_bytes, np.uint8)
    assert messenger.read(node.data_address, space.id, keys, [target], SECONDS).result(SECONDS) == 1
    assert np.array_equal(target, data)
    part = np.empty(3 * space.run_bytes, np.uint8)
    assert messenger.read(node.data_address, space.id, keys, [part], SECONDS, layers=(4, 3)).result(SECONDS) == 1
    assert np.array_equal(part, data[4 << 20 : 7 << 20])
    stats = client.stats().result(SECONDS)
    assert stats["tcp_bytes_out"] == data.nbytes + part.nbytes


def test_a_node_counts_what_waits_and_what_went_on_elsewhere(node: NodePeer, join: Join) -> None:
    stats = join(node).stats().result(SECONDS)
    for name in ("queued", "queued_bytes", "connections", "evicted_endpoints", "resubmissions", "refused_transfers"):
        assert stats[f"messenger_{name}"] == 0


def test_an_address_in_use_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen for data"):
        TcpServer("127.0.0.1", taken.getsockname()[1], None, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs a cluster token"):
        TcpServer("0.0.0.0", 0, None, None)  # type: ignore[arg-type]
