"""Which blocks a node gives up first.

Order: blocks whose parent is gone (no lookup can reach them), then the least recently used. A pinned
block is never a victim. Touches and unpins go from the last block to the first, so a prefix outlives
its continuations.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Entry(Generic[K]):
    size: int
    parent: K | None
    pins: int = 0


@dataclass(slots=True)
class Lru(Generic[K]):
    """Bookkeeping only: the owner frees the bytes and then calls `remove`. Sizes are bytes.

    Keys are opaque. A `parent` of None is the root; one that is not present makes the block an orphan
    until the parent is added. Unknown keys raise KeyError.
    """

    bytes: int = 0
    """Of all blocks."""
    evictable_bytes: int = 0
    """Of those that are not pinned."""
    _entries: dict[K, _Entry[K]] = field(default_factory=dict)
    _children: dict[K, dict[K, None]] = field(default_factory=dict)
    """By parent, present or not. Dicts, not sets: their order is the same in every process."""
    _reachable: OrderedDict[K, None] = field(default_factory=OrderedDict)
    """Unpinned, parent present: the least recently used first."""
    _orphans: OrderedDict[K, None] = field(default_factory=OrderedDict)
    """Unpinned, parent gone."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def add(self, key: K, size: int, parent: K | None = None) -> None:
        """A new block, most recently used. Raises ValueError where the key is present already."""
        if key in self._entries:
            raise ValueError(f"block {key!r} is present already; remove it before adding it again")
        self._entries[key] = _Entry(size, parent)
        self.bytes += size
        self.evictable_bytes += size
        if parent is not None:
            self._children.setdefault(parent, {})[key] = None
        self._enqueue(key)
        for child in self._children.get(key, ()):
            if child in self._orphans:
                del self._orphans[child]
                self._reachable[child] = None
        self._queue(key).move_to_end(key)

    def touch(self, keys: Sequence[K]) -> None:
        """These blocks of one prompt, in prompt order, were used now."""
        for key in reversed(keys):
            if self._entries[key].pins == 0:
                self._queue(key).move_to_end(key)

    def pin(self, keys: Sequence[K]) -> None:
        """Counted: each pin needs its unpin."""
        for key in keys:
            entry = self._entries[key]
            entry.pins += 1
            if entry.pins == 1:
                del self._queue(key)[key]
                self.evictable_bytes -= entry.size

    def unpin(self, keys: Sequence[K]) -> None:
        """Raises ValueError where a block is not pinned. The last unpin counts as a use."""
        for key in reversed(keys):
            entry = self._entries[key]
            if entry.pins == 0:
                raise ValueError(f"block {key!r} is not pinned")
            entry.pins -= 1
            if entry.pins == 0:
                self.evictable_bytes += entry.size
                self._enqueue(key)

    def pins(self, key: K) -> int:
        return self._entries[key].pins

    def remove(self, key: K) -> None:
        """The block is gone; its children become orphans. Raises ValueError where it is pinned."""
        entry = self._entries[key]
        if entry.pins:
            raise ValueError(f"block {key!r} is pinned {entry.pins} times; unpin it before removing it")
        del self._queue(key)[key]
        del self._entries[key]
        self.bytes -= entry.size
        self.evictable_bytes -= entry.size
        if entry.parent is not None:
            siblings = self._children[entry.parent]
            del siblings[key]
            if not siblings:
                del self._children[entry.parent]
        for child in self._children.get(key, ()):
            if child in self._reachable:
                del self._reachable[child]
                self._orphans[child] = None

    def victims(self, bytes_needed: int) -> tuple[K, ...]:
        """Blocks to remove, in this order, to free at least `bytes_needed`; all that can go if that is less.

        Changes nothing. O(1) for each victim.
        """
        chosen: list[K] = []
        freed = 0
        for key in self._order():
            if freed >= bytes_needed:
                break
            chosen.append(key)
            freed += self._entries[key].size
        return tuple(chosen)

    def _order(self) -> Iterator[K]:
        """All evictable blocks as they would go: removing each victim in turn gives the same order."""
        gone: set[K] = set()
        orphaned: deque[K] = deque()

        def take(key: K) -> K:
            gone.add(key)
            children = self._children.get(key, ())
            orphaned.extend(child for child in children if child in self._reachable and child not in gone)
            return key

        for key in self._orphans:
            yield take(key)
        for key in self._reachable:
            while orphaned:
                yield take(orphaned.popleft())
            if key not in gone:
                yield take(key)

    def _is_orphan(self, key: K) -> bool:
        parent = self._entries[key].parent
        return parent is not None and parent not in self._entries

    def _queue(self, key: K) -> OrderedDict[K, None]:
        return self._orphans if self._is_orphan(key) else self._reachable

    def _enqueue(self, key: K) -> None:
        self._queue(key)[key] = None

    def check_integrity(self) -> None:
        """Raises AssertionError where the books do not add up."""
        assert self.bytes == sum(e.size for e in self._entries.values())
        assert self.evictable_bytes == sum(e.size for e in self._entries.values() if e.pins == 0)
        for key, entry in self._entries.items():
            assert entry.pins >= 0, f"{key!r} has {entry.pins} pins"
            orphan = self._is_orphan(key)
            assert (key in self._orphans) == (orphan and entry.pins == 0), f"{key!r}: orphan queue"
            assert (key in self._reachable) == (not orphan and entry.pins == 0), f"{key!r}: recency queue"
            if entry.parent is not None:
                assert key in self._children[entry.parent], f"{key!r} is unknown to its parent"
        assert len(self._orphans) + len(self._reachable) == sum(1 for e in self._entries.values() if e.pins == 0)
        listed = sum(len(children) for children in self._children.values())
        assert listed == sum(1 for e in self._entries.values() if e.parent is not None)
