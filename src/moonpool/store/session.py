"""One client of a node: its calls, one after another, and the answers that take longer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Coroutine

from moonpool.errors import PoolError
from moonpool.store.arena import Arena
from moonpool.store.fetch import Fetcher
from moonpool.store.holder import Holder
from moonpool.store.ledger import LeaseId, Ledger
from moonpool.store.loader import Loader
from moonpool.store.messages import (
    PROTOCOL,
    Answer,
    Audit,
    Audited,
    AwaitRoom,
    Call,
    CloseRoom,
    Complete,
    FetchBlocks,
    Fetched,
    Hello,
    JoinRoom,
    LeaseBlocks,
    Leased,
    Measure,
    Measured,
    OpenRoom,
    RefusedCall,
    Release,
    RoomEnded,
    RoomOpened,
    RoomReady,
    Welcome,
    call_frames,
    frame,
)
from moonpool.store.rooms import ClientId, Room, RoomId

log = logging.getLogger(__name__)

HELLO_SECONDS = 5.0
LONGEST_SECONDS = 3600.0
RECEIVE_BYTES = 1 << 16
MAX_OUTSTANDING = 1024
"""Calls of one client that wait for something."""


class Session:
    """Speaks with one connected client until it is gone; its leases and rooms end then, and not before."""

    def __init__(
        self,
        sock: socket.socket,
        client: ClientId,
        holder: Holder,
        welcome: Welcome,
        arena: Arena,
        ledger: Ledger,
        loader: Loader,
        fetcher: Fetcher,
        measure: Callable[[], dict[str, float]],
    ) -> None:
        """`sock` is connected and non-blocking; the session closes it."""
        self._socket = sock
        self._client = client
        self._welcome = welcome
        self._arena = arena
        self._ledger = ledger
        self._loader = loader
        self._fetcher = fetcher
        self._measure = measure
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._frames = call_frames()
        self.name = f"client {client}"
        self.holder = holder
        self.heard = time.monotonic()
        """When the client last said something."""
        self._is_greeted = False

    async def run(self) -> None:
        try:
            try:
                await self._talk()
            except PoolError as e:
                log.warning("%s disconnected: %s", self.name, e)
                if self._is_greeted:
                    await self._await_end()
            except OSError as e:
                log.info("%s is gone: %s", self.name, e)
        finally:
            for task in list(self._tasks):
                task.cancel()
            self._socket.close()
            self._ledger.leave_all(self._client)

    def end(self) -> None:
        """The client's process is dead, though something keeps its socket open."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def room_ended(self, room: RoomId) -> None:
        """Called on the loop's thread."""
        self._later(self._send(RoomEnded(room)))

    async def _talk(self) -> None:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                early = await self._greet()
        except TimeoutError:
            raise PoolError(f"no Hello within {HELLO_SECONDS:g} s") from None
        for call in early:
            await self._handle(call)
        while data := await self._loop.sock_recv(self._socket, RECEIVE_BYTES):
            self.heard = time.monotonic()
            for call in self._frames.feed(data):
                await self._handle(call)
        if not self._frames.is_between_frames:
            raise PoolError("it closed the connection in the middle of a frame")
        log.info("%s left", self.name)

    async def _greet(self) -> list[Call]:
        """Exchange Hello and Welcome; returns calls that came right behind."""
        calls: list[Call] = []
        while not calls:
            data = await self._loop.sock_recv(self._socket, RECEIVE_BYTES)
            if not data:
                raise PoolError("it closed the connection without a Hello")
            calls = self._frames.feed(data)
        hello = calls[0]
        if not isinstance(hello, Hello):
            raise PoolError(f"{type(hello).__name__} came before Hello")
        if hello.protocol != PROTOCOL:
            raise PoolError(f"it speaks version {hello.protocol} of the node's protocol, this node {PROTOCOL}")
        self.name = f"client {hello.name} ({hello.incarnation})"
        # A fresh socket takes this much without waiting; sendmsg is the one call that passes descriptors.
        socket.send_fds(self._socket, [frame(self._welcome)], [self._arena.fd])
        self._is_greeted = True
        log.info("%s joined", self.name)
        return calls[1:]

    async def _await_end(self) -> None:
        """A client that talks nonsense is refused but may still write into its rooms: they last until it is gone."""
        self._socket.shutdown(socket.SHUT_WR)
        try:
            while await self._loop.sock_recv(self._socket, RECEIVE_BYTES):
                pass
        except OSError:
            return

    async def _handle(self, call: Call) -> None:
        match call:
            case Complete():
                self._ledger.complete(self._client, RoomId(call.room), call.runs, call.checksums)
            case CloseRoom():
                self._ledger.close(self._client, RoomId(call.room))
            case Release():
                self._ledger.release(self._client, LeaseId(call.lease))
            case AwaitRoom():
                self._start(call.serial, self._await_room(call))
            case LeaseBlocks() if self._loader.is_needed(call.space.id, call.keys):
                self._start(call.serial, self._load_and_lease(call))
            case FetchBlocks():
                self._start(call.serial, self._fetch(call))
            case Hello():
                raise PoolError("a second Hello")
            case _:
                try:
                    answer = self._answer(call)
                except PoolError as e:
                    answer = RefusedCall(call.serial, str(e))
                await self._send(answer)

    def _answer(self, call: LeaseBlocks | OpenRoom | JoinRoom | Measure | Audit) -> Answer:
        match call:
            case LeaseBlocks():
                lease = self._ledger.lease(self._client, call.space, call.keys)
                return Leased(call.serial, lease.id, tuple(block.offset for block in lease.blocks))
            case OpenRoom():
                return _opened(call.serial, self._ledger.open(self._client, call.space, call.keys, call.tail_tokens))
            case JoinRoom():
                return _opened(call.serial, self._ledger.join(self._client, call.request, call.attempt))
            case Measure():
                return Measured(call.serial, self._measure())
            case Audit():
                try:
                    self._ledger.check_integrity()
                except AssertionError as e:
                    raise PoolError(f"the node's books are wrong: {e}") from e
                return Audited(call.serial)

    async def _await_room(self, call: AwaitRoom) -> None:
        seconds = call.time_left if 0 <= call.time_left <= LONGEST_SECONDS else LONGEST_SECONDS
        waiter = self._ledger.await_room(self._client, call.request, call.attempt)
        timer = self._loop.call_later(seconds, self._ledger.give_up, waiter)
        try:
            room = await asyncio.wrap_future(waiter)
        finally:
            timer.cancel()
        await self._send(RoomReady(call.serial) if room is None else _ready(call.serial, room))

    async def _load_and_lease(self, call: LeaseBlocks) -> None:
        with await self._loader.load(call.space, call.keys):
            try:
                answer = self._answer(call)
            except PoolError as e:
                answer = RefusedCall(call.serial, str(e))
        await self._send(answer)

    async def _fetch(self, call: FetchBlocks) -> None:
        try:
            readable = await self._fetcher.fetch(call.source, call.space, call.keys, call.time_left)
            answer: Answer = Fetched(call.serial, readable)
        except PoolError as e:
            answer = RefusedCall(call.serial, str(e))
        await self._send(answer)

    def _start(self, serial: int, work: Coroutine[None, None, None]) -> None:
        if len(self._tasks) >= MAX_OUTSTANDING:
            work.close()
            work = self._send(RefusedCall(serial, f"{MAX_OUTSTANDING} calls of this client wait already"))
        self._later(work)

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(self._quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first step never gets to its work.
        task.add_done_callback(lambda _: work.close())

    async def _quietly(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except OSError as e:
            log.debug("%s took no answer: %s", self.name, e)
        except Exception:
            log.exception("a call of %s failed", self.name)

    async def _send(self, answer: Answer) -> None:
        data = frame(answer)
        async with self._sending:
            await self._loop.sock_sendall(self._socket, data)


def _opened(serial: int, room: Room) -> RoomOpened:
    offsets = tuple(None if block is None or block.resident else block.offset for block in room.blocks)
    tail = None if room.tail is None else room.tail.offset
    return RoomOpened(serial, room.id, room.space, offsets, tail, room.tail_tokens)


def _ready(serial: int, room: Room) -> RoomReady:
    offsets = tuple(block.offset for block in room.blocks if block is not None)
    tail = None if room.tail is None else room.tail.offset
    return RoomReady(serial, room.id, room.space, offsets, tail, room.tail_tokens)
