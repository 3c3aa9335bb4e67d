"""A process's access to the node of its host: views of the arena instead of copies (docs/protocol.md).

Calls return concurrent futures: `.result(timeout)` on a thread, `asyncio.wrap_future` in a coroutine. They fail with
PoolError, also when the node goes away. Views are numpy arrays over shared memory: those of readable blocks must not be
written, and none may be used after the lease or room it came from is closed.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from moonpool.core.vocabulary import BlockKey, Incarnation, KeySpace, NodePeer, PartId, RequestId
from moonpool.errors import NodeUnreachableError, PoolError
from moonpool.messenger.questions import Question, Reply, packed, unpack_sums
from moonpool.messenger.transfer import Bytes
from moonpool.store.arena import map_arena
from moonpool.store.board import BoardView
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
    Complete,
    FetchBlocks,
    Fetched,
    Frames,
    Hello,
    JoinRoom,
    LeaseBlocks,
    Leased,
    LeasedEach,
    LeaseEach,
    Measure,
    Measured,
    OpenRoom,
    Release,
    RoomEnded,
    RoomOpened,
    RoomReady,
    StreamBlocks,
    Streaming,
    TellTokens,
    Told,
    Welcome,
    answer_frames,
    frame,
)
from moonpool.store.pending import Pending, awaited
from moonpool.store.views import Found, Lease, Room, RoomContents, Stream

log = logging.getLogger(__name__)

T = TypeVar("T")

__all__ = ["NodeClient", "awaited"]

SEND_SECONDS = 5.0
CLOSE_SECONDS = 5.0
RECEIVE_BYTES = 1 << 16
_TIMEVAL = struct.Struct("ll")
_CREDENTIALS = struct.Struct("3i")


class NodeClient:
    """One connection to a node; thread-safe. The node treats its end as this process's death."""

    @classmethod
    def connect(cls, path: str | Path, *, name: str, incarnation: str, timeout: float = 5.0) -> NodeClient:
        """Raises PoolError if no node answers at the socket `path` within `timeout` seconds."""
        sock = open_socket(path, name, timeout, timeout)
        try:
            return cls(sock, name, incarnation)
        except (OSError, PoolError) as e:
            sock.close()
            raise PoolError(f"the node at {path} did not let {name} in: {e}") from None

    def __init__(self, sock: socket.socket, name: str, incarnation: str) -> None:
        """Use `connect`."""
        self.on_lost: Callable[[], None] | None = None
        """Called once, on the client's thread, when the node has gone away."""
        self._socket = sock
        self._frames = answer_frames()
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._pending: dict[int, Pending[Any]] = {}
        self._rooms: dict[int, Room] = {}
        self._streams: dict[int, Stream] = {}
        self._serials = count(1)
        self._closed = False
        self._gone = False
        entrance = enter(sock, self._frames, name, incarnation)
        self.node, self.node_incarnation, self.arena = entrance.node, entrance.incarnation, entrance.arena
        self.board = entrance.board
        """Where blocks in the node's DRAM are found without asking it; true as of a moment ago."""
        # Only sends are limited: a node that takes nothing for so long is as good as gone. The reader waits for ever.
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(SEND_SECONDS), 0))
        self._reader = threading.Thread(target=self._receive, name=f"client of {self.node}", daemon=True)
        self._reader.start()

    def lease(self, space: KeySpace, keys: Sequence[BlockKey], marks: bool = False) -> Future[Lease]:
        """The longest leading run of readable blocks, in place until the lease is closed.

        `marks`: with `Lease.marks`, which say which copy of a block each is.
        """

        def accept(answer: Answer) -> Lease:
            assert isinstance(answer, Leased)
            number = answer.lease
            views = [self._view(offset, space.block_bytes, writable=False) for offset in answer.offsets]
            return Lease(lambda: self._send_last(Release(number)), views, answer.offsets, unpack_sums(answer.marks))

        return self._call(lambda serial: LeaseBlocks(serial, space, tuple(keys), marks), accept)

    def lease_each(self, space: KeySpace, keys: Sequence[BlockKey], time_left: float) -> Future[Found]:
        """Those of these blocks that the node has in any tier, or gets from others within `time_left` seconds."""

        def accept(answer: Answer) -> Found:
            assert isinstance(answer, LeasedEach)
            number, size = answer.lease, space.block_bytes
            offsets = struct.unpack(f"<{len(keys)}q", answer.offsets)
            views = [None if at < 0 else self._view(at, size, writable=False) for at in offsets]
            return Found(lambda: self._send_last(Release(number)), views)

        seconds = max(0.0, time_left)
        return self._call(lambda serial: LeaseEach(serial, space, packed(keys), seconds, waits=False), accept)

    def ask(self, question: Question) -> Future[Reply]:
        """The node's answer, a refusal included."""

        def accept(answer: Answer) -> Reply:
            assert isinstance(answer, Told)
            return answer.reply

        return self._call(lambda serial: Ask(serial, question), accept)

    def fetch(self, source: NodePeer, space: KeySpace, keys: Sequence[BlockKey], time_left: float) -> Future[int]:
        """Have the node pull what it lacks from `source`; the number of leading keys readable here afterwards."""

        def accept(answer: Answer) -> int:
            assert isinstance(answer, Fetched)
            return answer.readable

        return self._call(lambda serial: FetchBlocks(serial, source, space, tuple(keys), time_left), accept)

    def stream(
        self,
        space: KeySpace,
        keys: Sequence[BlockKey],
        source: NodePeer | None,
        fetched: int,
        time_left: float,
        marks: bool = False,
    ) -> Future[Stream]:
        """The leading blocks that the node has in any tier, or gets from `source`, which is asked for the first
        `fetched` keys; their layers come in order and are readable as they do. `marks`: with `Stream.marks`.
        """

        def accept(answer: Answer) -> Stream:
            assert isinstance(answer, Streaming)
            number = answer.room
            views = [self._view(offset, space.block_bytes, writable=False) for offset in answer.offsets]
            close = partial(self._close_room, number)
            stream = Stream(close, number, views, answer.runs, answer.whole, answer.is_over, unpack_sums(answer.marks))
            with self._lock:
                self._streams[number] = stream
            return stream

        return self._call(
            lambda serial: StreamBlocks(serial, space, tuple(keys), source, fetched, max(0.0, time_left), marks), accept
        )

    def open_room(
        self,
        space: KeySpace,
        keys: Sequence[BlockKey],
        tail_tokens: int = 0,
        name: tuple[RequestId, int] | None = None,
    ) -> Future[Room]:
        """Room for caching: as many leading keys as there is space for. `keys` start at the prompt's first block.

        `name`: others may join it under this request and attempt.
        """
        named = (None, 0) if name is None else name
        return self._call(lambda serial: OpenRoom(serial, space, tuple(keys), tail_tokens, *named), self._accept_room)

    def join_room(self, request: RequestId, attempt: int) -> Future[Room]:
        """The hand-over room that the Conductor reserved on this node, or a caching room of that name, to write.

        PoolError if there is none.
        """
        return self._call(lambda serial: JoinRoom(serial, request, attempt), self._accept_room)

    def tell_tokens(self, room: Room | RoomContents | Stream, tokens: Sequence[int]) -> None:
        """What the blocks of the room are of, from the prompt's first token on, for those who look into the pool.

        Before `complete`, whoever hears of a block hears of its tokens. One-way and cheap. Raises PoolError if the
        node is gone.
        """
        ids = array("I", tokens)
        if sys.byteorder == "big":
            ids.byteswap()
        self._send(TellTokens(room.id, ids.tobytes()))

    def complete(self, room: Room, runs: Sequence[tuple[int, int, int]], checksums: Sequence[int]) -> None:
        """These (block or TAIL, first run, number of runs) are written; one checksum a run, in that order.

        One-way and cheap. Raises PoolError if the node is gone.
        """
        if runs and not room.ended:
            self._send(Complete(room.id, tuple(runs), tuple(checksums)))

    def await_room(self, request: RequestId, attempt: int, time_left: float) -> Future[RoomContents | None]:
        """The contents of a hand-over room when they are all readable; None if that will not be, or not in time."""

        def accept(answer: Answer) -> RoomContents | None:
            assert isinstance(answer, RoomReady)
            if not answer.room or answer.space is None:
                return None
            number, space = answer.room, answer.space
            blocks = [self._view(offset, space.block_bytes, writable=False) for offset in answer.offsets]
            tail = self._tail(space, answer.tail, answer.tail_tokens, writable=False)
            return RoomContents(lambda: self._send_last(CloseRoom(number)), number, space, blocks, tail)

        return self._call(lambda serial: AwaitRoom(serial, request, attempt, time_left), accept)

    def close_room(self, room: Room | RoomContents) -> None:
        """The same as `room.close()`."""
        room.close()

    def stats(self) -> Future[dict[str, float]]:
        """The node's counters and gauges."""

        def accept(answer: Answer) -> dict[str, float]:
            assert isinstance(answer, Measured)
            return answer.values

        return self._call(Measure, accept)

    def audit(self) -> Future[None]:
        """Have the node check its books (slow, for tests and diagnosis); PoolError says what is wrong with them."""

        def accept(answer: Answer) -> None:
            assert isinstance(answer, Audited)

        return self._call(Audit, accept)

    @property
    def is_gone(self) -> bool:
        """The node has gone away, or this client was closed: its calls fail."""
        return self._gone or self._closed

    def close(self) -> None:
        """Leave the node: all leases and rooms of this client end. Nothing may be reading or writing views any more."""
        with self._lock:
            self._closed = True
        _shut(self._socket)
        if threading.current_thread() is not self._reader:
            self._reader.join(CLOSE_SECONDS)
        self._socket.close()

    def __enter__(self) -> NodeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _view(self, offset: int, nbytes: int, writable: bool) -> Bytes:
        view = self.arena[offset : offset + nbytes]
        view.flags.writeable = writable
        return view

    def _tail(self, space: KeySpace, offset: int | None, tokens: int, writable: bool) -> Bytes | None:
        return None if offset is None else self._view(offset, space.tail_run_bytes(tokens) * space.runs, writable)

    def _accept_room(self, answer: Answer) -> Room:
        assert isinstance(answer, RoomOpened)
        number, space = answer.room, answer.space
        views = [
            None if offset is None else self._view(offset, space.block_bytes, writable=True)
            for offset in answer.offsets
        ]
        tail = self._tail(space, answer.tail, answer.tail_tokens, writable=True)
        room = Room(lambda: self._close_room(number), number, space, views, tail)
        with self._lock:
            self._rooms[number] = room
        return room

    def _close_room(self, number: int) -> None:
        with self._lock:
            self._rooms.pop(number, None)
            self._streams.pop(number, None)
        self._send_last(CloseRoom(number))

    def _call(self, make: Callable[[int], Call], accept: Callable[[Answer], T]) -> Future[T]:
        future: Future[T] = Future()
        serial = next(self._serials)
        with self._lock:
            if self._gone or self._closed:
                raise PoolError(f"the node {self.node} is gone")
            self._pending[serial] = Pending(future, accept)
        try:
            self._send(make(serial))
        except BaseException:
            with self._lock:
                self._pending.pop(serial, None)
            raise
        return future

    def _send(self, call: Call) -> None:
        data = frame(call)
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError as e:
            # Half a frame may be on its way: the connection is of no more use.
            _shut(self._socket)
            raise PoolError(f"the node {self.node} is gone: {e.strerror or e}") from None

    def _send_last(self, call: Call) -> None:
        """For the end of something that ends with the node anyhow."""
        try:
            self._send(call)
        except PoolError as e:
            log.debug("%s not sent: %s", type(call).__name__, e)

    def _receive(self) -> None:
        try:
            while data := self._socket.recv(RECEIVE_BYTES):
                for answer in self._frames.feed(data):
                    self._take(answer)
        except OSError as e:
            log.debug("connection to %s: %s", self.node, e)
        except Exception:
            log.exception("connection to %s given up", self.node)
        self._lose()

    def _take(self, answer: Answer) -> None:
        if isinstance(answer, RoomEnded):
            with self._lock:
                room = self._rooms.get(answer.room)
            if room is not None:
                room.ended = True
            return
        if isinstance(answer, Arrived):
            with self._lock:
                stream = self._streams.get(answer.room)
            if stream is not None:
                stream.change(answer.runs, answer.whole, answer.is_over, unpack_sums(answer.marks))
            return
        if isinstance(answer, Welcome):
            raise PoolError("a second Welcome")
        with self._lock:
            pending = self._pending.pop(answer.serial, None)
        if pending is not None:
            pending.resolve(answer)

    def _lose(self) -> None:
        _shut(self._socket)
        with self._lock:
            self._gone = True
            was_closed = self._closed
            pending, self._pending = self._pending, {}
            rooms, self._rooms = self._rooms, {}
            streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.change(0, 0, is_over=True)
        for room in rooms.values():
            room.ended = True
        for call in pending.values():
            call.fail(PoolError(f"the node {self.node} is gone"))
        if not was_closed:
            log.warning("the node %s is gone", self.node)
            if self.on_lost is not None:
                self.on_lost()


