"""Which block is where on a node, what it is part of, and how it is taken out.

The ledger's lock covers all of it; every method takes that lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import Enum

from moonpool.core.vocabulary import BlockKey, BlockMeta, KeySpaceId
from moonpool.messenger.questions import BUSY, LEASED, NO, PINNED, YES
from moonpool.store.blocks import Block, Blocks, Name
from moonpool.store.copies import Copies
from moonpool.store.pins import Pins
from moonpool.store.shelf import Shelf


class Place(Enum):
    DRAM = "dram"
    SSD = "ssd"
    FILLING = "filling"
    """Somebody writes it."""
    NOWHERE = "nowhere"


HERE = (Place.DRAM, Place.SSD)


class Catalogue:
    def __init__(self, lock: threading.Condition, blocks: Blocks, shelf: Shelf, pins: Pins, copies: Copies) -> None:
        self._lock = lock
        self._blocks = blocks
        self._shelf = shelf
        self._pins = pins
        self._copies = copies
        self.damaged = 0
        """Blocks in DRAM that were not what was put, since the start."""

    def places(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> list[Place]:
        """The best place of each."""
        with self._lock:
            return [self._place((space, key)) for key in keys]

    def describe(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> list[BlockMeta | None]:
        """What was given with these blocks when they were put."""
        with self._lock:
            return [self._describe((space, key)) for key in keys]

    def remove(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> list[int]:
        """For each key: YES where the block was in some tier and is gone now, NO where it was not; else why not.

        What of it is on its way here from another node does not become readable any more.
        """
        with self._lock:
            self._copies.removed((space, key) for key in keys)
            return [self._remove((space, key)) for key in keys]

    def drop(self, block: Block) -> int:
        """Take a damaged block out of DRAM, pinned or not: YES; NO where it is not there any more; else why not.

        What an SSD has of it has checksums of its own, and stays.
        """
        with self._lock:
            name, eviction = block.name, self._blocks.eviction
            if self._blocks.resident.get(name) is not block:
                return NO
            is_pinned = name in self._pins
            if eviction.pins(name) > is_pinned:
                return LEASED
            if block.saving:
                return BUSY
            if is_pinned:
                eviction.unpin([name])
            self._blocks.drop(name)
            self.damaged += 1
            return YES

    def _place(self, name: Name) -> Place:
        if name in self._blocks.resident:
            return Place.DRAM
        if self._shelf.find(name) is not None:
            return Place.SSD
        return Place.FILLING if name in self._blocks.filling else Place.NOWHERE

    def _describe(self, name: Name) -> BlockMeta | None:
        if (block := self._blocks.resident.get(name)) is not None:
            return BlockMeta(block.parent, block.index, block.tokens)
        if (shelved := self._shelf.find(name)) is not None:
            return BlockMeta(shelved.parent, shelved.index, shelved.tokens)
        return None

    def _remove(self, name: Name) -> int:
        block = self._blocks.resident.get(name)
        self._shelf.changed([name])
        if block is None and self._shelf.find(name) is None:
            return NO
        if name in self._pins:
            return PINNED
        if block is not None and self._blocks.eviction.pins(name):
            return LEASED
        if (block is not None and block.saving) or not self._shelf.remove(name):
            return BUSY
        if block is not None:
            self._blocks.drop(name)
        return YES
