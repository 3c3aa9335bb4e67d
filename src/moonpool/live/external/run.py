"""The lives of external instances: each is asked until it is well, serves, and is asked again when it has failed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from moonpool.core.events import Lost
from moonpool.core.vocabulary import Incarnation, KeySpace, PartId, Peer
from moonpool.errors import ConfigError, PeerUnavailableError
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


class Instances:
    """The external instances; some may come and go while it runs. Everything is on one event loop."""

    def __init__(self, config: ExternalConfig, conductor: str, open_link: OpenLink) -> None:
        """`conductor`: its control address. What `open_link` gives is closed here."""
        self._config = config
        self._conductor = conductor
        self._open_link = open_link
        self._keepers: dict[PartId, _Keeper] = {}
        self._lives: dict[PartId, asyncio.Task[None]] = {}
        self._running: _Running | None = None

    @property
    def all(self) -> tuple[Instance, ...]:
        return tuple([keeper.instance for keeper in self._keepers.values()])

    async def run(self) -> None:
        """Serve until cancelled. Raises ConfigError for a server that serves another model, or does not take its key.

        One that does not answer joins when it does.
        """
        herald = self._open_link(PartId("external"))
        pool: SharedPool | None = None
        try:
            for instance in self._config.instances:
                self._keepers[instance.id] = _Keeper(instance, self._config, self._conductor, self._open_link, herald)
            await asyncio.gather(*(keeper.look() for keeper in self._keepers.values()))
            async with asyncio.TaskGroup() as tasks:
                pool = SharedPool(self._config.pool_tokens, self._conductor, self._open_link, tasks)
                self._running = _Running(herald, tasks, pool)
                for keeper in self._keepers.values():
                    self._start(keeper, self._running)
                await asyncio.get_running_loop().create_future()
        finally:
            self._running = None
            herald.close()
            if pool is not None:
                pool.close()

    async def add(self, instance: Instance) -> None:
        """Serve from this one too.

        Raises ConfigError where its id or URL is taken, it serves another model or does not take its key,
        PeerUnavailableError while this does not run.
        """
        running = self._running
        if running is None:
            raise PeerUnavailableError("the instances of the file are still being asked: try again in a moment")
        for what, name, taken in (
            ("id", instance.id, {other.id for other in self.all}),
            ("url", instance.url, {other.url for other in self.all}),
        ):
            if name in taken:
                raise ConfigError(f"there is an instance with the {what} {name} already: take that out first")
        keeper = _Keeper(instance, self._config, self._conductor, self._open_link, running.herald)
        self._keepers[instance.id] = keeper
        try:
            await keeper.look()
        except BaseException:
            self._keepers.pop(instance.id, None)
            raise
        if self._keepers.get(instance.id) is keeper and self._running is running:
            self._start(keeper, running)
            log.info("%s at %s is registered, for %s", instance.id, instance.url, instance.role)

    async def remove(self, id_: PartId) -> bool:
        """Whether there was one. What it works on goes on elsewhere."""
        keeper, life = self._keepers.pop(id_, None), self._lives.pop(id_, None)
        if keeper is None:
            return False
        if life is not None:
            life.cancel()
            await asyncio.wait((life,))
            keeper.tell_lost("it was taken out")
        log.info("%s at %s is taken out", id_, keeper.instance.url)
        return True

    def _start(self, keeper: _Keeper, running: _Running) -> None:
        self._lives[keeper.instance.id] = running.tasks.create_task(keeper.run(running.pool))


class _Running(NamedTuple):
    herald: Link
    """Tells the Conductor of the end of a life: that life's own link ends with it."""
    tasks: asyncio.TaskGroup
    pool: SharedPool


class _Keeper:
    """One instance, over all its lives."""

    def __init__(
        self, instance: Instance, config: ExternalConfig, conductor: str, open_link: OpenLink, herald: Link
    ) -> None:
        self.instance = instance
        self._config = config
        self._model = config.model
        self._conductor = conductor
        self._open_link = open_link
        self._herald = herald
        self._said: tuple[str, float] | None = None
        """What was last logged of it, and when."""
        self._parts: list[Peer] = []
        """Of the present life, or of the latest one."""

    async def look(self) -> None:
        """Raises ConfigError where a mistake in the configuration is plain to see."""
        async with opened(self.instance) as server:
            try:
                await server.facts(self._model)
            except WrongModelError as e:
                raise ConfigError(f"{self.instance.id} at {self.instance.url}: {e}") from None
            except FaultError as e:
                self._say(str(e))

    async def run(self, pool: SharedPool) -> None:
        pauses = Pauses()
        while True:
            async with opened(self.instance) as server:
                known = await self._known(server)
                if known is not None:
                    began = time.monotonic()
                    await self._live(server, *known, pool)
                    pauses.lived(time.monotonic() - began)
            await asyncio.sleep(pauses.next())

    async def _known(self, server: Server) -> tuple[Facts, KeySpace | None] | None:
        """What is known of it, and its connector's key space where that has told it; None where it is not well."""
        try:
            facts = await server.facts(self._model)
            space = await server.pool_space(self._model) if self.instance.pool == "exact" else None
        except FaultError as e:
            self._say(str(e))
            return None
        self._said = None
        context = facts.context_tokens or DEFAULT_CONTEXT_TOKENS
        size = facts.block_tokens or DEFAULT_BLOCK_TOKENS
        blocks = facts.blocks or -(-context // size) * self.instance.max_sequences
        if self.instance.pool == "exact" and (space is None or space.block_tokens != size):
            log.warning(
                "%s at %s does not say what its blocks are called in the pool: what that has is estimated",
                *(self.instance.id, self.instance.url),
            )
            space = None
        return Facts(context, blocks, size, facts.caches_prefixes), space

    async def _live(self, server: Server, facts: Facts, told: KeySpace | None, pool: SharedPool) -> None:
        """Until the server is down. `told`: the pool's nodes announce what they have in this space."""
        instance = self.instance
        space = told or space_of(self._model, facts.block_tokens, self._config.kv_bytes_per_token)
        links: list[Link] = []
        try:
            links.append(self._open_link(instance.id))
            links.append(self._open_link(PartId(f"{instance.id}{CACHE}")))
            self._parts = [link.me for link in links]
            cache, follower = self._cache(links[1], space, facts)
            caches = (cache, pool.part(space)) if instance.pool != "no" and told is None else (cache,)
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
            self.tell_lost(reason)
        finally:
            for link in links:
                link.close()

    def _cache(self, link: Link, space: KeySpace, facts: Facts) -> tuple[CachePart, Follower | None]:
        instance = self.instance
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

    def tell_lost(self, reason: str) -> None:
        """At once: what was placed there goes on elsewhere."""
        conductor = Peer(PartId("conductor"), Incarnation(""), self._conductor)
        for part in self._parts:
            self._herald.post(conductor, Lost(part.id, part.incarnation, reason))

    def _say(self, what: str) -> None:
        """Not the same again and again."""
        now = time.monotonic()
        if self._said is None or self._said[0] != what or now - self._said[1] > REMIND_SECONDS:
            self._said = what, now
            log.warning("%s at %s does not serve yet: %s", self.instance.id, self.instance.url, what)
