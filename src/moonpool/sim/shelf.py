"""A simulated node's SSD: what DRAM has to give up goes there, and is read one block after another."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.core.eviction import Eviction
from moonpool.core.vocabulary import BlockKey


class SimShelf:
    """Writing takes no time: blocks are saved ahead of their eviction (decision 0005)."""

    def __init__(self, capacity_bytes: int, block_bytes: int, read_bytes_per_second: float) -> None:
        self.read_blocks = 0
        self._most = capacity_bytes // block_bytes
        self._seconds = block_bytes / read_bytes_per_second
        self._blocks: Eviction[BlockKey] = Eviction("lru")
        self._free_at = 0.0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def keys(self) -> tuple[BlockKey, ...]:
        return tuple(self._blocks.keys())

    def save(self, keys: Sequence[BlockKey]) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
        """Which of these are new here, and which others have gone for them."""
        fresh = tuple([key for key in keys if key not in self._blocks])[: self._most]
        gone = self._blocks.evict(max(len(self._blocks) + len(fresh) - self._most, 0))
        for key in fresh:
            self._blocks.add(key, 1)
        return fresh, gone

    def read(self, keys: Sequence[BlockKey], now: float) -> float:
        """When all of these have been read."""
        self._blocks.touch(keys)
        self.read_blocks += len(keys)
        self._free_at = max(now, self._free_at) + len(keys) * self._seconds
        return self._free_at
