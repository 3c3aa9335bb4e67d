"""Whether a request's client is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from starlette.types import Receive

from moonpool.gateway.problem import ClientGoneError

CLIENT_GONE = "the client went away"

T = TypeVar("T")


async def until_gone(receive: Receive) -> None:
    """To be awaited once the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless(gone: asyncio.Task[None], work: Coroutine[object, object, T]) -> T:
    """What `work` returns. It is cancelled when the client is gone first: raises ClientGoneError."""
    working = asyncio.create_task(work)
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError(CLIENT_GONE)
        return working.result()
    finally:
        working.cancel()
