"""Calls to a node that are not answered yet, and results that come when nobody waits for them any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from moonpool.errors import PoolError
from moonpool.store.messages import Answer, RefusedCall
from moonpool.store.views import Found, Lease, Room, RoomContents, Stream

T = TypeVar("T")


class Pending(Generic[T]):
    """A call that is not answered yet."""

    def __init__(self, future: Future[T], accept: Callable[[Answer], T]) -> None:
        self._future = future
        self._accept = accept

    def resolve(self, answer: Answer) -> None:
        if isinstance(answer, RefusedCall):
            self.fail(PoolError(answer.reason))
            return
        result = self._accept(answer)
        if self._future.set_running_or_notify_cancel():
            self._future.set_result(result)
        else:
            dispose_of(result)

    def fail(self, error: PoolError) -> None:
        if self._future.set_running_or_notify_cancel():
            self._future.set_exception(error)


async def awaited(future: Future[T]) -> T:
    """The result of a client's call, in a coroutine. If the coroutine is cancelled what still comes is closed.

    (`asyncio.wrap_future` alone would lose, and so never close, a lease that comes while its waiter is cancelled.)
    """

    def close_late(late: Future[T]) -> None:
        if not late.cancelled() and late.exception() is None:
            dispose_of(late.result())

    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.add_done_callback(close_late)
        raise


def dispose_of(result: object) -> None:
    if isinstance(result, Found | Lease | Room | RoomContents | Stream):
        result.close()
