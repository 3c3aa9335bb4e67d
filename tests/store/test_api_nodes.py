"""The pool's API on several nodes: what one lacks another has."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from moonpool.core.vocabulary import KeySpaceId, NodePeer
from moonpool.store import BlockKey, BlockMeta, Client, PoolError, Space
from moonpool.store.client import NodeClient

from .kit import BLOCK, SECONDS, SPACE, Conductor, DecidingConductor, bytes_of, eventually, keys_of

Connect = Callable[..., Client]
K = keys_of("k", 8)


@pytest.fixture(params=["near", "far"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def nodes(deciding: Conductor) -> list[NodePeer]:
    return [deciding.start_node(f"node-{number}") for number in range(3)]


def put(space: Space, keys: Sequence[BlockKey]) -> None:
    space.put_many(keys, [bytes_of(key) for key in keys])


def found(space: Space, keys: Sequence[BlockKey], **options: Any) -> list[bool]:
    with space.get(keys, **options) as blocks:
        return [block is not None for block in blocks]


def known(space: Space, keys: Sequence[BlockKey], count: int = 1) -> None:
    """The directory has heard of them."""
    eventually(lambda: all(space.replicas(key) == count for key in keys), f"{count} nodes are known to have them")


def test_what_another_node_has_is_fetched_and_stays(nodes: list[NodePeer], connect: Connect, way: str) -> None:
    here, there = connect(nodes[0], way).space(SPACE), connect(nodes[1], way).space(SPACE)
    metas = [BlockMeta.of(None if index == 0 else K[index - 1], index, [index]) for index in range(4)]
    there.put_many(K[:4], [bytes_of(key) for key in K[:4]], metas)
    known(here, K[:4])
    assert here.exists_many(K[:5]) == [True] * 4 + [False]
    with here.get([K[3], K[6], K[0]]) as blocks:
        assert [block is not None for block in blocks] == [True, False, True]
        assert np.array_equal(blocks[0], bytes_of(K[3]))
        assert np.array_equal(blocks[2], bytes_of(K[0]))
    known(here, [K[0], K[3]], 2)
    assert here.metas([K[0], K[3], K[1]]) == [metas[0], metas[3], None]
    target = bytearray(BLOCK)
    assert here.get_into(K[1], [target])
    assert target == bytes_of(K[1]).tobytes()


def test_blocks_of_several_nodes_come_together(nodes: list[NodePeer], connect: Connect) -> None:
    spaces = [connect(node, "near").space(SPACE) for node in nodes]
    for number, space in enumerate(spaces):
        put(space, K[number::3])
    known(spaces[0], K)
    with spaces[0].get(K) as blocks:
        for key, block in zip(K, blocks, strict=True):
            assert np.array_equal(block, bytes_of(key))


def test_pinning_brings_a_block_home(nodes: list[NodePeer], connect: Connect, way: str) -> None:
    here, there = connect(nodes[0], way).space(SPACE), connect(nodes[1], "near").space(SPACE)
    put(there, K[:1])
    known(here, K[:1])
    assert here.pin(K[:2], 600) == [True, False]
    known(here, K[:1], 2)


def test_a_removal_is_everywhere_or_refused_by_name(nodes: list[NodePeer], connect: Connect, way: str) -> None:
    here, there = connect(nodes[0], way).space(SPACE), connect(nodes[1], "near").space(SPACE)
    put(there, K[:3])
    known(here, K[:3])
    assert found(here, K[:1]) == [True]
    known(here, K[:1], 2)
    there.pin(K[2:3], 600)
    with there.get(K[1:2]), pytest.raises(PoolError) as refused:
        here.remove(K[:4])
    assert f"{K[1].hex()} (read by somebody), {K[2].hex()} (pinned)" in str(refused.value)
    assert K[0].hex() not in str(refused.value)
    known(here, K[:1], 0)
    there.unpin(K[2:3])
    assert here.remove(K[:4]) == [False, True, True, False]
    known(there, K[:4], 0)


def damage(node: NodePeer, key: BlockKey) -> None:
    with (
        NodeClient.connect(node.socket_path, name="vandal", incarnation="1") as vandal,
        vandal.lease(SPACE, [key]).result(SECONDS) as lease,
    ):
        vandal.arena[lease.offsets[0] + 5] ^= 1


@pytest.mark.parametrize("reader", ["another node", "a far client"])
def test_a_block_that_is_damaged_where_it_lies_is_a_miss_and_goes(
    nodes: list[NodePeer], connect: Connect, reader: str
) -> None:
    source = connect(nodes[1], "near")
    there = source.space(SPACE)
    here = connect(nodes[0], "near").space(SPACE) if reader == "another node" else connect(nodes[1], "far").space(SPACE)
    put(there, K[:3])
    known(here, K[:3])
    damage(nodes[1], K[1])
    assert found(here, K[:3]) == [True, False, True]
    assert there.exists_many(K[:3]) == [True, False, True]
    known(connect(nodes[2], "near").space(SPACE), K[1:2], 0)
    assert source.stats()["dram_checksum_failures"] == 1
    put(there, K[1:2])
    known(here, K[1:2])
    assert found(here, K[:3]) == [True] * 3


def test_a_damaged_block_stays_for_who_reads_it_and_goes_with_the_next_word_of_it(
    nodes: list[NodePeer], connect: Connect
) -> None:
    source = connect(nodes[1], "near")
    there, far = source.space(SPACE), connect(nodes[1], "far").space(SPACE)
    put(there, K[:1])
    damage(nodes[1], K[0])
    with there.get(K[:1]):
        assert found(far, K[:1]) == [False]
        assert source.stats()["dram_checksum_failures"] == 0
        assert found(there, K[:1]) == [True]
    assert found(far, K[:1]) == [False]
    assert source.stats()["dram_checksum_failures"] == 1
    assert found(there, K[:1]) == [False]


def test_a_pin_does_not_keep_what_is_damaged(nodes: list[NodePeer], connect: Connect) -> None:
    there, far = connect(nodes[1], "near").space(SPACE), connect(nodes[1], "far").space(SPACE)
    put(there, K[:1])
    assert there.pin(K[:1], 600.0) == [True]
    damage(nodes[1], K[0])
    assert found(far, K[:1]) == [False]
    put(there, K[:1])
    assert there.unpin(K[:1]) == [True]
    assert there.remove(K[:1]) == [True]


def test_a_silent_conductor_costs_a_second_once(deciding: DecidingConductor, connect: Connect, way: str) -> None:
    node, _ = deciding.start_node("node-0"), deciding.start_node("node-1")
    space = connect(node, way).space(SPACE)
    put(space, K[:1])
    known(space, K[:1])
    eventually(lambda: space.replicas(K[1]) == 0, "both nodes are known")
    deciding.silence()
    began = time.monotonic()
    assert not space.exists(K[1])
    once = time.monotonic() - began
    for _ in range(10):
        assert found(space, K[:2]) == [True, False]
    assert once < 5
    assert time.monotonic() - began < once + 5


def test_a_node_that_stands_still_does_not_hold_others_up_for_ever(deciding: Conductor, connect: Connect) -> None:
    node = deciding.start_node("node-0")
    with deciding.process_node("dead-1") as (there, process):
        put(connect(there, "near").space(SPACE), K[:2])
        space = connect(node, "near", timeout=2.0).space(SPACE)
        known(space, K[:2])
        put(space, K[2:4])
        os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert found(space, K[:4]) == [False, False, True, True]
        assert time.monotonic() - began < 10
        process.kill()
        assert sum(found(space, K[:4])) == 2


def test_a_copy_is_fetched_from_another_node_where_one_has_died(deciding: Conductor, connect: Connect) -> None:
    here, there = deciding.start_node("node-0"), deciding.start_node("node-2")
    with deciding.process_node("dead-1") as (dead, process):
        for node in (dead, there):
            put(connect(node, "near").space(SPACE), K)
        space = connect(here, "near").space(SPACE)
        known(space, K, 2)
        process.kill()
        with space.get(K) as blocks:
            assert [bytes(block) for block in blocks if block is not None] == [bytes(bytes_of(key)) for key in K]


def test_a_copy_is_fetched_from_another_node_where_one_stands_still(
    deciding: Conductor, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.store.gather.GONE_SECONDS", 0.5)
    here, there = deciding.start_node("node-0"), deciding.start_node("node-2")
    with deciding.process_node("dead-1") as (dead, process):
        for node in (dead, there):
            put(connect(node, "near").space(SPACE), K)
        space = connect(here, "near", timeout=60.0).space(SPACE)
        known(space, K, 2)
        # A connection to each of them is there already, so nothing but the fleet tells that one stands still.
        assert all(found(space, K[:4]))
        os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with space.get(K) as blocks:
            assert [bytes(block) for block in blocks if block is not None] == [bytes(bytes_of(key)) for key in K]
        assert time.monotonic() - began < 30
        # Whoever asks next is not told to wait for it either.
        assert space.replicas(K[0]) == 2


def test_one_name_with_two_layouts_harms_no_other_key_space(nodes: list[NodePeer], connect: Connect) -> None:
    """What came of the other layout, and was not kept, must not be read as the answer to the next question."""
    here, there = connect(nodes[0], "near"), connect(nodes[1], "near")
    other = replace(SPACE, runs=2 * SPACE.runs, run_bytes=SPACE.run_bytes // 2)
    victims = replace(SPACE, id=KeySpaceId("bb" * 16))
    here.space(other).put(K[0], bytes_of(K[0]))
    put(there.space(victims), K[1:2])
    there.space(SPACE).put(K[2], bytes_of(K[2]))
    known(here.space(victims), K[1:2])
    known(here.space(SPACE), K[2:3])
    with pytest.raises(PoolError, match=r"key space .* has 8 runs"):
        here.space(SPACE).get(K[2:3])
    with here.space(victims).get(K[1:2]) as blocks:
        assert np.array_equal(blocks[0], bytes_of(K[1]))
    assert here.stats()["messenger_transfers"] == 1, "the peer was not asked for what could not be kept"


def test_copies_of_a_moment_ago_are_removed_too(nodes: list[NodePeer], connect: Connect) -> None:
    here, there = connect(nodes[0], "near").space(SPACE), connect(nodes[1], "near").space(SPACE)
    for key in keys_of("fresh", 12):
        put(here, [key])
        eventually(lambda key=key: there.exists(key), "the directory has heard of it")  # type: ignore[misc]
        assert found(there, [key]) == [True]
        assert here.remove([key]) == [True]
        assert found(there, [key]) == [False]
        known(here, [key], 0)


def test_what_is_removed_is_nowhere_for_anybody_when_remove_returns(
    nodes: list[NodePeer], connect: Connect, way: str
) -> None:
    here, there, third = (connect(node, way).space(SPACE) for node in nodes)
    for turn in range(8):
        keys = keys_of(f"turn {turn}", 2)
        put(here, keys[:1])
        put(there, keys[1:])
        known(third, keys)
        assert here.remove(keys) == [True, True]
        assert [space.exists_many(keys) for space in (third, here, there)] == [[False, False]] * 3
