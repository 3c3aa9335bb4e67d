"""Which blocks a pool gives up first (PAPER §2).

Order: holes (blocks whose parent is gone: no lookup can reach them), then by policy. A pinned block is never a victim.
A parent that another tier has is not gone: it can be brought back.
A use goes through a prompt's blocks from the last to the first, so a prefix outlives its continuations.

- `lru`: the least recently used first.
- `lfu`: the least often used first, counted since the block came; of equal ones the least recently used.
- `length-aware`: the least often used first; of equal ones the block that is later in its prompt; of equal ones the
  least recently used (docs/decisions/0006 tells what the paper leaves open).

The loops are written out for speed: a replay of a trace goes through them millions of times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from moonpool.core.ranked import PAGE_ITEMS, Page, Ranked

K = TypeVar("K", bound=Hashable)

EvictionPolicy = Literal["lru", "lfu", "length-aware"]

HOLE_RANK = -1
GONE = -1
"""The pins of an entry whose block is gone."""
ELSEWHERE = -2
"""The pins of an entry whose block is gone from here, but is in another tier."""


def ranking(policy: EvictionPolicy) -> tuple[int, int]:
    """By how much each use raises a block's rank, and each position in its prompt lowers it."""
    match policy:
        case "lru":
            return 0, 0
        case "lfu":
            return 1, 0
        case "length-aware":
            return 1 << 32, 1


@dataclass(slots=True, eq=False)
class _Entry(Generic[K]):
    """A block; or one that is gone while blocks that continue it are still there."""

    key: K
    size: int
    parent: _Entry[K] | None
    rank: int
    """Lower goes first. A hole waits at HOLE_RANK instead."""
    pins: int
    children: _Entry[K] | dict[_Entry[K], None] | None = None
    """One, as nearly always, or several: a dict for each block would be most of the memory."""
    page: Page[_Entry[K]] | None = None
    """Where it waits; None while it is pinned, or gone."""

    @property
    def is_hole(self) -> bool:
        return self.parent is not None and self.parent.pins == GONE

    def offspring(self) -> tuple[_Entry[K], ...]:
        """The children, the oldest first."""
        if self.children is None:
            return ()
        return tuple(self.children) if isinstance(self.children, dict) else (self.children,)


