"""What a node tells the Conductor's directory: changes in order, numbered, or a snapshot instead of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from moonpool.core.events import BlocksRemoved, BlocksStored, Snapshot
from moonpool.core.vocabulary import BlockKey, Incarnation, KeySpaceId, PartId, Tier
from moonpool.store.blocks import Change, Name

KEYS_A_MESSAGE = 2048
KEYS_A_SNAPSHOT = 2048
"""The rest of a larger node follows as changes: whoever hears a message does nothing else meanwhile."""
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
    _rest: deque[tuple[Tier, list[Name]]] = field(default_factory=deque)
    """What did not fit into the last snapshot, by tier; goes before what has changed since."""

    def note(self, changes: Sequence[Change]) -> None:
        if self._wants_snapshot or not changes:
            return
        self._pending.extend(changes)
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
            tier, names = self._rest[0]
            space = names[-1][0]
            self.seq += 1
            keys = _take(names, KEYS_A_MESSAGE)
            if not names:
                self._rest.popleft()
            return BlocksStored(self.node, self.incarnation, self.seq, space, tier, keys, more=bool(self._rest))
        if not self._pending:
            return None
        first = self._pending[0]
        changed: list[BlockKey] = []
        while self._pending and len(changed) < KEYS_A_MESSAGE:
            change = self._pending[0]
            if (change.stored, change.tier, change.name[0]) != (first.stored, first.tier, first.name[0]):
                break
            changed.append(self._pending.popleft().name[1])
        self.seq += 1
        kind = BlocksStored if first.stored else BlocksRemoved
        return kind(self.node, self.incarnation, self.seq, first.name[0], first.tier, tuple(changed))

    def _snapshot(self, resident: dict[Tier, Iterable[Name]]) -> Snapshot:
        # A copy and no more, for the ledger's lock is held: the rest is put in order as it is sent.
        self._rest.extend((tier, names) for tier, present in resident.items() if (names := list(present)))
        blocks: list[tuple[KeySpaceId, Tier, tuple[BlockKey, ...]]] = []
        left = KEYS_A_SNAPSHOT
        while self._rest and left > 0:
            tier, names = self._rest[0]
            space = names[-1][0]
            keys = _take(names, left)
            blocks.append((space, tier, keys))
            left -= len(keys)
            if not names:
                self._rest.popleft()
        if self._rest:
            self.on_pending()
        return Snapshot(self.node, self.incarnation, self.seq, tuple(blocks), more=bool(self._rest))


def _take(names: list[Name], most: int) -> tuple[BlockKey, ...]:
    """Off the end: keys of the last name's key space."""
    space = names[-1][0]
    keys: list[BlockKey] = []
    while names and len(keys) < most and names[-1][0] == space:
        keys.append(names.pop()[1])
    return tuple(keys)
