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
        self.on_pending()

    def next(self, resident: Iterable[Name]) -> BlocksStored | BlocksRemoved | Snapshot | None:
        """The next message to send; None if there is nothing. A message that was not delivered calls for a snapshot."""
        if self._wants_snapshot:
            self._wants_snapshot = False
            return self._snapshot(resident)
        if not self._pending:
            return None
        first = self._pending[0]
        keys: list[BlockKey] = []
        while self._pending and len(keys) < KEYS_A_MESSAGE:
            change = self._pending[0]
            if change.stored != first.stored or change.name[0] != first.name[0]:
                break
            keys.append(self._pending.popleft().name[1])
        self.seq += 1
        kind = BlocksStored if first.stored else BlocksRemoved
        return kind(self.node, self.incarnation, self.seq, first.name[0], Tier.DRAM, tuple(keys))

    def _snapshot(self, resident: Iterable[Name]) -> Snapshot:
        def space(name: Name) -> KeySpaceId:
            return name[0]

        groups = groupby(sorted(resident), key=space)
        blocks = tuple((space_id, Tier.DRAM, tuple(key for _, key in names)) for space_id, names in groups)
        return Snapshot(self.node, self.incarnation, self.seq, blocks)
