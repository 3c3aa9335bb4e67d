"""Arena, ledger, disks and loader without sockets: what a node's tiers do, called directly."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from moonpool.core.events import BlocksRemoved, BlocksStored
from moonpool.core.vocabulary import BlockKey, Incarnation, KeySpace, PartId
from moonpool.messenger.transfer import Bytes
from moonpool.store.arena import Arena
from moonpool.store.disks import Disks
from moonpool.store.ledger import Ledger
from moonpool.store.loader import Loader
from moonpool.store.rooms import ClientId
from moonpool.store.slab import Slab

from .kit import BLOCK, SPACE, bytes_of, eventually, run_checksums

CLIENT = ClientId(1)


class Tiered:
    """Use as a context manager."""

    def __init__(
        self,
        directory: Path,
        dram_blocks: int = 8,
        ssd_blocks: int = 64,
        stall_seconds: float = 10.0,
        open_slab: Callable[[Path, int], Slab] = Slab,
        space: KeySpace = SPACE,
        is_restart: bool = False,
        open_seconds: float = 60.0,
        patience: float = 60.0,
    ) -> None:
        self.space = space
        self.arena = Arena(dram_blocks * BLOCK)
        self.ledger = Ledger(self.arena.extents, PartId("node-0"), Incarnation("1"), board=self.arena.board)
        nbytes = ssd_blocks * BLOCK
        self.disks = Disks(
            *(self.arena, self.ledger.shelf, [directory], nbytes, stall_seconds, open_slab),
            *(is_restart, open_seconds, patience),
        )
        self.loader = Loader(self.arena, self.ledger, self.disks)
        self._reserve = min(dram_blocks, ssd_blocks) // 2

    def __enter__(self) -> Tiered:
        return self

    def __exit__(self, *_: object) -> None:
        self.ledger.check_integrity()
        self.disks.close()
        self.arena.close()

    def put(self, keys: Sequence[BlockKey]) -> None:
        with contextlib.ExitStack() as stack:
            room = self.ledger.rooms.open(CLIENT, self.space, keys)
            stack.callback(self.ledger.rooms.close, CLIENT, room.id)
            for index, key in enumerate(keys):
                block = room.blocks[index]
                if block is None or block.resident:
                    continue
                data = bytes_of(key, self.space.block_bytes)
                self.arena.slice(block.offset, block.nbytes)[:] = data
                runs = self.space.runs
                self.ledger.rooms.complete(CLIENT, room.id, [(index, 0, runs)], run_checksums(data, runs))

    def put_gently(self, keys: Sequence[BlockKey]) -> None:
        """One at a time, so that the disk keeps up and nothing is lost."""
        for key in keys:
            self.put([key])
            eventually(self._is_reserve_saved, "the reserve is saved")

    def _is_reserve_saved(self) -> bool:
        now = self.ledger.counters()
        kept = (now["ssd_saves"] - now["demotions"]) * BLOCK
        return now["capacity_bytes"] - now["used_bytes"] + kept >= self._reserve * BLOCK

    def get(self, key: BlockKey, seconds: float = 5.0) -> bytes | None:
        return asyncio.run(self.get_later(key, seconds))

    async def get_later(self, key: BlockKey, seconds: float = 5.0) -> bytes | None:
        with await self.loader.load(self.space, [key], seconds):
            lease = self.ledger.leases.leading(CLIENT, self.space, [key])
            try:
                return bytes(self.view(lease.blocks[0].offset)) if lease.blocks else None
            finally:
                self.ledger.leases.end(CLIENT, lease.id)

    def view(self, offset: int) -> Bytes:
        return self.arena.slice(offset, self.space.block_bytes)

    def count(self, name: str) -> float:
        return (self.ledger.counters() | self.disks.counters())[name]

    def ssd_changes(self) -> list[BlocksStored | BlocksRemoved]:
        changes = []
        while (message := self.ledger.next_announcement()) is not None:
            if isinstance(message, BlocksStored | BlocksRemoved) and message.tier.value == "ssd":
                changes.append(message)
        return changes
