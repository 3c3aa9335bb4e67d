"""The pool's API, the same whether a client reaches its home node through shared memory or over the network."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moonpool.core.vocabulary import NodePeer
from moonpool.store import BlockKey, BlockMeta, Client, NodeUnreachableError, PoolError, Space, key_of
from moonpool.store.client import NodeClient
from moonpool.store.extents import PAGE_BYTES

from .kit import BLOCK, SECONDS, SPACE, ClientProcess, Conductor, bytes_of, eventually, keys_of, put, run_checksums

Connect = Callable[..., Client]
Join = Callable[..., NodeClient]
WAYS = ["near", "far"]
K = keys_of("k", 12)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pool(node: NodePeer, connect: Connect, way: str) -> Client:
    return connect(node, way)


@pytest.fixture
def space(pool: Client) -> Space:
    return pool.space(SPACE)


def holds(space: Space, keys: Sequence[BlockKey]) -> list[bool]:
    """Which of these blocks are there; those that are hold the right bytes."""
    with space.get(keys) as blocks:
        for key, block in zip(keys, blocks, strict=True):
            assert block is None or np.array_equal(block, bytes_of(key))
        return [block is not None for block in blocks]


# Bytes in, bytes out


def test_what_was_put_is_read_by_every_client(node: NodePeer, connect: Connect, space: Space, join: Join) -> None:
    assert space.put(K[0], bytes_of(K[0]))
    assert space.put_many(K[1:3], [bytes_of(key) for key in K[1:3]]) == [True, True]
    for other in WAYS:
        assert holds(connect(node, other).space(SPACE), [K[2], K[5], K[0], K[1]]) == [True, False, True, True]
    with join(node).lease(SPACE, K[:3]).result(SECONDS) as lease:
        assert lease.count == 3


def test_of_a_key_that_is_given_twice_the_first_block_is_kept(space: Space) -> None:
    space.put(K[2], bytes_of(K[2]))
    blocks = [bytes_of(K[0]), bytes_of(K[1]), bytes_of(K[5]), bytes_of(K[2])]
    assert space.put_many([K[0], K[1], K[0], K[2]], blocks, [BlockMeta(index=at) for at in range(4)]) == [
        True,
        True,
        False,
        False,
    ]
    assert holds(space, K[:3]) == [True, True, True]
    assert [meta and meta.index for meta in space.metas(K[:2])] == [0, 1]


def test_a_miss_leaves_the_others_where_they_are(space: Space) -> None:
    space.put_many([K[1], K[3]], [bytes_of(K[1]), bytes_of(K[3])])
    with space.get(K[:4]) as blocks:
        assert [block is not None for block in blocks] == [False, True, False, True]
        assert blocks.hits == 2
        assert len(blocks) == 4
    targets = [np.zeros(BLOCK, np.uint8) for _ in range(4)]
    assert space.get_into_many(K[:4], [[target] for target in targets]) == [False, True, False, True]
    assert np.array_equal(targets[3], bytes_of(K[3]))
    assert not targets[2].any()


def test_views_are_read_only_and_begin_with_a_page(space: Space) -> None:
    space.put(K[0], bytes_of(K[0]))
    with space.get([K[0], K[0]]) as (block, again):
        assert block is not None
        assert again is not None
        assert block.ctypes.data % PAGE_BYTES == 0
        assert np.array_equal(block, again)
        with pytest.raises(ValueError, match="read-only"):
            block[0] = 1


def test_buffers_of_nothing_between_others_and_at_the_end_are_no_end(pool: Client) -> None:
    # Where a group of buffers is full just before one: nothing is to be received then.
    size = 1 << 20
    space = pool.space("large blocks", block_bytes=size)
    data, target, nothing = bytes(range(256)) * (size // 256), np.zeros(size, np.uint8), np.empty(0, np.uint8)
    assert space.put_from(K[0], [b"", data, b""])
    assert space.get_into(K[0], [nothing, target[:100], nothing, target[100:], nothing])
    assert target.tobytes() == data


def test_layers_are_gathered_and_scattered(space: Space) -> None:
    whole = bytes_of(K[0]).reshape(SPACE.runs, -1)
    assert space.put_from(K[0], [*whole])
    layers = [bytearray(space.layer_bytes) for _ in range(SPACE.runs)]
    assert space.get_into(K[0], layers)
    assert b"".join(layers) == whole.tobytes()
    # Keys and values apart, and cut where no layer ends.
    assert space.put_from(K[1], [whole.reshape(-1)[:100], whole.reshape(-1)[100:9000], whole.reshape(-1)[9000:]])
    with space.get(K[:2], layers=(1, 2)) as blocks:
        for block in blocks:
            assert block is not None
            assert np.array_equal(block.reshape(2, -1), whole[1:3])
    last = np.zeros(space.layer_bytes, np.uint8)
    assert space.get_into(K[1], [last], layers=(3, 1))
    assert np.array_equal(last, whole[3])


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_whatever_has_contiguous_memory_is_a_buffer(space: Space) -> None:
    torch = pytest.importorskip("torch")
    plain = bytes_of(K[0])
    same = [
        plain.tobytes(),
        bytearray(plain),
        memoryview(plain.tobytes()),
        plain.view(np.float32).reshape(8, -1),
        torch.from_numpy(plain.copy()).view(torch.bfloat16).reshape(16, -1),
        np.matrix(plain.view(np.float32).reshape(8, -1)),
        np.ma.masked_array(plain),
    ]
    for key, data in zip(K, same, strict=False):
        assert space.put(key, data)
        with space.get([key]) as (block,):
            assert block is not None
            assert np.array_equal(block, plain)
    into = torch.zeros(BLOCK // 2, dtype=torch.bfloat16)
    assert space.get_into(K[0], [into])
    assert np.array_equal(into.view(torch.uint8).numpy(), plain)
    flat = np.matrix(np.zeros((4, BLOCK // 4), np.uint8))
    assert space.get_into(K[0], [flat])
    assert flat.tobytes() == plain.tobytes()


def test_a_tensor_that_is_not_what_it_holds_is_refused(space: Space) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(PoolError, match=r"give tensor\.clone"):
        space.put(K[0], torch.zeros(BLOCK // 8, dtype=torch.complex64).conj())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (bytes(BLOCK - 1), f"{BLOCK - 1} bytes in 1 buffer, where {BLOCK} bytes"),
        (np.zeros((BLOCK, 2), np.uint8)[:, 0], "not contiguous"),
        ("text", "str is no buffer"),
        (None, "NoneType is no buffer"),
    ],
    ids=["size", "strides", "text", "nothing"],
)
def test_other_buffers_are_refused_by_name(space: Space, data: Any, reason: str) -> None:
    with pytest.raises(PoolError, match=reason):
        space.put(K[0], data)
    assert not space.exists(K[0])


def test_mistakes_are_named(pool: Client, space: Space, node: NodePeer) -> None:
    data = bytes(BLOCK)
    short = BlockKey(b"short")
    with pytest.raises(PoolError, match="16 bytes, not 5"):
        space.put(short, data)
    with pytest.raises(PoolError, match="16 bytes, not 5"):
        space.get([K[0], short])
    with pytest.raises(PoolError, match="16 bytes, not 5"):
        space.exists(short)
    for call in (space.get, space.exists_many, space.remove, space.unpin, space.metas):
        with pytest.raises(PoolError, match="give a list of keys"):
            call(K[0])
    for no_key in ("sixteen characters"[:16], None, 16):
        with pytest.raises(PoolError, match="not those of"):
            space.put(no_key, data)  # type: ignore[arg-type]
        with pytest.raises(PoolError, match="not those of"):
            space.exists_many([K[0], no_key])  # type: ignore[list-item]
    with pytest.raises(PoolError, match=r"key space s: .*block_tokens"):
        pool.space("s", block_bytes=4096, block_tokens=0)
    with pytest.raises(PoolError, match=r"key space s: .*runs"):
        pool.space("s", block_bytes=1 << 20, layers=1 << 20)
    with pytest.raises(PoolError, match="2 keys with 1 lists"):
        space.put_many(K[:2], [data])
    with pytest.raises(PoolError, match="read-only"):
        space.get_into(K[0], [data])
    with pytest.raises(PoolError, match="a block of this space has 4"):
        space.get(K[:1], layers=(3, 2))
    with pytest.raises(PoolError, match="at most 16 tokens"):
        space.put(K[0], data, BlockMeta.of(tokens=range(17)))
    with pytest.raises(PoolError, match="no 3 layers of equal size"):
        pool.space("s", block_bytes=4096, layers=3)
    space.put(K[0], data)
    with pytest.raises(PoolError, match="has 4 runs of 4096 bytes on this node, not 2 of 4096"):
        pool.space(SPACE.id, block_bytes=8192, layers=2, block_tokens=16).put(K[1], bytes(8192))
    big = pool.space("big", block_bytes=65 * BLOCK)
    with pytest.raises(PoolError, match=r"do not fit into this node's arena|held: at most"):
        big.put(K[0], bytes(65 * BLOCK))
    assert holds(space, K[1:2]) == [False]


def test_a_key_space_is_its_name(pool: Client, node: NodePeer, connect: Connect) -> None:
    one = pool.space("llama/bf16", block_bytes=BLOCK, layers=2, block_tokens=4)
    same = connect(node, "near").space("llama/bf16", block_bytes=BLOCK, layers=2, block_tokens=4)
    other = pool.space("llama/fp8", block_bytes=BLOCK, layers=2, block_tokens=4)
    keys = one.keys_of(range(9))
    assert len(keys) == 2
    assert keys == same.keys_of(range(9))
    assert not set(keys) & {*other.keys_of(range(9)), *one.keys_of(range(9), salt="tenant")}
    one.put(keys[0], bytes_of(keys[0]))
    assert same.exists(keys[0])
    assert not other.exists(keys[0])
    assert key_of("a", "b") != key_of("ab")
    assert key_of("a") == key_of(b"a")


def test_a_layout_that_no_block_has_binds_nobody(pool: Client) -> None:
    """Whoever asked with the wrong one, or removed all blocks that had it."""
    wrong, right = (pool.space("s", block_bytes=nbytes) for nbytes in (100, 8192))
    assert not wrong.exists(K[0])
    assert wrong.get(K[:1]).hits == 0
    assert right.put(K[0], bytes(8192))
    for ask in (lambda: wrong.get(K[:1]), lambda: wrong.put(K[1], bytes(100))):
        with pytest.raises(
            PoolError, match=r"key space s has 1 runs of 8192 bytes on this node, not 1 of 100; .*another name"
        ):
            ask()
    assert right.remove(K[:1]) == [True]
    assert wrong.put(K[0], bytes(100))


def test_a_node_takes_blocks_of_so_many_key_spaces_at_a_time(pool: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.store.spaces.MAX_SPACES", 2)
    one, two, three = (pool.space(name, block_bytes=1) for name in ("one", "two", "three"))
    assert one.put(K[0], b"1")
    assert two.put(K[0], b"2")
    with pytest.raises(PoolError, match="blocks of 2 key spaces already"):
        three.put(K[0], b"3")
    assert three.get(K[:1]).hits == 0
    assert one.remove(K[:1]) == [True]
    assert three.put(K[0], b"3")
    assert bytes(three.get(K[:1])[0] or b"") == b"3"


def test_metas_are_kept_with_their_blocks(space: Space) -> None:
    first, second = BlockMeta.of(tokens=range(16)), BlockMeta.of(K[0], 1, range(16, 32))
    space.put_many(K[:2], [bytes_of(key) for key in K[:2]], [first, second])
    assert space.metas(K[:3]) == [first, second, None]
    assert second.token_ids == tuple(range(16, 32))


def test_small_blocks_and_parts_of_blocks_go_in_batches_of_the_room_they_take(
    conductor: Conductor, connect: Connect, way: str
) -> None:
    """A block of a byte takes a page; whoever reads a layer of each of many blocks has the node hold them whole."""
    node = conductor.start_node("small", 64 * BLOCK, client_quota=16 * BLOCK)
    pool = connect(node, way)
    tiny, keys = pool.space("tiny", block_bytes=1), keys_of("tiny", 200)
    assert all(tiny.put_many(keys, [bytes([at]) for at in range(200)]))
    targets = [bytearray(1) for _ in keys]
    assert all(tiny.get_into_many(keys, targets))
    assert targets == [bytes([at]) for at in range(200)]
    assert all(tiny.remove(keys))
    space, keys = pool.space(SPACE), keys_of("whole", 40)
    assert all(space.put_many(keys, [bytes_of(key) for key in keys]))
    layers = [np.zeros(BLOCK // 4, np.uint8) for _ in keys]
    # One that is not there: so all are asked for.
    there = space.get_into_many([*keys, K[0]], [*layers, bytearray(BLOCK // 4)], layers=(2, 1))
    assert there == [True] * 40 + [False]
    for key, layer in zip(keys, layers, strict=True):
        assert np.array_equal(layer, bytes_of(key).reshape(4, -1)[2])


def test_any_number_of_keys_is_asked_about(pool: Client, space: Space) -> None:
    """Though a frame holds a million of them, and the descriptions of a few thousand blocks."""
    space.put(K[0], bytes_of(K[0]))
    many = [BlockKey(at.to_bytes(16, "little")) for at in range(1 << 20)]
    many.append(K[0])
    assert space.exists_many(many) == [False] * (1 << 20) + [True]
    wordy = pool.space("wordy", block_bytes=1, block_tokens=65536)
    keys, metas = keys_of("w", 70), [BlockMeta.of(None, at, range(65536)) for at in range(70)]
    assert all(wordy.put_many(keys, [b"x"] * 70, metas))
    assert wordy.metas(keys) == metas


def test_a_batch_larger_than_the_arena_goes_through(space: Space) -> None:
    keys = keys_of("many", 100)
    assert space.put_many(keys, [bytes_of(key) for key in keys]) == [True] * 100
    there = space.exists_many(keys)
    assert 32 <= sum(there) <= 64
    targets = [bytearray(BLOCK) for _ in keys]
    assert space.get_into_many(keys, [[target] for target in targets]) == there
    for key, target, is_there in zip(keys, targets, there, strict=True):
        assert not is_there or target == bytes_of(key).tobytes()


def test_nothing_asked_is_nothing_found(space: Space) -> None:
    assert space.put_many([], []) == []
    assert space.exists_many([]) == []
    assert len(space.get([])) == 0
    assert space.remove([]) == []


# One key, several clients


def test_two_clients_put_one_key_at_once_and_both_succeed(node: NodePeer, connect: Connect, way: str) -> None:
    spaces = [connect(node, each).space(SPACE) for each in (way, "near", "far")]
    for key in K:
        with ThreadPoolExecutor(3) as threads:
            outcomes = list(threads.map(lambda space, key=key: space.put(key, bytes_of(key)), spaces))
        assert any(outcomes)
        assert holds(spaces[0], [key]) == [True]
    assert spaces[0].put(K[0], np.zeros(BLOCK, np.uint8)) is False
    assert holds(spaces[1], [K[0]]) == [True]
    stats = NodeClient.connect(node.socket_path, name="x", incarnation="0")
    with stats:
        assert stats.stats().result(SECONDS)["used_bytes"] == len(K) * BLOCK


def test_a_block_in_the_middle_of_a_put_is_a_miss_or_waited_for(node: NodePeer, join: Join, space: Space) -> None:
    writer = join(node)
    room = writer.open_room(SPACE, K[:1]).result(SECONDS)
    writer.stats().result(SECONDS)
    assert holds(space, K[:1]) == [False]
    began = time.monotonic()
    with space.get(K[:1], wait_until=began + 0.05) as blocks:
        assert blocks.hits == 0
    assert time.monotonic() - began >= 0.05
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(space.get, K[:1], wait_until=time.monotonic() + SECONDS)
        view = room.view(0)
        assert view is not None
        view[:] = bytes_of(K[0])
        eventually(lambda: writer.stats().result(SECONDS)["watches"] == 1, "it waits")
        with room:
            writer.complete(room, [(0, 0, SPACE.runs)], run_checksums(view))
        with waiting.result(SECONDS) as (block,):
            assert block is not None
            assert np.array_equal(block, bytes_of(K[0]))


def test_a_writer_that_gives_up_wakes_who_waits_with_a_miss(node: NodePeer, join: Join, space: Space) -> None:
    process = ClientProcess(node, "cacher", K[:2])
    observer = join(node)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(space.get, K[:2], wait_until=time.monotonic() + 600)
        eventually(lambda: observer.stats().result(SECONDS)["watches"] == 1, "it waits")
        process.kill()
        assert waiting.result(SECONDS).hits == 0
    eventually(lambda: observer.stats().result(SECONDS)["used_bytes"] == 0, "its room is freed")


def test_those_who_wait_hold_nobody_up(node: NodePeer, join: Join, space: Space) -> None:
    writer = join(node)
    room = writer.open_room(SPACE, K[:1]).result(SECONDS)
    writer.stats().result(SECONDS)
    with ThreadPoolExecutor(8) as threads:
        until = time.monotonic() + SECONDS
        waiting = [threads.submit(space.get, K[:1], wait_until=until) for _ in range(8)]
        eventually(lambda: writer.stats().result(SECONDS)["watches"] == 8, "all of them wait")
        assert space.put(K[1], bytes_of(K[1]))
        assert space.exists(K[1])
        assert holds(space, K[1:2]) == [True]
        assert not any(future.done() for future in waiting)
        room.close()
        for future in waiting:
            with future.result(SECONDS) as blocks:
                assert blocks.hits == 0


def test_who_waits_for_a_block_that_nobody_writes_waits_for_nothing(space: Space) -> None:
    began = time.monotonic()
    with space.get(K[:1], wait_until=began + 600) as blocks:
        assert blocks.hits == 0
    assert time.monotonic() - began < SECONDS


def test_what_is_read_stays_in_place_while_others_put(node: NodePeer, connect: Connect) -> None:
    space = connect(node, "near").space(SPACE)
    writer = connect(node, "far").space(SPACE)
    space.put_many(K, [bytes_of(key) for key in K])
    with space.get(K) as blocks:
        more = keys_of("more", 200)
        writer.put_many(more, [bytes_of(key) for key in more])
        for key, block in zip(K, blocks, strict=True):
            assert block is not None
            assert np.array_equal(block, bytes_of(key))
    writer.put_many(keys_of("yet more", 200), [bytes_of(key) for key in keys_of("yet more", 200)])
    assert not any(space.exists_many(K))


def test_an_arena_that_is_all_leased_takes_no_more(node: NodePeer, connect: Connect, space: Space) -> None:
    reader = connect(node, "near").space(SPACE)
    keys = keys_of("full", 64)
    for start in range(0, 64, 8):
        reader.put_many(keys[start : start + 8], [bytes_of(key) for key in keys[start : start + 8]])
    with reader.get(keys) as blocks:
        assert blocks.hits == 64
        with pytest.raises(PoolError, match=r"no room for 1 blocks|held: at most"):
            space.put(K[0], bytes_of(K[0]))
    reader.exists(K[0])  # What it said before, the end of its lease, has been heard then.
    assert space.put(K[0], bytes_of(K[0]))


# Keeping and removing


def test_a_pinned_block_outlives_what_comes_after_it(node: NodePeer, connect: Connect, space: Space, way: str) -> None:
    space.put_many(K[:4], [bytes_of(key) for key in K[:4]])
    pinning = connect(node, way)
    assert pinning.space(SPACE).pin([K[0], K[1], K[9]], ttl=600) == [True, True, False]
    pinning.close()
    more = keys_of("more", 100)
    space.put_many(more, [bytes_of(key) for key in more])
    assert holds(space, K[:4]) == [True, True, False, False]
    with pytest.raises(PoolError, match=rf"{K[0].hex()} \(pinned\)"):
        space.remove(K[:1])
    assert space.unpin([K[0], K[9]]) == [True, False]
    space.put_many(K[4:], [bytes_of(key) for key in K[4:]])
    again = keys_of("again", 100)
    space.put_many(again, [bytes_of(key) for key in again])
    assert space.exists_many(K[:2]) == [False, True]


def test_a_pin_ends_with_its_time(pool: Client, space: Space) -> None:
    space.put(K[0], bytes_of(K[0]))
    assert space.pin(K[:1], ttl=0.05) == [True]
    assert pool.stats()["pinned_bytes"] == BLOCK
    eventually(lambda: pool.stats()["pins"] == 0, "the pin ends")
    assert space.remove(K[:1]) == [True]


def test_pins_take_no_more_than_their_share(pool: Client, space: Space) -> None:
    keys = keys_of("kept", 20)
    space.put_many(keys, [bytes_of(key) for key in keys])
    assert space.pin(keys[:16], ttl=600) == [True] * 16
    with pytest.raises(PoolError, match="25% of the arena, may be pinned"):
        space.pin(keys[15:17], ttl=600)
    assert space.pin(keys[:16], ttl=600) == [True] * 16
    assert pool.stats()["pins"] == 16
    with pytest.raises(PoolError, match="a pin ends"):
        space.pin(keys[:1], ttl=0)
    assert space.unpin(keys[:16]) == [True] * 16


def test_a_block_that_is_read_is_not_removed(node: NodePeer, connect: Connect, space: Space) -> None:
    space.put_many(K[:3], [bytes_of(key) for key in K[:3]])
    reader = connect(node, "near").space(SPACE)
    with reader.get([K[1]]), pytest.raises(PoolError, match=rf"not removed: {K[1].hex()} \(read by somebody\);"):
        space.remove(K[:3])
    assert holds(space, K[:3]) == [False, True, False]
    assert space.remove(K[:3]) == [False, True, False]
    assert space.put(K[1], bytes_of(K[1]))


def test_a_removal_waits_for_a_reader_that_is_leaving(node: NodePeer, connect: Connect, space: Space) -> None:
    """As one over a socket is, which has its bytes before the node knows that it has."""
    space.put(K[0], bytes_of(K[0]))
    reader = connect(node, "near").space(SPACE)
    with ThreadPoolExecutor(1) as threads:
        with reader.get(K[:1]):
            removed = threads.submit(space.remove, K[:1])
            # Time for the first try; if it comes later, it finds nobody.
            time.sleep(0.05)
        assert removed.result(SECONDS) == [True]


def test_replicas_of_a_block_on_the_only_node(space: Space) -> None:
    space.put(K[0], bytes_of(K[0]))
    assert space.replicas(K[0]) == 1
    assert space.replicas(K[1]) == 0


# Trouble


def test_a_client_that_dies_leaves_nothing(node: NodePeer, join: Join, space: Space) -> None:
    observer = join(node)
    put(observer, K[:4])
    process = ClientProcess(node, "reader", K[:4])
    with pytest.raises(PoolError, match="read by somebody"):
        space.remove(K[:4])
    process.kill()
    eventually(lambda: observer.stats().result(SECONDS)["leases"] == 0, "its lease ends")
    assert space.remove(K[:4]) == [True] * 4


def test_many_threads_share_a_client(space: Space) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(20):
                key = key_of(f"{number}/{turn % 5}")
                space.put(key, bytes_of(key))
                assert holds(space, [key, K[0]]) == [True, False]
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not failures


def test_a_node_that_is_gone_is_said_to_be(conductor: Conductor, connect: Connect, way: str) -> None:
    with conductor.process_node("dead-0") as (node, process):
        pool = connect(node, way)
        space = pool.space(SPACE)
        space.put(K[0], bytes_of(K[0]))
        blocks = space.get(K[:1])
        process.kill()
        process.wait(SECONDS)
        with pytest.raises(PoolError, match=r"is gone|no node at"):
            space.exists(K[0])
        assert np.array_equal(blocks[0], bytes_of(K[0]))
        with contextlib.nullcontext() if way == "far" else pytest.raises(PoolError, match="what was read may be wrong"):
            blocks.close()
        blocks.close()


@pytest.mark.parametrize("start_timeout", [None, 0.0])
def test_where_nobody_listens_is_said_soon(way: str, start_timeout: float | None) -> None:
    """Not after the thirty seconds that a call may take."""
    address = "/tmp/no-such-node.sock" if way == "near" else "127.0.0.1:9"
    began = time.monotonic()
    with pytest.raises(
        NodeUnreachableError, match=rf"^no node (listens )?at {address}: (nothing listens|No such file)"
    ):
        Client.connect(address, **({} if start_timeout is None else {"start_timeout": start_timeout}))
    assert time.monotonic() - began < 10


def test_a_host_that_is_not_there_is_said_to_be_unreachable() -> None:
    with pytest.raises(NodeUnreachableError, match=r"no node at nohost\.invalid:9100") as told:
        Client.connect("nohost.invalid:9100")
    assert not told.value.is_starting
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(NodeUnreachableError, match="no node's data"):
        Client.connect(f"127.0.0.1:{silent.getsockname()[1]}", timeout=0.2)


def test_a_closed_client_says_so(space: Space, pool: Client) -> None:
    pool.close()
    with pytest.raises(PoolError, match="was closed"):
        space.exists(K[0])
    pool.close()


def test_another_token_is_refused(run_dir: Any, connect: Connect, node: NodePeer) -> None:
    with pytest.raises(PoolError, match="no cluster token, this one has"):
        connect(node, "far", token="some other token of enough characters")


# Anything goes


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from("pgrxk"), st.sets(st.integers(0, 9), min_size=1)), max_size=12))
def test_it_is_a_map(space: Space, steps: list[tuple[str, set[int]]]) -> None:
    there: set[int] = set()
    space.remove(K[:10])
    for verb, chosen in steps:
        numbers = sorted(chosen)
        keys = [K[number] for number in numbers]
        match verb:
            case "p":
                stored = space.put_many(keys, [bytes_of(key) for key in keys])
                assert stored == [number not in there for number in numbers]
                there |= chosen
            case "g":
                assert holds(space, keys) == [number in there for number in numbers]
            case "r":
                assert space.remove(keys) == [number in there for number in numbers]
                there -= chosen
            case "x":
                assert space.exists_many(keys) == [number in there for number in numbers]
            case "k":
                assert space.pin(keys, 600) == [number in there for number in numbers]
                assert space.unpin(keys) == [number in there for number in numbers]


# Many connections


def test_more_clients_than_connections_take_turns(
    node: NodePeer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that rests makes way, be it a client's or a stranger's who says nothing."""
    monkeypatch.setattr("moonpool.messenger.server.MAX_CONNECTIONS", 3)
    monkeypatch.setattr("moonpool.messenger.server.REST_SECONDS", 0.0)
    host, _, port = node.data_address.rpartition(":")
    strangers = [socket.create_connection((host, int(port)), SECONDS) for _ in range(3)]
    try:
        spaces = [connect(node, "far").space(SPACE) for _ in range(6)]
        for turn in range(2):
            for at, space in enumerate(spaces):
                assert space.put(K[at], bytes_of(K[at])) is not bool(turn)
                assert holds(space, K[: at + 1]) == [True] * (at + 1)
    finally:
        for stranger in strangers:
            stranger.close()
    assert connect(node, "near").stats()["tcp_evicted_connections"] >= 3


