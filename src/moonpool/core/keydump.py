"""All that a directory holds at one moment, given out in steps while it changes: a snapshot of millions of blocks.

Copying all of it at once would make everybody wait. A shard is copied when its turn comes, or just before it changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from moonpool.core.vocabulary import BLOCK_KEY_BYTES, BlockKey, KeySpaceId, Tier

if TYPE_CHECKING:
    from moonpool.core.masks import Masks, Shard


class KeyGroup(Struct, frozen=True, array_like=True):
    """Blocks of one tier that the same nodes hold."""

    space: KeySpaceId
    tier: Tier
    mask: bytes
    """The nodes' bits, little-endian, as the snapshot's directory has them."""
    keys: bytes
    """One behind the other."""

    def unpacked(self) -> list[BlockKey]:
        size = BLOCK_KEY_BYTES
        return [BlockKey(self.keys[at : at + size]) for at in range(0, len(self.keys), size)]


class ShardCopy(Struct, frozen=True):
    """`groups` may be called on another thread: nobody changes it any more."""

    space: KeySpaceId
    tier: Tier
    shard: dict[BlockKey, int]

    def groups(self) -> Iterator[KeyGroup]:
        by_mask: dict[int, list[BlockKey]] = {}
        for key, mask in self.shard.items():
            by_mask.setdefault(mask, []).append(key)
        for mask, keys in by_mask.items():
            bits = mask.to_bytes((mask.bit_length() + 7) // 8, "little")
            yield KeyGroup(self.space, self.tier, bits, b"".join(keys))


class KeyDump:
    """Of the moment in which it was made."""

    def __init__(self, spaces: Mapping[KeySpaceId, Mapping[Tier, Masks]]) -> None:
        self._left: dict[int, tuple[KeySpaceId, Tier, Shard]] = {}
        """By the id of the shard. Empty ones have nothing to give."""
        self._copied: list[ShardCopy] = []
        for space, tiers in spaces.items():
            for tier, masks in tiers.items():
                self._left.update((id(shard), (space, tier, shard)) for shard in masks.shards if shard)
                masks.dump = self

    @property
    def is_done(self) -> bool:
        return not self._left and not self._copied

    def take(self, most: int) -> list[ShardCopy]:
        """The next shards, of about `most` keys together."""
        taken, self._copied = self._copied, []
        count = sum(len(copy.shard) for copy in taken)
        while self._left and count < most:
            taken.append(self._copy(next(iter(self._left))))
            count += len(taken[-1].shard)
        return taken

    def before(self, masks: Masks, keys: Sequence[BlockKey]) -> None:
        """To be told before these keys change."""
        self.before_shards(masks.shard_of(key) for key in keys)

    def before_shards(self, shards: Iterable[Shard]) -> None:
        for shard in shards:
            if id(shard) in self._left:
                self._copied.append(self._copy(id(shard)))

    def _copy(self, number: int) -> ShardCopy:
        space, tier, shard = self._left.pop(number)
        return ShardCopy(space, tier, shard.copy())
