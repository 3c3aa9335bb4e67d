"""The pool's API for asyncio: the same calls as `api`, awaited. They run on threads, which also do the copying."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ParamSpec, Self, TypeVar

from moonpool.core.vocabulary import BlockKey, BlockMeta, KeySpace, PartId
from moonpool.errors import PoolError
from moonpool.store.api import START_SECONDS, TIMEOUT_SECONDS, Blocks, Client, Space
from moonpool.store.buffers import Buffer
from moonpool.store.forks import Maker
from moonpool.store.home import Layers

T = TypeVar("T")
P = ParamSpec("P")

THREADS = 8
"""Calls of one client that run at a time; further ones wait for these."""


class AsyncClient:
    """One program's connection to its home node. Get one from `connect`."""

    @classmethod
    async def connect(
        cls,
        address: str | Path,
        *,
        token: str | None = None,
        name: str = "client",
        timeout: float = TIMEOUT_SECONDS,
        start_timeout: float = START_SECONDS,
    ) -> AsyncClient:
        """See `Client.connect`."""
        threads = ThreadPoolExecutor(THREADS, thread_name_prefix=f"pool {name}")
        connecting = threads.submit(
            Client.connect, address, token=token, name=name, timeout=timeout, start_timeout=start_timeout
        )
        try:
            return cls(await _cancellable(connecting, Client.close), threads)
        except BaseException:
            threads.shutdown(wait=False)
            raise

    def __init__(self, client: Client, threads: ThreadPoolExecutor) -> None:
        """Use `connect`."""
        self._client = client
        self._threads = threads
        self._maker = Maker()

    @property
    def node(self) -> PartId:
        """The home node."""
        return self._client.node

    def space(
        self, name: str | KeySpace, *, block_bytes: int = 0, layers: int = 1, block_tokens: int = 1
    ) -> AsyncSpace:
        """See `Client.space`."""
        space = self._client.space(name, block_bytes=block_bytes, layers=layers, block_tokens=block_tokens)
        return AsyncSpace(space, self._threads, self._maker)

    async def stats(self) -> dict[str, float]:
        self._maker.check()
        return await _whole(_submit(self._threads, self._client.stats))

    async def close(self) -> None:
        """Leases of this client end: no view of it may be used any more."""
        if self._maker.is_other:
            # Its threads are in the process that made it.
            return
        await _whole(self._threads.submit(self._client.close))
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncSpace:
    """The blocks of one layout; see `Space` for what each method does.

    A call that is cancelled while it moves bytes is cancelled when they are through: buffers are the caller's own
    again whenever a call is over.
    """

    def __init__(self, space: Space, threads: ThreadPoolExecutor, maker: Maker) -> None:
        """Get one from `AsyncClient.space`."""
        self._space = space
        self._threads = threads
        self._maker = maker
        self.key_space = space.key_space
        self.block_bytes = space.block_bytes
        self.layer_bytes = space.layer_bytes
        self.keys_of = space.keys_of

    async def put(self, key: BlockKey, data: Buffer, meta: BlockMeta | None = None) -> bool:
        return await self._run(self._space.put, key, data, meta)

    async def put_many(
        self, keys: Sequence[BlockKey], data: Sequence[Buffer], metas: Sequence[BlockMeta] = ()
    ) -> list[bool]:
        return await self._run(self._space.put_many, keys, data, metas)

    async def put_from(self, key: BlockKey, pieces: Sequence[Buffer], meta: BlockMeta | None = None) -> bool:
        return await self._run(self._space.put_from, key, pieces, meta)

    async def put_from_many(
        self, keys: Sequence[BlockKey], pieces: Sequence[Sequence[Buffer]], metas: Sequence[BlockMeta] = ()
    ) -> list[bool]:
        return await self._run(self._space.put_from_many, keys, pieces, metas)

    @contextlib.asynccontextmanager
    async def get(
        self, keys: Sequence[BlockKey], layers: Layers | None = None, wait_until: float | None = None
    ) -> AsyncIterator[Blocks]:
        """`async with space.get(keys) as blocks:`"""
        self._maker.check()
        getting = _submit(self._threads, self._space.get, keys, layers, wait_until)
        with await _cancellable(getting, Blocks.close) as blocks:
            yield blocks

    async def get_into(
        self,
        key: BlockKey,
        pieces: Sequence[Buffer],
        layers: Layers | None = None,
        wait_until: float | None = None,
    ) -> bool:
        return await self._run(self._space.get_into, key, pieces, layers, wait_until)

    async def get_into_many(
        self,
        keys: Sequence[BlockKey],
        pieces: Sequence[Sequence[Buffer]],
        layers: Layers | None = None,
        wait_until: float | None = None,
    ) -> list[bool]:
        return await self._run(self._space.get_into_many, keys, pieces, layers, wait_until)

    async def exists(self, key: BlockKey) -> bool:
        return await self._run(self._space.exists, key)

    async def exists_many(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await self._run(self._space.exists_many, keys)

    async def metas(self, keys: Sequence[BlockKey]) -> list[BlockMeta | None]:
        return await self._run(self._space.metas, keys)

    async def pin(self, keys: Sequence[BlockKey], ttl: float) -> list[bool]:
        return await self._run(self._space.pin, keys, ttl)

    async def unpin(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await self._run(self._space.unpin, keys)

    async def replicas(self, key: BlockKey, n: int = 0) -> int:
        return await self._run(self._space.replicas, key, n)

    async def remove(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await self._run(self._space.remove, keys)

    async def _run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self._maker.check()
        return await _whole(_submit(self._threads, call, *args, **kwargs))


def _submit(threads: ThreadPoolExecutor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Raises PoolError where the client was closed."""
    try:
        return threads.submit(call, *args, **kwargs)
    except RuntimeError as e:
        raise PoolError(f"this client was closed: {e}") from None


async def _whole(future: Future[T]) -> T:
    """The result; a cancellation waits for the call's end, unless it has not begun."""
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if not future.cancelled():
            await asyncio.wait([asyncio.wrap_future(future)])
        raise


async def _cancellable(future: Future[T], dispose: Callable[[T], None]) -> T:
    """The result; after a cancellation what still comes is disposed of."""
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.add_done_callback(partial(_dispose, dispose))
        raise


def _dispose(dispose: Callable[[T], None], late: Future[T]) -> None:
    if not late.cancelled() and late.exception() is None:
        with contextlib.suppress(PoolError):
            dispose(late.result())
