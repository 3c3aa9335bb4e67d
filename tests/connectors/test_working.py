"""The worker's half against a real node: bytes there and back, two ranks, and everything that can go wrong."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from moonpool.connectors.pages import Pages
from moonpool.connectors.plan import Load, Save, StepPlan
from moonpool.connectors.scheduling import NO_SPACE
from moonpool.core.blocks import block_keys
from moonpool.core.vocabulary import BlockKey, BlockMeta, KeySpace, NodePeer, RequestId
from moonpool.messenger.questions import DescribeBlocks, Described, packed
from moonpool.messenger.transfer import Bytes
from moonpool.store.client import NodeClient

from ..store.kit import SECONDS, Conductor, eventually
from .kit import BLOCKS, NAMES, SIZE, Worker, spaces

Start = Callable[..., Worker]
REQUEST = RequestId("cmpl-1")


@pytest.fixture
def start(run_dir: Path) -> Iterator[Start]:
    workers: list[Worker] = []

    def start(node: NodePeer, **options: int | float) -> Worker:
        workers.append(Worker(node.socket_path, seed=len(workers), **options))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


def space_of(ranks: int = 1) -> KeySpace:
    found = spaces(ranks).of(None)
    assert found is not None
    return found


def keys_of(count: int, ranks: int = 1) -> tuple[BlockKey, ...]:
    return block_keys(range(count * SIZE), space_of(ranks))


def compute(workers: Sequence[Worker], blocks: Sequence[int], ranks: int = 1) -> None:
    """A step of all ranks that stores these blocks, as vLLM drives it."""
    tokens = tuple(range(len(blocks) * SIZE))
    save = Save(REQUEST, 1, space_of(ranks), keys_of(len(blocks), ranks), tuple(blocks), len(blocks), tokens)
    for worker in workers:
        worker.half.begin_step(StepPlan(saves=(save,)))
    for name in NAMES:
        for worker in workers:
            worker.half.layer_done(name)
    for worker in workers:
        worker.half.end_step()


def load(worker: Worker, blocks: Sequence[int], ranks: int = 1, keys: tuple[BlockKey, ...] = ()) -> set[int]:
    """The blocks that did not come, once vLLM hears that the load is over."""
    keys = keys or keys_of(len(blocks), ranks)
    worker.half.begin_step(StepPlan(loads=(Load(REQUEST, space_of(ranks), keys, tuple(blocks)),)))
    worker.half.start_loads()
    worker.half.end_step()
    arrived: set[str] = set()
    eventually(lambda: bool(arrived.update(worker.half.take_arrived()) or arrived), "the load is over")
    assert arrived == {REQUEST}
    return worker.half.take_invalid()


def test_blocks_come_back_in_other_places_as_they_were(node: NodePeer, start: Start) -> None:
    one, other = start(node), start(node)
    compute([one], [3, 1, 7])
    untouched = other.block(4).clone()
    assert load(other, [5, 6, 2]) == set()
    for there, here in zip([3, 1, 7], [5, 6, 2], strict=True):
        assert torch.equal(one.block(there), other.block(here))
    assert torch.equal(other.block(4), untouched)
    assert one.counters.take()["saved_blocks"] == 3
    assert other.counters.take()["loaded_blocks"] == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_node_hears_what_blocks_are_of(node: NodePeer, start: Start, ranks: int) -> None:
    compute([start(node, rank=rank, ranks=ranks) for rank in range(ranks)], [3, 1], ranks)
    keys = keys_of(2, ranks)
    with NodeClient.connect(node.socket_path, name="test", incarnation="1") as client:
        answer = client.ask(DescribeBlocks(space_of(ranks).id, packed(keys))).result(20)
    assert isinstance(answer, Described)
    assert answer.metas == (
        BlockMeta.of(None, 0, range(SIZE)),
        BlockMeta.of(keys[0], 1, range(SIZE, 2 * SIZE)),
    )


def test_what_the_pool_has_is_not_stored_again(node: NodePeer, start: Start) -> None:
    worker = start(node)
    compute([worker], [3, 1])
    assert worker.counters.take()["saved_blocks"] == 2
    compute([worker], [3, 1, 7])
    assert worker.counters.take()["saved_blocks"] == 1


def test_two_ranks_fill_a_block_together(node: NodePeer, start: Start) -> None:
    ranks = [start(node, rank=rank, ranks=2) for rank in range(2)]
    compute(ranks, [3, 1], ranks=2)
    others = [start(node, rank=rank, ranks=2) for rank in range(2)]
    for rank, other in enumerate(others):
        assert load(other, [8, 9], ranks=2) == set()
        assert torch.equal(other.block(8), ranks[rank].block(3))
        assert torch.equal(other.block(9), ranks[rank].block(1))


def test_a_block_that_one_rank_did_not_store_is_no_block(node: NodePeer, start: Start) -> None:
    first, second = [start(node, rank=rank, ranks=2) for rank in range(2)]
    compute([first], [3], ranks=2)
    assert load(second, [8], ranks=2) == {8}


def test_blocks_that_left_the_pool_are_said_to_be_lacking(node: NodePeer, start: Start) -> None:
    worker = start(node)
    compute([worker], [3, 1])
    assert load(worker, [5, 6, 8], keys=keys_of(3)) == {8}
    assert torch.equal(worker.block(3), worker.block(5))


def test_a_full_node_takes_the_first_blocks(conductor: Conductor, start: Start) -> None:
    worker = start(conductor.start_node("node-0", dram_bytes=4 * space_of().block_bytes))
    compute([worker], [3, 1, 7, 0, 2, 4])
    assert load(worker, [5, 6, 8, 9, 10, 11]) == {10, 11}
    assert torch.equal(worker.block(0), worker.block(9))


def test_a_load_that_was_given_up_is_over_at_once(node: NodePeer, start: Start) -> None:
    worker = start(node)
    worker.half.begin_step(StepPlan(loads=(Load(REQUEST, NO_SPACE, (), (5, 6)),)))
    worker.half.start_loads()
    eventually(lambda: worker.half.take_arrived() == {REQUEST}, "it is over")
    assert worker.half.take_invalid() == {5, 6}


def test_a_node_that_dies_costs_a_miss_and_comes_back_by_itself(conductor: Conductor, start: Start) -> None:
    with conductor.process_node("dead-0", dram_bytes=16 << 20) as (node, process):
        worker = start(node)
        compute([worker], [3])
        process.kill()
        process.wait(SECONDS)
        eventually(lambda: worker.link.client is None, "its end is seen")
        assert load(worker, [5]) == {5}
        compute([worker], [3])
        assert worker.counters.take()["dropped_blocks"] >= 1
    with conductor.process_node("dead-0", dram_bytes=16 << 20):
        eventually(lambda: worker.link.client is not None, "the new one lets it in")
        assert load(worker, [5]) == {5}
        compute([worker], [3])
        assert load(worker, [5]) == set()
        assert torch.equal(worker.block(3), worker.block(5))
        worker.close()


def test_a_node_that_stands_still_makes_nobody_wait_for_long(conductor: Conductor, start: Start) -> None:
    with conductor.process_node("dead-0", dram_bytes=16 << 20) as (node, process):
        worker = start(node, load_seconds=0.3, save_seconds=0.3)
        os.kill(process.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            compute([worker], [3])
            compute([worker], [4])
            assert load(worker, [5, 6]) == {5, 6}
            assert time.monotonic() - began < SECONDS / 2
        finally:
            os.kill(process.pid, signal.SIGCONT)
        # What was given up is not in the pool as if it had been stored in time.
        assert load(worker, [7]) == {7}
        worker.close()


class SlowPages(Pages):
    """The last layer's blocks are not read before somebody says so."""

    go_on = threading.Event()

    def run(self, layer: int, block: int) -> Bytes:
        assert layer < len(self) - 1 or self.go_on.wait(SECONDS)
        return super().run(layer, block)


def test_what_is_read_after_a_step_has_given_up_is_not_stored(node: NodePeer, start: Start) -> None:
    worker, other = start(node, save_seconds=0.2), start(node)
    worker.half.pages = SlowPages(worker.caches, BLOCKS)
    compute([worker], [3])
    for name in NAMES:
        worker.caches[name][3] = 0
    SlowPages.go_on.set()
    eventually(lambda: worker.counters.take().get("dropped_blocks") == 1, "the step is over")
    assert load(other, [5]) == {5}
