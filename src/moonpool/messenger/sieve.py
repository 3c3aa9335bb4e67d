"""SIEVE (Zhang et al., NSDI '24): which of the cached things goes next, in O(1) amortised. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True, eq=False)
class _Entry(Generic[K]):
    key: K
    newer: _Entry[K] | None = None
    older: _Entry[K] | None = None
    visited: bool = False


class Sieve(Generic[K]):
    """A queue from the newest to the oldest and a hand that moves from old to new.

    What was used since the hand last passed stays where it is and loses its mark; the first without one goes.
    """

    def __init__(self) -> None:
        self._entries: dict[K, _Entry[K]] = {}
        self._newest: _Entry[K] | None = None
        self._oldest: _Entry[K] | None = None
        self._hand: _Entry[K] | None = None

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def touch(self, key: K) -> None:
        """It is used: added as the newest, or marked."""
        if (entry := self._entries.get(key)) is not None:
            entry.visited = True
            return
        entry = self._entries[key] = _Entry(key, older=self._newest)
        if self._newest is not None:
            self._newest.newer = entry
        self._newest = entry
        self._oldest = self._oldest or entry

    def remove(self, key: K) -> None:
        """Unknown keys are ignored."""
        if (entry := self._entries.pop(key, None)) is None:
            return
        if self._hand is entry:
            self._hand = entry.newer
        if entry.newer is not None:
            entry.newer.older = entry.older
        else:
            self._newest = entry.older
        if entry.older is not None:
            entry.older.newer = entry.newer
        else:
            self._oldest = entry.newer

    def evict(self, may_go: Callable[[K], bool] = lambda key: True) -> K | None:
        """The next to go, removed; None if none may. What may not go keeps its mark and its place."""
        entry = self._hand or self._oldest
        # Twice around: the first time may only take the marks away.
        for _ in range(2 * len(self._entries)):
            assert entry is not None
            if may_go(entry.key):
                if not entry.visited:
                    self._hand = entry
                    self.remove(entry.key)
                    return entry.key
                entry.visited = False
            entry = entry.newer or self._oldest
        return None
