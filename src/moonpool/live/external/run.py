"""The lives of external instances: each is asked until it is well, serves, and is asked again when it has failed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from moonpool.core.events import Lost
from moonpool.core.vocabulary import Incarnation, KeySpace, PartId, Peer
from moonpool.errors import ConfigError
from moonpool.live.external.adapter import Adapter, DownError
from moonpool.live.external.breaker import Pauses
from moonpool.live.external.cache import CACHE, CachePart, space_of
from moonpool.live.external.config import ExternalConfig, Instance
from moonpool.live.external.dialect import FaultError
from moonpool.live.external.events import BlockTable
from moonpool.live.external.follower import Follower
from moonpool.live.external.pool import SharedPool
from moonpool.live.external.server import Facts, Server, WrongModelError, opened
from moonpool.wire.link import Link

log = logging.getLogger(__name__)

REMIND_SECONDS = 30.0
DEFAULT_BLOCK_TOKENS = 16
"""vLLM's, where the server does not say."""
DEFAULT_CONTEXT_TOKENS = 8192

OpenLink = Callable[[PartId], Link]


async def run_external(config: ExternalConfig, conductor: str, open_link: OpenLink) -> None:
    """Serve until cancelled. Raises ConfigError for a server that serves another model, or does not take its key.

    One that does not answer joins when it does; what `open_link` gives is closed here.
    """
    herald = open_link(PartId("external"))
    keepers = [_Keeper(instance, config, conductor, open_link, herald) for instance in config.instances]
    pool: SharedPool | None = None
    try:
        await asyncio.gather(*(keeper.look() for keeper in keepers))
        async with asyncio.TaskGroup() as tasks:
            pool = SharedPool(config.pool_tokens, conductor, open_link, tasks)
            for keeper in keepers:
                tasks.create_task(keeper.run(pool))
    finally:
        herald.close()
        if pool is not None:
            pool.close()


class _Keeper:
    """One instance, over all its lives."""

    def __init__(
        self, instance: Instance, config: ExternalConfig, conductor: str, open_link: OpenLink, herald: Link
    ) -> None:
        """`herald` tells the Conductor of the end of a life: that life's own link ends with it."""
        self._instance = instance
        self._config = config
        self._model = config.model
        self._conductor = conductor
        self._open_link = open_link
        self._herald = herald
        self._said: tuple[str, float] | None = None
        """What was last logged of it, and when."""

    async def look(self) -> None:
        """Raises ConfigError where a mistake in the configuration is plain to see."""
        async with opened(self._instance) as server:
            try:
                await server.facts(self._model)
            except WrongModelError as e:
                raise ConfigError(f"{self._instance.id} at {self._instance.url}: {e}") from None
            except FaultError as e:
                self._say(str(e))

    async def run(self, pool: SharedPool) -> None:
        pauses = Pauses()
        while True:
            async with opened(self._instance) as server:
                facts = await self._facts(server)
                if facts is not None:
                    began = time.monotonic()
                    await self._live(server, facts, pool)
                    pauses.lived(time.monotonic() - began)
            await asyncio.sleep(pauses.next())

    async def _facts(self, server: Server) -> Facts | None:
        """None where it is not well."""
        try:
            facts = await server.facts(self._model)
        except FaultError as e:
            self._say(str(e))
            return None
        self._said = None
        context = facts.context_tokens or DEFAULT_CONTEXT_TOKENS
        size = facts.block_tokens or DEFAULT_BLOCK_TOKENS
        blocks = facts.blocks or -(-context // size) * self._instance.max_sequences
        return Facts(context, blocks, size, facts.caches_prefixes)

    async def _live(self, server: Server, facts: Facts, pool: SharedPool) -> None:
        """Until the server is down."""
        instance = self._instance
        space = space_of(self._model, facts.block_tokens, self._config.kv_bytes_per_token)
        links: list[Link] = []
        try:
            links.append(self._open_link(instance.id))
            links.append(self._open_link(PartId(f"{instance.id}{CACHE}")))
            cache, follower = self._cache(links[1], space, facts)
            caches = (cache, pool.part(space)) if instance.pool else (cache,)
            adapter = Adapter(links[0], self._conductor, instance, self._model, facts, space, server, caches)
            log.info(
                "%s at %s: %d KV blocks of %d tokens, context %d",
                *(instance.id, instance.url, facts.blocks, facts.block_tokens, facts.context_tokens),
            )
            async with asyncio.TaskGroup() as tasks:
                if follower is not None:
                    tasks.create_task(follower.run())
                tasks.create_task(cache.run())
                tasks.create_task(adapter.run())
        except* DownError as group:
            reason = str(group.exceptions[0])
            log.warning("%s: %s", instance.id, reason)
            self._tell_lost([link.me for link in links], reason)
        finally:
            for link in links:
                link.close()

    def _cache(self, link: Link, space: KeySpace, facts: Facts) -> tuple[CachePart, Follower | None]:
        instance = self._instance
        blocks, caches = facts.blocks, facts.caches_prefixes
        if instance.kv_events is None:
            return CachePart(link, self._conductor, space, blocks, caches), None
        table = BlockTable(space)
        follower = Follower(
            instance.kv_events,
            instance.kv_events_replay,
            table,
            lambda known: cache.told(known),
            listens=instance.listens_for_kv_events,
        )
        cache = CachePart(link, self._conductor, space, blocks, caches, follower.counters)
        return cache, follower

    def _tell_lost(self, parts: list[Peer], reason: str) -> None:
        """At once: what was placed there goes on elsewhere."""
        conductor = Peer(PartId("conductor"), Incarnation(""), self._conductor)
        for part in parts:
            self._herald.post(conductor, Lost(part.id, part.incarnation, reason))

    def _say(self, what: str) -> None:
        """Not the same again and again."""
        now = time.monotonic()
        if self._said is None or self._said[0] != what or now - self._said[1] > REMIND_SECONDS:
            self._said = what, now
            log.warning("%s at %s does not serve yet: %s", self._instance.id, self._instance.url, what)
