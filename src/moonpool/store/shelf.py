"""What a node has on its SSDs, and what should get there next. Bookkeeping only: no I/O.

A block is *saved* (a copy of it goes to an SSD) while it is still in DRAM, in the order in which DRAM will give blocks
up: so that of each moment a part of the arena, the reserve, can be had at once and without a loss. Eviction of a saved
block is its demotion. Where the disks do not keep up, what is given up is lost, as it is without an SSD: nobody ever
waits for a disk to get space in DRAM.

The ledger's lock covers all of it; every public method takes that lock.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from moonpool.core.eviction import Eviction
from moonpool.core.vocabulary import BlockKey, KeySpace, KeySpaceId, Tier
from moonpool.store.blocks import Block, Blocks, Change, Name
from moonpool.store.extents import Extents, page_aligned
from moonpool.store.index import Shelved

RESERVE = 0.5
"""The part of the arena that is kept free or saved: room for as large a prompt at once without a loss."""


LATE_NAMES = 1 << 18
"""Blocks that come or go while a disk is still opening; of more, nothing that is on it is believed."""
LOOKS = 64
"""DRAM is looked through for what is to be saved about so often while its whole content changes once."""


@dataclass(slots=True)
class Saves:
    """One batch for one volume: log what goes, then write, then log what came."""

    volume: int
    blocks: list[tuple[Shelved, Block]] = field(default_factory=list)
    removed: list[Shelved] = field(default_factory=list)
    """Their bytes are about to be overwritten."""


@dataclass(slots=True)
class _Volume:
    extents: Extents
    lru: Eviction[Name]
    unlogged: list[Shelved] = field(default_factory=list)
    """Gone, but the index does not know yet."""
    is_lost: bool = False


class Shelf:
    def __init__(self, lock: threading.Condition, blocks: Blocks, note: Callable[[Sequence[Change]], None]) -> None:
        self._lock = lock
        self._blocks = blocks
        self._note = note
        self._volumes: list[_Volume] = []
        self._shelved: dict[Name, Shelved] = {}
        self._leaving: dict[Name, None] = {}
        """Blocks that leave DRAM as soon as they are saved."""
        self._copying: dict[Name, None] = {}
        """Pinned blocks of which no SSD has a copy yet."""
        self._reserve = 0
        self._plan: deque[Name] = deque()
        """What is to be saved next, in order; some of it may have changed since."""
        self._looked_at = 0
        """How many blocks had come when nothing was found to be saved; 0: something was."""
        self._late = 0
        """Disks that are still opening."""
        self._since: set[Name] = set()
        """What has been put or removed meanwhile: what they have of it is outdated."""
        self.pinned: Container[Name] = ()
        """Blocks that must stay where they are (`Pins`)."""
        self.pin_share = 0.0
        """Of each volume, that copies of pinned blocks may take."""
        self.on_pressure: Callable[[], None] = lambda: None
        """Called under the lock when something may have to be saved: it may only wake somebody."""
        self._counts = dict.fromkeys(("ssd_saves", "ssd_promotions", "ssd_evictions", "ssd_checksum_failures"), 0)
        blocks.is_kept = blocks.eviction.is_elsewhere = self._shelved.__contains__
        blocks.gives_way = self._gives_way
        blocks.on_come, blocks.on_go = self._came_to_dram, self._left_dram

    def add_volume(self, nbytes: int, entries: Sequence[Shelved], is_late: bool = False) -> int:
        """A disk with what is on it, the least recently used first; its number.

        `is_late`: the directory has heard of the node already.
        """
        with self._lock:
            number = len(self._volumes)
            spaces = {id(space): space for space in (entry.space for entry in entries)}
            # One that no longer looks as the other blocks of its key space could not be loaded.
            odd = {id_ for id_, space in spaces.items() if not self._blocks.spaces.fits(space)}
            fresh = {
                name: entry
                for entry in entries
                if (name := entry.name) not in self._shelved
                and name not in self._blocks.saving
                and not self._is_outdated(entry)
                and id(entry.space) not in odd
            }
            extents = Extents(nbytes, sorted([(entry.offset, entry.nbytes) for entry in fresh.values()]))
            volume = _Volume(extents, self._new_lru())
            self._volumes.append(volume)
            # Half the SSD at most: else saving one block of the reserve would push out another, without an end.
            room = sum(volume.extents.capacity for volume in self._volumes) // 2
            self._reserve = min(int(self._blocks.extents.capacity * RESERVE), room)
            for entry in fresh.values():
                entry.volume = number
            for id_, blocks in Counter(id(entry.space) for entry in fresh.values()).items():
                self._blocks.spaces.came(spaces[id_], blocks)
            self._shelved.update(fresh)
            volume.lru.fill((name, entry.nbytes, _parent(entry)) for name, entry in fresh.items())
            for tier in self._tiers():
                if tier.holes:
                    for name in fresh:
                        tier.came_elsewhere(name)
            if is_late:
                volume.lru.pin([name for name in fresh if name in self.pinned])
                self._note([Change(True, name, Tier.SSD) for name in fresh])
                self.pressed()
            return number

    def expect_late(self) -> None:
        """A disk will be added later; `late_is_over` when it is, or is given up."""
        with self._lock:
            self._late += 1

    def late_is_over(self) -> None:
        with self._lock:
            self._late -= 1
            if not self._late:
                self._since.clear()

    def changed(self, names: Sequence[Name]) -> None:
        """These were put or removed. The caller has the lock."""
        if self._late and len(self._since) <= LATE_NAMES:
            self._since.update(names)

    def pressed(self) -> None:
        """Blocks have become evictable, or DRAM was taken. The caller has the lock."""
        if self._blocks.extents.free < self._reserve:
            self.on_pressure()

    def next_saves(self, number: int, most_blocks: int, most_bytes: int) -> Saves | None:
        """What this volume should save now; every answer needs its `saved`."""
        with self._lock:
            volume = self._volumes[number]
            lacking = self._reserve - self._blocks.extents.free
            if volume.is_lost or (lacking <= 0 and not (self._leaving or self._copying or volume.unlogged)):
                return None
            removed, volume.unlogged = volume.unlogged, []
            saves = Saves(number, removed=removed)
            taken = 0
            leaving = [name for name in list(self._leaving) if not self._gives_up(name)]
            for name in chain(leaving, self._next_to_copy(volume), self._next_to_go(lacking) if lacking > 0 else ()):
                block = self._blocks.resident[name]
                if block.saving:
                    continue
                size = page_aligned(block.nbytes)
                if len(saves.blocks) >= most_blocks or (taken and taken + size > most_bytes):
                    if name not in self._leaving and name not in self._copying:
                        self._plan.appendleft(name)
                    break
                offset = self._allocate(volume, size, saves.removed)
                if offset is None:
                    self._leaving.pop(name, None)
                    self._copying.pop(name, None)
                    continue
                block.saving = True
                self._blocks.saving[name] = block
                taken += size
                sums = _packed_sums(block)
                shelved = Shelved(offset, block.space, name[1], block.parent, sums, size, number)
                shelved.index, shelved.tokens = block.index, block.tokens
                saves.blocks.append((shelved, block))
            return saves if saves.blocks or saves.removed else None

    def saved(self, saves: Saves, is_written: bool) -> None:
        """The batch's I/O is over."""
        with self._lock:
            volume = self._volumes[saves.volume]
            for shelved, block in saves.blocks:
                block.saving = False
                del self._blocks.saving[shelved.name]
                if volume.is_lost:
                    continue
                if is_written:
                    self._add(volume, shelved)
                    self._counts["ssd_saves"] += 1
                    self._note([Change(True, shelved.name, Tier.SSD)])
                else:
                    self._leaving.pop(shelved.name, None)
                    volume.extents.release(shelved.offset)
            if not (is_written or volume.is_lost):
                volume.unlogged = [*saves.removed, *volume.unlogged]

    def demote(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> None:
        """DRAM gives these blocks up as soon as an SSD has them, unless they are pinned then. Without SSD nothing."""
        with self._lock:
            if all(volume.is_lost for volume in self._volumes):
                return
            # A continuation goes before its prefix.
            for key in reversed(keys):
                name = space, key
                if name in self._blocks.resident and not self._blocks.eviction.pins(name):
                    self._leaving[name] = None
                    self._gives_up(name)
            if self._leaving:
                self.on_pressure()

    def copy_pinned(self, names: Iterable[Name]) -> None:
        """These were pinned in DRAM: an SSD is to have a copy of each. The caller has the lock."""
        if all(volume.is_lost for volume in self._volumes):
            return
        self._copying.update((name, None) for name in names if self._lacks_copy(name))
        if self._copying:
            self.on_pressure()

    def has_more(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> bool:
        """Whether the leading blocks in any tier are more than the leading ones in DRAM."""
        with self._lock:
            first = next((key for key in keys if (space, key) not in self._blocks.resident), None)
            return first is not None and (space, first) in self._shelved

    def borrow(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> tuple[int, list[tuple[int, Shelved]]]:
        """How many leading keys are here in any tier; and those of them (index, block) that only an SSD has.

        They stay where they are until `give_back`.
        """
        with self._lock:
            found: list[tuple[int, Shelved]] = []
            leading = 0
            for index, key in enumerate(keys):
                if (space, key) not in self._blocks.resident:
                    shelved = self._shelved.get((space, key))
                    if shelved is None:
                        break
                    found.append((index, shelved))
                leading += 1
            for _, shelved in found:
                self._volumes[shelved.volume].lru.pin([shelved.name])
            return leading, found

    def give_back(self, borrowed: Iterable[Shelved], bad: Sequence[Shelved] = ()) -> None:
        """`bad`: those that turned out to be damaged; they are no longer here."""
        with self._lock:
            # From the last to the first: a prefix is to outlive what continues it.
            for shelved in reversed(list(borrowed)):
                if self._shelved.get(shelved.name) is shelved:
                    self._volumes[shelved.volume].lru.unpin([shelved.name])
            for shelved in bad:
                volume = self._volumes[shelved.volume]
                if self._shelved.get(shelved.name) is not shelved:
                    continue
                # A pin is no reason to keep what is damaged.
                is_pinned = shelved.name in self.pinned
                if volume.lru.pins(shelved.name) == is_pinned:
                    if is_pinned:
                        volume.lru.unpin([shelved.name])
                    self._remove(volume, shelved)
                    volume.unlogged.append(shelved)

    def remove(self, name: Name) -> bool:
        """Forget a block; False while it is being loaded. The caller has the lock, and it is not pinned."""
        # What comes in its place is to be looked at, though there are no more blocks than before.
        self._looked_at = 0
        shelved = self._shelved.get(name)
        if shelved is None:
            return True
        volume = self._volumes[shelved.volume]
        if volume.lru.pins(name):
            return False
        self._remove(volume, shelved)
        volume.unlogged.append(shelved)
        self.on_pressure()
        return True

    def _gives_way(self, block: Block) -> bool:
        """A block is about to become readable in DRAM whose key is on an SSD."""
        shelved = self._shelved[block.name]
        return shelved.checksums == _packed_sums(block) or self.remove(block.name)

    def find(self, name: Name) -> Shelved | None:
        """The caller has the lock."""
        return self._shelved.get(name)

    def hold(self, name: Name) -> None:
        """Keep it, if it is here, until `let_go`. The caller has the lock."""
        if (shelved := self._shelved.get(name)) is not None:
            self._volumes[shelved.volume].lru.pin([name])

    def let_go(self, name: Name) -> None:
        """After `hold`. The caller has the lock."""
        if (shelved := self._shelved.get(name)) is not None:
            self._volumes[shelved.volume].lru.unpin([name])

    def space_of(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> KeySpace | None:
        """What the blocks of a key space look like, if one of these is on an SSD."""
        with self._lock:
            return next((s.space for key in keys if (s := self._shelved.get((space, key))) is not None), None)

    def lose(self, number: int) -> bool:
        """The volume is unusable: its blocks are gone. False if it was lost already."""
        with self._lock:
            volume = self._volumes[number]
            if volume.is_lost:
                return False
            volume.is_lost = True
            self._leaving.clear()
            self._copying.clear()
            volume.lru = self._new_lru()
            for name in [name for name, shelved in self._shelved.items() if shelved.volume == number]:
                self._blocks.spaces.left(self._shelved.pop(name).space)
                self._left_ssd(name)
            volume.extents = Extents(0)
            volume.unlogged = []
            # What it had may be saved on another.
            self._looked_at = 0
            self._reserve = min(self._reserve, sum(volume.extents.capacity for volume in self._volumes) // 2)
            return True

    def blocks_on(self, number: int) -> int:
        with self._lock:
            return len(self._volumes[number].lru)

    def entries(self, number: int) -> list[Shelved]:
        """All blocks of a volume, the oldest first."""
        with self._lock:
            return [shelved for shelved in self._shelved.values() if shelved.volume == number]

    def count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def shelved(self) -> Iterable[Shelved]:
        """The caller has the lock."""
        return self._shelved.values()

    def names(self) -> Iterable[Name]:
        """The caller has the lock."""
        return self._shelved

    def counters(self) -> dict[str, float]:
        """Sizes and blocks now; counts since the start. `ssd_volumes` are those in use."""
        with self._lock:
            gauges = {
                "ssd_capacity_bytes": sum(volume.extents.capacity for volume in self._volumes),
                "ssd_used_bytes": sum(volume.extents.used for volume in self._volumes),
                "ssd_blocks": len(self._shelved),
                "ssd_holes": sum(volume.lru.holes for volume in self._volumes),
                "ssd_volumes": sum(not volume.is_lost for volume in self._volumes),
                "ssd_lost_volumes": sum(volume.is_lost for volume in self._volumes),
            }
            return {name: float(value) for name, value in (gauges | self._counts).items()}

    def check_integrity(self) -> None:
        """The caller has the lock. Raises AssertionError where blocks and bytes do not add up."""
        writing = list(self._blocks.saving.values())
        assert all(block.saving and block.resident for block in writing)
        for number, volume in enumerate(self._volumes):
            volume.extents.check_integrity()
            volume.lru.check_integrity()
            own = [shelved for shelved in self._shelved.values() if shelved.volume == number]
            assert {shelved.name for shelved in own} == {s.name for s in own if s.name in volume.lru}
            assert len(volume.lru) == len(own)
            used = sum(shelved.nbytes for shelved in own)
            assert used == volume.lru.bytes
            assert used <= volume.extents.used <= used + sum(page_aligned(block.nbytes) for block in writing)

    def _gives_up(self, name: Name) -> bool:
        """Whether a block is no longer one of those that leave DRAM: it has just left, or it must stay after all."""
        if name not in self._leaving:
            return True
        block = self._blocks.resident.get(name)
        if block is not None and not self._blocks.eviction.pins(name):
            if block.saving or name not in self._shelved:
                return False
            self._blocks.evict(name)
        del self._leaving[name]
        return True

    def _next_to_go(self, lacking: int) -> Iterator[Name]:
        """What DRAM gives up next, no SSD has or gets now, and is of use, in about that order.

        Looking it up goes through half of DRAM, so it is done for many saves at once; and where nothing was found, not
        again before so much has come that it is worth it: the reserve is large against that.
        """
        blocks, eviction = self._blocks, self._blocks.eviction
        if not self._plan:
            arrivals = len(blocks.resident) + blocks.evictions
            if arrivals - self._looked_at < len(blocks.resident) // LOOKS:
                return
            self._plan.extend(name for name in eviction.victims(lacking) if self._is_unsaved(name))
            self._looked_at = 0 if self._plan else arrivals
        while self._plan:
            name = self._plan.popleft()
            if name in blocks.resident and not eviction.pins(name) and self._is_unsaved(name):
                yield name

    def _next_to_copy(self, volume: _Volume) -> Iterator[Name]:
        """Pinned blocks, as long as not too much of the volume is held by what nobody may evict."""
        most, held = self.pin_share * volume.extents.capacity, volume.lru.bytes - volume.lru.evictable_bytes
        for name in list(self._copying):
            block = self._blocks.resident.get(name)
            if block is None or not self._lacks_copy(name) or held + page_aligned(block.nbytes) > most:
                del self._copying[name]
            elif not block.saving:
                held += page_aligned(block.nbytes)
                yield name

    def _lacks_copy(self, name: Name) -> bool:
        return name in self.pinned and name in self._blocks.resident and name not in self._shelved

    def _is_unsaved(self, name: Name) -> bool:
        is_here = name in self._shelved or name in self._blocks.saving
        return not (is_here or self._blocks.eviction.is_hole(name))

    def _is_outdated(self, entry: Shelved) -> bool:
        """Something else has been put under its key since, or it was removed."""
        block = self._blocks.resident.get(entry.name)
        if block is not None:
            return _packed_sums(block) != entry.checksums
        return entry.name in self._since or len(self._since) > LATE_NAMES

    def _allocate(self, volume: _Volume, size: int, removed: list[Shelved]) -> int | None:
        if size > volume.extents.free + volume.lru.evictable_bytes:
            return None
        offset = volume.extents.allocate(size)
        while offset is None:
            victims = volume.lru.victims(size)
            if not victims:
                return None
            for name in victims:
                shelved = self._shelved[name]
                self._remove(volume, shelved)
                removed.append(shelved)
                self._counts["ssd_evictions"] += 1
                offset = volume.extents.allocate(size)
                if offset is not None:
                    break
        return offset

    def _add(self, volume: _Volume, shelved: Shelved) -> None:
        name = shelved.name
        self._shelved[name] = shelved
        self._blocks.spaces.came(shelved.space)
        volume.lru.add(name, shelved.nbytes, _parent(shelved), pins=int(name in self.pinned))
        for tier in self._tiers():
            tier.came_elsewhere(name)

    def _remove(self, volume: _Volume, shelved: Shelved) -> None:
        del self._shelved[shelved.name]
        self._blocks.spaces.left(shelved.space)
        volume.lru.remove(shelved.name)
        volume.extents.release(shelved.offset)
        self._left_ssd(shelved.name)

    # A block is no hole as long as some tier, and some volume, has its parent.

    def _new_lru(self) -> Eviction[Name]:
        return Eviction(is_elsewhere=lambda name: name in self._shelved or name in self._blocks.resident)

    def _tiers(self) -> list[Eviction[Name]]:
        return [self._blocks.eviction, *(volume.lru for volume in self._volumes)]

    def _left_ssd(self, name: Name) -> None:
        if name not in self._blocks.resident:
            for tier in self._tiers():
                tier.left_elsewhere(name)
        self._note([Change(False, name, Tier.SSD)])

    def _came_to_dram(self, names: Sequence[Name]) -> None:
        self.changed(names)
        for volume in self._volumes:
            for name in names:
                volume.lru.came_elsewhere(name)

    def _left_dram(self, name: Name) -> None:
        if name not in self._shelved:
            for volume in self._volumes:
                volume.lru.left_elsewhere(name)


def _packed_sums(block: Block) -> bytes:
    return np.array(block.checksums, "<u8").tobytes()


def _parent(shelved: Shelved) -> Name | None:
    return None if shelved.parent is None else (shelved.space.id, shelved.parent)
