"""Copies from other nodes that are on their way, so that what is removed meanwhile does not come back with them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moonpool.core.vocabulary import BlockKey, KeySpaceId
from moonpool.store.blocks import Name


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    names: frozenset[Name]
    gone: set[Name] = field(default_factory=set)
    """Those of them that were removed since it was asked for: they do not become readable (`Room.gone`)."""


class Copies:
    """The ledger's lock covers all of it; every method takes that lock."""

    def __init__(self, lock: threading.Condition) -> None:
        self._lock = lock
        self._open: set[Copy] = set()

    def begin(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> Copy:
        """Before anybody is asked for these blocks. Needs `end`."""
        with self._lock:
            copy = Copy(frozenset((space, key) for key in keys))
            self._open.add(copy)
            return copy

    def end(self, copy: Copy) -> None:
        """Nothing of it is written any more."""
        with self._lock:
            self._open.discard(copy)

    def removed(self, names: Iterable[Name]) -> None:
        with self._lock:
            if self._open:
                gone = frozenset(names)
                for copy in self._open:
                    copy.gone.update(copy.names & gone)
