"""What subscribers have been told of the pool's blocks, and what they are to be told next. No I/O, no clock.

A block is told of once it is known what it is of, and after the block before it in its prompt, if that is in the pool:
routers hang blocks into trees. What nobody knows the tokens of is not told of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from msgspec import Struct

from moonpool.core.blocks import chain_root, next_key
from moonpool.core.vocabulary import BlockKey, BlockMeta, KeySpace, KeySpaceId, Tier
from moonpool.live.kv_events.schema import Change

TIERS = ((0, Tier.DRAM), (1, Tier.SSD))
"""(bit, tier)"""
IN_DRAM, IN_SSD = 1, 2


class _Block(Struct, gc=False):
    """In the pool, as far as the directory knew when it was looked at last."""

    there: int = 0
    """Bitmask of tiers."""
    told: int = 0
    is_asked: bool = False
    is_known: bool = False
    parent: BlockKey | None = None
    tokens: bytes = b""
    is_salted: bool = False


class Space:
    """Of one key space."""

    def __init__(self, id_: KeySpaceId) -> None:
        self._blocks: dict[BlockKey, _Block] = {}
        self._waiting: dict[BlockKey, dict[BlockKey, None]] = {}
        """By the block before them, which may be told of first."""
        self._root = chain_root(KeySpace(id_, 1, 1, 1))
        self.told = 0
        """Blocks that subscribers know of, in whatever tier."""
        self.told_tiers = 0
        """One that is in two tiers counts twice."""

    def __len__(self) -> int:
        return len(self._blocks)

    def keys(self) -> list[BlockKey]:
        """Of all blocks that may have to be looked at again."""
        return list(self._blocks)

    def is_told(self, key: BlockKey) -> bool:
        """Subscribers know of it, wherever it is."""
        block = self._blocks.get(key)
        return block is not None and block.told == block.there

    def look(self, key: BlockKey, there: int, changes: list[Change]) -> bool:
        """The block is in these tiers now (bitmask). True: somebody is to be asked what it is of, then `learn`."""
        block = self._blocks.get(key)
        if block is None:
            if not there:
                return False
            block = self._blocks[key] = _Block()
        block.there = there
        if block.is_known:
            self._tell(key, changes)
        elif there and not block.is_asked:
            block.is_asked = True
            return True
        if not there:
            del self._blocks[key]
            self._release(key, changes)
        return False

    def learn(self, key: BlockKey, meta: BlockMeta | None, changes: list[Change]) -> bool:
        """What the block is of. False where that is no answer: it may be asked again."""
        block = self._blocks.get(key)
        if block is None:
            return True
        block.is_asked = False
        if block.is_known:
            return True
        if meta is None or not self._accept(key, block, meta):
            self._release(key, changes)
            return False
        self._tell(key, changes)
        return True

    def stored(self, keys: Sequence[BlockKey], done: set[BlockKey]) -> Iterator[Change]:
        """All that is told of these blocks, each after the one before it, if that is told of; `done`: those that were
        given before, and are now.
        """
        for key in keys:
            line = []
            at: BlockKey | None = key
            while at is not None and at not in done and (block := self._blocks.get(at)) is not None and block.told:
                line.append((at, block))
                done.add(at)
                at = block.parent
            for told, part in groupby(reversed(line), lambda named: named[1].told):
                run = list(part)
                for bit, tier in TIERS:
                    if told >> bit & 1:
                        yield from (_stored(at, block, tier) for at, block in run)

    def check_integrity(self) -> None:
        """Raises AssertionError where the books do not add up. Slow."""
        assert self.told == sum(block.told > 0 for block in self._blocks.values())
        assert self.told_tiers == sum(block.told.bit_count() for block in self._blocks.values())
        for key, block in self._blocks.items():
            assert block.there, f"{key!r} is nowhere"
            assert block.is_known or not block.told
            waits = block.parent is not None and key in self._waiting.get(block.parent, ())
            assert not block.is_known or block.told == block.there or waits
        assert all(parent in self._blocks for parent in self._waiting)

    def _accept(self, key: BlockKey, block: _Block, meta: BlockMeta) -> bool:
        """Only what the key proves: whoever put it may have said anything."""
        if not meta.tokens:
            return False
        parent = self._root if meta.parent is None else meta.parent
        is_proven = next_key(parent, meta.tokens) == key
        # A prompt's first block proves its tokens to whoever knows its salt.
        block.is_salted = not is_proven and meta.parent is None and meta.index == 0
        if not is_proven and not block.is_salted:
            return False
        block.is_known, block.parent, block.tokens = True, meta.parent, meta.tokens
        return True

    def _tell(self, key: BlockKey, changes: list[Change]) -> None:
        """Tell of it what is so now, and of those that have waited for it; unless it has to wait itself."""
        ready = [key]
        while ready:
            at = ready.pop()
            block = self._blocks.get(at)
            if block is None or not block.is_known:
                continue
            if not block.told and block.there and block.parent is not None and self._is_awaited(block.parent):
                self._waiting.setdefault(block.parent, {})[at] = None
                continue
            was, block.told = block.told, block.there
            self.told += (block.told > 0) - (was > 0)
            self.told_tiers += block.told.bit_count() - was.bit_count()
            came, went = block.told & ~was, was & ~block.told
            changes += [_stored(at, block, tier) for bit, tier in TIERS if came >> bit & 1]
            changes += [Change(False, tier, at) for bit, tier in TIERS if went >> bit & 1]
            if block.told and not was:
                ready += self._waiting.pop(at, ())

    def _is_awaited(self, parent: BlockKey) -> bool:
        before = self._blocks.get(parent)
        return before is not None and not before.told and (before.is_known or before.is_asked)

    def _release(self, key: BlockKey, changes: list[Change]) -> None:
        """Whoever waited for this block waits no more: it is gone, or nobody knows what it is of."""
        for child in self._waiting.pop(key, ()):
            self._tell(child, changes)


def _stored(key: BlockKey, block: _Block, tier: Tier) -> Change:
    return Change(True, tier, key, block.parent, block.tokens, block.is_salted)