def open_socket(path: str | Path, name: str, timeout: float, start_timeout: float) -> socket.socket:
    """Connected to the node that listens at `path`, which takes it in within `timeout` seconds.

    Raises NodeUnreachableError where none listens after `start_timeout` seconds, PoolError for anything else.
    """
    until = time.monotonic() + start_timeout
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.01, timeout))
            sock.connect(str(path))
            return sock
        except (FileNotFoundError, ConnectionRefusedError) as e:
            sock.close()
            if time.monotonic() >= until:
                hint = "" if "/" in str(path) else "; give the path of a node's socket, or host:port"
                message = f"no node listens at {path}: {e.strerror}{hint}"
                raise NodeUnreachableError(message, is_starting=True) from None
            time.sleep(0.05)
        except OSError as e:
            sock.close()
            raise PoolError(f"the node at {path} did not let {name} in: {e}") from None


@dataclass(frozen=True, slots=True)
class Entrance:
    node: PartId
    incarnation: Incarnation
    arena: Bytes
    """To write blocks into."""
    readable: Bytes
    """The same memory, which this process can only read by it, whatever it makes of the array."""
    board: BoardView


def enter(sock: socket.socket, frames: Frames[Answer], name: str, incarnation: str) -> Entrance:
    """Hello and Welcome. Raises OSError or PoolError."""
    process, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise PoolError(f"process {process}, which listens there, belongs to user {user}, not to {os.geteuid()}")
    sock.sendall(frame(Hello(PROTOCOL, name, incarnation)))
    descriptors: list[int] = []
    try:
        answers: list[Answer] = []
        while not answers:
            data, received, _, _ = socket.recv_fds(sock, RECEIVE_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
            descriptors += received
            if not data:
                raise PoolError("it closed the connection")
            answers = frames.feed(data)
        welcome = answers[0]
        if not isinstance(welcome, Welcome) or len(descriptors) != 2:
            raise PoolError("it did not answer Hello with its arena and its board")
        arena, board = descriptors
        return Entrance(
            welcome.node,
            welcome.incarnation,
            map_arena(arena, welcome.arena_bytes),
            map_arena(arena, welcome.arena_bytes, writable=False),
            BoardView(board, welcome.board_entries),
        )
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
