"""Leases: blocks that clients read stay where they are until they are through with them.

The ledger's lock covers all of it; every public method takes that lock.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NewType

from moonpool.core.vocabulary import BlockKey, KeySpace, KeySpaceId
from moonpool.errors import PoolError
from moonpool.store.blocks import Block, Blocks, Name
from moonpool.store.overdue import Holding, Kind
from moonpool.store.quotas import Quotas, bytes_of
from moonpool.store.rooms import ClientId
from moonpool.store.shelf import Shelf

LeaseId = NewType("LeaseId", int)


@dataclass(frozen=True, slots=True)
class Lease:
    id: LeaseId
    client: ClientId
    blocks: tuple[Block, ...]


class Leases:
    def __init__(self, lock: threading.Condition, blocks: Blocks, shelf: Shelf, quotas: Quotas) -> None:
        self._lock = lock
        self._blocks = blocks
        self._shelf = shelf
        self._quotas = quotas
        self._leases: dict[LeaseId, Lease] = {}
        self._ids = count(1)
        self.counts = dict.fromkeys(("lookups", "hit_blocks", "missed_blocks"), 0)
        """Of whoever reads, since the start."""

    def __len__(self) -> int:
        return len(self._leases)

    def leading(self, client: ClientId, space: KeySpace, keys: Sequence[BlockKey]) -> Lease:
        """The longest leading run of readable blocks; they stay where they are until the lease ends."""
        with self._lock:
            self._blocks.spaces.check_keys(space, keys)
            blocks = self._blocks.leading(space.id, keys)
            self._quotas.check(client, "lease", bytes_of(blocks))
            self.count_hits(len(keys), len(blocks))
            return self._take(client, blocks)

    def each(self, client: ClientId, space: KeySpace, keys: Sequence[BlockKey]) -> tuple[Lease, list[Block | None]]:
        """All of these blocks that are readable, wherever they stand in the list; None for the others."""
        with self._lock:
            self._blocks.spaces.check_keys(space, keys)
            found = [self._blocks.resident.get((space.id, key)) for key in keys]
            blocks = [block for block in found if block is not None]
            self._quotas.check(client, "lease", bytes_of(blocks))
            self.count_hits(len(keys), len(blocks))
            return self._take(client, blocks), found

    def touch(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> None:
        """A client has read these where they lay, without a lease."""
        with self._lock:
            found = [(space, key) for key in keys if (space, key) in self._blocks.resident]
            self._blocks.eviction.touch(found)
            self.count_hits(len(keys), len(keys))

    def remote(self, client: ClientId, space: KeySpaceId, keys: Sequence[BlockKey]) -> Lease:
        """The leading ones for another node, which need not know what this node's blocks look like."""
        with self._lock:
            return self._take(client, self._blocks.leading(space, keys))

    def end(self, client: ClientId, lease: LeaseId) -> None:
        """Raises PoolError where the client has no such lease."""
        with self._lock:
            held = self._leases.get(lease)
            if held is None or held.client != client:
                raise PoolError(f"no lease {lease} to release")
            self._end(held)

    def leave_all(self, client: ClientId) -> None:
        """The client is dead."""
        with self._lock:
            for lease in [lease for lease in self._leases.values() if lease.client == client]:
                self._end(lease)

    def count_hits(self, wanted: int, found: int) -> None:
        """Under the lock."""
        self.counts["lookups"] += 1
        self.counts["hit_blocks"] += found
        self.counts["missed_blocks"] += wanted - found

    def holdings(self) -> list[Holding]:
        """Under the lock, as what follows."""
        return [Holding(Kind.LEASE, lease.id, (lease.client,)) for lease in self._leases.values()]

    def pinned(self) -> Counter[Name]:
        """How often each block is pinned by a lease."""
        return Counter(block.name for lease in self._leases.values() for block in lease.blocks)

    def held(self) -> Counter[ClientId]:
        """Bytes of each client."""
        held: Counter[ClientId] = Counter()
        for lease in self._leases.values():
            held[lease.client] += bytes_of(lease.blocks)
        return held

    def _take(self, client: ClientId, blocks: Sequence[Block]) -> Lease:
        lease = Lease(LeaseId(next(self._ids)), client, tuple(blocks))
        self._blocks.eviction.pin([block.name for block in blocks])
        self._leases[lease.id] = lease
        self._quotas.hold(client, blocks)
        return lease

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.id]
        self._quotas.let_go(lease.client, lease.blocks)
        self._blocks.eviction.unpin([block.name for block in lease.blocks])
        self._shelf.pressed()
