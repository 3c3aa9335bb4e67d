"""The node: one process a machine that holds the arena and answers for it (docs/protocol.md)."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

from msgspec import Struct

from moonpool.core.actions import (
    Demote,
    DropReplica,
    ReleaseRoom,
    ReplicasOrdered,
    Replicate,
    ReserveRoom,
    SendSnapshot,
)
from moonpool.core.events import Registered, Reported, RoomConfirmed, RoomRefused
from moonpool.core.eviction import EvictionPolicy
from moonpool.core.vocabulary import Capacity, PartKind, Peer
from moonpool.errors import ConfigError, PeerUnavailableError, PoolError, RoomTooLargeError
from moonpool.messenger.questions import Entered
from moonpool.messenger.server import TcpServer
from moonpool.messenger.tcp import TcpMessenger
from moonpool.store.arena import Arena
from moonpool.store.desk import Desk
from moonpool.store.disks import Disks
from moonpool.store.exchange import Exchange
from moonpool.store.fetch import Fetcher
from moonpool.store.gather import Gatherer
from moonpool.store.ledger import Ledger
from moonpool.store.loader import Loader
from moonpool.store.messages import Welcome
from moonpool.store.neighbours import Neighbours
from moonpool.store.orders import Orders
from moonpool.store.pins import PIN_SHARE
from moonpool.store.places import amount
from moonpool.store.rooms import ClientId, RoomId
from moonpool.store.server import HoldingRules, LocalServer, listen
from moonpool.store.streaming import Streamer
from moonpool.wire.link import Link
from moonpool.wire.membership import Absences, Membership
from moonpool.wire.messages import Envelope, Located, Message

log = logging.getLogger(__name__)

ANNOUNCE_SECONDS = 0.02
"""From one announcement to the next: the directory may be so far behind while many blocks come and go."""
EXPIRY_SECONDS = 0.5
"""How often rooms and leases are looked through for those whose time is over."""
BATCHES = 4
"""A client's batch is moved in parts of this part of its quota, so that the arena never has to hold all of it."""
FILES = 8192
"""That a node may have open, if the system lets it."""
RESERVE_SECONDS = 1.0
"""The most that a room waits for the SSD: the Conductor takes no answer within 2 s for a refusal."""


class NodeConfig(Struct, frozen=True):
    dram_bytes: int
    run_dir: str
    """For the Unix socket: short, this user's, mode 0700."""
    data_host: str
    data_port: int = 0
    """0: a free one."""
    token: str | None = None
    connections: int = 2
    """Most tcp connections to one other node."""
    eviction: EvictionPolicy = "lru"
    """Of DRAM. The SSD tier goes by `lru`."""
    lease_seconds: float = 120.0
    """The most that a worker of our supervisor may hold a lease; then it is killed."""
    grace: float = 10.0
    """Seconds from a request's deadline until a worker that still holds its room is killed."""
    client_quota: int | None = None
    """Bytes of leases and caching rooms for any other client; None: half the arena."""
    pin_share: float = PIN_SHARE
    """Of the arena, and of each SSD, that pinned blocks may take."""
    ssd_bytes: int = 0
    """In all `ssd_dirs` together."""
    ssd_dirs: tuple[str, ...] = ()
    """In each of them the node keeps a directory with its name. None: DRAM alone."""
    ssd_stall_seconds: float = 10.0
    """A disk on which an operation takes longer is given up."""
    is_restart: bool = False
    """This node has been up before: an SSD directory that cannot be used any more is given up, DRAM goes on alone."""
    life_fd: int | None = None
    """The pipe from this node's supervisor; None: the node was started by hand and kills nobody."""


