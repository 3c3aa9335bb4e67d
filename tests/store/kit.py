"""Nodes for tests: in this process or one of their own, and a Conductor that only listens and gives orders."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from moonpool.core.actions import FleetChanged, FleetPart, ReleaseRoom, ReserveRoom
from moonpool.core.conductor import ConductorConfig
from moonpool.core.events import Registered, RoomConfirmed, RoomRefused
from moonpool.core.vocabulary import (
    BlockKey,
    Capacity,
    Incarnation,
    KeySpace,
    KeySpaceId,
    NodePeer,
    PartId,
    PartKind,
    Peer,
    RequestId,
)
from moonpool.live.conductor import run_conductor
from moonpool.messenger.transfer import Bytes, RoomWrite, checksum
from moonpool.store.client import NodeClient, Room
from moonpool.store.node import NodeConfig, run_node
from moonpool.wire.link import Link
from moonpool.wire.messages import Envelope, Message

T = TypeVar("T")
M = TypeVar("M")
NodeProcess = tuple[NodePeer, subprocess.Popen[bytes]]

SECONDS = 20.0
"""The most that any wait of a test takes."""
GATEWAY = Peer(PartId("gateway-0"), Incarnation("here"), "tcp://127.0.0.1:9")
"""In the fleet, as far as nodes hear."""
GATEWAY_PART = FleetPart(PartKind.GATEWAY, GATEWAY, Capacity(), None, "")
SPACE = KeySpace(KeySpaceId("aa" * 16), block_tokens=16, runs=4, run_bytes=4096)
BLOCK = SPACE.block_bytes


def keys_of(name: str, count: int) -> list[BlockKey]:
    return [BlockKey(hashlib.sha256(f"{name}/{i}".encode()).digest()[:16]) for i in range(count)]


def bytes_of(key: bytes, nbytes: int = BLOCK) -> Bytes:
    """What a block with this key holds in tests."""
    return np.random.default_rng(int.from_bytes(key, "little")).integers(0, 256, nbytes, np.uint8)


def run_checksums(data: Bytes, runs: int = SPACE.runs) -> list[int]:
    return [checksum(run) for run in data.reshape(runs, -1)]


def fill(client: NodeClient, room: Room, index: int, data: Bytes) -> None:
    """Write a whole block (or TAIL) and say so."""
    view = room.view(index)
    assert view is not None
    view[:] = data
    client.complete(room, [(index, 0, room.space.runs)], run_checksums(data, room.space.runs))


def put(client: NodeClient, keys: list[BlockKey]) -> None:
    """Cache these blocks, with the bytes of `bytes_of`."""
    with client.open_room(SPACE, keys).result(SECONDS) as room:
        for index, key in enumerate(keys):
            if room.view(index) is not None:
                fill(client, room, index, bytes_of(key))


def eventually(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until, f"never happened: {what}"
        time.sleep(0.005)


class ClientProcess:
    """A client in a process of its own that holds something until it is killed; see `client_process.py`."""

    def __init__(self, node: NodePeer, role: str, keys: Sequence[BlockKey] = (), pass_fds: Sequence[int] = ()) -> None:
        script = str(Path(__file__).with_name("client_process.py"))
        arguments = [sys.executable, script, node.socket_path, role, *(key.hex() for key in keys)]
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=tuple(pass_fds)
        )
        assert self.process.stdout is not None
        self.answer = self.process.stdout.readline().decode().strip()
        assert self.answer

    def stop(self) -> None:
        """It stands still and lives."""
        self.process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=SECONDS)


class Conductor:
    """Answers registrations, keeps what it hears, and hosts nodes on its event loop."""

    def __init__(self, run_dir: Path, token: str | None = None) -> None:
        self.before = set(threading.enumerate())
        self.run_dir = run_dir
        self.token = token
        self.heard: list[Envelope] = []
        self.nodes: dict[PartId, NodePeer] = {}
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="conductor")
        self._thread.start()
        self._tasks: list[asyncio.Task[None]] = []
        self.link = self._on_loop(self._open_link(PartId("conductor")))
        self._on_loop(self._start(self._receive()))

    def start_node(self, name: str, dram_bytes: int = 64 * BLOCK, **settings: Any) -> NodePeer:
        link = self._on_loop(self._open_link(PartId(name)))
        config = self._config(dram_bytes, settings)

        async def serve() -> None:
            try:
                await run_node(link, self.link.me.address, config)
            finally:
                link.close()

        self._on_loop(self._start(serve()))
        return self.registered(name)

    @contextlib.contextmanager
    def process_node(
        self, name: str, dram_bytes: int = 64 * BLOCK, **settings: Any
    ) -> Iterator[tuple[NodePeer, subprocess.Popen[bytes]]]:
        command = [sys.executable, str(Path(__file__).with_name("node_process.py"))]
        config = self._config(dram_bytes, settings)
        life = [] if config.life_fd is None else [config.life_fd]
        with self._changed:
            self.nodes.pop(PartId(name), None)
        process = subprocess.Popen(
            [*command, name, self.link.me.address, msgspec.json.encode(config).decode()], pass_fds=life
        )
        try:
            yield self.registered(name), process
        finally:
            process.kill()
            process.wait(SECONDS)

    def _config(self, dram_bytes: int, settings: dict[str, Any]) -> NodeConfig:
        # Clients of tests may hold all of it, unless a test says otherwise.
        settings = {"client_quota": dram_bytes} | settings
        return NodeConfig(dram_bytes, str(self.run_dir), "127.0.0.1", token=self.token, **settings)

    def registered(self, name: str) -> NodePeer:
        with self._changed:
            assert self._changed.wait_for(lambda: PartId(name) in self.nodes, SECONDS), f"{name} did not register"
            return self.nodes[PartId(name)]

    def tell(self, node: NodePeer, message: Message) -> None:
        self._on_loop(self.link.send(Peer(node.id, node.incarnation, node.address), message))

    def messages(self, kind: type[M] | tuple[type[M], ...]) -> list[M]:
        with self._changed:
            return [envelope.body for envelope in self.heard if isinstance(envelope.body, kind)]

    def wait_for(self, kind: type[M] | tuple[type[M], ...], accept: Callable[[M], bool] = lambda message: True) -> M:
        def find() -> M | None:
            return next((m for m in self.messages(kind) if accept(m)), None)

        with self._changed:
            assert self._changed.wait_for(lambda: find() is not None, SECONDS), f"no such {kind} came"
            found = find()
            assert found is not None
            return found

    def reserve(
        self,
        node: NodePeer,
        request: str,
        keys: list[BlockKey],
        tail_tokens: int = 0,
        attempt: int = 1,
        time_left: float = 60.0,
        space: KeySpace = SPACE,
        gateway: Peer | None = None,
    ) -> RoomConfirmed | RoomRefused:
        whose = gateway or GATEWAY
        order = ReserveRoom(node, RequestId(request), attempt, whose, space, tuple(keys), tail_tokens, time_left)
        self.tell(node, order)

        def answers(m: RoomConfirmed | RoomRefused) -> bool:
            return m.request == request and m.attempt == attempt

        return self.wait_for((RoomConfirmed, RoomRefused), answers)

    def release(self, node: NodePeer, request: str, attempt: int = 1) -> None:
        self.tell(node, ReleaseRoom(node, RequestId(request), attempt))

    def close(self) -> None:
        async def stop() -> None:
            for task in self._tasks:
                task.cancel()
            results = await asyncio.gather(*self._tasks, return_exceptions=True)
            self.link.close()
            for result in results:
                assert result is None or isinstance(result, asyncio.CancelledError), result

        try:
            self._on_loop(stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(SECONDS)
            self._loop.close()

    async def _open_link(self, name: PartId) -> Link:
        return Link(name, "127.0.0.1", 0, self.token)

    async def _start(self, work: Awaitable[None]) -> None:
        self._tasks.append(asyncio.ensure_future(work))

    def _on_loop(self, work: Awaitable[T]) -> T:
        async def run() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(SECONDS)

    async def _receive(self) -> None:
        while True:
            envelope = await self.link.receive()
            if isinstance(envelope.body, Registered) and envelope.body.kind is PartKind.NODE:
                r = envelope.body
                self.link.post(r.peer, FleetChanged(r.peer, (GATEWAY_PART,), (_node_peer(r),), (), 0))
            self._note(envelope)

    def _note(self, envelope: Envelope) -> None:
        with self._changed:
            if isinstance(envelope.body, Registered) and envelope.body.kind is PartKind.NODE:
                self.nodes[envelope.body.peer.id] = _node_peer(envelope.body)
            self.heard.append(envelope)
            self._changed.notify_all()


class DecidingConductor(Conductor):
    """The real one, whose messages are listened to."""

    def silence(self) -> None:
        """It says nothing more, and hears nothing."""

        async def cancel() -> None:
            self._tasks[0].cancel()

        self._on_loop(cancel())

    async def _receive(self) -> None:
        await run_conductor(_Tapped(self.link, self._note), ConductorConfig(), seed=0)


class _Tapped(Link):
    def __init__(self, link: Link, note: Callable[[Envelope], None]) -> None:
        self.__dict__.update(vars(link))
        self._note = note

    async def receive(self) -> Envelope:
        envelope = await super().receive()
        self._note(envelope)
        return envelope


def _node_peer(r: Registered) -> NodePeer:
    return NodePeer(r.peer.id, r.peer.incarnation, r.peer.address, r.data_address, r.socket_path)


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def room_write(
    request: str, index: int, data: Bytes, first_run: int = 0, runs: int = SPACE.runs, attempt: int = 1
) -> RoomWrite:
    """Runs of a block as Messenger sends them, K and V apart as an engine has them."""
    middle = data.nbytes // 2
    checksums = run_checksums(data, runs)
    return RoomWrite(RequestId(request), attempt, index, first_run, runs, [data[:middle], data[middle:]], checksums)
