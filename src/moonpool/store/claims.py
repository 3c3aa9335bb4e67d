"""Transfers into hand-over rooms: no two write the same run, and no byte is freed while one may still write it.

The ledger's lock covers all of it; every public method takes that lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moonpool.core.vocabulary import RequestId
from moonpool.errors import PoolError
from moonpool.store.blocks import Block, Blocks
from moonpool.store.rooms import Room, finish_runs, mask_of


@dataclass(frozen=True, slots=True)
class Claim:
    """Runs of one block that a transfer is about to write: no other transfer writes them, nobody frees them."""

    room: Room
    block: Block
    runs: int
    """Bitmask of those that are still wanted; the others are complete already."""


class Claims:
    def __init__(
        self,
        lock: threading.Condition,
        blocks: Blocks,
        rooms: Mapping[tuple[RequestId, int], Room],
        on_finished: Callable[[Room], None],
    ) -> None:
        """`rooms`: the hand-over rooms there are, by request and attempt. `on_finished`: one has all its runs."""
        self._lock = lock
        self._blocks = blocks
        self._rooms = rooms
        self._on_finished = on_finished
        self._open = 0
        self.late_runs = 0
        """Runs that came when their room had ended, since the start."""

    def __len__(self) -> int:
        """Those that have not ended."""
        return self._open

    def take(self, request: RequestId, attempt: int, index: int, first: int, count: int, nbytes: int) -> Claim | None:
        """The right to write runs of a hand-over room; None while another transfer writes one. Raises PoolError."""
        with self._lock:
            room = self._rooms.get((request, attempt))
            if room is None:
                raise PoolError(f"no room for attempt {attempt} of {request}: it was released, or never reserved here")
            block = room.block(index)
            if block is None:
                raise PoolError(f"the room of {request} has no tail")
            runs = mask_of(block, first, count)
            if nbytes != count * block.run_bytes:
                raise PoolError(
                    f"{nbytes} bytes came for {count} runs of {block.run_bytes} bytes in block {index} of {request}"
                )
            if block.arriving & runs:
                return None
            claim = Claim(room, block, runs & ~block.complete)
            self._blocks.begin_transfer(block, claim.runs)
            self._open += 1
            return claim

    def take_when_free(
        self, request: RequestId, attempt: int, index: int, first: int, count: int, nbytes: int, seconds: float
    ) -> Claim:
        """`take`, after waiting for the other transfer; PoolError also when it still runs after `seconds`."""
        claim: Claim | None = None

        def taken() -> bool:
            nonlocal claim
            claim = self.take(request, attempt, index, first, count, nbytes)
            return claim is not None

        with self._lock:
            self._lock.wait_for(taken, max(0.0, seconds))
        if claim is None:
            raise PoolError(f"another transfer still writes runs of block {index} of {request}")
        return claim

    def landed(self, claim: Claim, run: int, checksum: int) -> None:
        """A run of the claim (its number in the block) is all there and verified."""
        with self._lock:
            if claim.room.ended or claim.block.discarded or claim.block.resident:
                self.late_runs += 1
                return
            claim.block.checksums[run] = checksum
            finish_runs(self._blocks, claim.room, [(claim.block, 1 << run)], self._on_finished)

    def end(self, claim: Claim) -> None:
        """The transfer writes no more."""
        with self._lock:
            self._blocks.end_transfer(claim.block, claim.runs)
            self._open -= 1
            self._lock.notify_all()
