"""A simulated node: which blocks its DRAM holds, by the rules of the real one (pins, rooms, eviction); no bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.core.actions import ReserveRoom
from moonpool.core.events import (
    BlocksRemoved,
    BlocksStored,
    Event,
    Registered,
    Reported,
    RoomConfirmed,
    RoomRefused,
    Snapshot,
)
from moonpool.core.eviction import Eviction, EvictionPolicy
from moonpool.core.options import room_bytes
from moonpool.core.vocabulary import (
    BlockKey,
    Capacity,
    Incarnation,
    KeySpace,
    NodePeer,
    PartId,
    PartKind,
    Peer,
    RequestId,
    Tier,
)
from moonpool.sim.clock import Link, transfer
from moonpool.sim.shelf import SimShelf

MOST_ARRIVALS = 4096

_Room = tuple[tuple[BlockKey, ...], tuple[BlockKey, ...], int]
"""Keys, those of them that were pinned, bytes reserved for the others and the tail."""


class SimNode:
    def __init__(
        self,
        name: str,
        space: KeySpace,
        dram_bytes: int,
        policy: EvictionPolicy,
        link: Link,
        tell: Callable[[Event], None],
        shelf: SimShelf | None = None,
    ) -> None:
        """`shelf`: its SSD, if it has one."""
        self.peer = Peer(PartId(name), Incarnation("1"), name)
        self.link = link
        self.capacity = dram_bytes
        self._space = space
        self._tell = tell
        self._eviction: Eviction[BlockKey] = Eviction(policy)
        self._held = self._eviction.keys()
        self._reserved = 0
        self._rooms: dict[tuple[RequestId, int], _Room] = {}
        self._shelf = shelf
        self._seq = 0
        self._arrivals: dict[BlockKey, float] = {}
        """When blocks that were fetched have come; forgotten when that is past."""
        self.evicted_blocks = 0
        self.id = self.peer.id
        self._told_used = 0

    @property
    def as_peer(self) -> NodePeer:
        return NodePeer(self.peer.id, self.peer.incarnation, self.peer.address, "", "")

    def register(self) -> Registered:
        return Registered(PartKind.NODE, self.peer, Capacity(dram_bytes=self.capacity))

    def report(self) -> None:
        """Unless nothing has changed: here no announcement is lost, and nobody is thought dead."""
        used = self.capacity - self._free
        if used != self._told_used:
            self._told_used = used
            self._tell(Reported(self.id, self.peer.incarnation, used_bytes=used, announced=self._seq))

    def snapshot(self) -> None:
        tiers = [(Tier.DRAM, tuple(self._eviction.keys()))]
        if self._shelf is not None:
            tiers.append((Tier.SSD, self._shelf.keys()))
        blocks = tuple([(self._space.id, tier, keys) for tier, keys in tiers])
        self._tell(Snapshot(self.id, self.peer.incarnation, self._seq, blocks))

    # Blocks

    def leading(self, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks are here."""
        held = self._held
        for count, key in enumerate(keys):
            if key not in held:
                return count
        return len(keys)

    def load(self, keys: Sequence[BlockKey], now: float) -> None:
        """Bring those leading blocks to DRAM that only the SSD has, as far as there is room."""
        shelf = self._shelf
        if not shelf:
            return
        end = 0
        while end < len(keys) and (keys[end] in self._eviction or keys[end] in shelf):
            end += 1
        slow = [key for key in keys[:end] if key not in self._eviction]
        if slow:
            self._arrive(slow, shelf.read(slow, now), now)
            self.store(keys[:end])

    def fetch(self, source: SimNode, keys: Sequence[BlockKey], now: float) -> int:
        """Copy what is lacking of these leading blocks as far as the source has them; how many that are."""
        source.load(keys, now)
        have, end = self.leading(keys), source.leading(keys)
        if end <= have:
            return 0
        begin = source.arrival(keys[have:end], now)
        done = transfer(source.link, self.link, (end - have) * self._space.block_bytes, begin)
        self.store(keys[:end])
        self._arrive(keys[have:end], done, now)
        return end - have

    def _arrive(self, keys: Sequence[BlockKey], at: float, now: float) -> None:
        self._arrivals.update(dict.fromkeys(keys, at))
        if len(self._arrivals) > MOST_ARRIVALS:
            self._arrivals = {key: time for key, time in self._arrivals.items() if time > now}

    def demote(self, keys: Sequence[BlockKey]) -> None:
        """To the SSD, but for those that somebody uses."""
        if self._shelf is not None and (gone := self._remove(keys)):
            self._gave_up(gone)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Forget these, but for those that somebody uses."""
        if gone := self._remove(keys):
            self._announce_removed(gone, Tier.DRAM)

    def _remove(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        gone = tuple([key for key in keys if key in self._eviction and not self._eviction.pins(key)])
        # The last first: without the one before it a block would be a hole until it goes as well.
        for key in reversed(gone):
            self._eviction.remove(key)
        return gone

    def arrival(self, keys: Sequence[BlockKey], now: float) -> float:
        """When all of these blocks, which are here or on their way, can be read."""
        arrivals = self._arrivals
        return max([now, *(arrivals[key] for key in keys if key in arrivals)]) if arrivals else now

    def pin(self, keys: Sequence[BlockKey]) -> None:
        self._eviction.pin(keys)

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        self._eviction.unpin(keys)

    def store(self, keys: Sequence[BlockKey]) -> None:
        """Keep what is lacking of these leading blocks of a prompt, as far as there is room."""
        held = self._held
        at = used = self.leading(keys)
        if at:
            self._eviction.touch(keys[:at])
        while at < len(keys):
            if keys[at] in held:
                # It outlived a block before it.
                at += 1
                continue
            end = at + 1
            while end < len(keys) and keys[end] not in held:
                end += 1
            count = self._make_room(end - at, keys[:at], at == used)
            added = keys[at : at + count]
            if added:
                parent = keys[at - 1] if at else None
                self._eviction.extend(added, self._space.block_bytes, parent, at, 0)
                self._announce_stored(added)
            if count < end - at:
                return
            at = end

    def _make_room(self, blocks: int, keep: Sequence[BlockKey], just_used: bool) -> int:
        """Evict for so many blocks, but not those to `keep`; how many there is room for."""
        size = self._space.block_bytes
        lacking = blocks * size - self._free
        if lacking > 0:
            eviction = self._eviction
            # Where the least recently used goes first, those that have just been used come last.
            if just_used and eviction.policy == "lru" and eviction.evictable_bytes - len(keep) * size >= lacking:
                self._evict(lacking)
            else:
                held = [key for key in keep if key in self._held]
                eviction.pin(held)
                self._evict(lacking)
                eviction.unpin(held)
        return min(blocks, max(self._free, 0) // size)

    @property
    def _free(self) -> int:
        return self.capacity - self._reserved - self._eviction.bytes

    def _evict(self, nbytes: int) -> None:
        gone = self._eviction.evict(nbytes)
        if gone:
            self.evicted_blocks += len(gone)
            self._gave_up(gone)

    def _gave_up(self, keys: tuple[BlockKey, ...]) -> None:
        """DRAM has: the SSD has them then."""
        if self._shelf is not None:
            fresh, gone = self._shelf.save(keys)
            if fresh:
                self._announce_stored(fresh, Tier.SSD)
            if gone:
                self._announce_removed(gone, Tier.SSD)
        self._announce_removed(keys, Tier.DRAM)

    def _announce_removed(self, keys: tuple[BlockKey, ...], tier: Tier) -> None:
        self._seq += 1
        self._tell(BlocksRemoved(self.id, self.peer.incarnation, self._seq, self._space.id, tier, keys))

    def _announce_stored(self, keys: Sequence[BlockKey], tier: Tier = Tier.DRAM) -> None:
        self._seq += 1
        self._tell(BlocksStored(self.id, self.peer.incarnation, self._seq, self._space.id, tier, tuple(keys)))

    # Rooms for hand-over

    def reserve(self, order: ReserveRoom) -> None:
        """All of it or nothing."""
        keys, here = order.keys, self._held
        lacking = tuple([at for at, key in enumerate(keys) if key not in here])
        held = tuple([key for key in keys if key in here]) if len(lacking) < len(keys) else ()
        tokens = len(keys) * self._space.block_tokens + order.tail_tokens
        needed = room_bytes(self._space, tokens) - len(held) * self._space.block_bytes
        self._eviction.pin(held)
        free = self._free
        if needed > free + self._eviction.evictable_bytes:
            self._eviction.unpin(held)
            reason = f"{needed} bytes wanted, {free} free"
            self._tell(RoomRefused(self.id, self.peer.incarnation, order.request, order.attempt, reason))
            return
        if needed > free:
            self._evict(needed - free)
        self._reserved += needed
        self._rooms[order.request, order.attempt] = keys, held, needed
        self._tell(RoomConfirmed(self.id, self.peer.incarnation, order.request, order.attempt, lacking))

    def close(self, request: RequestId, attempt: int, arrived: bool) -> None:
        """The room is over; what has arrived in it stays as cached blocks. Unknown rooms are ignored."""
        room = self._rooms.pop((request, attempt), None)
        if room is None:
            return
        keys, held, nbytes = room
        self._reserved -= nbytes
        self._eviction.unpin(held)
        if arrived:
            self.store(keys)

    def check_integrity(self) -> None:
        self._eviction.check_integrity()
        assert self._reserved == sum(room[2] for room in self._rooms.values())
        assert self._eviction.bytes + self._reserved <= self.capacity
