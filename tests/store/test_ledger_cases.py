"""Cases of the ledger that chance meets too rarely, and what it says when asked for the impossible."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from moonpool.core.events import BlocksRemoved, BlocksStored
from moonpool.core.eviction import EvictionPolicy
from moonpool.core.vocabulary import BlockKey, Incarnation, KeySpace, KeySpaceId, PartId, RequestId
from moonpool.errors import PoolError
from moonpool.messenger.questions import KEYS_A_QUESTION, NO, YES, unpacked
from moonpool.messenger.transfer import TAIL
from moonpool.store.board import Board, BoardView, space_tag
from moonpool.store.catalogue import Place
from moonpool.store.claims import Claim
from moonpool.store.extents import PAGE_BYTES, Extents
from moonpool.store.ledger import Ledger
from moonpool.store.rooms import ClientId

from .kit import SECONDS, keys_of

SPACE = KeySpace(KeySpaceId("aa"), block_tokens=4, runs=3, run_bytes=1024)
KEYS = keys_of("a", 3)
ONE, TWO = ClientId(1), ClientId(2)
R = RequestId("r")


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(Extents(8 * PAGE_BYTES), PartId("node-0"), Incarnation("1"))


def claim(ledger: Ledger, first: int, count: int, index: int = 0) -> Claim | None:
    return ledger.claims.take(R, 1, index, first, count, count * SPACE.run_bytes)


def put(ledger: Ledger, keys: list[BlockKey]) -> None:
    room = ledger.rooms.open(ONE, SPACE, keys)
    for index in room.lacking:
        ledger.rooms.complete(ONE, room.id, [(index, 0, 3)], [1, 2, 3])
    ledger.rooms.close(ONE, room.id)


def test_what_a_transfer_writes_only_that_transfer_completes(ledger: Ledger) -> None:
    ledger.rooms.reserve(R, 1, SPACE, KEYS[:1], 0, 9.0)
    room = ledger.rooms.join(ONE, R, 1)
    arriving = claim(ledger, 0, 2)
    assert arriving is not None
    assert claim(ledger, 1, 1) is None
    ledger.rooms.complete(ONE, room.id, [(0, 0, 3)], [7, 7, 7])
    assert ledger.leading(SPACE, KEYS) == 0
    ledger.claims.landed(arriving, 0, 1)
    ledger.claims.landed(arriving, 1, 2)
    ledger.claims.end(arriving)
    assert ledger.leading(SPACE, KEYS) == 1
    assert ledger.leases.leading(TWO, SPACE, KEYS).blocks[0].checksums == [1, 2, 7]


def test_a_second_transfer_of_a_run_waits_for_the_first(ledger: Ledger) -> None:
    ledger.rooms.reserve(R, 1, SPACE, KEYS[:1], 0, 9.0)
    first = claim(ledger, 0, 3)
    assert first is not None
    with pytest.raises(PoolError, match="another transfer still writes runs of block 0"):
        ledger.claims.take_when_free(R, 1, 0, 0, 3, 3 * SPACE.run_bytes, 0.01)
    started = threading.Event()

    def wait() -> Claim:
        started.set()
        return ledger.claims.take_when_free(R, 1, 0, 0, 3, 3 * SPACE.run_bytes, SECONDS)

    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(wait)
        started.wait(SECONDS)
        ledger.claims.landed(first, 0, 1)
        ledger.claims.end(first)
        got = second.result(SECONDS)
    assert got.runs == 0b110


def test_the_end_of_a_room_ends_the_wait_for_it(ledger: Ledger) -> None:
    ledger.rooms.reserve(R, 1, SPACE, KEYS[:1], 0, 9.0)
    assert claim(ledger, 0, 3) is not None
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(ledger.claims.take_when_free, R, 1, 0, 0, 3, 3 * SPACE.run_bytes, SECONDS)
        ledger.rooms.end_reserved(R, 1)
        with pytest.raises(PoolError, match="no room for attempt 1"):
            second.result(SECONDS)


def test_runs_that_land_after_the_room_ended_make_nothing_readable(ledger: Ledger) -> None:
    ledger.rooms.reserve(R, 1, SPACE, KEYS[:1], 0, 9.0)
    ledger.rooms.join(ONE, R, 1)
    late = claim(ledger, 0, 3)
    assert late is not None
    ledger.rooms.end_reserved(R, 1)
    for run in range(3):
        ledger.claims.landed(late, run, 1)
    assert ledger.leading(SPACE, KEYS) == 0
    ledger.leave_all(ONE)
    assert ledger.counters()["used_bytes"] == PAGE_BYTES
    ledger.claims.end(late)
    assert ledger.counters()["used_bytes"] == 0
    ledger.check_integrity()


def test_the_first_copy_of_a_key_is_the_one_that_is_read(ledger: Ledger) -> None:
    one, two = ledger.rooms.open(ONE, SPACE, KEYS[:1]), ledger.rooms.open(TWO, SPACE, KEYS[:1])
    ledger.rooms.complete(ONE, one.id, [(0, 0, 3)], [1, 1, 1])
    ledger.rooms.complete(TWO, two.id, [(0, 0, 3)], [2, 2, 2])
    assert ledger.leases.leading(TWO, SPACE, KEYS).blocks[0].checksums == [1, 1, 1]
    ledger.rooms.close(TWO, two.id)
    ledger.check_integrity()
    assert ledger.counters()["used_bytes"] == PAGE_BYTES


def test_a_room_somebody_is_bound_to_does_not_expire(ledger: Ledger) -> None:
    ledger.rooms.reserve(R, 1, SPACE, KEYS[:1], 0, 1.0)
    assert ledger.rooms.expire(0.5) == 0
    waiter = ledger.rooms.await_room(TWO, R, 1)
    assert ledger.rooms.expire(2.0) == 0
    ledger.rooms.give_up(waiter)
    room = ledger.rooms.join(ONE, R, 1)
    assert ledger.rooms.expire(2.0) == 0
    ledger.rooms.complete(ONE, room.id, [(0, 0, 3)], [1, 1, 1])
    ledger.rooms.close(ONE, room.id)
    assert ledger.rooms.expire(2.0) == 1
    assert ledger.leading(SPACE, KEYS) == 1


def test_a_writer_that_closes_early_ends_the_room(ledger: Ledger) -> None:
    ledger.rooms.reserve(R, 1, SPACE, KEYS[:1], 0, 9.0)
    waiter = ledger.rooms.await_room(TWO, R, 1)
    ledger.rooms.close(ONE, ledger.rooms.join(ONE, R, 1).id)
    assert waiter.result(0) is None


def test_one_of_two_stages_may_be_done_before_the_other(ledger: Ledger) -> None:
    ledger.rooms.reserve(R, 1, SPACE, KEYS[:1], 0, 9.0)
    waiter = ledger.rooms.await_room(ClientId(3), R, 1)
    one, two = ledger.rooms.join(ONE, R, 1), ledger.rooms.join(TWO, R, 1)
    ledger.rooms.complete(ONE, one.id, [(0, 0, 2)], [1, 2])
    ledger.rooms.close(ONE, one.id)
    assert not waiter.done()
    ledger.rooms.complete(TWO, two.id, [(0, 2, 1)], [3])
    assert waiter.result(0) is two


def test_a_stage_that_dies_wakes_who_waits(ledger: Ledger) -> None:
    ledger.rooms.reserve(R, 1, SPACE, KEYS[:1], 0, 9.0)
    waiter = ledger.rooms.await_room(ClientId(3), R, 1)
    ledger.rooms.join(ONE, R, 1)
    ledger.rooms.join(TWO, R, 1)
    ledger.leave_all(TWO)
    assert waiter.result(0) is None


def test_stages_here_and_elsewhere_fill_a_room_for_caching(ledger: Ledger) -> None:
    room = ledger.rooms.open(ONE, SPACE, KEYS[:2], name=(R, 1))
    with pytest.raises(PoolError, match="has a room here"):
        ledger.rooms.open(TWO, SPACE, KEYS, name=(R, 1))
    assert ledger.rooms.join(TWO, R, 1) is room
    assert [holding.expires for holding in ledger.holdings()] == [None], "nobody is late with it"
    for index in range(2):
        ledger.rooms.complete(ONE, room.id, [(index, 0, 1)], [1])
        ledger.rooms.complete(TWO, room.id, [(index, 1, 1)], [2])
        far = claim(ledger, 2, 1, index)
        assert far is not None
        ledger.claims.landed(far, 2, 3)
        ledger.claims.end(far)
    assert ledger.leading(SPACE, KEYS) == 2
    ledger.rooms.close(ONE, room.id)
    assert ledger.rooms.join(TWO, R, 1) is room
    ledger.check_integrity()
    ledger.rooms.close(TWO, room.id)
    with pytest.raises(PoolError, match="no room for attempt 1"):
        ledger.rooms.join(TWO, R, 1)
    ledger.check_integrity()
    assert not ledger.holdings()


def test_a_prefix_outlives_its_continuation(ledger: Ledger) -> None:
    put(ledger, KEYS)
    put(ledger, keys_of("b", 3))
    put(ledger, keys_of("c", 3))
    assert ledger.leading(SPACE, KEYS) == 2
    put(ledger, keys_of("d", 2))
    assert ledger.leading(SPACE, KEYS) == 0
    assert ledger.leading(SPACE, keys_of("b", 3)) == 3


def test_a_lease_of_nothing_is_a_lease(ledger: Ledger) -> None:
    lease = ledger.leases.leading(ONE, SPACE, KEYS)
    assert lease.blocks == ()
    with pytest.raises(PoolError, match=f"no lease {lease.id}"):
        ledger.leases.end(TWO, lease.id)
    ledger.leases.end(ONE, lease.id)
    assert ledger.counters()["leases"] == 0


@pytest.mark.parametrize(
    ("runs", "checksums", "reason"),
    [
        ([(0, 2, 2)], [1, 2], "a block has 3 runs, not runs 2 to 3"),
        ([(0, 0, 0)], [], "a block has 3 runs"),
        ([(3, 0, 1)], [1], "has 3 blocks, no block 3"),
        ([(0, 0, 3)], [1], "3 runs with 1 checksums"),
    ],
)
def test_impossible_runs_are_refused(
    ledger: Ledger, runs: list[tuple[int, int, int]], checksums: list[int], reason: str
) -> None:
    room = ledger.rooms.open(ONE, SPACE, KEYS)
    with pytest.raises(PoolError, match=reason):
        ledger.rooms.complete(ONE, room.id, runs, checksums)


def test_a_tail_is_shorter_than_a_block(ledger: Ledger) -> None:
    room = ledger.rooms.open(ONE, SPACE, [], 3)
    assert room.block(TAIL) is not None
    for tokens in (-1, 4):
        with pytest.raises(PoolError, match="a tail has 0 to 3 tokens"):
            ledger.rooms.open(ONE, SPACE, [], tokens)


@pytest.mark.parametrize(("policy", "left"), [("lru", 0), ("lfu", 3), ("length-aware", 3)])
def test_the_policy_says_what_a_full_node_gives_up(policy: EvictionPolicy, left: int) -> None:
    """Three blocks that were read often, but before the others came."""
    ledger = Ledger(Extents(8 * PAGE_BYTES), PartId("node-0"), Incarnation("1"), eviction=policy)
    put(ledger, KEYS)
    for _ in range(3):
        ledger.leases.end(TWO, ledger.leases.leading(TWO, SPACE, KEYS).id)
    for name in "bc":
        put(ledger, keys_of(name, 5))
    assert ledger.leading(SPACE, KEYS) == left
    assert ledger.counters()["holes"] == 0
    ledger.check_integrity()


def test_length_aware_gives_up_later_blocks_first() -> None:
    """A long prompt that came last loses its end, where `lfu` would take the short one that came first."""
    long, short = keys_of("long", 5), keys_of("short", 3)
    leading = {}
    for policy in ("lfu", "length-aware"):
        ledger = Ledger(Extents(8 * PAGE_BYTES), PartId("node-0"), Incarnation("1"), eviction=policy)
        put(ledger, short)
        put(ledger, long)
        put(ledger, keys_of("c", 1))
        leading[policy] = ledger.leading(SPACE, short), ledger.leading(SPACE, long)
    assert leading == {"lfu": (2, 5), "length-aware": (3, 4)}


def test_what_has_no_tokens_of_equal_size_has_no_tail(ledger: Ledger) -> None:
    """Such a tail would be of no bytes, and lie where the next block lies."""
    odd = KeySpace(KeySpaceId("odd"), block_tokens=4096, runs=1, run_bytes=1024)
    with pytest.raises(PoolError, match="has no tails"):
        ledger.rooms.reserve(R, 1, odd, KEYS[:1], 3, 9.0)
    with pytest.raises(PoolError, match="has no tails"):
        ledger.rooms.open(ONE, odd, [], 3)
    ledger.rooms.reserve(R, 1, odd, KEYS[:1], 0, 9.0)
    ledger.check_integrity()


def test_a_refused_room_costs_nobody_anything(ledger: Ledger) -> None:
    put(ledger, KEYS)
    with pytest.raises(
        PoolError, match=r"no room for 9 blocks of KVCache and 0 more tokens: they take 36864 bytes of the 32768"
    ):
        ledger.rooms.reserve(R, 1, SPACE, keys_of("big", 9), 0, 9.0)
    assert ledger.leading(SPACE, KEYS) == 3
    assert (ledger.counters()["evictions"], ledger.counters()["refused_rooms"]) == (0, 1)
    ledger.check_integrity()


def test_a_block_that_goes_before_it_was_told_of_is_told_of_first() -> None:
    board = Board(8 * PAGE_BYTES)
    ledger = Ledger(Extents(3 * PAGE_BYTES), PartId("node-0"), Incarnation("1"), board=board)
    view = BoardView(board.fd, board.entries)
    room = ledger.rooms.open_each(ONE, SPACE, KEYS, ())
    ledger.rooms.complete_blocks(ONE, room.id, [0, 1, 2], [1, 2, 3] * 3)
    ledger.rooms.close(ONE, room.id)
    assert ledger.leading(SPACE, KEYS) == 3, "readable, whether or not it was told of"
    assert view.find(space_tag(SPACE.id), KEYS[0]) is None
    ledger.rooms.open_each(TWO, SPACE, keys_of("b", 1), ())
    ledger.rooms.tell()
    ledger.rooms.tell()
    stored, removed = ledger.next_announcement(), ledger.next_announcement()
    assert isinstance(stored, BlocksStored)
    assert isinstance(removed, BlocksRemoved)
    assert stored.keys == tuple(KEYS)
    assert removed.keys == (KEYS[2],)
    assert ledger.next_announcement() is None
    assert [view.find(space_tag(SPACE.id), key) is not None for key in KEYS] == [True, True, False]
    ledger.check_integrity()
    board.close()


def test_what_is_removed_while_a_copy_of_it_comes_stays_removed(ledger: Ledger) -> None:
    copy = ledger.copies.begin(SPACE.id, KEYS[:2])
    assert ledger.catalogue.remove(SPACE.id, KEYS[:1]) == [NO]
    room = ledger.rooms.open(ONE, SPACE, KEYS[:2], gone=copy.gone)
    for index in range(2):
        ledger.rooms.complete(ONE, room.id, [(index, 0, SPACE.runs)], [0] * SPACE.runs)
    assert ledger.catalogue.places(SPACE.id, KEYS[:2]) == [Place.NOWHERE, Place.DRAM]
    ledger.rooms.close(ONE, room.id)
    ledger.copies.end(copy)
    assert ledger.catalogue.remove(SPACE.id, KEYS[:2]) == [NO, YES]
    again = ledger.rooms.open(ONE, SPACE, KEYS[:1], gone=ledger.copies.begin(SPACE.id, KEYS[:1]).gone)
    ledger.rooms.complete(ONE, again.id, [(0, 0, SPACE.runs)], [0] * SPACE.runs)
    assert ledger.leading(SPACE, KEYS[:1]) == 1, "what is put after a removal may come"
    ledger.rooms.close(ONE, again.id)


def test_a_question_has_an_end() -> None:
    assert len(unpacked(bytes(16 * KEYS_A_QUESTION))) == KEYS_A_QUESTION
    with pytest.raises(PoolError, match="8193 keys in one question; at most 8192"):
        unpacked(bytes(16 * (KEYS_A_QUESTION + 1)))
