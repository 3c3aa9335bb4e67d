"""Blocks that may not leave the tier they are in for some time, because somebody asked for that.

A pin ends with its time or by `unpin`, and with nothing else: not with the client that asked for it. Together pins take
at most a share of the arena, so that they never starve what the cluster needs. An SSD gets a copy of what is pinned, so
that it is still there when the node is started again; the pin itself is not, and has to be asked for again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from moonpool.errors import PoolError
from moonpool.store.blocks import Blocks, Name
from moonpool.store.extents import page_aligned
from moonpool.store.shelf import Shelf

PIN_SHARE = 0.25
"""Of the arena, unless the node is told another."""


class Pins:
    """The ledger's lock covers all of it; every public method takes that lock."""

    def __init__(self, lock: threading.Condition, blocks: Blocks, shelf: Shelf, share: float = PIN_SHARE) -> None:
        self._lock = lock
        self._blocks = blocks
        self._shelf = shelf
        self._until: dict[Name, float] = {}
        self._sizes: dict[Name, int] = {}
        self._share = share
        self.limit = int(blocks.extents.capacity * share)
        """Bytes that may be pinned."""
        blocks.pinned = shelf.pinned = self._until
        shelf.pin_share = share

    def pin(self, names: Sequence[Name], until: float) -> list[bool]:
        """Which of them are here, in any tier, and pinned now. Raises PoolError, and pins none, beyond the share."""
        with self._lock:
            sizes = {name: size for name in names if (size := self._size(name))}
            pinned = sum(self._sizes.values())
            wanted = sum(size for name, size in sizes.items() if name not in self._until)
            if pinned + wanted > self.limit:
                raise PoolError(
                    f"pins of {wanted} bytes on top of {pinned}: at most {self.limit}, {self._share:.0%} of the arena, "
                    "may be pinned on a node; unpin some, wait for others to end, or give the node more DRAM or a "
                    "larger --caching-share"
                )
            for name, size in sizes.items():
                if name not in self._until:
                    self._sizes[name] = size
                    self._hold(name)
                self._until[name] = max(until, self._until.get(name, until))
            self._shelf.copy_pinned(sizes)
            return [name in sizes for name in names]

    def unpin(self, names: Sequence[Name]) -> list[bool]:
        """Which of them were pinned."""
        with self._lock:
            return [self._end(name) for name in names]

    def expire(self, now: float) -> int:
        """End the pins whose time is over; their number. `now` is of the clock that `until` was read from."""
        with self._lock:
            return sum(self._end(name) for name in [name for name, until in self._until.items() if until <= now])

    @property
    def nbytes(self) -> int:
        """The caller has the lock."""
        return sum(self._sizes.values())

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, name: Name) -> bool:
        """The caller has the lock."""
        return name in self._until

    def _size(self, name: Name) -> int:
        if (block := self._blocks.resident.get(name)) is not None:
            return page_aligned(block.nbytes)
        shelved = self._shelf.find(name)
        return 0 if shelved is None else shelved.nbytes

    def _hold(self, name: Name) -> None:
        if name in self._blocks.resident:
            self._blocks.eviction.pin([name])
        self._shelf.hold(name)

    def _end(self, name: Name) -> bool:
        if self._until.pop(name, None) is None:
            return False
        del self._sizes[name]
        if name in self._blocks.resident:
            self._blocks.eviction.unpin([name])
        self._shelf.let_go(name)
        self._shelf.pressed()
        return True

    def check_integrity(self) -> None:
        """The caller has the lock. Raises AssertionError where the books do not add up."""
        assert self._until.keys() == self._sizes.keys()
        assert self.nbytes <= self.limit
