"""Work on requests' bodies that takes long, on threads of its own.

What has not begun waits here and not in the executor, so that it is counted, refused when there is too much of it, and
dropped with its client.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

from moonpool.core.vocabulary import RejectReason
from moonpool.gateway.bodies import Body
from moonpool.gateway.presence import CLIENT_GONE
from moonpool.gateway.problem import ApiError, ClientGoneError, refused

WEIGHT = 0.1
"""Of the newest piece of work in the average."""

Check = Callable[[], None]
"""Raises ClientGoneError when nobody waits for the work any more."""

T = TypeVar("T")


class Turns:
    """First come, first served, on `threads` threads. To be used on one event loop."""

    def __init__(self, name: str, threads: int, most_waiting: int) -> None:
        self._name = name
        self._threads = threads
        self._most = most_waiting
        self._pool = ThreadPoolExecutor(threads, name)
        self._waiting: deque[_Piece[Any]] = deque()
        self._running: set[asyncio.Future[Any]] = set()
        self._seconds = 0.0
        """That a piece of work takes, averaged."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def run(self, body: Body, work: Callable[[bytes | bytearray, Check], T]) -> T:
        """What `work` returns, which is called on a thread with the body's bytes.

        Takes the body over: it is released when the work has ended or is dropped. Cancelled, work that has not begun
        is dropped, other work may look at its `Check`. Raises ApiError (429) when too much waits.
        """
        if len(self._waiting) >= self._most:
            message = f"{len(self._waiting)} {self._name} wait to be taken in, which is the limit: try again later"
            raise refused(RejectReason.QUEUE_FULL, message, self._seconds * len(self._waiting) / self._threads)
        piece: _Piece[T] = _Piece(body.hand_over(), work, asyncio.get_running_loop().create_future())
        self._waiting.append(piece)
        self._begin()
        try:
            return await piece.answer
        finally:
            if piece in self._waiting:
                self._waiting.remove(piece)
                piece.body.release()
            del piece  # or an error's traceback would keep it, and it the error

    def close(self) -> None:
        """Nothing more begins; who waits is cancelled."""
        while self._waiting:
            piece = self._waiting.popleft()
            piece.body.release()
            piece.answer.cancel()
        for running in self._running:
            running.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        while self._waiting and len(self._running) < self._threads:
            piece = self._waiting.popleft()
            running = asyncio.get_running_loop().run_in_executor(self._pool, piece.do)
            self._running.add(running)
            running.add_done_callback(partial(self._ended, piece, time.monotonic()))

    def _ended(self, piece: _Piece[T], began: float, done: asyncio.Future[T]) -> None:
        self._running.discard(done)
        self._seconds += WEIGHT * (time.monotonic() - began - self._seconds)
        piece.body.release()
        piece.take(done)
        if not done.cancelled():
            self._begin()

    def check_integrity(self) -> None:
        assert len(self._running) <= self._threads, f"{len(self._running)} pieces of work on {self._threads} threads"
        assert len(self._waiting) <= self._most, f"{len(self._waiting)} wait, the limit is {self._most}"
        assert not self._waiting or len(self._running) == self._threads, "work waits for a thread that is free"


class _Piece(Generic[T]):
    def __init__(self, body: Body, work: Callable[[bytes | bytearray, Check], T], answer: asyncio.Future[T]) -> None:
        self.body = body
        self._work = work
        self.answer = answer

    def do(self) -> T:
        """On a thread."""
        return self._work(self.body.data, self._check)

    def take(self, done: asyncio.Future[T]) -> None:
        if done.cancelled():
            self.answer.cancel()
            return
        error = done.exception()
        if self.answer.done():  # its client is gone
            return
        if error is None:
            self.answer.set_result(done.result())
            return
        if isinstance(error, ApiError):  # an answer like others: what the traceback keeps in memory is of no use
            error.__traceback__ = error.__context__ = None
        self.answer.set_exception(error)

    def _check(self) -> None:
        if self.answer.done():
            raise ClientGoneError(CLIENT_GONE)
