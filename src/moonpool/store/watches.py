"""Waiting for blocks that somebody else is writing.

The ledger's lock covers all of it; every public method takes that lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from moonpool.store.blocks import Blocks, Name

Watch = Future[None]


class Watches:
    def __init__(self, lock: threading.Condition, blocks: Blocks) -> None:
        self._lock = lock
        self._blocks = blocks
        self._watching: dict[Name, list[Watch]] = {}
        self._left: dict[Watch, set[Name]] = {}
        blocks.on_settled = self._settled

    def watch(self, names: Sequence[Name]) -> Watch:
        """Resolves when none of these is being written any more: each is readable then, or its writers have given up.

        Needs its `end`.
        """
        with self._lock:
            watch = Watch()
            watch.set_running_or_notify_cancel()
            left = {name for name in names if name in self._blocks.filling and name not in self._blocks.resident}
            if left:
                self._left[watch] = left
                for name in left:
                    self._watching.setdefault(name, []).append(watch)
            else:
                watch.set_result(None)
            return watch

    def end(self, watch: Watch) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            for name in self._left.pop(watch, ()):
                self._forget(name, watch)

    def __len__(self) -> int:
        """Who waits now."""
        return len(self._left)

    def _settled(self, names: Sequence[Name]) -> None:
        if not self._watching:
            return
        for name in names:
            if name in self._blocks.filling and name not in self._blocks.resident:
                continue
            for watch in self._watching.pop(name, ()):
                left = self._left[watch]
                left.discard(name)
                if not left:
                    del self._left[watch]
                    watch.set_result(None)

    def _forget(self, name: Name, watch: Watch) -> None:
        watching = self._watching[name]
        watching.remove(watch)
        if not watching:
            del self._watching[name]

    def check_integrity(self) -> None:
        """The caller has the lock. Raises AssertionError where somebody waits for nothing."""
        assert self._watching.keys() <= self._blocks.filling.keys()
        assert all(self._left.values())
        assert {name for left in self._left.values() for name in left} == self._watching.keys()
