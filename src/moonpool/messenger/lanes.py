"""A few connections to one peer, each with a thread that carries one transfer after another."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from moonpool.errors import TransferError
from moonpool.messenger.channel import Channel, greet

T = TypeVar("T")

CONNECT_SECONDS = 5.0
IDLE_SECONDS = 30.0
CLOSE_SECONDS = 5.0


class RefusedError(TransferError):
    """The peer answered no; the connection is still good."""


@dataclass(slots=True, eq=False)
class _Transfer(Generic[T]):
    work: Callable[[Channel], T]
    until: float
    future: Future[T] = field(default_factory=Future)


class Lanes:
    """Threads and connections come with the work, up to `limit`, and go when there was none for IDLE_SECONDS.

    A transfer whose connection breaks is tried once more on a new one, so `work` must be repeatable.
    """

    def __init__(self, address: str, key: bytes, limit: int) -> None:
        self._address = address
        self._key = key
        self._limit = limit
        self._changed = threading.Condition()
        self._queue: deque[_Transfer[Any]] = deque()
        self._threads: set[threading.Thread] = set()
        self._channels: set[Channel] = set()
        self._idle = 0
        self._is_watched = False
        self._closed = False

    def submit(self, work: Callable[[Channel], T], until: float) -> Future[T]:
        """The future fails with TransferError at `until` (monotonic) at the latest, give or take a system call."""
        transfer = _Transfer(work, until)
        with self._changed:
            if self._closed:
                _fail(transfer, TransferError(f"Messenger is closed; nothing more goes to {self._address}"))
                return transfer.future
            self._queue.append(transfer)
            if len(self._queue) > self._idle and len(self._threads) < self._limit:
                self._start(self._carry)
            elif len(self._queue) > self._idle and not self._is_watched:
                self._is_watched = True
                self._start(self._expire_queued)
            self._changed.notify_all()
        return transfer.future

    def close(self) -> None:
        """Running and queued transfers fail at once."""
        with self._changed:
            self._closed = True
            queued, self._queue = self._queue, deque()
            channels, threads = list(self._channels), list(self._threads)
            self._changed.notify_all()
        for transfer in queued:
            _fail(transfer, TransferError(f"Messenger was closed before the transfer with {self._address} began"))
        for channel in channels:
            channel.shut()
        until = time.monotonic() + CLOSE_SECONDS
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"messenger {self._address}", daemon=True)
        if target == self._carry:
            self._threads.add(thread)
        thread.start()

    def _carry(self) -> None:
        channel: Channel | None = None
        try:
            while (transfer := self._next()) is not None:
                channel = self._attempt(transfer, channel)
        finally:
            self._drop(channel)
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _next(self) -> _Transfer[Any] | None:
        until = time.monotonic() + IDLE_SECONDS
        with self._changed:
            while not self._queue:
                if self._closed or time.monotonic() >= until:
                    # Out of the set under the lock: from now on `submit` must not count on this thread.
                    self._threads.discard(threading.current_thread())
                    return None
                self._idle += 1
                self._changed.wait(until - time.monotonic())
                self._idle -= 1
            return self._queue.popleft()

    def _attempt(self, transfer: _Transfer[Any], channel: Channel | None) -> Channel | None:
        """Run one transfer; returns the connection if it is still good."""
        if not transfer.future.set_running_or_notify_cancel():
            return channel
        failure: Exception | None = None
        for _ in range(2):
            try:
                channel = channel or self._connect(transfer.until)
                result = transfer.work(channel)
            except RefusedError as e:
                transfer.future.set_exception(e)
                return channel
            except TimeoutError:
                failure = TransferError(f"the transfer with {self._address} was not over by its deadline")
                break
            except (OSError, EOFError) as e:
                failure = TransferError(f"the connection to {self._address} broke: {e or 'closed by the peer'}")
                self._drop(channel)
                channel = None
                if self._closed or time.monotonic() >= transfer.until:
                    break
            except Exception as e:
                failure = e
                break
            else:
                transfer.future.set_result(result)
                return channel
        self._drop(channel)
        transfer.future.set_exception(failure)
        return None

    def _connect(self, until: float) -> Channel:
        seconds = min(CONNECT_SECONDS, until - time.monotonic())
        if seconds <= 0:
            raise TimeoutError
        host, _, port = self._address.rpartition(":")
        channel = Channel(socket.create_connection((host.strip("[]"), int(port)), seconds))
        with self._changed:
            self._channels.add(channel)
            if self._closed:
                channel.shut()
        try:
            greet(channel, self._key, until)
        except BaseException:
            self._drop(channel)
            raise
        return channel

    def _drop(self, channel: Channel | None) -> None:
        if channel is not None:
            with self._changed:
                self._channels.discard(channel)
            channel.close()

    def _expire_queued(self) -> None:
        """While transfers wait for a lane: fail those whose deadline passes."""
        while True:
            with self._changed:
                now = time.monotonic()
                late = [transfer for transfer in self._queue if transfer.until <= now]
                for transfer in late:
                    self._queue.remove(transfer)
                if not late:
                    if not self._queue:
                        self._is_watched = False
                        return
                    self._changed.wait(min(transfer.until for transfer in self._queue) - now)
            for transfer in late:
                _fail(transfer, TransferError(f"the transfer with {self._address} did not begin before its deadline"))


def _fail(transfer: _Transfer[Any], error: TransferError) -> None:
    if transfer.future.set_running_or_notify_cancel():
        transfer.future.set_exception(error)
