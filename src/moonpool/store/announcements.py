"""What a node tells the Conductor's directory: changes in order, numbered, or a snapshot instead of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby

from moonpool.core.events import BlocksRemoved, BlocksStored, Snapshot
from moonpool.core.vocabulary import BlockKey, Incarnation, KeySpaceId, PartId, Tier
from moonpool.store.blocks import Change, Name

KEYS_A_MESSAGE = 4096
KEYS_A_SNAPSHOT = 400_000
"""A control message is at most 16 MiB; the rest of a large node follows as changes."""
KEYS_A_REST = 100_000
MAX_PENDING = 100_000


@dataclass(slots=True)
class Announcements:
    """Not thread-safe: the ledger's lock covers it."""

    node: PartId
    incarnation: Incarnation
    on_pending: Callable[[], None]
    """Called, under the lock, when there is something to send: it may only wake a sender."""
    seq: int = 0
    """Of the last message made."""
    _pending: deque[Change] = field(default_factory=deque)
    _wants_snapshot: bool = False
    _rest: deque[tuple[KeySpaceId, Tier, tuple[BlockKey, ...]]] = field(default_factory=deque)
    """What did not fit into the last snapshot; goes before what has changed since."""

    def note(self, change: Change) -> None:
        if self._wants_snapshot:
            return
        self._pending.append(change)
        if len(self._pending) > MAX_PENDING:
            self.ask_snapshot()
        self.on_pending()

    def ask_snapshot(self) -> None:
        """The next message is a snapshot: someone joined, asked for it, or missed a message."""
        self._wants_snapshot = True
        self._pending.clear()
        self._rest.clear()
        self.on_pending()

    def next(self, dram: Iterable[Name], ssd: Iterable[Name] = ()) -> BlocksStored | BlocksRemoved | Snapshot | None:
        """The next message to send; None if there is nothing. A message that was not delivered calls for a snapshot."""
        if self._wants_snapshot:
            self._wants_snapshot = False
            return self._snapshot({Tier.DRAM: dram, Tier.SSD: ssd})
        if self._rest:
            self.seq += 1
            return BlocksStored(self.node, self.incarnation, self.seq, *self._rest.popleft())
        if not self._pending:
            return None
        first = self._pending[0]
        keys: list[BlockKey] = []
        while self._pending and len(keys) < KEYS_A_MESSAGE:
            change = self._pending[0]
            if (change.stored, change.tier, change.name[0]) != (first.stored, first.tier, first.name[0]):
                break
            keys.append(self._pending.popleft().name[1])
        self.seq += 1
        kind = BlocksStored if first.stored else BlocksRemoved
        return kind(self.node, self.incarnation, self.seq, first.name[0], first.tier, tuple(keys))

    def _snapshot(self, resident: dict[Tier, Iterable[Name]]) -> Snapshot:
        def space(name: Name) -> KeySpaceId:
            return name[0]

        blocks: list[tuple[KeySpaceId, Tier, tuple[BlockKey, ...]]] = []
        left = KEYS_A_SNAPSHOT
        for tier, present in resident.items():
            for space_id, names in groupby(sorted(present), key=space):
                keys = tuple(key for _, key in names)
                if left > 0:
                    blocks.append((space_id, tier, keys[:left]))
                    keys, left = keys[left:], left - len(keys)
                for start in range(0, len(keys), KEYS_A_REST):
                    self._rest.append((space_id, tier, keys[start : start + KEYS_A_REST]))
        if self._rest:
            self.on_pending()
        return Snapshot(self.node, self.incarnation, self.seq, tuple(blocks))
