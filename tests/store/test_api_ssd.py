"""The pool's API where DRAM is small and an SSD lies below it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from moonpool.errors import PoolError
from moonpool.messenger.transfer import Bytes
from moonpool.store import BlockKey, BlockMeta, Client, Space
from moonpool.store.slab import Slab

from .kit import BLOCK, SECONDS, SPACE, Conductor, bytes_of, eventually, keys_of

Connect = Callable[..., Client]
DRAM = 16
"""Blocks."""
K = keys_of("k", 40)
METAS = [BlockMeta.of(K[index - 1] if index else None, index, [index] * 16) for index in range(40)]


@pytest.fixture(params=["near", "far"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ssd(folder: Path) -> dict[str, object]:
    return {"dram_bytes": DRAM * BLOCK, "ssd_bytes": 256 * BLOCK, "ssd_dirs": (str(folder),)}


def put_gently(pool: Client, keys: Sequence[BlockKey], metas: Sequence[BlockMeta] = ()) -> None:
    """One at a time, so that the disk keeps up and nothing is lost."""
    space = pool.space(SPACE)
    for index, key in enumerate(keys):
        space.put(key, bytes_of(key), metas[index] if metas else None)
        eventually(lambda: is_reserve_saved(pool.stats()), "the reserve is saved")


def is_reserve_saved(now: dict[str, float]) -> bool:
    kept = (now["ssd_saves"] - now["demotions"]) * BLOCK
    return now["capacity_bytes"] - now["used_bytes"] + kept >= DRAM // 2 * BLOCK


def found(space: Space, keys: Sequence[BlockKey]) -> list[bool]:
    with space.get(keys) as blocks:
        for key, block in zip(keys, blocks, strict=True):
            assert block is None or np.array_equal(block, bytes_of(key))
        return [block is not None for block in blocks]


@pytest.fixture
def pool(conductor: Conductor, connect: Connect, tmp_path: Path, way: str) -> Client:
    return connect(conductor.start_node("node-0", **ssd(tmp_path)), way)


def test_what_dram_gave_up_is_there_in_any_order(pool: Client) -> None:
    space = pool.space(SPACE)
    put_gently(pool, K, METAS)
    assert space.exists_many([*K, *keys_of("no", 1)]) == [True] * 40 + [False]
    assert found(space, [K[7], *keys_of("no", 2), K[0], K[39], K[3]]) == [True, False, False, True, True, True]
    assert pool.stats()["ssd_promotions"] >= 3
    assert space.metas(K) == METAS
    targets = [bytearray(BLOCK) for _ in K]
    assert space.get_into_many(K, [[target] for target in targets]) == [True] * 40
    assert all(target == bytes_of(key).tobytes() for key, target in zip(K, targets, strict=True))


def test_a_removed_block_is_on_no_tier_and_does_not_come_back(
    conductor: Conductor, connect: Connect, tmp_path: Path, way: str
) -> None:
    with conductor.process_node("dead-0", **ssd(tmp_path)) as (node, process):
        pool = connect(node, way)
        put_gently(pool, K, METAS)
        assert pool.space(SPACE).remove(K[:30]) == [True] * 30
        assert pool.space(SPACE).exists_many(K) == [False] * 30 + [True] * 10
        # What is saved from now on may lie where they were.
        put_gently(pool, keys_of("next", 20))
        process.send_signal(signal.SIGKILL)
        process.wait(SECONDS)
    with conductor.process_node("dead-0", **ssd(tmp_path)) as (node, _):
        space = connect(node, way).space(SPACE)
        assert found(space, K[:30]) == [False] * 30
        assert sum(space.exists_many(keys_of("next", 20))) > 4
        kept = [number for number, is_there in enumerate(space.exists_many(K)) if is_there]
        assert kept
        assert space.metas([K[number] for number in kept]) == [METAS[number] for number in kept]


def test_a_pin_keeps_a_block_on_the_ssd_too(conductor: Conductor, connect: Connect, tmp_path: Path) -> None:
    settings = ssd(tmp_path) | {"ssd_bytes": 32 * BLOCK}
    pool = connect(conductor.start_node("node-0", **settings), "near")
    space = pool.space(SPACE)
    put_gently(pool, K[:30])
    assert space.pin(K[:2], ttl=600) == [True, True]
    put_gently(pool, keys_of("more", 60))
    assert found(space, [*K[:2], K[2], K[3]]) == [True, True, False, False]
    assert space.unpin(K[:2]) == [True, True]
    assert space.remove(K[:2]) == [True, True]
    assert not any(space.exists_many(K[:2]))


def test_what_only_the_ssd_has_is_there_and_stays_as_it_is(pool: Client) -> None:
    space, other = pool.space(SPACE), bytes_of(keys_of("other", 1)[0])
    put_gently(pool, K)
    before = pool.stats()
    assert before["blocks"] < len(K)
    assert space.put_many(K, [other] * len(K)) == [False] * len(K)
    assert pool.stats()["rooms"] == 0
    assert all(found(space, [key]) == [True] for key in K)


@pytest.mark.parametrize("is_stuck", [False, True], ids=["writes", "stands still"])
def test_a_put_waits_for_what_the_ssd_is_just_writing(
    conductor: Conductor, connect: Connect, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch, is_stuck: bool
) -> None:
    writes, may_go_on, write = threading.Event(), threading.Event(), Slab.write

    def wait(self: Slab, offset: int, buffers: Sequence[Bytes]) -> None:
        writes.set()
        may_go_on.wait(SECONDS)
        write(self, offset, buffers)

    monkeypatch.setattr(Slab, "write", wait)
    node = conductor.start_node("node-0", **(ssd(tmp_path) | {"dram_bytes": BLOCK, "client_quota": BLOCK}))
    pool = connect(node, way, timeout=0.6 if is_stuck else SECONDS)
    space = pool.space(SPACE)
    try:
        space.put(K[0], bytes_of(K[0]))
        assert writes.wait(SECONDS)
        with ThreadPoolExecutor(1) as thread:
            putting = thread.submit(space.put, K[1], bytes_of(K[1]))
            if is_stuck:
                with pytest.raises(PoolError, match="put again in a moment"):
                    putting.result(SECONDS)
                return
            with pytest.raises(TimeoutError):
                putting.result(0.1)
            may_go_on.set()
            assert putting.result(SECONDS)
        assert found(space, K[1:2]) == [True]
    finally:
        may_go_on.set()
