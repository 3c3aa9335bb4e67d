"""Which rooms there are, who writes and reads them, and when they end.

The ledger's lock covers all of it; every public method takes that lock. What is called back is called under it.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from moonpool.core.vocabulary import BlockKey, BlockMeta, KeySpace, Peer, RequestId
from moonpool.errors import PoolBusyError, PoolError, RoomTooLargeError
from moonpool.store.blocks import Block, Blocks, Name
from moonpool.store.claims import Claims
from moonpool.store.extents import page_aligned
from moonpool.store.leases import Leases
from moonpool.store.overdue import Holding, Kind
from moonpool.store.quotas import Quotas, bytes_of
from moonpool.store.rooms import (
    ClientId,
    Room,
    RoomId,
    Waiter,
    check_metas,
    finish_blocks,
    finish_runs,
    free_room,
    mask_of,
    name_tokens,
    open_room,
)
from moonpool.store.shelf import Shelf

BUSY_SECONDS = 5.0
"""How long a put waits, at most, for an SSD to have written what is in its way."""
BUSY_RETRY_SECONDS = 0.002
_BARE = BlockMeta()


class Bookings:
    def __init__(
        self,
        lock: threading.Condition,
        blocks: Blocks,
        shelf: Shelf,
        quotas: Quotas,
        leases: Leases,
        on_room_ended: Callable[[ClientId, RoomId], None],
    ) -> None:
        """`leases` counts the hits of those that read as they come. `on_room_ended`: a hand-over room ended while this
        client was a writer of it.
        """
        self._lock = lock
        self._blocks = blocks
        self._shelf = shelf
        self._quotas = quotas
        self._leases = leases
        self._on_room_ended = on_room_ended
        self._rooms: dict[RoomId, Room] = {}
        self._reserved: dict[tuple[RequestId, int], Room] = {}
        self.claims = Claims(lock, blocks, self._reserved, self._wake)
        self._ids = itertools.count(1)
        self.counts = dict.fromkeys(("rooms_opened", "refused_rooms", "missed_rooms"), 0)
        """Since the start."""

    def __len__(self) -> int:
        return len(self._rooms)

    def reserve(
        self,
        request: RequestId,
        attempt: int,
        space: KeySpace,
        keys: Sequence[BlockKey],
        tail_tokens: int,
        expires: float,
        gateway: Peer | None = None,
    ) -> tuple[int, ...]:
        """A hand-over room, whole or not at all: the indices of the keys that are lacking. Raises PoolError."""
        with self._lock:
            self._check(space, keys, tail_tokens)
            known = self._reserved.get((request, attempt))
            if known is not None:
                return known.lacking
            room = self._open(space, keys, tail_tokens, whole=True)
            if room is None:
                self.counts["refused_rooms"] += 1
                extents = self._blocks.extents
                self._check_size(space, keys, tail_tokens)
                raise PoolError(
                    f"no room for {len(keys)} blocks of {space.block_bytes} bytes and {tail_tokens} more tokens: "
                    f"{extents.free} of {extents.capacity} bytes are free, "
                    f"{self._blocks.eviction.evictable_bytes} evictable"
                )
            room.reserved = request, attempt
            room.expires = expires
            room.gateway = gateway
            self._reserved[request, attempt] = room
            return room.lacking

    def _check_size(self, space: KeySpace, keys: Sequence[BlockKey], tail_tokens: int) -> None:
        """Raises RoomTooLargeError where the room would not fit if nothing but what is pinned were here."""
        needed = len(keys) * page_aligned(space.block_bytes)
        needed += page_aligned(space.tail_run_bytes(tail_tokens) * space.runs)
        pinned = self._blocks.pinned_bytes_beside({(space.id, key) for key in keys})
        capacity = self._blocks.extents.capacity
        if needed > capacity - pinned:
            where = f"{capacity} that a node has" + (f" less {pinned} that cached contexts pin" if pinned else "")
            raise RoomTooLargeError(
                f"no room for {len(keys)} blocks of KVCache and {tail_tokens} more tokens: they take {needed} bytes of "
                f"the {where}; shorten the prompt, " + ("delete cached contexts, " if pinned else "") + "or give nodes "
                "more DRAM"
            )

    def end_reserved(self, request: RequestId, attempt: int) -> bool:
        """The attempt is over; False if there is no such room."""
        with self._lock:
            room = self._reserved.get((request, attempt))
            if room is not None:
                self._end(room)
            return room is not None

    def open(
        self,
        client: ClientId,
        space: KeySpace,
        keys: Sequence[BlockKey],
        tail_tokens: int = 0,
        metas: Sequence[BlockMeta] | None = None,
        name: tuple[RequestId, int] | None = None,
        gone: Collection[Name] = (),
    ) -> Room:
        """A caching room: as many leading keys as there is room for, perhaps none.

        `metas`: one a key; without them the keys are a prompt's, from its first block on. `name`: others may `join` it
        as this attempt of a request and write into it from elsewhere; it ends when all have left it, or one has died.
        `gone`: see `Room`.
        """
        with self._lock:
            self._check(space, keys, tail_tokens)
            if metas is not None:
                check_metas(space, keys, metas)
            budget = self._quotas.left(client)
            room = self._open(space, keys, tail_tokens, whole=False, budget=budget, metas=metas)
            assert room is not None, "a best-effort room opens even when it is empty"
            room.gone = gone
            if name is not None:
                if name in self._reserved:
                    self._end(room)
                    raise PoolError(f"attempt {name[1]} of {name[0]} has a room here")
                room.reserved, room.opener = name, client
                self._reserved[name] = room
            self._give(room, client)
            return room

    def check_share(self, client: ClientId, space: KeySpace, blocks: int) -> None:
        """Raises PoolError where so many blocks are too many for the client to `share`: then no room need be made."""
        with self._lock:
            self._quotas.check(client, "stream", blocks * page_aligned(space.block_bytes))

    def share(self, client: ClientId, room: Room, wanted: int, found: int) -> None:
        """The client, which wanted so many blocks, reads those of this caching room as well until it closes it.

        Raises PoolError where they are too many for it.
        """
        with self._lock:
            self._quotas.check(client, "stream", bytes_of(room.blocks))
            self._quotas.hold(client, room.blocks)
            self._leases.count_hits(wanted, found)
            room.readers.add(client)

    def open_each(
        self, client: ClientId, space: KeySpace, keys: Sequence[BlockKey], metas: Sequence[BlockMeta]
    ) -> Room:
        """A caching room for blocks of different prompts that are nowhere here, all of them or PoolError.

        One meta a key, or none at all. Those that an SSD has stay as they are. PoolBusyError where there will be room
        when the SSD has written what it is writing.
        """
        with self._lock:
            self._check(space, keys)
            if metas:
                check_metas(space, keys, metas)
            else:
                metas = [_BARE] * len(keys)
            wanted = len(keys) * page_aligned(space.block_bytes)
            if wanted > self._blocks.extents.capacity:
                raise PoolError(self._no_room(space, len(keys)))
            self._quotas.check(client, "room", wanted)
            room = self._open(space, keys, 0, whole=True, metas=metas, leaves_kept=True)
            if room is None:
                if self._may_come(space, keys):
                    raise PoolBusyError(self._no_room(space, len(keys)))
                self.counts["refused_rooms"] += 1
                raise PoolError(self._no_room(space, len(keys)))
            self._give(room, client)
            return room

    def commit(self, client: ClientId, number: RoomId, checksums: Sequence[int]) -> None:
        """All blocks of this caching room are written (a checksum a run of those that were not readable): close it.

        Raises PoolError where there is no such room.
        """
        with self._lock:
            room = self._rooms.get(number)
            if room is None or room.reserved is not None or client not in room.writers:
                raise PoolError(f"no room {number} to commit")
            runs = room.space.runs
            own = [index for index in room.lacking if room.blocks[index] is not None]
            if len(checksums) != len(own) * runs:
                raise PoolError(f"{len(own)} blocks of {runs} runs with {len(checksums)} checksums")
            self._complete_blocks(room, own, checksums)
            self._blocks.tell()
            self._leave(room, client)

    def join(self, client: ClientId, request: RequestId, attempt: int) -> Room:
        """Become a writer of a hand-over room. Raises PoolError if there is none."""
        with self._lock:
            room = self._reserved.get((request, attempt))
            if room is None:
                raise PoolError(f"no room for attempt {attempt} of {request}: it was released, or never reserved here")
            room.writers.add(client)
            return room

    def tell_tokens(self, client: ClientId, number: RoomId, tokens: bytes) -> None:
        """Token ids (u32, little-endian) of the room's blocks, the prompt's first ones first.

        They are kept with those blocks of which none are known. Ignored where the room has ended. Raises PoolError for
        what are no token ids.
        """
        if len(tokens) % 4:
            raise PoolError(f"{len(tokens)} bytes are no token ids of 4 bytes")
        with self._lock:
            room = self._rooms.get(number)
            if room is not None and (client in room.writers or client in room.readers):
                name_tokens(room, tokens)

    def complete(
        self, client: ClientId, number: RoomId, runs: Sequence[tuple[int, int, int]], checksums: Sequence[int]
    ) -> None:
        """These (block, first run, runs) are written. Ignored where the room has ended; PoolError for nonsense."""
        with self._lock:
            room = self._rooms.get(number)
            if room is None or room.ended or client not in room.writers:
                self.claims.late_runs += sum(count for _, _, count in runs)
                return
            if len(checksums) != sum(count for _, _, count in runs):
                raise PoolError(f"{sum(count for _, _, count in runs)} runs with {len(checksums)} checksums")
            self._complete(room, runs, checksums)

    def complete_blocks(
        self, client: ClientId, number: RoomId, indices: Sequence[int], checksums: Sequence[int]
    ) -> None:
        """As `complete`, for all runs of these blocks. Needs `tell`."""
        with self._lock:
            room = self._rooms.get(number)
            if room is None or room.ended or client not in room.writers:
                self.claims.late_runs += len(checksums)
                return
            self._complete_blocks(room, indices, checksums)

    def tell(self) -> None:
        """What `complete_blocks` made readable is to be seen from outside: until then it is found by asking."""
        with self._lock:
            self._blocks.tell()

    def await_room(self, client: ClientId, request: RequestId, attempt: int) -> Waiter:
        """Resolves with the room when all of it is readable (the client is a reader of it then), or with None."""
        with self._lock:
            waiter = Waiter()
            waiter.set_running_or_notify_cancel()
            room = self._reserved.get((request, attempt))
            if room is None:
                self._miss(waiter)
            else:
                room.waiters[waiter] = client
                if not room.unfinished:
                    self._wake(room)
            return waiter

    def give_up(self, waiter: Waiter) -> None:
        """The waiter's time is over: it gets a miss unless it was answered already."""
        with self._lock:
            for room in self._reserved.values():
                if room.waiters.pop(waiter, None) is not None:
                    self._miss(waiter)
                    return

    def close(self, client: ClientId, number: RoomId) -> None:
        """The client is through with the room. Unknown rooms are ignored: a close may cross the room's end.

        A reader's close ends a hand-over room; so does that of the last writer if not everything is written.
        """
        with self._lock:
            room = self._rooms.get(number)
            if room is not None:
                self._leave(room, client)

    def leave_all(self, client: ClientId) -> None:
        """The client is dead: its unfinished rooms end."""
        with self._lock:
            for room in list(self._rooms.values()):
                for waiter in [waiter for waiter, owner in room.waiters.items() if owner == client]:
                    del room.waiters[waiter]
                    self._miss(waiter)
                if client in room.writers or client in room.readers:
                    self._leave(room, client, died=True)

    def gateways(self) -> set[Peer]:
        """Whose requests have hand-over rooms here."""
        with self._lock:
            return {room.gateway for room in self._reserved.values() if room.gateway is not None}

    def expire(self, now: float, lost: Collection[Peer] = ()) -> int:
        """End the hand-over rooms whose time is over, or whose gateway is `lost`, and that no local client is bound to.

        Returns their number.
        """
        with self._lock:
            late = [
                room
                for room in self._reserved.values()
                if (room.expires <= now or room.gateway in lost) and not (room.writers or room.readers or room.waiters)
            ]
            for room in late:
                self._end(room)
            return len(late)

    def holdings(self) -> list[Holding]:
        """Under the lock, as what follows."""
        held = []
        for room in self._rooms.values():
            kind = Kind.HAND_OVER_ROOM if room.is_handed_over else Kind.CACHING_ROOM
            expires = room.expires if room.is_handed_over else None
            held.append(Holding(kind, room.id, tuple(sorted(room.writers | room.readers)), expires))
        return held

    def own(self) -> list[Block]:
        """Blocks that only rooms have."""
        return [block for room in self._rooms.values() for block in room.own()]

    def pinned(self) -> Counter[Name]:
        """How often each block is pinned by a room."""
        return Counter(block.name for room in self._rooms.values() for block in room.pinned())

    def held(self) -> Counter[ClientId]:
        """Bytes of each client in rooms that count for its quota."""
        held: Counter[ClientId] = Counter()
        for room in self._rooms.values():
            for client in (*room.writers, *room.readers):
                if room.reserved is None or client == room.opener:
                    held[client] += bytes_of(room.blocks)
        return held

    def waiters(self) -> int:
        return sum(len(room.waiters) for room in self._reserved.values())

    def check_integrity(self) -> None:
        """Raises AssertionError where rooms do not add up."""
        for number, room in self._rooms.items():
            assert number == room.id
            assert not (room.ended and not (room.writers or room.readers)), f"ended room {number} is held by nobody"
            assert room.unfinished == sum(not block.is_complete for block in room.own())
            assert not (room.waiters and (room.ended or not room.unfinished)), f"room {number} left a waiter asleep"
            is_listed = room.reserved is not None and self._reserved.get(room.reserved) is room
            assert is_listed == (room.reserved is not None and not room.ended)
        assert all(room.id in self._rooms for room in self._reserved.values())

    def _check(self, space: KeySpace, keys: Sequence[BlockKey], tail_tokens: int = 0) -> None:
        self._blocks.spaces.check_keys(space, keys)
        if not 0 <= tail_tokens < space.block_tokens:
            raise PoolError(f"a tail has 0 to {space.block_tokens - 1} tokens, not {tail_tokens}")
        if tail_tokens and space.run_bytes % space.block_tokens:
            raise PoolError(
                f"key space {space.id} has no tails: its runs of {space.run_bytes} bytes are no {space.block_tokens} "
                "tokens of equal size"
            )

    def _no_room(self, space: KeySpace, blocks: int) -> str:
        extents = self._blocks.extents
        wanted = blocks * page_aligned(space.block_bytes)
        if wanted > extents.capacity:
            return (
                f"{blocks} blocks of {space.block_bytes} bytes do not fit into this node's arena of {extents.capacity} "
                "bytes: use smaller blocks, or give the node more DRAM"
            )
        return (
            f"no room for {blocks} blocks of {space.block_bytes} bytes: of {extents.capacity} bytes {extents.free} are "
            f"free and {self._blocks.eviction.evictable_bytes} evictable, the rest is leased, pinned or being written; "
            f"release or unpin some, or give the node more DRAM{self._passing()}"
        )

    def _passing(self) -> str:
        saving = self._blocks.saving_bytes()
        return f"; {saving} evictable bytes are just being written to an SSD: put again in a moment" if saving else ""

    def _may_come(self, space: KeySpace, keys: Sequence[BlockKey]) -> bool:
        """Whether it is only what an SSD writes now that keeps the room."""
        blocks = self._blocks
        names = [(space.id, key) for key in keys]
        lacking = sum(name not in blocks.resident and not blocks.is_kept(name) for name in names)
        could_be = blocks.extents.free + blocks.eviction.evictable_bytes
        return bool(blocks.saving_bytes()) and lacking * page_aligned(space.block_bytes) <= could_be

    def _open(
        self,
        space: KeySpace,
        keys: Sequence[BlockKey],
        tail_tokens: int,
        whole: bool,
        budget: int | None = None,
        metas: Sequence[BlockMeta] | None = None,
        leaves_kept: bool = False,
    ) -> Room | None:
        self._blocks.spaces.check_new(space)
        number = RoomId(next(self._ids))
        room = open_room(self._blocks, number, space, keys, tail_tokens, whole, budget, metas, leaves_kept)
        if room is not None:
            self._rooms[room.id] = room
            self.counts["rooms_opened"] += 1
            self._shelf.pressed()
        return room

    def _give(self, room: Room, client: ClientId) -> None:
        """A caching room, until the client leaves it."""
        room.writers.add(client)
        self._quotas.hold(client, room.blocks)

    def _complete(self, room: Room, runs: Sequence[tuple[int, int, int]], checksums: Sequence[int]) -> None:
        """These (block, first run, runs) of the room. Raises PoolError, and notes none, for what the room has not."""
        written: list[tuple[Block, int]] = []
        position = 0
        for index, first, count in runs:
            block = room.block(index)
            sums, position = checksums[position : position + count], position + count
            if block is not None and not block.resident:
                written.append((block, self._note_sums(block, first, sums)))
        finish_runs(self._blocks, room, written, self._wake)

    def _complete_blocks(self, room: Room, indices: Sequence[int], checksums: Sequence[int]) -> None:
        """All runs of these blocks of the room."""
        runs = room.space.runs
        blocks = [block for index in indices if (block := room.blocks[index]) is not None and block.is_untouched]
        if len(blocks) < len(indices):
            self._complete(room, [(index, 0, runs) for index in indices], checksums)
            return
        for at, block in enumerate(blocks):
            block.checksums = list(checksums[at * runs : (at + 1) * runs])
        finish_blocks(self._blocks, room, blocks, self._wake)

    def _note_sums(self, block: Block, first: int, checksums: Sequence[int]) -> int:
        """Of runs from the first one on; a bitmask of those whose checksums were not known."""
        runs = mask_of(block, first, len(checksums))
        if len(checksums) == block.space.runs and not (block.complete or block.arriving):
            block.checksums[:] = checksums
            return runs
        wanted = runs & ~block.complete & ~block.arriving
        for run, checksum in enumerate(checksums, first):
            if wanted >> run & 1:
                block.checksums[run] = checksum
        return wanted

    def _wake(self, room: Room) -> None:
        waiters, room.waiters = room.waiters, {}
        for waiter, client in waiters.items():
            room.readers.add(client)
            waiter.set_result(room)

    def _miss(self, waiter: Waiter) -> None:
        self.counts["missed_rooms"] += 1
        waiter.set_result(None)

    def _leave(self, room: Room, client: ClientId, died: bool = False) -> None:
        was_reader, was_writer = client in room.readers, client in room.writers
        if was_writer and (room.reserved is None or room.opener == client):
            self._quotas.let_go(client, room.blocks)
        if was_reader and room.reserved is None:
            self._quotas.let_go(client, room.blocks)
        room.readers.discard(client)
        room.writers.discard(client)
        if room.ended:
            self._free_unless_held(room)
        elif was_reader or (was_writer and (not room.writers or died) and self._is_over(room)):
            self._end(room)

    def _is_over(self, room: Room) -> bool:
        """If one of its writers writes no more; the others may be stages that write other layers."""
        return not room.is_handed_over or room.unfinished > 0

    def _end(self, room: Room) -> None:
        room.ended = True
        if room.reserved is not None:
            del self._reserved[room.reserved]
        waiters, room.waiters = room.waiters, {}
        for waiter in waiters:
            self._miss(waiter)
        self._blocks.settle(room.own())
        for client in room.writers:
            self._on_room_ended(client, room.id)
        self._free_unless_held(room)
        self._lock.notify_all()

    def _free_unless_held(self, room: Room) -> None:
        if not (room.writers or room.readers):
            free_room(self._blocks, room)
            del self._rooms[room.id]
            self._shelf.pressed()
