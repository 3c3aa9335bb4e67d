"""The state of a node: who may read and write which bytes of the arena. Synchronous, one lock, no I/O, no clock.

Every method may be called from any thread and returns at once (`claims.take_when_free` excepted). What the ledger calls
back is called under its lock and may only wake somebody. Whoever has a part of that state (`Leases`, `Bookings`,
`Claims`, `Catalogue`, `Copies`, `Pins`, `Shelf`, `Watches`) has the same lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from moonpool.core.events import BlocksRemoved, BlocksStored, Snapshot
from moonpool.core.eviction import Eviction, EvictionPolicy
from moonpool.core.vocabulary import BlockKey, Incarnation, KeySpace, PartId
from moonpool.store.announcements import Announcements
from moonpool.store.blocks import Blocks
from moonpool.store.board import Board
from moonpool.store.bookings import Bookings
from moonpool.store.catalogue import Catalogue
from moonpool.store.copies import Copies
from moonpool.store.extents import Extents
from moonpool.store.leases import Leases
from moonpool.store.overdue import Holding
from moonpool.store.pins import PIN_SHARE, Pins
from moonpool.store.quotas import Quotas
from moonpool.store.rooms import ClientId, RoomId
from moonpool.store.shelf import Shelf
from moonpool.store.watches import Watches


class Ledger:
    def __init__(
        self,
        extents: Extents,
        node: PartId,
        incarnation: Incarnation,
        on_pending: Callable[[], None] = lambda: None,
        on_room_ended: Callable[[ClientId, RoomId], None] = lambda client, room: None,
        eviction: EvictionPolicy = "lru",
        board: Board | None = None,
        pin_share: float = PIN_SHARE,
    ) -> None:
        """`on_room_ended`: a hand-over room ended while this client was a writer of it."""
        self._lock = threading.Condition(threading.RLock())
        self._announcements = Announcements(node, incarnation, on_pending)
        self._blocks = Blocks(extents, self._announcements.note, Eviction(eviction), board)
        self.shelf = Shelf(self._lock, self._blocks, self._announcements.note)
        self.pins = Pins(self._lock, self._blocks, self.shelf, pin_share)
        self.watches = Watches(self._lock, self._blocks)
        self.copies = Copies(self._lock)
        self.catalogue = Catalogue(self._lock, self._blocks, self.shelf, self.pins, self.copies)
        self._quotas = Quotas()
        self.leases = Leases(self._lock, self._blocks, self.shelf, self._quotas)
        self.rooms = Bookings(self._lock, self._blocks, self.shelf, self._quotas, self.leases, on_room_ended)
        self.claims = self.rooms.claims
        self._owners = 0

    def own_client(self) -> ClientId:
        """A client that stands for the node itself: for rooms that I/O of the node fills, whoever asked for it."""
        with self._lock:
            self._owners += 1
            return ClientId(-self._owners)

    def limit(self, client: ClientId, nbytes: int) -> None:
        """This client, which nobody may kill, holds at most so many bytes in leases and caching rooms of its own."""
        with self._lock:
            self._quotas.limit(client, nbytes)

    def check_takes(self, space: KeySpace) -> None:
        """Raises PoolError where no blocks of this key space, with this layout, can come to this node."""
        with self._lock:
            self._blocks.spaces.check(space)
            self._blocks.spaces.check_new(space)

    def leading(self, space: KeySpace, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks are readable now."""
        with self._lock:
            self._blocks.spaces.check_keys(space, keys)
            return len(self._blocks.leading(space.id, keys))

    def leave_all(self, client: ClientId) -> None:
        """The client is dead: its leases end, its unfinished rooms too."""
        with self._lock:
            self._quotas.lift(client)
            self.leases.leave_all(client)
            self.rooms.leave_all(client)

    def holdings(self) -> list[Holding]:
        """What clients hold now."""
        with self._lock:
            return self.leases.holdings() + self.rooms.holdings()

    def next_announcement(self) -> BlocksStored | BlocksRemoved | Snapshot | None:
        with self._lock:
            self._blocks.tell()
            return self._announcements.next(self._blocks.resident, self.shelf.names())

    def ask_snapshot(self) -> None:
        with self._lock:
            self._announcements.ask_snapshot()

    def counters(self) -> dict[str, float]:
        """Gauges (capacity_bytes, used_bytes, blocks, holes, rooms, leases, …) and counts since the start."""
        with self._lock:
            gauges = {
                "capacity_bytes": self._blocks.extents.capacity,
                "used_bytes": self._blocks.extents.used,
                "evictable_bytes": self._blocks.eviction.evictable_bytes,
                "blocks": len(self._blocks.resident),
                "holes": self._blocks.eviction.holes,
                "rooms": len(self.rooms),
                "leases": len(self.leases),
                "watches": len(self.watches),
                "waiters": self.rooms.waiters(),
                "transfers": len(self.claims),
                "late_runs": self.claims.late_runs,
                "pins": len(self.pins),
                "pinned_bytes": self.pins.nbytes,
                "pinnable_bytes": self.pins.limit,
                "evictions": self._blocks.evictions,
                "demotions": self._blocks.demotions,
                "dram_checksum_failures": self.catalogue.damaged,
            }
            counts = gauges | self.leases.counts | self.rooms.counts
            return {name: float(value) for name, value in counts.items()} | self.shelf.counters()

    def check_integrity(self) -> None:
        """Raises AssertionError where bytes, pins or rooms do not add up."""
        with self._lock:
            private = self.rooms.own()
            in_dram = [*private, *self._blocks.resident.values(), *self._blocks.lingering.values()]
            spaces = [block.space for block in in_dram] + [shelved.space for shelved in self.shelf.shelved()]
            self._blocks.spaces.check_integrity(spaces)
            self._blocks.check_integrity(private)
            self.shelf.check_integrity()
            self.pins.check_integrity()
            self.watches.check_integrity()
            self.rooms.check_integrity()
            pins = self.leases.pinned() + self.rooms.pinned()
            pins.update(name for name in self._blocks.resident if name in self.pins)
            for name in self._blocks.resident:
                assert self._blocks.eviction.pins(name) == pins[name], (
                    f"{name} is pinned by nobody, or not by all who should"
                )
            held = self.leases.held() + self.rooms.held()
            assert held == self._quotas.held, f"clients hold {held}, counted as {self._quotas.held}"