def test_connections_that_are_used_make_no_way(
    node: NodePeer, join: Join, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.messenger.server.MAX_CONNECTIONS", 1)
    monkeypatch.setattr("moonpool.messenger.server.REST_SECONDS", 0.0)
    space = connect(node, "far").space(SPACE)
    with join(node).open_room(SPACE, K[:1]).result(SECONDS) as room, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: space.get(K[:1], wait_until=time.monotonic() + SECONDS).hits)
        near = connect(node, "near")
        eventually(lambda: near.stats()["watches"] == 1, "it is waited for")
        with pytest.raises(PoolError, match="no node at"):
            connect(node, "far")
        data = bytes_of(K[0])
        view = room.view(0)
        assert view is not None
        view[:] = data
        join(node).stats().result(SECONDS)
        room.close()
        assert waiting.result(SECONDS) == 0

    def comes_in() -> bool:
        try:
            return connect(node, "far").space(SPACE).exists_many(K[:1]) == [False]
        except PoolError:
            # The answer was here before the node's thread was through with it.
            return False

    eventually(comes_in, "the connection rests, and makes way")


def test_a_connection_that_cannot_be_served_costs_only_itself(
    node: NodePeer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("moonpool.messenger.server.threading.Thread.start", no_thread)
        with pytest.raises(PoolError, match="no node at"):
            Client.connect(node.data_address, timeout=SECONDS)
    assert connect(node, "far").node == node.id


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_call_that_the_node_fails_at_is_answered(
    conductor: Conductor, node: NodePeer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr("moonpool.store.desk.Desk.bring", fail)
    monkeypatch.setattr("moonpool.store.desk.Desk.is_ready", lambda *_: False)
    space = connect(node, "near").space(SPACE)
    began = time.monotonic()
    with pytest.raises(PoolError, match="the node failed at it: unforeseen"):
        space.get(K[:1])
    assert time.monotonic() - began < SECONDS / 2
    assert not space.exists(K[0])


def test_a_node_that_only_starts_is_waited_for_on_either_way(conductor: Conductor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ThreadPoolExecutor(2) as threads:
        addresses = [str(conductor.run_dir / "node-0.sock"), f"127.0.0.1:{port}"]
        waits = {"timeout": SECONDS, "start_timeout": SECONDS}
        waiting = [threads.submit(Client.connect, address, **waits) for address in addresses]
        # Both have found nobody by then.
        time.sleep(0.2)
        conductor.start_node("node-0", data_port=port)
        for client in waiting:
            with client.result(SECONDS) as pool:
                assert pool.node == "node-0"
