"""Makes cached contexts, and keeps what they stand for in the pool: pinned, and computed again where it was lost.

Pins at the nodes are short and renewed from here, so that nothing stays pinned for long when a gateway is gone.
A context whose node is lost, or started again, is pinned again: from what its SSD or another node has, else it is
computed again, behind all other requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from moonpool.core.vocabulary import NodePeer, PartId, RejectReason
from moonpool.errors import ConfigError
from moonpool.gateway.caching.book import Book, Held
from moonpool.gateway.caching.context import Context
from moonpool.gateway.caching.files import Files
from moonpool.gateway.caching.pinning import PIN_SECONDS, Pinner
from moonpool.gateway.caching.reference import Reference
from moonpool.gateway.caching.schema import ContextChange
from moonpool.gateway.cluster import Cluster
from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.problem import ApiError, invalid, refused
from moonpool.store.extents import page_aligned

log = logging.getLogger(__name__)

RENEW_SECONDS = 30.0
"""From one renewal to the next."""
TICK_SECONDS = 0.5
MISSING_SECONDS = 10.0
"""That a node may be away, as one that is started again is, before its contexts are pinned elsewhere."""
READY_SECONDS = 2.0
"""Between two looks at a fleet that cannot compute yet."""
MOST_RETRY_SECONDS = 60.0


class Keeper:
    """On the event loop. `run` must run for anything to be kept."""

    def __init__(
        self,
        cluster: Cluster,
        token: str | None,
        config: GatewayConfig,
        is_owner: Callable[[str], bool],
    ) -> None:
        """`token`: the cluster's. `is_owner`: whether contexts of this one are kept still."""
        self.book = Book(time.time, config.caching_quota)
        self._is_owner = is_owner
        self._cluster = cluster
        self._files = Files(config.caching_dir)
        self._disk = ThreadPoolExecutor(1, "cached contexts")
        """Of one thread, so that a file's writes come in the order of the changes."""
        self._pinner = Pinner(cluster, self.book, token, config.request_timeout)
        self.totals = {"contexts_made": 0, "contexts_expired": 0, "contexts_computed_again": 0, "context_failures": 0}

    async def load(self, model: str, vocabulary: int) -> None:
        """What the files hold. Raises ConfigError where they cannot be read."""
        for context in await asyncio.get_running_loop().run_in_executor(self._disk, self._files.load):
            if (context.model, context.vocabulary) != (model, vocabulary):
                log.warning("the cached context %s is of another model, %s: passed over", context.id, context.model)
            else:
                self.book.add(Held(context))
        if len(self.book):
            log.info("%d cached contexts are to be pinned again", len(self.book))

    async def run(self) -> None:
        """Until cancelled; pins stay for a while."""
        async with asyncio.TaskGroup() as group:
            for each in (self._renew_all, self._tidy_all, self._gather_all, self._compute_all):
                group.create_task(each())

    async def close(self) -> None:
        """What waits for a node fails at once."""
        await self._pinner.pool.close()
        self._disk.submit(self._files.close)
        self._disk.shutdown(wait=False)

    # ---- what clients ask for

    async def make(self, context: Context, ttl: int, label: str, priority: str) -> Held:
        """Compute and pin a context of which the tokens are known. Raises ApiError.

        `context`: its id, node, sizes and times are yet to come.
        """
        lacks, spaces = self._cluster.fleet.lacks, self._cluster.fleet.spaces
        if lacks is not None or not spaces:
            raise refused(RejectReason.NO_INSTANCE, lacks or "the cluster is not ready", 1.0)
        blocks = context.count // spaces[0].block_tokens
        if not blocks:
            raise invalid(
                "messages" if context.messages else "prompt",
                f"the prefix has {context.count} tokens, and whole blocks of {spaces[0].block_tokens} are kept: it is "
                "too short to be cached",
                "context_too_short",
            )
        held = Held(context)
        with self.book.reserve(context.owner, blocks * spaces[0].block_tokens):
            await self._pinner.check_room(blocks * page_aligned(spaces[0].block_bytes))
            await self._pinner.compute(held, label, priority)
        # In the book at once: the end of another context would take the pins that they share.
        id_, now = f"cache-{secrets.token_hex(12)}", time.time()
        held.context = replace(held.context, id=id_, created=int(now), expires=now + ttl)
        self.book.add(held)
        try:
            await self._write(held.context)
        except BaseException:
            with _logged():
                await self.delete(held)
            raise
        self.totals["contexts_made"] += 1
        log.info("cached context %s: %d tokens at %s", id_, held.context.pinned_tokens, held.context.node)
        return held

    async def change(self, held: Held, change: ContextChange) -> None:
        """Raises ApiError where it cannot be written; then it is as it was."""
        before = held.context
        name = before.name if change.name is None else change.name
        metadata = before.metadata if change.metadata is None else change.metadata
        expires = before.expires if change.ttl is None else time.time() + change.ttl
        self.book.replace(held, replace(before, name=name, metadata=metadata, expires=expires))
        try:
            await self._write(held.context)
        except ApiError:
            if self.book.has(held):
                as_before = {"name": before.name, "metadata": before.metadata, "expires": before.expires}
                self.book.replace(held, replace(held.context, **as_before))
            raise

    def extend(self, cache: Reference, owner: str) -> None:
        """As a request asks that begins with it; its file follows. Raises ApiError."""
        held = self.book.find(cache.id, owner)
        if cache.reset_ttl is not None:
            self.book.replace(held, replace(held.context, expires=time.time() + cache.reset_ttl))
            held.is_unwritten = True

    async def delete(self, held: Held) -> None:
        """Raises ApiError where its file cannot be removed."""
        if self.book.has(held):
            self.book.remove(held)
            await self._forget(held)

    # ---- keeping

    async def _renew_all(self) -> None:
        """It waits for nothing else: pins would end meanwhile."""
        while True:
            nodes = {node.id: node for node in self._pinner.nodes()}
            self._pinner.forget_all_but(nodes.values())
            for held in self.book:
                self._look_for_node(held, nodes)
            await self._renew()
            await asyncio.sleep(TICK_SECONDS)

    async def _tidy_all(self) -> None:
        """What is over leaves the book first, then nodes and disk, however long those take."""
        while True:
            over = self.book.expired()
            for held in over:
                self.book.remove(held, is_expired=True)
                self.totals["contexts_expired"] += 1
            for held in self.book:
                if not self._is_owner(held.context.owner):
                    self.book.remove(held)
                    over.append(held)
            await asyncio.gather(*(self._let_go(held) for held in over))
            for held in self.book:
                if held.is_unwritten and self.book.has(held):
                    held.is_unwritten = False
                    with _logged():
                        await self._write(held.context)
            await asyncio.sleep(TICK_SECONDS)

    async def _let_go(self, held: Held) -> None:
        with _logged():
            await self._forget(held)

    def _look_for_node(self, held: Held, nodes: Mapping[PartId, NodePeer]) -> None:
        """One that is not in the fleet may be there again in a moment: a new Conductor knows nobody at first."""
        now = asyncio.get_running_loop().time()
        there = nodes.get(PartId(held.context.node))
        if there is not None:
            held.missed_since = None
            if held.pinned is not None and held.pinned.node != there:
                held.pinned = None
        elif held.missed_since is None:
            held.missed_since = now
        elif now >= held.missed_since + MISSING_SECONDS:
            held.pinned = None

    async def _renew(self) -> None:
        """One question a node and key space, for all contexts that are due there."""
        due_before = asyncio.get_running_loop().time() + PIN_SECONDS - RENEW_SECONDS
        due: dict[tuple[NodePeer, str], list[Held]] = {}
        for held in self.book:
            if held.pinned is not None and held.is_ready and held.until < due_before:
                due.setdefault((held.pinned.node, held.pinned.space.id), []).append(held)
        await asyncio.gather(*(self._pinner.renew(node, some) for (node, _), some in due.items()))

    async def _gather_all(self) -> None:
        """What some node still has waits for nothing that has to be computed."""
        while True:
            for held in self.book:
                node = self._node_for(held)
                if node is None or held.must_be_computed or not self._is_lost(held):
                    continue
                lacks = self._cluster.fleet.lacks
                if await self._pinner.gather(held, node):
                    await self._restored(held)
                elif lacks is not None:
                    held.retry_at = asyncio.get_running_loop().time() + READY_SECONDS
                else:
                    held.must_be_computed = True
            await asyncio.sleep(TICK_SECONDS)

    async def _compute_all(self) -> None:
        """One after the other: it may be much, and others have requests too."""
        while True:
            for held in self.book:
                if held.must_be_computed and self._is_lost(held):
                    await self._compute_again(held)
            await asyncio.sleep(TICK_SECONDS)

    def _is_lost(self, held: Held) -> bool:
        if held.pinned is not None or held.retry_at > asyncio.get_running_loop().time():
            return False
        return self.book.has(held) and held.context.expires > time.time()

    async def _compute_again(self, held: Held) -> None:
        """However it ends, nodes are asked first before it is computed another time."""
        self.totals["contexts_computed_again"] += 1
        try:
            await self._pinner.compute(held, held.context.id, "")
        except ApiError as e:
            held.failures += 1
            wait = min(2.0**held.failures, MOST_RETRY_SECONDS)
            held.problem, held.retry_at = str(e), asyncio.get_running_loop().time() + wait
            self.totals["context_failures"] += 1
            log.warning("cached context %s is not pinned: %s", held.context.id, e)
        else:
            await self._restored(held)
        finally:
            held.must_be_computed = False

    async def _restored(self, held: Held) -> None:
        if not self.book.has(held):  # it was deleted meanwhile
            await self._pinner.unpin(held)
            return
        held.failures, held.problem, held.is_unwritten = 0, "", True
        log.info("cached context %s is pinned again, at %s", held.context.id, held.context.node)

    def _node_for(self, held: Held) -> NodePeer | None:
        """The one that had it; when that has been away for long, any."""
        nodes, since = self._pinner.nodes(), held.missed_since
        home = next((node for node in nodes if node.id == held.context.node), None)
        is_over = since is not None and asyncio.get_running_loop().time() >= since + MISSING_SECONDS
        return home or (nodes[0] if nodes and is_over else None)

    # ---- files

    async def _write(self, context: Context) -> None:
        await self._on_disk(self._files.write, context, "written")

    async def _forget(self, held: Held) -> None:
        await self._pinner.unpin(held)
        if held.context.id:
            await self._on_disk(self._files.remove, held.context, "removed")

    async def _on_disk(self, work: Callable[[Context], None], context: Context, what: str) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._disk, work, context)
        except (OSError, ConfigError) as e:
            why = getattr(e, "strerror", None) or e
            message = f"the file of a cached context cannot be {what}: {why}"
            raise ApiError(503, message, code="caching_unavailable") from None


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """What nobody waits for fails in the log alone."""
    try:
        yield
    except ApiError as e:
        log.error("%s", e)
