"""How much of the arena each client holds, in leases and in caching rooms, and the most that it may.

A hand-over room was granted by the Conductor and does not count. Not thread-safe: the ledger's lock covers it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from moonpool.errors import PoolError
from moonpool.store.blocks import Block
from moonpool.store.extents import page_aligned
from moonpool.store.rooms import ClientId


class Quotas:
    def __init__(self) -> None:
        self.held: Counter[ClientId] = Counter()
        """Bytes."""
        self._most: dict[ClientId, int] = {}

    def limit(self, client: ClientId, nbytes: int) -> None:
        self._most[client] = nbytes

    def lift(self, client: ClientId) -> None:
        self._most.pop(client, None)

    def left(self, client: ClientId) -> int | None:
        """Bytes; None where there is no limit."""
        most = self._most.get(client)
        return None if most is None else most - self.held[client]

    def check(self, client: ClientId, what: str, wanted: int) -> None:
        """Raises PoolError where so many bytes more are too many."""
        most = self._most.get(client)
        if most is not None and (held := self.held[client]) + wanted > most:
            raise PoolError(
                f"a {what} of {wanted} bytes on top of {held} bytes held: at most {most} are for a client that this "
                "node's supervisor did not start; release some, or give the node a larger --client-quota"
            )

    def hold(self, client: ClientId, blocks: Iterable[Block | None]) -> None:
        self.held[client] += bytes_of(blocks)

    def let_go(self, client: ClientId, blocks: Iterable[Block | None]) -> None:
        self.held[client] -= bytes_of(blocks)
        if not self.held[client]:
            del self.held[client]


def bytes_of(blocks: Iterable[Block | None]) -> int:
    """`blocks`: whole ones of one key space."""
    there = [block for block in blocks if block is not None]
    return len(there) * page_aligned(there[0].nbytes) if there else 0
