"""The pool's nodes, as the keeper of cached contexts asks them: over their data addresses, as any client does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from msgspec import Struct

from moonpool.core.vocabulary import BlockKey, KeySpace, NodePeer
from moonpool.errors import PoolError
from moonpool.store.aio import AsyncClient

CALL_SECONDS = 5.0
CLOSE_SECONDS = 0.5


class PinRoom(Struct, frozen=True):
    """Bytes on one node."""

    free: int
    most: int


class Pool:
    def __init__(self, token: str | None) -> None:
        self._token = token
        self._clients: dict[NodePeer, asyncio.Task[AsyncClient]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def room(self, node: NodePeer) -> PinRoom:
        """What may be pinned there. Raises PoolError."""
        stats = await (await self._client(node)).stats()
        most = int(stats.get("pinnable_bytes", 0))
        return PinRoom(max(most - int(stats.get("pinned_bytes", 0)), 0), most)

    async def pin(self, node: NodePeer, space: KeySpace, keys: Sequence[BlockKey], seconds: float) -> list[bool]:
        """Which of them the node has now, from wherever it got them. Raises PoolError, also beyond its share."""
        return await (await self._client(node)).space(space).pin(keys, seconds)

    async def unpin(self, node: NodePeer, space: KeySpace, keys: Sequence[BlockKey]) -> None:
        """Raises PoolError."""
        await (await self._client(node)).space(space).unpin(keys)

    def forget_all_but(self, nodes: Iterable[NodePeer]) -> None:
        for gone in self._clients.keys() - set(nodes):
            self._end(self._clients.pop(gone))

    async def close(self) -> None:
        """Questions that are under way fail at once."""
        self.forget_all_but(())
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSE_SECONDS)

    async def _client(self, node: NodePeer) -> AsyncClient:
        """One for all who ask. A node that cannot be reached is tried again by whoever asks next."""
        connecting = self._clients.get(node)
        if connecting is None:
            connecting = asyncio.create_task(
                AsyncClient.connect(
                    node.data_address, token=self._token, name="caching", timeout=CALL_SECONDS, start_timeout=0.0
                )
            )
            self._clients[node] = connecting
        try:
            return await asyncio.shield(connecting)
        except PoolError:
            if self._clients.get(node) is connecting:
                del self._clients[node]
            raise
        except asyncio.CancelledError:
            if connecting.cancelled():  # the node was forgotten meanwhile
                raise PoolError(f"{node.id} has left the cluster") from None
            raise

    def _end(self, connecting: asyncio.Task[AsyncClient]) -> None:
        task = asyncio.create_task(_close(connecting))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _close(connecting: asyncio.Task[AsyncClient]) -> None:
    if not connecting.done():
        connecting.cancel()
    try:
        client = await connecting
    except (PoolError, asyncio.CancelledError):
        return
    await client.close()