async def run_node(
    link: Link,
    conductor: str,
    config: NodeConfig,
    is_up: Callable[[], None] = lambda: None,
    tell: Callable[[str], None] = lambda what: None,
) -> None:
    """Serve until cancelled, then leave nothing behind. Raises ConfigError where it cannot start.

    `tell` hears what takes a while before the node can serve; `is_up` is called as soon as it can.
    """
    socket_path = Path(config.run_dir) / f"{link.me.id}.sock"
    _allow_files()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_own(socket_path))
        listener = stack.enter_context(contextlib.closing(listen(socket_path)))
        # Filling the arena with pages takes a third of a second a GiB.
        arena = await asyncio.to_thread(Arena, config.dram_bytes)
        stack.callback(arena.close)
        messenger = TcpMessenger(config.token, config.connections)
        stack.callback(messenger.close)
        node = _Node(link, arena, messenger, config)
        directories = [Path(directory) / link.me.id for directory in config.ssd_dirs] if config.ssd_bytes else []
        if directories:
            # Reading the index of a large one takes seconds.
            tell(f"opening {amount(config.ssd_bytes)} of SSD")
        node.disks = await asyncio.to_thread(
            Disks,
            arena,
            node.ledger.shelf,
            directories,
            config.ssd_bytes,
            config.ssd_stall_seconds,
            is_restart=config.is_restart,
        )
        stack.callback(node.disks.close)
        node.loader = loader = Loader(arena, node.ledger, node.disks)
        quota = arena.size // 2 if config.client_quota is None else config.client_quota
        batch_bytes = max(1, min(quota, arena.size) // BATCHES)
        node.membership = Membership(link, conductor, lambda: describe, node.report, node.counters)
        node.neighbours = Neighbours(link, messenger, lambda: node.membership.fleet, lambda: node.membership.conductor)
        gatherer = Gatherer(arena, node.ledger, loader, node.neighbours, messenger)
        entered = Entered(link.me.id, link.me.incarnation, arena.size, batch_bytes)
        desk = Desk(entered, node.ledger, gatherer, node.neighbours, node.counters)
        exchange = Exchange(arena, node.ledger, loader, desk, batch_bytes)
        data = TcpServer(config.data_host, config.data_port, config.token, exchange)
        stack.callback(data.close)
        stack.callback(exchange.close)
        fetcher = Fetcher(arena, node.ledger, loader, messenger, data.address)
        streamer = Streamer(arena, node.ledger, node.disks, messenger, data.address)
        node.orders = Orders(gatherer, desk, node.ledger.shelf)
        welcome = Welcome(link.me.id, link.me.incarnation, arena.size, arena.board.entries)
        node.data = data
        rules = HoldingRules(config.lease_seconds, config.grace, quota, config.life_fd)
        node.clients = LocalServer(
            listener, welcome, arena, node.ledger, loader, fetcher, streamer, desk, node.counters, rules
        )
        describe = Registered(
            PartKind.NODE,
            link.me,
            Capacity(dram_bytes=arena.size),
            data_address=data.address,
            socket_path=str(socket_path),
        )
        size = arena.size >> 20
        is_up()
        log.info("node %s: %d MiB in %s, %s, data on %s", link.me.id, size, arena.pages, socket_path, data.address)
        await node.run()


def _allow_files() -> None:
    """Each client takes two descriptors, and a usual limit of 1024 is one that any process may raise."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def _own(socket_path: Path) -> Iterator[None]:
    """The right to this socket path while the process lives; what a dead node left there is removed."""
    lock_path = socket_path.with_suffix(".lock")
    try:
        socket_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise ConfigError(f"run directory {socket_path.parent}: {e.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"a node runs at {socket_path} already; give this one another id or run directory"
            ) from None
        socket_path.unlink(missing_ok=True)
        try:
            yield
        finally:
            socket_path.unlink(missing_ok=True)
            lock_path.unlink(missing_ok=True)
    finally:
        os.close(lock)


class _Node:
    """What runs beside each other in a node, on one event loop."""

    membership: Membership
    clients: LocalServer
    data: TcpServer
    disks: Disks
    loader: Loader
    orders: Orders
    neighbours: Neighbours

    def __init__(self, link: Link, arena: Arena, messenger: TcpMessenger, config: NodeConfig) -> None:
        self._link = link
        self._arena = arena
        self._messenger = messenger
        self._loop = asyncio.get_running_loop()
        self._pending = asyncio.Event()
        self._announced = 0
        """Number of the last announcement that was sent."""
        self._is_pending = False
        self._loads: set[asyncio.Task[None]] = set()
        self.ledger = Ledger(
            arena.extents,
            link.me.id,
            link.me.incarnation,
            self._on_pending,
            self._on_room_ended,
            config.eviction,
            arena.board,
            config.pin_share,
        )

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                # In this order: it is there to be ended before anything is heard.
                tasks.create_task(self.membership.ousted())
                tasks.create_task(self._listen())
                tasks.create_task(self.clients.run())
                await self.membership.join()
                log.info("joined the cluster")
                tasks.create_task(self.membership.run())
                tasks.create_task(self._announce())
                tasks.create_task(self._expire())
                tasks.create_task(self.orders.run())
        except BaseExceptionGroup as group:
            refused, _ = group.split(ConfigError)
            if refused is not None:
                raise ConfigError(str(refused.exceptions[0])) from group
            raise
        finally:
            for load in list(self._loads):
                load.cancel()

    def report(self) -> Reported:
        me, used = self._link.me, self._arena.extents.used
        return Reported(me.id, me.incarnation, used_bytes=used, announced=self._announced)

    def counters(self) -> dict[str, float]:
        """By name: the ledger's, `tcp_` of the listening and `messenger_` of the connecting side, and sums of both."""
        served, moved = self.data.counters(), self._messenger.counters()
        sums = {
            "dram_bytes": float(self._arena.size),
            "dram_huge_bytes": float(self._arena.huge_bytes),
            "bytes_in": served["bytes_in"] + moved["bytes_received"],
            "bytes_out": served["bytes_out"] + moved["bytes_sent"],
            "checksum_failures": served["checksum_failures"] + moved["checksum_failures"],
        }
        return (
            self.ledger.counters()
            | self.disks.counters()
            | self.orders.counters()
            | self.clients.counters()
            | {f"tcp_{k}": v for k, v in served.items()}
            | {f"messenger_{k}": v for k, v in moved.items()}
            | sums
        )

    async def _listen(self) -> None:
        self.membership.on_joined = self._joined
        while True:
            envelope = await self._link.receive()
            try:
                if not self.membership.heard(envelope):
                    self._handle(envelope)
            except Exception:
                # One message's trouble must not cost all that is in DRAM.
                log.exception("%s of %s failed", type(envelope.body).__name__, envelope.sender.id)

    def _joined(self) -> None:
        self.neighbours.conductor_is_new()
        self.ledger.ask_snapshot()

    def _handle(self, envelope: Envelope) -> None:
        match envelope.body:
            case ReserveRoom() as order if self.loader.is_needed(order.space.id, order.keys):
                self._later(self._load_and_reserve(envelope.sender, order))
            case ReserveRoom() as order:
                self._link.post(envelope.sender, self._reserve(order))
            case ReleaseRoom(request=request, attempt=attempt):
                if self.ledger.rooms.end_reserved(request, attempt):
                    log.info("room of %s attempt %d released", request, attempt)
            case Located() | ReplicasOrdered() as answer:
                self.neighbours.heard(answer)
            case Replicate() | Demote() | DropReplica() as order:
                self.orders.take(order)
            case SendSnapshot():
                self.ledger.ask_snapshot()
            case other:
                log.warning("%s from %s is not for a node", type(other).__name__, envelope.sender.id)

    async def _load_and_reserve(self, sender: Peer, order: ReserveRoom) -> None:
        """What the SSD holds of a prompt is in DRAM before the room is opened: then it is not lacking."""
        with await self.loader.load(order.space, order.keys, RESERVE_SECONDS):
            self._link.post(sender, self._reserve(order))

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)

    def _reserve(self, order: ReserveRoom) -> Message:
        me = self._link.me
        try:
            lacking = self.ledger.rooms.reserve(
                order.request,
                order.attempt,
                order.space,
                order.keys,
                order.tail_tokens,
                time.monotonic() + order.time_left,
                order.gateway,
            )
        except PoolError as e:
            log.info("room of %s attempt %d refused: %s", order.request, order.attempt, e)
            is_lasting = isinstance(e, RoomTooLargeError)
            return RoomRefused(me.id, me.incarnation, order.request, order.attempt, str(e), is_lasting)
        return RoomConfirmed(me.id, me.incarnation, order.request, order.attempt, lacking)

    async def _announce(self) -> None:
        """Tell the directory what becomes readable and what no longer is, in order."""
        is_reachable = True
        while True:
            if (message := self.ledger.next_announcement()) is None:
                await self._pending.wait()
                self._pending.clear()
                self._is_pending = False
                continue
            while message is not None:
                try:
                    await self._link.send(self.membership.conductor, message)
                except PeerUnavailableError as e:
                    if is_reachable:
                        log.warning("%s not announced, a snapshot follows: %s", type(message).__name__, e)
                    self.ledger.ask_snapshot()
                    is_reachable = False
                else:
                    is_reachable, self._announced = True, message.seq
                message = self.ledger.next_announcement()
            # What becomes of the next few blocks goes together: a message a block would cost more than the block.
            await asyncio.sleep(ANNOUNCE_SECONDS)
            # Before the next look: whatever is noted after it wakes this loop, and nothing did meanwhile.
            self._is_pending = False

    async def _expire(self) -> None:
        absences = Absences()
        while True:
            await asyncio.sleep(EXPIRY_SECONDS)
            now = time.monotonic()
            lost = absences.over(self.ledger.rooms.gateways() - self.membership.there(), now)
            if expired := self.ledger.rooms.expire(now, lost):
                log.warning("%d rooms ended: their time was over or their gateway gone, and nobody used them", expired)
            self.ledger.pins.expire(now)
            self.clients.end_overdue()
            self.disks.check(time.monotonic())

    def _on_pending(self) -> None:
        # Under the ledger's lock. The loop is woken once, not for each block.
        if not self._is_pending:
            self._is_pending = True
            self._on_loop(self._pending.set)

    def _on_room_ended(self, client: ClientId, room: RoomId) -> None:
        self._on_loop(lambda: self.clients.room_ended(client, room))

    def _on_loop(self, call: Callable[[], None]) -> None:
        """From any thread. A tcp thread may still finish a transfer when the loop is closed already."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)
