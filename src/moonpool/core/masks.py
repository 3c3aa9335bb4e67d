"""Block key -> bitmask, for tens of millions of keys.

One dict would stand still for a second whenever it grows: it copies all that it holds. Many small ones grow one by one,
each in a fraction of a millisecond. They hold bytes and ints only, which the garbage collector does not visit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moonpool.core.keydump import KeyDump
from moonpool.core.vocabulary import BlockKey

SHARDS = 1021
"""A prime: the place of a key within its shard goes by the same hash, modulo powers of two."""

Shard = dict[BlockKey, int]


class Masks:
    """A key without a bit is not there."""

    def __init__(self) -> None:
        self.shards: tuple[Shard, ...] = tuple({} for _ in range(SHARDS))
        """A key is in number `hash(key) % SHARDS`; for loops that look up one key after another."""
        self.dump: KeyDump | None = None
        """While what is here is being copied: told before anything changes."""

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def get(self, key: BlockKey) -> int:
        return self.shards[hash(key) % SHARDS].get(key, 0)

    def shard_of(self, key: BlockKey) -> Shard:
        return self.shards[hash(key) % SHARDS]

    def items(self) -> Iterator[tuple[BlockKey, int]]:
        for shard in self.shards:
            yield from shard.items()

    def set_bit(self, keys: Sequence[BlockKey], bit: int) -> int:
        """How many of them did not have it."""
        if self.dump is not None:
            self.dump.before(self, keys)
        shards, fresh = self.shards, 0
        for key, at in zip(keys, map(hash, keys), strict=True):
            shard = shards[at % SHARDS]
            mask = shard.get(key, 0)
            if not mask & bit:
                # Most blocks have one holder: they share its int.
                shard[key] = mask | bit if mask else bit
                fresh += 1
        return fresh

    def clear_bit(self, keys: Sequence[BlockKey], bit: int) -> int:
        """How many of them had it."""
        if self.dump is not None:
            self.dump.before(self, keys)
        shards, cleared = self.shards, 0
        for key, at in zip(keys, map(hash, keys), strict=True):
            shard = shards[at % SHARDS]
            mask = shard.get(key, 0)
            if mask & bit:
                cleared += 1
                if mask == bit:
                    del shard[key]
                else:
                    shard[key] = mask & ~bit
        return cleared


def clear_bits(shard: Shard, bits: int) -> None:
    """Of all keys of a shard."""
    for key in [key for key, mask in shard.items() if mask & bits]:
        if left := shard[key] & ~bits:
            shard[key] = left
        else:
            del shard[key]
