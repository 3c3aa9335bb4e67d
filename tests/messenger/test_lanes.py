"""Messenger's connecting side against a data server whose store is in memory: striping, order, bounds, the cap."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np
import pytest

from moonpool.core.vocabulary import BlockKey, KeySpaceId
from moonpool.errors import PoolError, TransferError
from moonpool.messenger import lanes, waiting
from moonpool.messenger.channel import Blocks, Channel, Read, framed
from moonpool.messenger.receiving import ReadGroup
from moonpool.messenger.server import TcpServer
from moonpool.messenger.tcp import Priority, TcpMessenger
from moonpool.messenger.transfer import checksum
from moonpool.messenger.waiting import RefusedError

from .kit import SECONDS, SPACE, Leaving, MemoryStore, bytes_of, keys_of, serving, write_of
from .proxy import proxy

MIB = 1 << 20


def eventually(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until, f"never happened: {what}"
        time.sleep(0.005)


@pytest.fixture
def threads() -> Iterator[None]:
    """None is left."""
    before = set(threading.enumerate())
    yield
    eventually(lambda: not set(threading.enumerate()) - before, "all threads end")


@pytest.fixture
def messenger(threads: None) -> Iterator[TcpMessenger]:
    messenger = TcpMessenger(None)
    yield messenger
    messenger.close()


@pytest.fixture
def one_lane(threads: None) -> Iterator[TcpMessenger]:
    messenger = TcpMessenger(None, connections_per_peer=1)
    yield messenger
    messenger.close()


@contextlib.contextmanager
def held(store: MemoryStore, messenger: TcpMessenger, server: TcpServer) -> Iterator[None]:
    """The only lane is busy meanwhile."""
    store.put(keys_of("first", 1))
    store.gate.clear()
    target = np.empty(store.blocks[keys_of("first", 1)[0]][0].nbytes, np.uint8)
    first = messenger.read(server.address, SPACE, keys_of("first", 1), [target], SECONDS)
    eventually(lambda: len(store.asked) == 1, "the first read is there")
    yield
    store.gate.set()
    assert first.result(SECONDS) == 1


@pytest.mark.parametrize("runs", [1, 5, 8, 512])
def test_one_large_block_is_read_over_two_connections(messenger: TcpMessenger, runs: int) -> None:
    store = MemoryStore(8 * MIB // runs * runs, runs)
    keys = keys_of("a", 1)
    store.put(keys)
    target = np.zeros_like(store.blocks[keys[0]][0])
    seen: list[tuple[int, list[int]]] = []

    def on_block(index: int, sums: object) -> None:
        seen.append((index, list(sums)))  # type: ignore[call-overload]

    with serving(store) as server:
        assert messenger.read(server.address, SPACE, keys, [target], SECONDS, on_block).result(SECONDS) == 1
        assert store.asked == [(keys[0],)] * 2
        eventually(lambda: server.counters()["bytes_out"] == target.nbytes, "the server has counted no more than that")
    assert np.array_equal(target, store.blocks[keys[0]][0])
    assert seen == [(0, store.blocks[keys[0]][1])]


def test_one_large_block_is_written_over_two_connections(messenger: TcpMessenger) -> None:
    store = MemoryStore(8 * MIB, 8)
    data = bytes_of(b"x", 8 * MIB)
    with serving(store) as server:
        messenger.write(server.address, [write_of(3, data, 8)], SECONDS).result(SECONDS)
    assert sorted(store.landed) == [(3, 0, 4), (3, 4, 4)]
    assert store.complete[3] == set(range(8))
    assert np.array_equal(store.rooms[3], data)


@pytest.mark.parametrize("byte", [0, 3 * MIB, 4 * MIB - 1, 4 * MIB, 8 * MIB - 1])
@pytest.mark.parametrize("runs", [1, 8])
def test_a_wrong_byte_anywhere_in_a_striped_block_is_found(messenger: TcpMessenger, byte: int, runs: int) -> None:
    store = MemoryStore(8 * MIB, runs)
    keys = keys_of("a", 1)
    store.put(keys)
    store.blocks[keys[0]][0][byte] ^= 1
    with serving(store) as server, pytest.raises(TransferError, match="arrived with a wrong checksum"):
        messenger.read(server.address, SPACE, keys, [np.empty(8 * MIB, np.uint8)], SECONDS, on_block=never).result(
            SECONDS
        )
    assert messenger.counters()["checksum_failures"] == 1


def never(index: int, sums: object) -> None:
    raise AssertionError("the block is not good")


def test_two_halves_of_different_copies_are_no_block(one_lane: TcpMessenger) -> None:
    store = MemoryStore(8 * MIB, 8)
    keys = keys_of("a", 1)
    store.put(keys)
    depart = store.depart

    def replace_between(*args: object) -> object:
        leaving = depart(*args)  # type: ignore[arg-type]
        store.put(keys, "another version")
        return leaving

    store.depart = replace_between  # type: ignore[method-assign, assignment]
    target = np.empty(8 * MIB, np.uint8)
    with serving(store) as server, pytest.raises(TransferError, match="replaced by another copy"):
        # Background, so that it goes in several pieces over the one connection.
        one_lane.read(server.address, SPACE, keys, [target], SECONDS, never, priority=Priority.BACKGROUND).result(
            SECONDS
        )


def test_two_reads_of_one_group_are_of_one_copy(one_lane: TcpMessenger) -> None:
    store = MemoryStore(4096, 4)
    keys = keys_of("a", 2)
    store.put(keys)
    group = ReadGroup(4)
    with serving(store) as server:

        def read(layers: tuple[int, int], which: ReadGroup) -> int:
            targets = [np.empty(layers[1] * 1024, np.uint8) for _ in keys]
            reading = one_lane.read(server.address, SPACE, keys, targets, SECONDS, layers=layers, group=which)
            return reading.result(SECONDS)

        assert read((0, 1), group) == read((2, 2), group) == 2
        store.put(keys[1:], "another version")
        with pytest.raises(TransferError, match="replaced by another copy"):
            read((1, 1), group)
        assert read((1, 1), ReadGroup(4)) == 2
        with pytest.raises(TransferError, match="have 4 runs"):
            read((0, 1), ReadGroup(2))


def test_what_nobody_wants_any_more_is_not_asked_for(one_lane: TcpMessenger) -> None:
    store = MemoryStore(4096, 1)
    keys = keys_of("a", 8)
    store.put(keys)
    wanted = [True]
    with serving(store) as server, held(store, one_lane, server):
        target, group = np.empty(4096, np.uint8), ReadGroup(1, lambda: wanted[0])
        reads = [one_lane.read(server.address, SPACE, [k], [target], SECONDS, never, group=group) for k in keys]
        wanted[0] = False
        store.gate.set()
        for reading in reads:
            with contextlib.suppress(TransferError):
                assert reading.result(SECONDS) == 0
        # One may be under way already.
        assert len(store.asked) <= 2


def test_a_source_that_stands_still_in_the_middle_is_given_up(
    one_lane: TcpMessenger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.messenger.pace.STALL_SECONDS", 0.3)
    monkeypatch.setattr("moonpool.messenger.pace.SLOWEST_BYTES", 100 * MIB)
    store = MemoryStore(4 * MIB, 4)
    keys = keys_of("a", 1)
    store.put(keys)
    on, pieces = threading.Event(), itertools.count()

    def delay() -> float:
        if next(pieces) > 5:
            on.wait(SECONDS)
        return 0.0

    with serving(store) as server, proxy(server.address, delay=delay) as between:
        target = np.empty(4 * MIB, np.uint8)
        with pytest.raises(TransferError, match="stands still"):
            one_lane.read(between.address, SPACE, keys, [target], 60.0, never).result(SECONDS)
        on.set()


def test_layers(messenger: TcpMessenger) -> None:
    store = MemoryStore(4 * MIB, 8)
    keys = keys_of("a", 3)
    store.put(keys)
    targets = [np.zeros(3 * MIB // 2, np.uint8) for _ in keys]
    sums: dict[int, list[int]] = {}
    with serving(store) as server:
        count = messenger.read(
            server.address, SPACE, keys, targets, SECONDS, lambda i, found: sums.update({i: list(found)}), layers=(2, 3)
        ).result(SECONDS)
        assert count == 3
        eventually(lambda: server.counters()["bytes_out"] == 3 * targets[0].nbytes, "no more than that was counted")
        with pytest.raises(TransferError, match="runs 6 to 8"):
            messenger.read(server.address, SPACE, keys, targets, SECONDS, layers=(6, 3)).result(SECONDS)
    for index, (key, target) in enumerate(zip(keys, targets, strict=True)):
        data, checksums = store.blocks[key]
        assert np.array_equal(target, data.reshape(8, -1)[2:5].reshape(-1))
        assert sums[index] == checksums[2:5]


def test_what_the_peer_has_not_got_ends_the_read(one_lane: TcpMessenger) -> None:
    store = MemoryStore(MIB, 4)
    keys = keys_of("a", 40)
    store.put(keys[:5])
    store.put(keys[6:])
    targets = [np.zeros(MIB, np.uint8) for _ in keys]
    with serving(store) as server:
        assert one_lane.read(server.address, SPACE, keys, targets, SECONDS).result(SECONDS) == 5
    # The rest was not asked for, but for what was under way already.
    assert len(store.asked) <= 4


def test_a_connection_that_dies_costs_only_what_was_not_there(messenger: TcpMessenger) -> None:
    store = MemoryStore(8 * MIB, 32)
    keys = keys_of("a", 4)
    store.put(keys)
    targets = [np.zeros(8 * MIB, np.uint8) for _ in keys]
    complete: list[int] = []
    with serving(store) as server, proxy(server.address, cut_back_after=5 * MIB) as between:
        read = messenger.read(
            between.address, SPACE, keys, targets, SECONDS, lambda index, sums: complete.append(index)
        )
        assert read.result(SECONDS) == 4
        assert between.cuts == 1
    for key, target in zip(keys, targets, strict=True):
        assert np.array_equal(target, store.blocks[key][0])
    assert sorted(complete) == [0, 1, 2, 3]
    counters = messenger.counters()
    assert 1 <= counters["resubmissions"] <= 2
    # No run that was whole came again.
    assert counters["bytes_received"] == 32 * MIB
    assert counters["failures"] == 0


def test_a_write_whose_connection_dies_is_finished_over_another(messenger: TcpMessenger) -> None:
    store = MemoryStore(8 * MIB, 32)
    blocks = [bytes_of(key, 8 * MIB) for key in keys_of("a", 4)]
    with serving(store) as server, proxy(server.address, cut_after=5 * MIB) as between:
        writes = [write_of(index, data, 32) for index, data in enumerate(blocks)]
        messenger.write(between.address, writes, SECONDS).result(SECONDS)
        assert between.cuts == 1
        # The confirmed pieces did not go again: no more than the two that were under way.
        assert between.there < (32 + 2 * 4 + 1) * MIB
    for index, data in enumerate(blocks):
        assert np.array_equal(store.rooms[index], data)
    assert messenger.counters()["resubmissions"] >= 1


def test_a_peer_that_never_answers_a_write_is_given_up(one_lane: TcpMessenger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.messenger.pace.STALL_SECONDS", 0.2)
    store = MemoryStore(4096, 1)
    with serving(store) as server:
        store.gate.clear()
        began = time.monotonic()
        with pytest.raises(TransferError, match="stands still"):
            one_lane.write(server.address, [write_of(0, bytes_of(b"a", 4096), 1)], 600.0).result(SECONDS)
        assert 0.4 <= time.monotonic() - began < SECONDS
        store.gate.set()
        # What comes next has a connection of its own.
        one_lane.write(server.address, [write_of(1, bytes_of(b"b", 4096), 1)], SECONDS).result(SECONDS)
    assert np.array_equal(store.rooms[1], bytes_of(b"b", 4096))


def test_writes_that_nobody_wants_any_more_end_soon(one_lane: TcpMessenger) -> None:
    store = MemoryStore(4096, 1)
    wanted = [True]
    with serving(store) as server:
        store.gate.clear()
        writes = [
            one_lane.write(
                server.address, [write_of(block, bytes_of(b"a", 4096), 1)], 600.0, is_wanted=lambda: wanted[0]
            )
            for block in range(6)
        ]
        wanted[0] = False
        for write in writes:
            with contextlib.suppress(TransferError):
                write.result(SECONDS)
        assert not store.landed
        store.gate.set()
        one_lane.write(server.address, [write_of(9, bytes_of(b"b", 4096), 1)], SECONDS).result(SECONDS)
        assert np.array_equal(store.rooms[9], bytes_of(b"b", 4096))


def test_urgent_work_overtakes_background_work_that_runs_and_waits(one_lane: TcpMessenger) -> None:
    store = MemoryStore(8 * MIB, 8)
    background, urgent = keys_of("background", 4), keys_of("urgent", 1)
    store.put([*background, *urgent])
    targets = [np.empty(8 * MIB, np.uint8) for _ in range(5)]
    requests: list[Future[int]] = []
    depart = store.depart

    def on_second(space: KeySpaceId, keys: Sequence[BlockKey]) -> Leaving:
        if keys[0] == background[1] and not requests:
            # Time for the lane to go ahead of this answer, if it did so for background work.
            time.sleep(0.05)
            requests.append(one_lane.read(server.address, SPACE, urgent, targets[4:], SECONDS))
        return depart(space, keys)

    store.depart = on_second  # type: ignore[method-assign]
    with serving(store) as server:
        replicas = [
            one_lane.read(server.address, SPACE, [key], [target], SECONDS, priority=Priority.BACKGROUND)
            for key, target in zip(background, targets, strict=False)
        ]
        assert [replica.result(SECONDS) for replica in replicas] == [1] * 4
        assert requests[0].result(0) == 1
    asked = [keys[0] for keys in store.asked]
    # Right behind the piece under way, before the 23 others.
    assert asked[asked.index(background[1]) + 1] == urgent[0]


def test_background_work_is_not_starved(one_lane: TcpMessenger) -> None:
    store = MemoryStore(64 << 10, 1)
    background, urgent = keys_of("background", 1), keys_of("urgent", 30)
    store.put([*background, *urgent])
    target = np.empty(64 << 10, np.uint8)
    with serving(store) as server, held(store, one_lane, server):
        replica = one_lane.read(server.address, SPACE, background, [target], SECONDS, priority=Priority.BACKGROUND)
        targets = [np.empty(64 << 10, np.uint8) for _ in urgent]
        requests = [
            one_lane.read(server.address, SPACE, [key], [own], SECONDS)
            for key, own in zip(urgent, targets, strict=True)
        ]
        store.gate.set()
        assert [request.result(SECONDS) for request in requests] == [1] * 30
        assert replica.result(SECONDS) == 1
    assert [keys[0] for keys in store.asked].index(background[0]) <= 9


def test_a_full_queue_refuses_background_work_and_lets_urgent_work_wait(
    one_lane: TcpMessenger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "QUEUE_TRANSFERS", 4)
    store = MemoryStore(4096, 1)
    keys = keys_of("a", 1)
    store.put(keys)

    def read(priority: Priority, time_left: float = SECONDS):  # type: ignore[no-untyped-def]
        target = np.empty(4096, np.uint8)
        return one_lane.read(server.address, SPACE, keys, [target], time_left, priority=priority)

    with serving(store) as server, held(store, one_lane, server):
        waits = [read(Priority.BACKGROUND) for _ in range(4)]
        counters = one_lane.counters()
        assert (counters["queued"], counters["queued_bytes"]) == (4, 4 * 4096)
        with pytest.raises(TransferError, match=r"4 transfers .* wait for .*queue is full for background work"):
            read(Priority.BACKGROUND).result(0)
        late = read(Priority.URGENT, 0.1)
        with pytest.raises(TransferError, match="did not begin before its deadline"):
            late.result(SECONDS)
        waits.append(read(Priority.URGENT))
        store.gate.set()
        assert [wait.result(SECONDS) for wait in waits] == [1] * 5
        assert one_lane.counters()["refused_transfers"] == 1


def test_more_peers_than_connections(threads: None) -> None:
    """Six peers, all busy at once, and three connections: everybody is served, the cap holds."""
    messenger = TcpMessenger(None, connections_per_peer=2, most_connections=3)
    keys = keys_of("a", 1)
    most = 0.0
    try:
        with contextlib.ExitStack() as stack:
            stores = [MemoryStore(256 << 10, 1) for _ in range(6)]
            servers = [stack.enter_context(serving(store)) for store in stores]
            for store in stores:
                store.put(keys)
            for _ in range(5):
                reads = [
                    messenger.read(server.address, SPACE, keys, [np.empty(256 << 10, np.uint8)], SECONDS)
                    for server in servers
                    for _ in range(4)
                ]
                while not all(read.done() for read in reads):
                    most = max(most, messenger.counters()["connections"])
                    time.sleep(0.001)
                assert [read.result() for read in reads] == [1] * 24
            assert most <= 3
            for server in servers:
                # One at a time: now they are idle, and evicted when another is wanted.
                target = np.empty(256 << 10, np.uint8)
                assert messenger.read(server.address, SPACE, keys, [target], SECONDS).result(SECONDS) == 1
            counters = messenger.counters()
            assert counters["evicted_endpoints"] >= 3
            assert counters["connections"] <= 3
    finally:
        messenger.close()


def test_a_peer_that_is_always_busy_gives_way_in_the_end(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "TURN_SECONDS", 0.02)
    messenger = TcpMessenger(None, most_connections=1)
    store, other = MemoryStore(4096, 1), MemoryStore(4096, 1)
    keys = keys_of("a", 1)
    store.put(keys)
    other.put(keys)
    try:
        with serving(store) as busy, serving(other) as wanting:

            def read(server: TcpServer):  # type: ignore[no-untyped-def]
                return messenger.read(server.address, SPACE, keys, [np.empty(4096, np.uint8)], SECONDS)

            going = [read(busy) for _ in range(1500)]
            wanted = read(wanting)
            assert wanted.result(SECONDS) == 1
            assert not going[-1].done()
            assert [each.result(SECONDS) for each in going] == [1] * len(going)
    finally:
        messenger.close()


def test_nothing_is_kept_of_a_peer_that_nobody_talks_to(
    messenger: TcpMessenger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "IDLE_SECONDS", 0.1)
    before = threading.active_count()
    store = MemoryStore(4096, 1)
    keys = keys_of("a", 1)
    store.put(keys)
    with serving(store) as server:
        target = np.empty(4096, np.uint8)
        assert messenger.read(server.address, SPACE, keys, [target], SECONDS).result(SECONDS) == 1
        assert messenger.read(server.address, SPACE, keys, [target], SECONDS).result(SECONDS) == 1
        assert messenger.counters()["connections"] >= 1
        eventually(lambda: messenger.counters()["endpoints"] == 0, "the peer is forgotten")
        assert messenger.counters()["connections"] == 0
        assert messenger.read(server.address, SPACE, keys, [target], SECONDS).result(SECONDS) == 1
    eventually(lambda: threading.active_count() == before, "its threads end")


def test_anything_may_be_carried(messenger: TcpMessenger) -> None:
    store = MemoryStore(4096, 1)
    errors: list[Exception] = [
        ConnectionResetError(),
        ConnectionResetError(),
        RefusedError("no"),
        PoolError("not today"),
    ]

    def fail(channel: Channel) -> int:
        raise errors.pop(0)

    with serving(store) as server:
        assert messenger.carry(server.address, lambda channel: 7, SECONDS).result(SECONDS) == 7
        with pytest.raises(TransferError, match="broke"):
            messenger.carry(server.address, fail, SECONDS).result(SECONDS)
        with pytest.raises(RefusedError, match="no"):
            messenger.carry(server.address, fail, SECONDS).result(SECONDS)
        assert messenger.counters()["connections"] == 1
        assert messenger.carry(server.address, lambda channel: 8, SECONDS).result(SECONDS) == 8
        with pytest.raises(PoolError, match="not today"):
            messenger.carry(server.address, fail, SECONDS).result(SECONDS)


def test_bytes_that_nobody_read_are_never_taken_for_an_answer(one_lane: TcpMessenger) -> None:
    """Whoever asked gives up in the middle of what came, whose next bytes look like another answer."""
    store = MemoryStore(4096, 1)
    key, other = keys_of("a", 2)
    store.put([other])
    forged = bytes(4096)
    evil = framed(Blocks(1, 4096, (checksum(np.frombuffer(forged, np.uint8)),))) + forged
    store.blocks[key] = np.frombuffer(evil, np.uint8), [0]

    def give_up(channel: Channel) -> None:
        channel.send_header(Read(SPACE, (key,), SECONDS), time.monotonic() + SECONDS)
        channel.receive_header(time.monotonic() + SECONDS)
        raise PoolError("there is no room for it")

    with serving(store) as server:
        with pytest.raises(PoolError, match="no room"):
            one_lane.carry(server.address, give_up, SECONDS).result(SECONDS)
        target = np.empty(4096, np.uint8)
        assert one_lane.read(server.address, SPACE, [other], [target], SECONDS).result(SECONDS) == 1
        assert np.array_equal(target, store.blocks[other][0])


def test_a_peer_that_is_not_there_fails_all_that_waits_for_it_at_once(one_lane: TcpMessenger) -> None:
    store = MemoryStore(4096, 1)
    with serving(store) as server:
        address = server.address
    start = time.monotonic()
    reads = [
        one_lane.read(address, SPACE, keys_of("a", 1), [np.empty(4096, np.uint8)], 600, priority=priority)
        for priority in Priority
        for _ in range(20)
    ]
    for read in reads:
        with pytest.raises(TransferError, match="broke"):
            read.result(SECONDS)
    assert time.monotonic() - start < 5
