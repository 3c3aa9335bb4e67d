"""Getting cached contexts' blocks computed and pinned, at nodes that have room for them.

Contexts share blocks, and nodes do not count how often one is pinned: whoever lets go of some leaves those that others
need. So what is pinned, renewed and unpinned at one node takes turns, and is noted before its turn ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence

from msgspec.structs import replace

from moonpool.core.vocabulary import NodePeer
from moonpool.errors import PoolError
from moonpool.gateway.caching.book import Book, Held, Pinned
from moonpool.gateway.caching.compute import compute
from moonpool.gateway.caching.pool import Pool
from moonpool.gateway.cluster import Cluster
from moonpool.gateway.generation import chains_of
from moonpool.gateway.problem import ApiError
from moonpool.store.extents import page_aligned

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
        self._turns: dict[NodePeer, asyncio.Lock] = {}

    def nodes(self) -> list[NodePeer]:
        """Those that are there and keep blocks of others."""
        fleet = self._cluster.fleet.latest
        return [] if fleet is None else [node for node in fleet.nodes if node.data_address]

    def forget_all_but(self, nodes: Collection[NodePeer]) -> None:
        """What others are being asked fails at once."""
        self.pool.forget_all_but(nodes)
        self._turns = {node: turn for node, turn in self._turns.items() if node in nodes or turn.locked()}

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
        # Others may have taken the room meanwhile.
        await self.check_room(len(done.keys) * page_aligned(done.space.block_bytes))
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

    async def renew(self, node: NodePeer, some: Sequence[Held]) -> None:
        """One question for all of these contexts, of one key space, that are still pinned there."""
        clock = asyncio.get_running_loop().time
        async with self._turn(node):
            pins = {h: h.pinned for h in some if self._book.has(h) and h.pinned is not None and h.pinned.node == node}
            if not pins:
                return
            space = next(iter(pins.values())).space
            keys = list(dict.fromkeys(key for pinned in pins.values() for key in pinned.keys))
            until = clock() + PIN_SECONDS
            try:
                there = dict(zip(keys, await self.pool.pin(node, space, keys, PIN_SECONDS), strict=True))
            except PoolError as e:
                log.warning("%s does not renew the pins of %d cached contexts: %s", node.id, len(pins), e)
                for held, pinned in pins.items():
                    if held.pinned is pinned and held.until < clock():
                        held.pinned = None
                return
            for held, pinned in pins.items():
                if held.pinned is pinned:
                    held.until = until
                    held.pinned = pinned if all(there[key] for key in pinned.keys) else None

    async def unpin(self, held: Held) -> None:
        """But for what other contexts have pinned there. A node that is away, or does not answer, lets go by itself."""
        pinned, held.pinned = held.pinned, None
        if pinned is not None:
            await self._unpin(pinned)

    async def _pin(self, held: Held, wanted: Pinned, patience: float) -> bool:
        """All of it or nothing; `patience`: seconds without another block that has come. Raises PoolError."""
        clock = asyncio.get_running_loop().time
        until, most = 0.0, -1
        try:
            while True:
                async with self._turn(wanted.node):
                    there = await self.pool.pin(wanted.node, wanted.space, wanted.keys, PIN_SECONDS)
                    if all(there):
                        self._note(held, wanted)
                        return True
                if sum(there) > most:
                    until, most = clock() + patience, sum(there)
                elif clock() >= until:
                    await self._unpin(wanted)
                    return False
                await asyncio.sleep(POLL_SECONDS)
        except BaseException:
            await self._unpin(wanted)
            raise

    def _note(self, held: Held, wanted: Pinned) -> None:
        """It is pinned."""
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
        held.pinned, held.missed_since = wanted, None
        held.until = asyncio.get_running_loop().time() + PIN_SECONDS

    async def _unpin(self, pinned: Pinned) -> None:
        async with self._turn(pinned.node):
            if pinned.node not in self.nodes():
                return
            needed = self._book.needed(pinned.node, pinned.space)
            try:
                await self.pool.unpin(pinned.node, pinned.space, [key for key in pinned.keys if key not in needed])
            except PoolError as e:
                log.warning("%s is not told to unpin %d blocks: %s", pinned.node.id, len(pinned.keys), e)

    def _turn(self, node: NodePeer) -> asyncio.Lock:
        return self._turns.setdefault(node, asyncio.Lock())
