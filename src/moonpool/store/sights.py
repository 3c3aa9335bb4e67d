"""Blocks that a client of this host finds by itself, on the node's board; the node is told of them afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from moonpool.core.vocabulary import BlockKey, KeySpace, KeySpaceId
from moonpool.messenger.questions import packed
from moonpool.store.board import BoardView, Sighting, space_tag
from moonpool.store.calls import Caller
from moonpool.store.messages import Touch

REPORT_KEYS = 64
REPORT_SECONDS = 0.05
"""The node hears of a use this late, or with the next call, so that uses travel together."""


class Sights:
    """Thread-safe."""

    def __init__(self, board: BoardView, caller: Caller) -> None:
        self._board = board
        self._caller = caller
        self._lock = threading.Lock()
        self._space: KeySpaceId | None = None
        self._used: list[BlockKey] = []
        self._reported = 0.0

    def holds_all(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> bool:
        if not self._caller.is_quiet():
            return False
        tag = space_tag(space)
        return all(self._board.find(tag, key) is not None for key in keys)

    def find(self, space: KeySpace, keys: Sequence[BlockKey]) -> list[Sighting] | None:
        """Where they are; None unless all are on the board, and the node is there (else its client is to hear so)."""
        if not self._caller.is_quiet():
            return None
        tag = space_tag(space.id)
        found = []
        for key in keys:
            seen = self._board.find(tag, key)
            if seen is None or seen.nbytes != space.block_bytes:
                return None
            found.append(seen)
        return found

    def have_stayed(self, space: KeySpace, keys: Sequence[BlockKey], seen: Sequence[Sighting]) -> bool:
        """Whether what was read there since is those blocks; if so, they count as used."""
        if not all(self._board.is_still(sighting) for sighting in seen):
            return False
        with self._lock:
            late = self._take() if self._space not in (space.id, None) else None
            self._space = space.id
            self._used += keys
            is_due = len(self._used) >= REPORT_KEYS or time.monotonic() >= self._reported + REPORT_SECONDS
            due = self._take() if is_due else None
        for touch in (late, due):
            if touch is not None:
                self._caller.post(touch)
        return True

    def report(self) -> None:
        """Tell the node what it has not heard of yet."""
        with self._lock:
            touch = self._take()
        if touch is not None:
            self._caller.post(touch)

    def _take(self) -> Touch | None:
        """The lock is held."""
        if self._space is None or not self._used:
            return None
        used, self._used = self._used, []
        self._reported = time.monotonic()
        return Touch(self._space, packed(used))
