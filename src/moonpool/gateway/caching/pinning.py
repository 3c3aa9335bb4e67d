"""Getting one cached context's blocks computed and pinned, at a node that has room for them."""

from __future__ import annotations

import asyncio
import logging

from msgspec.structs import replace

from moonpool.core.vocabulary import NodePeer
from moonpool.errors import PoolError
from moonpool.gateway.caching.book import Book, Held, Pinned
from moonpool.gateway.caching.compute import compute
from moonpool.gateway.caching.pool import Pool
from moonpool.gateway.cluster import Cluster
from moonpool.gateway.generation import chains_of
from moonpool.gateway.problem import ApiError

log = logging.getLogger(__name__)

PIN_SECONDS = 90.0
"""That a pin lasts without its gateway: longer than one takes to start again."""
ARRIVE_SECONDS = 10.0
"""For the next of the blocks that were computed to be in a node: the token may come before the last of them."""
POLL_SECONDS = 0.02


class Pinner:
    """On the event loop."""

    def __init__(self, cluster: Cluster, book: Book, token: str | None, request_timeout: float) -> None:
        """`token`: the cluster's."""
        self.pool = Pool(token)
        self._cluster = cluster
        self._book = book
        self._timeout = request_timeout

    def nodes(self) -> list[NodePeer]:
        """Those that are there and keep blocks of others."""
        fleet = self._cluster.fleet.latest
        return [] if fleet is None else [node for node in fleet.nodes if node.data_address]

    async def check_room(self, nbytes: int) -> None:
        """Before it is computed in vain. Raises ApiError."""
        answers = await asyncio.gather(*(self.pool.room(node) for node in self.nodes()), return_exceptions=True)
        rooms = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not rooms:
            why = next((str(a) for a in answers if isinstance(a, PoolError)), "there is no node that keeps blocks")
            raise ApiError(503, f"nothing can be pinned: {why}", code="no_node", headers={"retry-after": "5"})
        most, free = max(room.most for room in rooms), max(room.free for room in rooms)
        if nbytes > most:
            raise ApiError(
                400,
                f"the prefix takes {nbytes} bytes, and cached contexts may take {most} of a node: cache a shorter one; "
                "who runs the cluster can give nodes more DRAM or a larger --caching-share",
                code="context_too_large",
            )
        if nbytes > free:
            raise ApiError(
                429,
                f"the prefix takes {nbytes} bytes, and of the pool's share for cached contexts {free} are free on a "
                "node: delete some, or wait until some expire",
                code="caching_full",
            )

    async def compute(self, held: Held, label: str, priority: str) -> None:
        """Whatever of it is in the pool already is not computed, as with any request. Raises ApiError."""
        context, block = held.context, self._cluster.fleet.spaces[0].block_tokens
        tokens = context.token_ids()[: context.count // block * block]
        done = await compute(self._cluster, tokens, context.salt, label=label, seconds=self._timeout, priority=priority)
        nodes = self.nodes()
        problem = "it was gone before it could be pinned"
        for node in dict.fromkeys([node for node in done.nodes if node in nodes] + nodes):
            try:
                if await self._pin(held, Pinned(node, done.space, done.keys), ARRIVE_SECONDS):
                    return
            except PoolError as e:
                problem = str(e)
        message = f"the prefix was computed and is not pinned: {problem}"
        raise ApiError(503, message, code="not_pinned", headers={"retry-after": "5"})

    async def gather(self, held: Held, node: NodePeer) -> bool:
        """Whether the node has all of it, or gets it from its SSD or other nodes, and pins it."""
        tokens, spaces = held.context.token_ids(), self._cluster.fleet.spaces
        chains = await asyncio.to_thread(chains_of, tokens, spaces, held.context.salt)
        try:
            for space, chain in zip(spaces, chains, strict=True):
                if chain.keys and await self._pin(held, Pinned(node, space, chain.keys), 0.0):
                    return True
        except PoolError as e:
            log.info("%s does not pin the cached context %s: %s", node.id, held.context.id, e)
        return False

    async def unpin(self, held: Held) -> None:
        """But for what other contexts have pinned there. A node that does not answer lets go by itself."""
        pinned, held.pinned = held.pinned, None
        if pinned is not None:
            await self._unpin(pinned)

    async def _pin(self, held: Held, wanted: Pinned, patience: float) -> bool:
        """All of it or nothing; `patience`: seconds without another block that has come. Raises PoolError."""
        clock = asyncio.get_running_loop().time
        until, most = 0.0, -1
        try:
            while not all(there := await self.pool.pin(wanted.node, wanted.space, wanted.keys, PIN_SECONDS)):
                if sum(there) > most:
                    until, most = clock() + patience, sum(there)
                elif clock() >= until:
                    await self._unpin(wanted)
                    return False
                await asyncio.sleep(POLL_SECONDS)
        except BaseException:
            await self._unpin(wanted)
            raise
        context = replace(
            held.context,
            pinned_tokens=len(wanted.keys) * wanted.space.block_tokens,
            nbytes=len(wanted.keys) * wanted.space.block_bytes,
            node=wanted.node.id,
        )
        if self._book.has(held):
            self._book.replace(held, context)
        else:
            held.context = context
        held.pinned, held.until, held.missed_since = wanted, clock() + PIN_SECONDS, None
        return True

    async def _unpin(self, pinned: Pinned) -> None:
        needed = self._book.needed(pinned.node, pinned.space)
        try:
            await self.pool.unpin(pinned.node, pinned.space, [key for key in pinned.keys if key not in needed])
        except PoolError as e:
            log.warning("%s is not told to unpin %d blocks: %s", pinned.node.id, len(pinned.keys), e)
