"""One client of a node: its calls, one after another, and the answers that take longer.

What can be answered from the node's books is answered in the callback that read the call: a task or a future a call
would be most of its latency.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Coroutine

from moonpool.errors import PoolBusyError, PoolError
from moonpool.messenger.digest import copy_mark
from moonpool.messenger.questions import pack_sums, unpack_sums, unpacked
from moonpool.store.arena import Arena
from moonpool.store.bookings import BUSY_RETRY_SECONDS, BUSY_SECONDS
from moonpool.store.desk import Desk
from moonpool.store.fetch import Fetcher
from moonpool.store.holder import Holder
from moonpool.store.leases import LeaseId
from moonpool.store.ledger import Ledger
from moonpool.store.loader import Loader
from moonpool.store.messages import (
    PROTOCOL,
    Answer,
    Arrived,
    Ask,
    Audit,
    Audited,
    AwaitRoom,
    Call,
    CloseRoom,
    Commit,
    Committed,
    Complete,
    FetchBlocks,
    Fetched,
    Hello,
    JoinRoom,
    LeaseBlocks,
    Leased,
    LeasedEach,
    LeaseEach,
    Measure,
    Measured,
    OpenEach,
    OpenRoom,
    RefusedCall,
    Release,
    RoomEnded,
    RoomOpened,
    RoomReady,
    StreamBlocks,
    TellTokens,
    Told,
    Touch,
    UnreadableCall,
    Welcome,
    call_frames,
    frame,
)
from moonpool.store.rooms import ClientId, Room, RoomId
from moonpool.store.streaming import Streamer
from moonpool.wire.legible import legible

log = logging.getLogger(__name__)

HELLO_SECONDS = 5.0
LONGEST_SECONDS = 3600.0
RECEIVE_BYTES = 1 << 16
MAX_OUTSTANDING = 1024
"""Calls of one client that wait for something."""
NAME_CHARS = 64
"""Of what a client calls itself, in the log."""


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
        streamer: Streamer,
        desk: Desk,
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
        self._streamer = streamer
        self._desk = desk
        self._measure = measure
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._frames = call_frames()
        self._calls: deque[Call | UnreadableCall] = deque()
        """Read, but not yet taken; no more than one read brings."""
        self._unsent = bytearray()
        """What the client is too slow to take. Nothing more is read from it meanwhile."""
        self._over: asyncio.Future[None] = self._loop.create_future()
        """Resolved at the client's end, failed with PoolError where it talks nonsense."""
        self.name = f"client {client}"
        self.holder = holder
        self.heard = time.monotonic()
        """When the client last said something."""
        self._is_greeted = False

    async def run(self) -> None:
        try:
            self._loop.add_reader(self._socket, self._readable)
            timer = self._loop.call_later(HELLO_SECONDS, self._still_silent)
            try:
                await self._over
                log.info("%s left", self.name)
            except PoolError as e:
                log.warning("%s disconnected: %s", self.name, e)
                if self._is_greeted:
                    await self._await_end()
            except OSError as e:
                log.info("%s is gone: %s", self.name, e)
            finally:
                timer.cancel()
        finally:
            self._deafen()
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
        self._send(RoomEnded(room))

    def _arrived(self, arrived: Arrived) -> None:
        """On whatever thread. Some transfer may end when the loop is closed already."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._send, arrived)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
            self.heard = time.monotonic()
            if data:
                self._calls.extend(self._frames.feed(data))
        except (BlockingIOError, InterruptedError):
            return
        except (PoolError, OSError) as e:
            self._finish(e)
            return
        if data:
            self._work()
        else:
            self._left()

    def _work(self) -> None:
        """Take the calls that have come, as long as the client takes the answers."""
        try:
            while self._calls and not self._unsent:
                call = self._calls.popleft()
                if self._is_greeted:
                    self._take(call)
                else:
                    self._greet(call)
        except (PoolError, OSError) as e:
            self._finish(e)
        except Exception as e:
            log.exception("a call of %s failed", self.name)
            self._finish(PoolError(f"its call failed: {e}"))

    def _take(self, call: Call | UnreadableCall) -> None:
        """Raises PoolError for nonsense that has no answer to be refused by."""
        try:
            if isinstance(call, UnreadableCall):
                raise PoolError(call.reason)
            self._handle(call)
        except PoolError as e:
            serial: int | None = getattr(call, "serial", None)
            if serial is None:
                raise
            log.warning("a call of %s refused: %s", self.name, e)
            self._send(RefusedCall(serial, str(e)))

    def _left(self) -> None:
        if not self._is_greeted:
            self._finish(PoolError("it closed the connection without a Hello"))
        elif not self._frames.is_between_frames:
            self._finish(PoolError("it closed the connection in the middle of a frame"))
        else:
            self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        self._deafen()
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def _deafen(self) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)

    def _still_silent(self) -> None:
        if not self._is_greeted:
            self._finish(PoolError(f"no Hello within {HELLO_SECONDS:g} s"))

    def _greet(self, hello: Call | UnreadableCall) -> None:
        if not isinstance(hello, Hello):
            raise PoolError(f"{type(hello).__name__} came before Hello")
        if hello.protocol != PROTOCOL:
            raise PoolError(f"it speaks version {hello.protocol} of the node's protocol, this node {PROTOCOL}")
        self.name = f"client {legible(hello.name, NAME_CHARS)} ({legible(hello.incarnation, NAME_CHARS)})"
        # A fresh socket takes this much without waiting; sendmsg is the one call that passes descriptors.
        socket.send_fds(self._socket, [frame(self._welcome)], [self._arena.fd, self._arena.board.fd])
        self._is_greeted = True
        log.info("%s joined", self.name)

    async def _await_end(self) -> None:
        """A client that talks nonsense is refused but may still write into its rooms: they last until it is gone."""
        self._socket.shutdown(socket.SHUT_WR)
        try:
            while await self._loop.sock_recv(self._socket, RECEIVE_BYTES):
                pass
        except OSError:
            return

    def _handle(self, call: Call) -> None:
        match call:
            case Complete():
                self._ledger.rooms.complete(self._client, RoomId(call.room), call.runs, call.checksums)
            case TellTokens():
                self._ledger.rooms.tell_tokens(self._client, RoomId(call.room), call.tokens)
            case CloseRoom():
                self._ledger.rooms.close(self._client, RoomId(call.room))
            case Release():
                self._ledger.leases.end(self._client, LeaseId(call.lease))
            case Touch():
                self._ledger.leases.touch(call.space, unpacked(call.keys))
            case AwaitRoom():
                self._start(call.serial, self._await_room(call))
            case LeaseBlocks() if self._loader.is_needed(call.space.id, call.keys):
                self._start(call.serial, self._load_and_lease(call))
            case FetchBlocks():
                self._start(call.serial, self._fetch(call))
            case Ask():
                reply = self._desk.answer_now(call.question)
                if reply is None:
                    self._start(call.serial, self._ask(call))
                else:
                    self._send(Told(call.serial, reply))
            case LeaseEach():
                if self._desk.is_ready(call.space.id, unpacked(call.keys), call.waits):
                    self._send(self._answered(call))
                else:
                    self._start(call.serial, self._bring_and_lease(call))
            case OpenEach():
                self._open_each(call)
            case StreamBlocks() if call.source is not None and call.fetched:
                self._start(call.serial, self._stream(call))
            case Hello():
                raise PoolError("a second Hello")
            case _:
                self._send(self._answered(call))

    def _answered(
        self, call: LeaseBlocks | LeaseEach | StreamBlocks | OpenRoom | OpenEach | Commit | JoinRoom | Measure | Audit
    ) -> Answer:
        try:
            return self._answer(call)
        except PoolError as e:
            return RefusedCall(call.serial, str(e))

    def _answer(
        self, call: LeaseBlocks | LeaseEach | StreamBlocks | OpenRoom | OpenEach | Commit | JoinRoom | Measure | Audit
    ) -> Answer:
        match call:
            case LeaseBlocks():
                lease = self._ledger.leases.leading(self._client, call.space, call.keys)
                marks = pack_sums([copy_mark(block.checksums) for block in lease.blocks]) if call.marks else b""
                return Leased(call.serial, lease.id, tuple(block.offset for block in lease.blocks), marks)
            case LeaseEach():
                lease, found = self._ledger.leases.each(self._client, call.space, unpacked(call.keys))
                offsets = [-1 if block is None else block.offset for block in found]
                return LeasedEach(call.serial, lease.id, struct.pack(f"<{len(offsets)}q", *offsets))
            case StreamBlocks():
                return self._streamer.begin(self._client, call, self._arrived)
            case OpenRoom():
                return _opened(call.serial, self._open_room(call))
            case OpenEach():
                keys = unpacked(call.keys)
                return _opened(call.serial, self._ledger.rooms.open_each(self._client, call.space, keys, call.metas))
            case Commit():
                self._ledger.rooms.commit(self._client, RoomId(call.room), unpack_sums(call.checksums))
                return Committed(call.serial)
            case JoinRoom():
                return _opened(call.serial, self._ledger.rooms.join(self._client, call.request, call.attempt))
            case Measure():
                return Measured(call.serial, self._measure())
            case Audit():
                try:
                    self._ledger.check_integrity()
                except AssertionError as e:
                    raise PoolError(f"the node's books are wrong: {e}") from e
                return Audited(call.serial)

    def _open_room(self, call: OpenRoom) -> Room:
        name = None if call.request is None else (call.request, call.attempt)
        return self._ledger.rooms.open(self._client, call.space, call.keys, call.tail_tokens, name=name)

    def _open_each(self, call: OpenEach) -> None:
        try:
            answer = self._answer(call)
        except PoolBusyError:
            self._start(call.serial, self._open_soon(call))
            return
        except PoolError as e:
            answer = RefusedCall(call.serial, str(e))
        self._send(answer)

    async def _open_soon(self, call: OpenEach) -> None:
        """Room is made as soon as an SSD has written what it writes: in some milliseconds."""
        until = time.monotonic() + min(call.time_left, BUSY_SECONDS)
        while True:
            await asyncio.sleep(BUSY_RETRY_SECONDS)
            try:
                answer = self._answer(call)
            except PoolBusyError as e:
                if time.monotonic() < until:
                    continue
                answer = RefusedCall(call.serial, str(e))
            except PoolError as e:
                answer = RefusedCall(call.serial, str(e))
            self._send(answer)
            return

    async def _await_room(self, call: AwaitRoom) -> None:
        seconds = call.time_left if 0 <= call.time_left <= LONGEST_SECONDS else LONGEST_SECONDS
        waiter = self._ledger.rooms.await_room(self._client, call.request, call.attempt)
        timer = self._loop.call_later(seconds, self._ledger.rooms.give_up, waiter)
        try:
            room = await asyncio.wrap_future(waiter)
        finally:
            timer.cancel()
        self._send(RoomReady(call.serial) if room is None else _ready(call.serial, room))

    async def _load_and_lease(self, call: LeaseBlocks) -> None:
        with await self._loader.load(call.space, call.keys):
            answer = self._answered(call)
        self._send(answer)

    async def _bring_and_lease(self, call: LeaseEach) -> None:
        seconds = min(call.time_left, LONGEST_SECONDS)
        with await self._desk.bring(call.space, unpacked(call.keys), seconds, call.waits):
            answer = self._answered(call)
        self._send(answer)

    async def _ask(self, call: Ask) -> None:
        self._send(Told(call.serial, await self._desk.answer(call.question)))

    async def _stream(self, call: StreamBlocks) -> None:
        try:
            answer = self._answered(await self._streamer.asked(self._client, call))
        except PoolError as e:
            answer = RefusedCall(call.serial, str(e))
        self._send(answer)

    async def _fetch(self, call: FetchBlocks) -> None:
        try:
            readable = await self._fetcher.fetch(call.source, call.space, call.keys, call.time_left)
            answer: Answer = Fetched(call.serial, readable)
        except PoolError as e:
            answer = RefusedCall(call.serial, str(e))
        self._send(answer)

    def _start(self, serial: int, work: Coroutine[None, None, None]) -> None:
        if len(self._tasks) >= MAX_OUTSTANDING:
            work.close()
            self._send(RefusedCall(serial, f"{MAX_OUTSTANDING} calls of this client wait already"))
            return
        task = self._loop.create_task(self._quietly(serial, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first step never gets to its work.
        task.add_done_callback(lambda _: work.close())

    async def _quietly(self, serial: int, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except Exception as e:
            log.exception("a call of %s failed", self.name)
            self._send(RefusedCall(serial, f"the node failed at it: {e}"))

    def _send(self, answer: Answer) -> None:
        """What the socket does not take at once goes later; the client is not listened to before it is gone.

        So no more than one answer and those to MAX_OUTSTANDING calls ever wait.
        """
        data = frame(answer)
        if self._over.done():
            return
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as e:
            self._finish(e)
            return
        if sent < len(data):
            self._unsent += data[sent:]
            self._loop.remove_reader(self._socket)
            self._loop.add_writer(self._socket, self._writable)

    def _writable(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as e:
            self._finish(e)
            return
        if not self._unsent:
            self._loop.remove_writer(self._socket)
            self._loop.add_reader(self._socket, self._readable)
            self._work()


def _opened(serial: int, room: Room) -> RoomOpened:
    offsets = tuple(None if block is None or block.resident else block.offset for block in room.blocks)
    tail = None if room.tail is None else room.tail.offset
    return RoomOpened(serial, room.id, room.space, offsets, tail, room.tail_tokens)


def _ready(serial: int, room: Room) -> RoomReady:
    offsets = tuple(block.offset for block in room.blocks if block is not None)
    tail = None if room.tail is None else room.tail.offset
    return RoomReady(serial, room.id, room.space, offsets, tail, room.tail_tokens)
