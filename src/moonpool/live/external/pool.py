"""The pool beneath servers that have the connector, as far as what they computed tells: a node that lends.

Its nodes hold these blocks in a key space of the connector's own, which depends on things that only a server knows. So
what was computed at any of these servers is taken to be in the pool, as much as fits; what the pool does not have
after all, the server computes.
"""

from __future__ import annotations

from asyncio import TaskGroup
from collections.abc import Callable

from moonpool.core.vocabulary import KeySpace, PartId
from moonpool.live.external.cache import POOL, CachePart
from moonpool.wire.link import Link


class SharedPool:
    """Servers with blocks of one size share; `close` it when `tasks` are over."""

    def __init__(self, tokens: int, conductor: str, open_link: Callable[[PartId], Link], tasks: TaskGroup) -> None:
        self._tokens = tokens
        self._conductor = conductor
        self._open_link = open_link
        self._tasks = tasks
        self._parts: dict[KeySpace, CachePart] = {}

    def part(self, space: KeySpace) -> CachePart:
        if space not in self._parts:
            link = self._open_link(PartId(f"{POOL}-{space.block_tokens}"))
            blocks = self._tokens // space.block_tokens
            part = self._parts[space] = CachePart(link, self._conductor, space, blocks, True, is_pool=True)
            self._tasks.create_task(part.run())
        return self._parts[space]

    def close(self) -> None:
        for part in self._parts.values():
            part.close()
