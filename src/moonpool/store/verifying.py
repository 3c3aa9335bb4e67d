"""Whether blocks in DRAM are what was put: looked at where they lie, when a reader far away says that one is not.

Whoever says so is not believed: a block goes only where its own bytes do not fit its own checksums. Nor can false
alarms keep the node busy: after one it rests for a multiple of the time that it took.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from moonpool.core.vocabulary import BlockKey, KeySpaceId
from moonpool.messenger.questions import BUSY, LEASED, NO
from moonpool.messenger.transfer import checksum
from moonpool.store.arena import Arena
from moonpool.store.blocks import Block
from moonpool.store.ledger import Ledger

log = logging.getLogger(__name__)

LEAVING_SECONDS = 0.5
"""How long a reader that is just leaving is waited for: the one that says so, above all."""
RETRY_SECONDS = 0.005
RESTS = 4
"""Times as long as it looked in vain nothing is looked at: a liar has a fifth of one core, at most."""


class Verifier:
    """Thread-safe. Takes the time that the blocks' bytes take to be summed up, without a lock."""

    def __init__(self, arena: Arena, ledger: Ledger) -> None:
        self._arena = arena
        self._ledger = ledger
        self._owner = ledger.own_client()
        self._looking = threading.Lock()
        self._rests_until = 0.0

    def verify(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> list[int]:
        """A mark a key: YES where it was damaged and is gone, LEASED or BUSY where it was but stays for a reader or
        for the SSD that writes it, NO where it is as it was put, is not in DRAM, or nobody looks after false alarms.
        """
        if not self._looking.acquire(timeout=LEAVING_SECONDS):
            return [NO] * len(keys)
        try:
            began = time.monotonic()
            if began < self._rests_until:
                return [NO] * len(keys)
            marks = {key: self._verify(space, key) for key in dict.fromkeys(keys)}
            if not any(marks.values()):
                now = time.monotonic()
                self._rests_until = now + RESTS * (now - began)
            return [marks[key] for key in keys]
        finally:
            self._looking.release()

    def _verify(self, space: KeySpaceId, key: BlockKey) -> int:
        block = self._damaged(space, key)
        if block is None:
            return NO
        until = time.monotonic() + LEAVING_SECONDS
        while (mark := self._ledger.catalogue.drop(block)) in (LEASED, BUSY) and time.monotonic() < until:
            time.sleep(RETRY_SECONDS)
        is_kept = mark in (LEASED, BUSY)
        log.warning("block %s in DRAM has a wrong checksum: %s", key.hex(), "still read" if is_kept else "dropped")
        return mark

    def _damaged(self, space: KeySpaceId, key: BlockKey) -> Block | None:
        lease = self._ledger.leases.remote(self._owner, space, [key])
        try:
            for block in lease.blocks:
                runs = self._arena.slice(block.offset, block.nbytes).reshape(block.space.runs, -1)
                if any(checksum(run) != expected for run, expected in zip(runs, block.checksums, strict=True)):
                    return block
            return None
        finally:
            self._ledger.leases.end(self._owner, lease.id)
