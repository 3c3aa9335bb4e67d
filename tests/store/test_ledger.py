"""The ledger against a model that keeps everything in plain lists and counts by looking."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.core.events import BlocksRemoved, BlocksStored, Snapshot
from moonpool.core.vocabulary import BlockKey, Incarnation, KeySpace, KeySpaceId, PartId, RequestId
from moonpool.errors import PoolError
from moonpool.messenger.questions import LEASED, NO, PINNED, YES
from moonpool.messenger.transfer import TAIL
from moonpool.store.catalogue import Place
from moonpool.store.claims import Claim
from moonpool.store.extents import PAGE_BYTES, Extents
from moonpool.store.leases import Lease
from moonpool.store.ledger import Ledger
from moonpool.store.pins import PIN_SHARE
from moonpool.store.rooms import ClientId, Room, RoomId, Waiter
from moonpool.store.watches import Watch
from tests.soak import often

from .kit import keys_of

# Every block and every tail takes one page, so that what fits is a matter of counting.
SPACE = KeySpace(KeySpaceId("aa"), block_tokens=4, runs=3, run_bytes=1024)
PAGES = 8
CHAINS = [keys_of("a", 5), keys_of("b", 5), [*keys_of("a", 2), *keys_of("c", 3)]]
RUNS = range(SPACE.runs)

clients = st.integers(1, 2).map(ClientId)
requests = st.tuples(st.just(RequestId("r")), st.integers(1, 2))
prompts = st.tuples(st.sampled_from(CHAINS), st.integers(0, 5)).map(lambda choice: choice[0][: choice[1]])
ALL = sorted({key for chain in CHAINS for key in chain})
blocks = st.lists(st.sampled_from(ALL), max_size=4, unique=True)
tails = st.sampled_from([0, 3])
picks = st.integers(0, 1000)


@dataclass(eq=False)
class Own:
    """A block that only its room has."""

    key: BlockKey | None
    runs: set[int] = field(default_factory=set)
    claims: list[set[int]] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return self.runs == set(RUNS)


@dataclass(eq=False)
class ModelRoom:
    slots: dict[int, BlockKey | Own | None]
    """By index (TAIL for the tail): a readable block's key, an own block, nothing."""
    reserved: tuple[RequestId, int] | None = None
    writers: set[ClientId] = field(default_factory=set)
    readers: set[ClientId] = field(default_factory=set)
    waiters: dict[Waiter, ClientId] = field(default_factory=dict)
    ended: bool = False
    given: tuple[int, ...] = ()
    """Indices of the blocks that it got space for."""

    @property
    def own(self) -> list[Own]:
        return [slot for slot in self.slots.values() if isinstance(slot, Own)]

    @property
    def pinned(self) -> list[BlockKey]:
        return [slot for slot in self.slots.values() if isinstance(slot, bytes)]

    @property
    def is_whole(self) -> bool:
        return all(own.is_whole for own in self.own)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ended_for: list[tuple[ClientId, RoomId]] = []
        self.ledger = Ledger(
            Extents(PAGES * PAGE_BYTES),
            PartId("node-0"),
            Incarnation("1"),
            on_room_ended=lambda client, room: self.ended_for.append((client, room)),
        )
        self.resident: set[BlockKey] = set()
        self.rooms: dict[RoomId, ModelRoom] = {}
        self.leases: dict[int, tuple[Lease, list[BlockKey]]] = {}
        self.claims: list[tuple[Claim, RoomId, Own | None, set[int]]] = []
        self.lingering: list[Own] = []
        self.pinned: set[BlockKey] = set()
        self.watches: dict[Watch, set[BlockKey]] = {}
        self.seq = 0
        self.answers: dict[Waiter, bool] = {}
        """What each waiter that was answered should have got: the room, or a miss."""

    # What the model says -----------------------------------------------------------------------------------------

    def pins(self) -> Counter[BlockKey]:
        pins = Counter(key for _, keys in self.leases.values() for key in keys)
        for room in self.rooms.values():
            pins.update(room.pinned)
        pins.update(self.pinned)
        return pins

    def is_filling(self, key: BlockKey) -> bool:
        """Somebody may still make it readable."""
        rooms = [room for room in self.rooms.values() if not room.ended]
        return key not in self.resident and any(own.key == key for room in rooms for own in room.own)

    def used(self) -> int:
        return len(self.resident) + sum(len(room.own) for room in self.rooms.values()) + len(self.lingering)

    def listen(self, stored: set[BlockKey], removed: int) -> None:
        """Exactly these became readable, and so many unpinned ones went."""
        pins = self.pins()
        gone = 0
        new: set[BlockKey] = set()
        while (message := self.ledger.next_announcement()) is not None:
            self.seq += 1
            assert message.seq == self.seq
            assert isinstance(message, BlocksStored | BlocksRemoved)
            for key in message.keys:
                if isinstance(message, BlocksStored):
                    assert key not in self.resident
                    self.resident.add(key)
                    new.add(key)
                else:
                    assert not pins[key], "a pinned block was evicted"
                    self.resident.remove(key)
                    gone += 1
        assert new == stored
        assert gone == removed

    def open(self, keys: list[BlockKey], tail_tokens: int, whole: bool) -> tuple[ModelRoom, int] | None:
        """The room as it should be, and how many blocks go for it."""
        lacking: list[int] = [index for index, key in enumerate(keys) if key not in self.resident]
        wanted = ([TAIL] if tail_tokens else []) + lacking
        pins = self.pins()
        evictable = sum(not pins[key] and key not in keys for key in self.resident)
        free = PAGES - self.used()
        if whole and len(wanted) > free + evictable:
            return None
        given = wanted[: free + evictable]
        slots: dict[int, BlockKey | Own | None] = {}
        for index in [*range(len(keys)), TAIL]:
            key = None if index == TAIL else keys[index]
            if key in self.resident:
                slots[index] = key
            else:
                slots[index] = Own(key) if index in given else None
        own = tuple(index for index in given if index != TAIL)
        return ModelRoom(slots, given=own), max(0, len(given) - free)

    def leave(self, number: RoomId, client: ClientId, died: bool = False) -> None:
        room = self.rooms[number]
        is_last = died or room.writers == {client}
        ends = client in room.readers or (
            client in room.writers and is_last and (room.reserved is None or not room.is_whole)
        )
        room.writers.discard(client)
        room.readers.discard(client)
        if ends and not room.ended:
            self.end(number)
        elif room.ended:
            self.free(number)

    def end(self, number: RoomId) -> None:
        room = self.rooms[number]
        room.ended = True
        for waiter in room.waiters:
            self.answers[waiter] = False
        room.waiters.clear()
        self.free(number)

    def free(self, number: RoomId) -> None:
        room = self.rooms[number]
        if not room.writers and not room.readers:
            self.lingering += [own for own in room.own if own.claims]
            del self.rooms[number]

    def finish(self, number: RoomId, index: int, runs: set[int]) -> set[BlockKey]:
        """Runs of a block are complete; the keys that become readable by it."""
        room = self.rooms[number]
        own = room.slots[index]
        stored: set[BlockKey] = set()
        if isinstance(own, Own):
            was_whole = own.is_whole
            own.runs |= runs
            if own.is_whole and not was_whole and own.key is not None and own.key not in self.resident:
                room.slots[index] = own.key
                stored.add(own.key)
                self.lingering_claims(own)
        if room.is_whole:
            for waiter, client in room.waiters.items():
                self.answers[waiter] = True
                room.readers.add(client)
            room.waiters.clear()
        return stored

    def lingering_claims(self, own: Own) -> None:
        """A block that is readable is no longer lingering or owned, whoever still holds a claim on it."""
        own.claims.clear()

    def pick_room(self, pick: int) -> tuple[RoomId, ModelRoom]:
        number = sorted(self.rooms)[pick % len(self.rooms)]
        return number, self.rooms[number]

    def find(self, request: tuple[RequestId, int]) -> tuple[RoomId, ModelRoom] | None:
        found = [(n, room) for n, room in self.rooms.items() if room.reserved == request and not room.ended]
        assert len(found) <= 1
        return found[0] if found else None

    # What may happen ---------------------------------------------------------------------------------------------

    @rule(request=requests, keys=prompts, tail_tokens=tails, expires=st.integers(0, 10))
    def reserve(self, request: tuple[RequestId, int], keys: list[BlockKey], tail_tokens: int, expires: int) -> None:
        known = self.find(request)
        expected = None if known else self.open(keys, tail_tokens, whole=True)
        try:
            lacking = self.ledger.rooms.reserve(*request, SPACE, keys, tail_tokens, float(expires))
        except PoolError:
            assert expected is None
            assert known is None
            self.listen(set(), 0)
            return
        if known is None:
            assert expected is not None
            room, evicted = expected
            assert list(lacking) == [i for i, slot in room.slots.items() if isinstance(slot, Own) and i != TAIL]
            room.reserved = request
            self.rooms[self.ledger.rooms._reserved[request].id] = room
            self.listen(set(), evicted)

    @rule(client=clients, keys=prompts, tail_tokens=tails)
    def open_room(self, client: ClientId, keys: list[BlockKey], tail_tokens: int) -> None:
        expected = self.open(keys, tail_tokens, whole=False)
        assert expected is not None
        model, evicted = expected
        room = self.ledger.rooms.open(client, SPACE, keys, tail_tokens)
        model.writers.add(client)
        self.rooms[room.id] = model
        self.listen(set(), evicted)

    @rule(client=clients, keys=blocks)
    def open_each(self, client: ClientId, keys: list[BlockKey]) -> None:
        expected = self.open(keys, 0, whole=True)
        try:
            room = self.ledger.rooms.open_each(client, SPACE, keys, ())
        except PoolError:
            assert expected is None
            return
        assert expected is not None
        model, evicted = expected
        model.writers.add(client)
        self.rooms[room.id] = model
        self.listen(set(), evicted)

    @precondition(lambda self: self.rooms)
    @rule(pick=picks, client=clients, is_right=st.sampled_from([True, True, False]))
    def commit(self, pick: int, client: ClientId, is_right: bool) -> None:
        number, room = self.pick_room(pick)
        checksums = [7] * (len(room.given) * len(RUNS) + (not is_right))
        try:
            self.ledger.rooms.commit(client, number, checksums)
        except PoolError:
            assert client not in room.writers or not is_right or room.reserved is not None
            return
        assert client in room.writers
        assert is_right
        assert room.reserved is None
        stored: set[BlockKey] = set()
        for index in room.given:
            slot = room.slots[index]
            arriving = set().union(*slot.claims) if isinstance(slot, Own) else set()
            stored |= self.finish(number, index, set(RUNS) - arriving)
        self.leave(number, client)
        self.listen(stored, 0)

    @precondition(lambda self: self.rooms)
    @rule(pick=picks, client=clients)
    def complete_blocks(self, pick: int, client: ClientId) -> None:
        number, room = self.pick_room(pick)
        self.ledger.rooms.complete_blocks(client, number, room.given, [7] * (len(room.given) * len(RUNS)))
        stored: set[BlockKey] = set()
        for index in room.given if client in room.writers and not room.ended else ():
            slot = room.slots[index]
            arriving = set().union(*slot.claims) if isinstance(slot, Own) else set()
            stored |= self.finish(number, index, set(RUNS) - arriving)
        self.listen(stored, 0)

    @rule(client=clients, request=requests)
    def join(self, client: ClientId, request: tuple[RequestId, int]) -> None:
        known = self.find(request)
        try:
            room = self.ledger.rooms.join(client, *request)
        except PoolError:
            assert known is None
        else:
            assert known is not None
            assert room.id == known[0]
            known[1].writers.add(client)

    @rule(client=clients, request=requests)
    def await_room(self, client: ClientId, request: tuple[RequestId, int]) -> None:
        known = self.find(request)
        waiter = self.ledger.rooms.await_room(client, *request)
        if known is None:
            self.answers[waiter] = False
        elif known[1].is_whole:
            self.answers[waiter] = True
            known[1].readers.add(client)
        else:
            known[1].waiters[waiter] = client

    @precondition(lambda self: any(room.waiters for room in self.rooms.values()))
    @rule(pick=picks)
    def give_up(self, pick: int) -> None:
        waiters = [(room, waiter) for room in self.rooms.values() for waiter in room.waiters]
        room, waiter = waiters[pick % len(waiters)]
        del room.waiters[waiter]
        self.answers[waiter] = False
        self.ledger.rooms.give_up(waiter)

    @precondition(lambda self: self.rooms)
    @rule(pick=picks, client=clients, which=picks, runs=st.sampled_from([(0, 1), (1, 2), (0, 3), (2, 1)]))
    def complete(self, pick: int, client: ClientId, which: int, runs: tuple[int, int]) -> None:
        number, room = self.pick_room(pick)
        self.write(number, client, sorted(room.slots)[which % len(room.slots)], *runs)

    def write(self, number: RoomId, client: ClientId, index: int, first: int, count: int) -> None:
        room = self.rooms[number]
        self.ledger.rooms.complete(client, number, [(index, first, count)], [7] * count)
        stored: set[BlockKey] = set()
        if client in room.writers and not room.ended:
            slot = room.slots[index]
            arriving = set().union(*slot.claims) if isinstance(slot, Own) else set()
            stored = self.finish(number, index, set(range(first, first + count)) - arriving)
        self.listen(stored, 0)

    @precondition(lambda self: any(room.writers for room in self.rooms.values()))
    @rule(pick=picks, most=st.sampled_from([1, 2, 6]))
    def fill(self, pick: int, most: int) -> None:
        """A writer does what it came for: some of the blocks, or all of them (chance alone rarely gets there)."""
        rooms = sorted(number for number, room in self.rooms.items() if room.writers)
        number = rooms[pick % len(rooms)]
        writer = min(self.rooms[number].writers)
        for index in list(self.rooms[number].slots)[:most]:
            self.write(number, writer, index, 0, SPACE.runs)

    @precondition(lambda self: any(room.writers or room.readers for room in self.rooms.values()))
    @rule(pick=picks)
    def close_own(self, pick: int) -> None:
        rooms = sorted(number for number, room in self.rooms.items() if room.writers or room.readers)
        number = rooms[pick % len(rooms)]
        client = min(self.rooms[number].writers | self.rooms[number].readers)
        self.leave(number, client)
        self.ledger.rooms.close(client, number)

    @precondition(lambda self: self.rooms)
    @rule(pick=picks, client=clients)
    def close(self, pick: int, client: ClientId) -> None:
        number, room = self.pick_room(pick)
        if client in room.writers | room.readers:
            self.leave(number, client)
        self.ledger.rooms.close(client, number)

    @rule(request=requests)
    def release_room(self, request: tuple[RequestId, int]) -> None:
        known = self.find(request)
        assert self.ledger.rooms.end_reserved(*request) == (known is not None)
        if known is not None:
            self.end(known[0])

    @rule(now=st.integers(0, 10))
    def expire(self, now: int) -> None:
        late = [
            number
            for number, room in self.rooms.items()
            if room.reserved and not (room.ended or room.writers or room.readers or room.waiters)
            if self.ledger.rooms._rooms[number].expires <= now
        ]
        assert self.ledger.rooms.expire(float(now)) == len(late)
        for number in late:
            self.end(number)

    @rule(client=clients, keys=prompts)
    def lease(self, client: ClientId, keys: list[BlockKey]) -> None:
        leading = 0
        while leading < len(keys) and keys[leading] in self.resident:
            leading += 1
        lease = self.ledger.leases.leading(client, SPACE, keys)
        assert [block.key for block in lease.blocks] == keys[:leading]
        assert all(block.is_complete for block in lease.blocks)
        self.leases[lease.id] = (lease, keys[:leading])

    @rule(client=clients, keys=blocks)
    def lease_each(self, client: ClientId, keys: list[BlockKey]) -> None:
        lease, found = self.ledger.leases.each(client, SPACE, keys)
        assert [block and block.key for block in found] == [key if key in self.resident else None for key in keys]
        self.leases[lease.id] = (lease, [key for key in keys if key in self.resident])

    @rule(keys=blocks)
    def pin(self, keys: list[BlockKey]) -> None:
        here = {key for key in keys if key in self.resident}
        try:
            outcomes = self.ledger.pins.pin([(SPACE.id, key) for key in keys], 5.0)
        except PoolError:
            assert len(self.pinned | here) > PAGES * PIN_SHARE
            return
        self.pinned |= here
        assert len(self.pinned) <= PAGES * PIN_SHARE
        assert outcomes == [key in here for key in keys]

    @rule(keys=blocks)
    def unpin(self, keys: list[BlockKey]) -> None:
        assert self.ledger.pins.unpin([(SPACE.id, key) for key in keys]) == [key in self.pinned for key in keys]
        self.pinned -= set(keys)

    @rule(now=st.sampled_from([4.0, 6.0]))
    def expire_pins(self, now: float) -> None:
        assert self.ledger.pins.expire(now) == (len(self.pinned) if now > 5 else 0)
        if now > 5:
            self.pinned.clear()

    @rule(keys=blocks)
    def remove(self, keys: list[BlockKey]) -> None:
        pins, removed = self.pins(), 0
        for key, outcome in zip(keys, self.ledger.catalogue.remove(SPACE.id, keys), strict=True):
            if key not in self.resident:
                assert outcome == NO
            elif key in self.pinned:
                assert outcome == PINNED
            elif pins[key]:
                assert outcome == LEASED
            else:
                assert outcome == YES
                removed += 1
        self.listen(set(), removed)

    @rule(keys=blocks)
    def watch(self, keys: list[BlockKey]) -> None:
        self.watches[self.ledger.watches.watch([(SPACE.id, key) for key in keys])] = set(keys)

    @precondition(lambda self: self.watches)
    @rule(pick=picks)
    def end_watch(self, pick: int) -> None:
        watch = list(self.watches)[pick % len(self.watches)]
        del self.watches[watch]
        self.ledger.watches.end(watch)

    @precondition(lambda self: self.leases)
    @rule(pick=picks, client=clients)
    def release(self, pick: int, client: ClientId) -> None:
        number = sorted(self.leases)[pick % len(self.leases)]
        lease, _ = self.leases[number]
        try:
            self.ledger.leases.end(client, lease.id)
        except PoolError:
            assert client != lease.client
        else:
            assert client == lease.client
            del self.leases[number]

    @rule(client=clients)
    def die(self, client: ClientId) -> None:
        self.ledger.leave_all(client)
        for number in [number for number, (lease, _) in self.leases.items() if lease.client == client]:
            del self.leases[number]
        for number, room in list(self.rooms.items()):
            for waiter in [waiter for waiter, owner in room.waiters.items() if owner == client]:
                del room.waiters[waiter]
                self.answers[waiter] = False
            if client in room.writers | room.readers:
                self.leave(number, client, died=True)

    @rule(request=requests, which=picks, runs=st.sampled_from([(0, 1), (1, 2), (0, 3)]))
    def claim(self, request: tuple[RequestId, int], which: int, runs: tuple[int, int]) -> None:
        known = self.find(request)
        first, count = runs
        if known is None:
            try:
                self.ledger.claims.take(*request, 0, first, count, count * SPACE.run_bytes)
            except PoolError:
                return
            raise AssertionError("a claim on a room that is not there")
        number, room = known
        indices = [index for index, slot in room.slots.items() if slot is not None]
        if not indices:
            return
        index = indices[which % len(indices)]
        slot = room.slots[index]
        size = SPACE.tail_run_bytes(3) if index == TAIL else SPACE.run_bytes
        claim = self.ledger.claims.take(*request, index, first, count, count * size)
        wanted = set(range(first, first + count))
        if isinstance(slot, Own) and any(wanted & runs for runs in slot.claims):
            assert claim is None
            return
        assert claim is not None
        arriving = wanted - slot.runs if isinstance(slot, Own) else set()
        assert {run for run in RUNS if claim.runs >> run & 1} == arriving
        if isinstance(slot, Own):
            slot.claims.append(arriving)
        self.claims.append((claim, number, slot if isinstance(slot, Own) else None, arriving))

    @precondition(lambda self: self.claims)
    @rule(pick=picks, lands=st.booleans())
    def end_claim(self, pick: int, lands: bool) -> None:
        claim, number, own, runs = self.claims.pop(pick % len(self.claims))
        stored: set[BlockKey] = set()
        room = self.rooms.get(number)
        for run in sorted(runs) if lands else ():
            self.ledger.claims.landed(claim, run, 7)
            if room is not None and not room.ended and own in room.own:
                index = next(index for index, slot in room.slots.items() if slot is own)
                stored |= self.finish(number, index, {run})
        self.ledger.claims.end(claim)
        if own is not None and runs in own.claims:
            own.claims.remove(runs)
            if own in self.lingering and not own.claims:
                self.lingering.remove(own)
        self.listen(stored, 0)

    @rule()
    def snapshot(self) -> None:
        self.ledger.ask_snapshot()
        message = self.ledger.next_announcement()
        assert isinstance(message, Snapshot)
        assert message.seq == self.seq
        assert {key for _, _, keys in message.blocks for key in keys} == self.resident

    # What always holds -------------------------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        self.ledger.check_integrity()
        counters = self.ledger.counters()
        assert counters["used_bytes"] == self.used() * PAGE_BYTES
        assert counters["blocks"] == len(self.resident)
        assert counters["rooms"] == len(self.rooms)
        assert counters["leases"] == len(self.leases)
        assert counters["evictable_bytes"] == PAGE_BYTES * len(self.resident - set(self.pins()))

    @invariant()
    def waiters_are_answered(self) -> None:
        for waiter, gets_room in self.answers.items():
            assert waiter.done()
            assert (waiter.result() is not None) == gets_room
        for room in self.rooms.values():
            assert not any(waiter.done() for waiter in room.waiters)

    @invariant()
    def watches_end_with_the_last_writer(self) -> None:
        for watch, keys in self.watches.items():
            keys -= {key for key in keys if not self.is_filling(key)}
            assert watch.done() == (not keys)
        for key in ALL:
            place = self.ledger.catalogue.places(SPACE.id, [key])[0]
            assert (place is Place.DRAM) == (key in self.resident)
            assert place is not Place.FILLING or self.is_filling(key)

    @invariant()
    def no_two_blocks_share_bytes(self) -> None:
        rooms: list[Room] = list(self.ledger.rooms._rooms.values())
        own = [block.offset for room in rooms for block in room.own()]
        leased = {block.offset for lease, _ in self.leases.values() for block in lease.blocks}
        assert len(own) == len(set(own))
        assert leased.isdisjoint(own)

    def teardown(self) -> None:
        for claim, *_ in self.claims:
            self.ledger.claims.end(claim)
        for client in range(1, 4):
            self.ledger.leave_all(ClientId(client))
        self.ledger.rooms.expire(1e9)
        self.ledger.pins.expire(1e9)
        self.ledger.check_integrity()
        counters = self.ledger.counters()
        assert (counters["rooms"], counters["leases"], counters["transfers"]) == (0, 0, 0)
        assert counters["used_bytes"] == counters["evictable_bytes"] == counters["blocks"] * PAGE_BYTES


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=often(100), stateful_step_count=80)
