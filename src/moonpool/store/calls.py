"""Calls over a node's Unix socket in the calling threads: no other thread stands between a call and its answer.

Of several threads that wait, one reads for all of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import count

from moonpool.core.vocabulary import PartId
from moonpool.errors import PoolError
from moonpool.store.messages import Answer, Arrived, Call, Frames, RefusedCall, RoomEnded, Welcome, frame

log = logging.getLogger(__name__)

SEND_SECONDS = 5.0
SPIN_SECONDS = 100e-6
"""How long a caller looks for its answer before it sleeps."""
RECEIVE_BYTES = 1 << 16
_TIMEVAL = struct.Struct("ll")


class LostError(PoolError):
    """The node, or this connection to it, is gone."""


class _Own(threading.local):
    """What each thread has for itself: a poll object serves one at a time."""

    def __init__(self, sock: socket.socket, alarm: int) -> None:
        self.poll = select.poll()
        self.poll.register(alarm, select.POLLIN)
        self.poll.register(sock, select.POLLIN | select.POLLRDHUP)


class Caller:
    """Thread-safe."""

    def __init__(
        self, sock: socket.socket, frames: Frames[Answer], node: PartId, dispose: Callable[[Caller, Answer], None]
    ) -> None:
        """`sock` has been welcomed by the node. `dispose` of an answer that comes when nobody waits for it any more."""
        self._socket = sock
        self._frames = frames
        self._node = node
        self._dispose = dispose
        self._sending = threading.Lock()
        # Entered as a lock and not as a condition, whose own way in is of Python: an exception of a signal handler
        # in there would leave it taken.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._serials = count(1)
        self._waiting: set[int] = set()
        self._answers: dict[int, Answer] = {}
        self._is_reading = False
        self._copies = 0
        self._gone = ""
        self._closed = False
        self._alarm = os.eventfd(0, os.EFD_CLOEXEC)
        """Readable once the node is gone, for whoever reads: the connection itself may have to stay for a while."""
        weakref.finalize(self, os.close, self._alarm)
        sock.settimeout(None)
        # A node that takes nothing for so long is as good as gone. Who reads polls first, with the call's deadline.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(SEND_SECONDS), 0))
        self._own = _Own(sock, self._alarm)

    def call(self, make: Callable[[int], Call], seconds: float) -> Answer:
        """The answer to a call, made with its serial. Raises PoolError: refused or too late; LostError."""
        until = time.monotonic() + seconds
        serial = next(self._serials)
        data = frame(make(serial))
        with self._lock:
            self._check()
            self._waiting.add(serial)
        try:
            self._send(data)
            answer = self._await(serial, until)
        finally:
            with self._lock:
                self._waiting.discard(serial)
                late = self._answers.pop(serial, None)
            if late is not None:
                self._dispose(self, late)
        if isinstance(answer, RefusedCall):
            raise PoolError(answer.reason)
        return answer

    def post(self, call: Call) -> None:
        """A call that has no answer, for the end of something that ends with the node anyhow."""
        with contextlib.suppress(PoolError):
            self._send(frame(call))

    def is_quiet(self) -> bool:
        """Whether the node is there and has said nothing that was not heard yet."""
        return not (self._gone or self._own.poll.poll(0))

    def check_lasting(self) -> None:
        """Raises LostError where the node has taken back what this client was lent."""
        if not self._gone:
            ends = select.POLLHUP | select.POLLRDHUP | select.POLLERR
            if any(event & ends for _, event in self._own.poll.poll(0)):
                self._lose("it closed the connection")
        if self._gone and not self._closed:
            raise LostError(
                f"what was read may be wrong: the connection to the node {self._node} was lost meanwhile ({self._gone})"
            )

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """While the node's memory is read or written that this client was lent. Raises PoolError, LostError.

        The connection lasts as long, whoever closes this client: after it the node lends the memory to others.
        """
        with self._lock:
            self._check()
            self._copies += 1
        try:
            yield
        finally:
            with self._lock:
                self._copies -= 1
                self._shut_if_gone()

    def forget(self) -> None:
        """Close the socket only: another process goes on using it."""
        self._socket.close()

    def close(self) -> None:
        """Calls that run fail at once, or when they have copied."""
        self._closed = True
        self.drop()

    def drop(self) -> None:
        """As `close`, but what was leased counts as lost."""
        self._lose("this client was closed")
        with self._lock:
            is_over = self._changed.wait_for(lambda: not (self._is_reading or self._copies), SEND_SECONDS)
        if is_over:
            self._socket.close()

    def _await(self, serial: int, until: float) -> Answer:
        reads = False
        try:
            with self._lock:
                while (answer := self._answers.pop(serial, None)) is None:
                    self._check()
                    if not self._is_reading:
                        self._is_reading = reads = True
                        break
                    if not self._changed.wait(until - time.monotonic()) and time.monotonic() >= until:
                        raise self._late()
                else:
                    return answer
            return self._read_until(serial, until)
        finally:
            if reads:
                with self._lock:
                    self._is_reading = False
                    self._changed.notify_all()

    def _read_until(self, serial: int, until: float) -> Answer:
        while True:
            seconds = until - time.monotonic()
            if seconds <= 0 or not (self._is_soon() or self._own.poll.poll(seconds * 1000)):
                raise self._late()
            with self._lock:
                self._check()
            answers = self._receive()
            found: Answer | None = None
            unwanted: list[Answer] = []
            with self._lock:
                for answer in answers:
                    if isinstance(answer, RoomEnded | Arrived | Welcome):
                        continue
                    if answer.serial == serial:
                        found = answer
                    elif answer.serial in self._waiting:
                        self._answers[answer.serial] = answer
                        self._changed.notify_all()
                    else:
                        unwanted.append(answer)
            for answer in unwanted:
                self._dispose(self, answer)
            if found is not None:
                return found

    def _is_soon(self) -> bool:
        """Whether an answer comes at once: most do, and to sleep and be woken takes longer than they."""
        until = time.perf_counter() + SPIN_SECONDS
        while not self._own.poll.poll(0):
            if time.perf_counter() >= until:
                return False
        return True

    def _receive(self) -> list[Answer]:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
            answers = self._frames.feed(data)
        except (OSError, PoolError) as e:
            self._lose(str(e))
            data, answers = b"", []
        if not data:
            self._lose("it closed the connection")
            with self._lock:
                self._check()
        return answers

    def _send(self, data: bytes) -> None:
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError as e:
            # Half a frame may be on its way: the connection is of no more use.
            self._lose(e.strerror or str(e))
            with self._lock:
                self._check()

    def _lose(self, why: str) -> None:
        with self._lock:
            self._gone = self._gone or why
            os.eventfd_write(self._alarm, 1)
            self._shut_if_gone()

    def _shut_if_gone(self) -> None:
        """The lock is held."""
        if self._gone and not self._copies:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._changed.notify_all()

    def _check(self) -> None:
        if self._closed:
            raise PoolError(f"the node {self._node}: this client was closed")
        if self._gone:
            raise LostError(f"the node {self._node} is gone ({self._gone})")

    def _late(self) -> PoolError:
        return PoolError(f"the node {self._node} did not answer in time: it is stopped or overloaded")
