"""The arena as Messenger's tcp server sees it: places for runs that arrive, blocks that leave."""

from __future__ import annotations

import time
from collections.abc import Sequence

from moonpool.core.vocabulary import BlockKey, KeySpaceId, RequestId
from moonpool.errors import PoolError
from moonpool.messenger.transfer import Bytes
from moonpool.store.arena import Arena
from moonpool.store.ledger import Claim, Lease, Ledger
from moonpool.store.loader import Loader
from moonpool.store.rooms import ClientId

REMOTE = ClientId(0)
"""Whoever reads over tcp; such a lease ends with its transfer."""


class Exchange:
    """A `messenger.transfer.Store`."""

    def __init__(self, arena: Arena, ledger: Ledger, loader: Loader) -> None:
        self._arena = arena
        self._ledger = ledger
        self._loader = loader

    def land(
        self, request: RequestId, attempt: int, block: int, first_run: int, runs: int, nbytes: int, until: float
    ) -> RoomLanding | str:
        try:
            claim = self._ledger.claim_when_free(
                request, attempt, block, first_run, runs, nbytes, until - time.monotonic()
            )
        except PoolError as e:
            return str(e)
        return RoomLanding(self._arena, self._ledger, claim, first_run, runs)

    def depart(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> LeaseDeparture:
        with self._loader.load_blocking(space, keys):
            return LeaseDeparture(self._arena, self._ledger, self._ledger.lease_remote(REMOTE, space, keys))


class RoomLanding:
    def __init__(self, arena: Arena, ledger: Ledger, claim: Claim, first_run: int, runs: int) -> None:
        self._ledger = ledger
        self._claim = claim
        self._first_run = first_run
        self.run_bytes = claim.block.run_bytes
        self.slices: list[Bytes | None] = [
            arena.slice(claim.block.offset + run * self.run_bytes, self.run_bytes) if claim.runs >> run & 1 else None
            for run in range(first_run, first_run + runs)
        ]

    def landed(self, position: int, checksum: int) -> None:
        self._ledger.landed(self._claim, self._first_run + position, checksum)

    def close(self) -> None:
        self._ledger.end_claim(self._claim)


class LeaseDeparture:
    def __init__(self, arena: Arena, ledger: Ledger, lease: Lease) -> None:
        self._ledger = ledger
        self._lease = lease
        self.blocks = [arena.slice(block.offset, block.nbytes) for block in lease.blocks]
        self.checksums = [checksum for block in lease.blocks for checksum in block.checksums]

    def close(self) -> None:
        self._ledger.release(REMOTE, self._lease.id)