class Eviction(Generic[K]):
    """Bookkeeping only: the owner frees the bytes of what goes. Sizes are bytes, or whatever the owner counts in.

    Keys are opaque. A `parent` of None is the root; one that is not present makes the block a hole until the parent is
    added. Unknown keys raise KeyError. An operation takes O(1) a block with `lru`, amortized O(log n) with the others;
    the removal or return of a parent takes that for each of its children.
    """

    def __init__(self, policy: EvictionPolicy = "lru", is_elsewhere: Callable[[K], bool] = lambda key: False) -> None:
        """`is_elsewhere`: whether another tier has a block that is not here; changes are told with `came_elsewhere`."""
        self.policy: EvictionPolicy = policy
        self.is_elsewhere = is_elsewhere
        self.bytes = 0
        """Of all blocks."""
        self.evictable_bytes = 0
        """Of those that are not pinned."""
        self.holes = 0
        """Blocks whose parent is gone, pinned or not."""
        self._use, self._step = ranking(policy)
        self._entries: dict[K, _Entry[K]] = {}
        self._gone: dict[K, _Entry[K]] = {}
        """Parents that are not here: of holes, or in another tier."""
        self._waiting: Ranked[_Entry[K]] = Ranked()
        """All blocks that are not pinned."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def keys(self) -> KeysView[K]:
        """A live view of the blocks."""
        return self._entries.keys()

    def add(self, key: K, size: int, parent: K | None = None, position: int = 0, pins: int = 0) -> None:
        """A new block, used now. Raises ValueError where the key is present already.

        `position`: which block of its prompt it is, from 0; `pins`: so many unpins are to come.
        """
        entries = self._entries
        if key in entries:
            raise ValueError(f"block {key!r} is present already; remove it before adding it again")
        above = None if parent is None else entries.get(parent) or self._absent(parent)
        entries[key] = entry = _Entry(key, size, above, self._use - position * self._step, pins)
        if above is not None:
            if above.children is None:
                above.children = entry
            else:
                self._join(above, entry)
        if self._gone and key in self._gone:
            self._return(entry)
        self.bytes += size
        if not pins:
            self.evictable_bytes += size
            self._wait((entry,))

    def extend(self, keys: Sequence[K], size: int, parent: K | None, position: int, pins: int) -> None:
        """New blocks of one prompt, in its order: the first continues `parent`, each other one the one before it.

        Raises ValueError, and adds none, where one is present already or given twice.
        """
        entries, gone, step = self._entries, self._gone, self._step
        if not entries.keys().isdisjoint(keys) or len(set(keys)) < len(keys):
            repeated = next(key for at, key in enumerate(keys) if key in entries or key in keys[:at])
            raise ValueError(f"block {repeated!r} is present already; remove it before adding it again")
        rank = self._use - position * step
        # Without __init__: it would be a third of the time that a block's arrival takes.
        new = object.__new__
        added: list[_Entry[K]] = []
        above = None if parent is None or not keys else entries.get(parent) or self._absent(parent)
        for key in keys:
            entry = new(_Entry)
            entry.key, entry.size, entry.parent = key, size, above
            entry.rank, entry.pins, entry.children, entry.page = rank, pins, None, None
            if above is not None:
                if above.children is None:
                    above.children = entry
                else:
                    self._join(above, entry)
            if gone and key in gone:
                self._return(entry)
            entries[key] = above = entry
            added.append(entry)
            rank -= step
        self.bytes += size * len(keys)
        if not pins:
            self.evictable_bytes += size * len(keys)
            self._wait(reversed(added))

    def fill(self, blocks: Iterable[tuple[K, int, K | None]]) -> None:
        """New blocks with their sizes and parents, the least recently used first: what a pool begins with.

        Raises ValueError, and adds those before it, where one is present already, or was missed as a parent.
        """
        entries, new, rank = self._entries, object.__new__, self._use
        added: list[_Entry[K]] = []
        parents: list[K | None] = []
        try:
            for key, size, parent in blocks:
                if key in entries or key in self._gone:
                    raise ValueError(f"block {key!r} is present already, or the parent of one that is")
                entry = entries[key] = new(_Entry)
                entry.key, entry.size, entry.parent = key, size, None
                entry.rank, entry.pins, entry.children, entry.page = rank, 0, None, None
                added.append(entry)
                parents.append(parent)
                self.bytes += size
                self.evictable_bytes += size
        finally:
            # A parent may come after its child.
            for entry, parent in zip(added, parents, strict=False):
                if parent is not None:
                    above = entry.parent = entries.get(parent) or self._absent(parent)
                    if above.children is None:
                        above.children = entry
                    else:
                        self._join(above, entry)
            self._wait(added)

    def touch(self, keys: Sequence[K]) -> None:
        """These blocks of one prompt, in prompt order, were used now."""
        entries, use = self._entries, self._use
        waiting = []
        for key in reversed(keys):
            entry = entries[key]
            entry.rank += use
            if entry.page is not None:
                del entry.page[entry]
                entry.page = None
                waiting.append(entry)
        self._wait(waiting)

    def pin(self, keys: Sequence[K]) -> None:
        """Each pin counts as a use, and needs its unpin."""
        entries, use = self._entries, self._use
        for key in keys:
            entry = entries[key]
            if entry.page is not None:
                del entry.page[entry]
                entry.page = None
                self.evictable_bytes -= entry.size
            entry.pins += 1
            entry.rank += use

    def unpin(self, keys: Sequence[K]) -> None:
        """These blocks of one prompt, in prompt order. The last unpin of a block is the time of its last use.

        Raises ValueError where a block is not pinned.
        """
        entries, released = self._entries, []
        try:
            for key in reversed(keys):
                entry = entries[key]
                if not entry.pins:
                    raise ValueError(f"block {key!r} is not pinned")
                entry.pins -= 1
                if not entry.pins:
                    self.evictable_bytes += entry.size
                    released.append(entry)
        finally:
            self._wait(released)

    def pins(self, key: K) -> int:
        return self._entries[key].pins

    def is_hole(self, key: K) -> bool:
        return self._entries[key].is_hole

    def came_elsewhere(self, key: K) -> None:
        """Another tier has this block now: if it is not here, its children are holes no more."""
        self._turn(key, ELSEWHERE)

    def left_elsewhere(self, key: K) -> None:
        """No other tier has this block any more: if it is not here, its children are holes."""
        self._turn(key, GONE)

    def remove(self, key: K) -> None:
        """The block is gone; its children become holes. Raises ValueError where it is pinned."""
        entry = self._entries[key]
        if entry.pins:
            raise ValueError(f"block {key!r} is pinned {entry.pins} times; unpin it before removing it")
        self._dequeue(entry)
        self._forget(entry)
        self.bytes -= entry.size
        self.evictable_bytes -= entry.size

    def evict(self, bytes_needed: int) -> tuple[K, ...]:
        """Remove the `victims` and name them. Cheaper than their removal one by one."""
        waiting, entries, freed, gone = self._waiting, self._entries, 0, []
        while freed < bytes_needed and (page := waiting.first()):
            leaving = []
            for entry in page:
                leaving.append(entry)
                freed += entry.size
                # One with children leaves holes, which go next.
                if freed >= bytes_needed or entry.children is not None:
                    break
            for entry in leaving:
                del page[entry]
                entry.page = None
                parent = entry.parent
                if entry.children is None and parent is not None and parent.children is entry and parent.pins >= 0:
                    # The end of a prompt, as nearly always.
                    del entries[entry.key]
                    parent.children = None
                else:
                    self._forget(entry)
                gone.append(entry.key)
        self.bytes -= freed
        self.evictable_bytes -= freed
        return tuple(gone)

    def victims(self, bytes_needed: int) -> tuple[K, ...]:
        """Blocks to remove, in this order, to free at least `bytes_needed`; all that can go if that is less.

        Changes nothing. The order is that in which one removal after another would go on.
        """
        chosen: dict[_Entry[K], None] = {}
        bereft: deque[_Entry[K]] = deque()
        for entry in self._order(chosen, bereft):
            if bytes_needed <= 0:
                break
            chosen[entry] = None
            bytes_needed -= entry.size
            if entry.children is not None and not self.is_elsewhere(entry.key):
                bereft.extend([child for child in entry.offspring() if child not in chosen and not child.pins])
        return tuple([entry.key for entry in chosen])

    def _order(self, chosen: Container[_Entry[K]], bereft: deque[_Entry[K]]) -> Iterator[_Entry[K]]:
        """What goes next, given what was chosen so far and the holes that this would make (`bereft`)."""
        for rank, entry in self._waiting.ascending():
            while bereft and rank != HOLE_RANK:
                yield bereft.popleft()
            if entry not in chosen:
                yield entry
        while bereft:
            yield bereft.popleft()

    def _wait(self, entries: Iterable[_Entry[K]]) -> None:
        next_page, page, of, left = self._waiting.page, None, 0, 0
        for entry in entries:
            parent = entry.parent
            rank = entry.rank if parent is None or parent.pins != GONE else HOLE_RANK
            if page is None or rank != of or not left:
                page, of = next_page(rank), rank
                left = PAGE_ITEMS - len(page)
            page[entry] = None
            entry.page = page
            left -= 1

    def _dequeue(self, entry: _Entry[K]) -> None:
        assert entry.page is not None
        del entry.page[entry]
        entry.page = None

    def _forget(self, entry: _Entry[K]) -> None:
        """A block that waits no more is gone. Its size is for the caller to book."""
        del self._entries[entry.key]
        parent = entry.parent
        if parent is not None:
            if parent.children is entry:
                parent.children = None
            else:
                self._part(parent, entry)
            if parent.pins < 0:
                self._bereave(parent)
        if entry.children is not None:
            self._leave_holes(entry)

    def _join(self, parent: _Entry[K], child: _Entry[K]) -> None:
        """A further child."""
        if isinstance(parent.children, dict):
            parent.children[child] = None
        else:
            parent.children = dict.fromkeys((*parent.offspring(), child))

    def _part(self, parent: _Entry[K], child: _Entry[K]) -> None:
        """One of several children leaves."""
        assert isinstance(parent.children, dict)
        del parent.children[child]
        if not parent.children:
            parent.children = None

    def _absent(self, key: K) -> _Entry[K]:
        """The parent, which is not here, of one more block."""
        entry = self._gone.get(key)
        if entry is None:
            pins = ELSEWHERE if self.is_elsewhere(key) else GONE
            entry = self._gone[key] = _Entry(key, 0, None, 0, pins)
        self.holes += entry.pins == GONE
        return entry

    def _bereave(self, parent: _Entry[K]) -> None:
        """One that is not here has a child less."""
        self.holes -= parent.pins == GONE
        if parent.children is None:
            del self._gone[parent.key]

    def _leave_holes(self, entry: _Entry[K]) -> None:
        self._gone[entry.key] = entry
        entry.pins, entry.parent = ELSEWHERE, None
        if not self.is_elsewhere(entry.key):
            self._turn(entry.key, GONE)

    def _turn(self, key: K, pins: int) -> None:
        """A parent that is not here is `GONE` from now on, or `ELSEWHERE`."""
        entry = self._gone.get(key)
        if entry is None or entry.pins == pins:
            return
        children = entry.offspring()
        waiting = [child for child in children if not child.pins]
        for child in waiting:
            self._dequeue(child)
        entry.pins = pins
        self.holes += len(children) if pins == GONE else -len(children)
        self._wait(waiting)

    def _return(self, entry: _Entry[K]) -> None:
        """A block that was not here is back, with those of its children that outlived it."""
        self._turn(entry.key, ELSEWHERE)
        children = self._gone.pop(entry.key).offspring()
        entry.children = children[0] if len(children) == 1 else dict.fromkeys(children)
        for child in children:
            child.parent = entry

    def check_integrity(self) -> None:
        """Raises AssertionError where the books do not add up."""
        entries = self._entries.values()
        free = [entry for entry in entries if not entry.pins]
        waiting = {entry: rank for rank, entry in self._waiting.ascending()}
        assert self.bytes == sum(entry.size for entry in entries)
        assert self.evictable_bytes == sum(entry.size for entry in free)
        assert self.holes == sum(entry.is_hole for entry in entries)
        for key, entry in self._entries.items():
            assert entry.key == key
            assert entry.pins >= 0, f"{key!r} has {entry.pins} pins"
            assert entry.parent is None or entry in entry.parent.offspring(), f"{key!r} is unknown to its parent"
            assert entry.children != {}
            assert (entry.page is None) == (entry.pins > 0)
        for key, entry in self._gone.items():
            assert entry.pins == (ELSEWHERE if self.is_elsewhere(key) else GONE), f"{key!r} came or left untold"
            assert key not in self._entries
            assert entry.offspring(), f"{key!r} is gone and nobody's parent"
        for entry in free:
            rank = HOLE_RANK if entry.is_hole else entry.rank
            assert waiting.get(entry) == rank, f"{entry.key!r} does not wait at {rank}"
            assert entry.page is not None
            assert entry in entry.page
        assert len(waiting) == len(free)
        linked = [child for entry in (*entries, *self._gone.values()) for child in entry.offspring()]
        assert len(linked) == sum(entry.parent is not None for entry in entries)
        self._waiting.check_integrity()
