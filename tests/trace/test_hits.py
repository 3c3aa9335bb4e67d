"""Hit ratios against a pool that looks at everything each time, and the paper's figures on the published trace."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.eviction import EvictionPolicy
from moonpool.trace.describe import describe
from moonpool.trace.hits import HitRatio, Pool, hit_ratios, load
from moonpool.trace.read import TraceFile
from moonpool.trace.request import TraceRequest
from tests.soak import often

POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)
TRACES = "MOONPOOL_TRACES"


class PlainPool:
    """No queues, no links: every block's uses and last use, sorted for each victim."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy, self.capacity = policy, capacity
        self.blocks: dict[int, tuple[int, int, int, int | None]] = {}
        """uses, time of the last use, position, parent"""
        self.clock = 0

    def serve(self, prompt: Sequence[int]) -> int:
        hit = 0
        while hit < len(prompt) and prompt[hit] in self.blocks:
            hit += 1
        kept = []
        for position, block in enumerate(prompt):
            if block not in self.blocks and not self._make_room(prompt):
                continue
            uses, _, known, parent = self.blocks.get(
                block, (0, 0, position, prompt[position - 1] if position else None)
            )
            self.blocks[block] = uses + 1, 0, known, parent
            kept.append(block)
        for block in reversed(kept):
            self.clock += 1
            uses, _, position, parent = self.blocks[block]
            self.blocks[block] = uses, self.clock, position, parent
        return hit

    def _make_room(self, prompt: Sequence[int]) -> bool:
        if len(self.blocks) < self.capacity:
            return True
        free = [block for block in self.blocks if block not in prompt]
        if not free:
            return False
        del self.blocks[min(free, key=self._order)]
        return True

    def _order(self, block: int) -> tuple[int, ...]:
        uses, last, position, parent = self.blocks[block]
        if parent is not None and parent not in self.blocks:
            return 0, last
        return {"lru": (1, last), "lfu": (1, uses, last), "length-aware": (1, uses, -position, last)}[self.policy]


# Prompts from a small tree: a block's id is its path, so equal ids mean equal prefixes.
PATHS = st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), min_size=1, max_size=40)


def prompt_of(path: tuple[int, ...]) -> tuple[int, ...]:
    ids, number = [], 1
    for branch in path:
        number = number * 3 + branch
        ids.append(number)
    return tuple(ids)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=often(80))
@given(paths=PATHS, capacity=st.integers(1, 20))
def test_a_pool_hits_what_a_plain_pool_hits_and_keeps_no_holes(
    policy: EvictionPolicy, paths: list[tuple[int, ...]], capacity: int
) -> None:
    pool, plain = Pool(policy, capacity), PlainPool(policy, capacity)
    for path in paths:
        prompt = prompt_of(path)
        assert pool.serve(prompt) == plain.serve(prompt)
        pool.eviction.check_integrity()
        assert pool.eviction.keys() == plain.blocks.keys()
        assert pool.eviction.evictable_bytes == len(pool.eviction) <= capacity
        assert pool.eviction.holes == 0


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=often(80))
@given(
    prompts=st.lists(st.lists(st.integers(0, 9), unique=True, max_size=6).map(tuple), max_size=30),
    capacity=st.integers(1, 12),
)
def test_ids_that_break_their_promise_break_no_books(
    policy: EvictionPolicy, prompts: list[tuple[int, ...]], capacity: int
) -> None:
    """In such a trace an id may follow several others."""
    pool = Pool(policy, capacity)
    for prompt in prompts:
        lead = next((at for at, block in enumerate(prompt) if block not in pool.eviction), len(prompt))
        assert pool.serve(prompt) == lead
        pool.eviction.check_integrity()
        assert pool.eviction.evictable_bytes == len(pool.eviction) <= capacity


def requests_of(*prompts: tuple[int, tuple[int, ...]]) -> list[TraceRequest]:
    return [TraceRequest(float(at), tokens, 1, ids) for at, (tokens, ids) in enumerate(prompts)]


def test_the_three_ratios_count_ids_whole_blocks_and_tokens() -> None:
    loaded = load(requests_of((25, (0, 1, 2)), (25, (0, 1, 2)), (20, (0, 1)), (8, (9,))), block_tokens=10)
    assert (loaded.blocks, loaded.whole_blocks, loaded.tokens, loaded.distinct_blocks) == (9, 6, 78, 4)
    (found,) = hit_ratios(loaded, [("lru", None)])
    assert found == HitRatio("lru", None, 5 / 9, 4 / 6, 45 / 78, 0, 0)


def test_only_leading_blocks_are_hits() -> None:
    # With room for two the second prompt takes the place of 1 and 2; the third finds 0 alone.
    loaded = load(requests_of((30, (0, 1, 2)), (20, (0, 5)), (30, (0, 1, 2))), block_tokens=10)
    limited, unlimited = hit_ratios(loaded, [("lru", 2), ("lru", None)])
    assert (round(limited.by_block * 8), limited.evictions) == (2, 2)
    assert round(unlimited.by_block * 8) == 4


def test_without_a_limit_the_policy_does_not_matter() -> None:
    loaded = load(requests_of((20, (0, 1)), (20, (0, 2)), (20, (0, 1))), block_tokens=10)
    replays = [(p, c) for p in POLICIES for c in (None, 3, 2)]
    ratios = hit_ratios(loaded, replays)
    assert [(r.policy, r.capacity) for r in ratios] == replays
    assert {r.by_block for r in ratios if r.capacity != 2} == {3 / 6}
    assert all(r.evictions for r in ratios if r.capacity == 2)


@settings(max_examples=often(80))
@given(prompts=st.lists(st.lists(st.integers(0, 9), unique=True, max_size=6).map(tuple), max_size=30))
def test_the_ceiling_is_what_a_pool_hits_that_never_evicts(prompts: list[tuple[int, ...]]) -> None:
    loaded = load(requests_of(*((10 * len(ids), ids) for ids in prompts)), block_tokens=10)
    (ceiling,) = hit_ratios(loaded, [("lru", None)])
    pool = Pool("lru", 10)
    assert round(ceiling.by_block * max(1, loaded.blocks)) == sum(pool.serve(ids) for ids in prompts)
    assert (pool.evictions, pool.eviction.holes) == (0, 0)


def test_ids_that_do_not_fit_the_block_size_are_counted() -> None:
    requests = requests_of((20, (0, 1)), (21, (0, 1)), (5, ()))
    assert load(requests, block_tokens=10).unfit == 2
    assert describe(requests, block_tokens=10).unfit == 1, "a request without ids is no sign of a wrong size"


def test_a_description_counts_what_is_there() -> None:
    rows = [
        TraceRequest(1.0, 100, 1, (0, 1)),
        TraceRequest(1.0, 300, 3, (0, 2)),
        TraceRequest(0.5, 200, 2, (0, 1, 3)),
    ]
    found = describe(rows, block_tokens=100)
    assert (found.requests, found.seconds, found.most_at_once, found.is_ordered) == (3, 0.5, 2, False)
    assert (found.requests_per_second, found.input_tokens.mean, found.input_tokens.highest) == (6.0, 200, 300)
    assert (found.output_tokens.total, found.output_tokens.median) == (6, 2)
    assert (found.blocks, found.distinct_blocks, found.blocks_used_once, found.most_uses_of_a_block) == (7, 4, 2, 3)
    with pytest.raises(ValueError, match="no requests"):
        describe([])


def conversation_trace() -> Path:
    """The published trace, from $MOONPOOL_TRACES or shared/traces beside the checkout."""
    here = Path(__file__).resolve().parents[2]
    folders = [Path(os.environ[TRACES])] if TRACES in os.environ else [here.parent / "shared" / "traces"]
    for folder in folders:
        if (folder / "conversation_trace.jsonl").exists():
            return folder / "conversation_trace.jsonl"
    pytest.skip(
        f"no conversation_trace.jsonl (from the paper's repository) in {folders[0]}; ${TRACES} names its folder"
    )


def test_the_ceiling_of_the_conversation_trace_is_the_papers() -> None:
    trace = TraceFile(conversation_trace())
    loaded = load(trace)
    assert (trace.requests, loaded.unfit, loaded.blocks) == (12031, 0, 288_500)
    began = time.process_time()
    ratios = hit_ratios(loaded, [("lru", None), ("lru", 10_000), ("length-aware", 10_000)])
    seconds = time.process_time() - began
    assert (round(ratios[0].by_block, 3), round(ratios[0].by_whole_block, 3)) == (0.366, 0.382)
    limited = [r for r in ratios if r.capacity is not None]
    assert all(r.by_block < ratios[0].by_block and r.evictions > 200_000 and r.holes == 0 for r in limited)
    # Two replays of the fifteen of the whole table, which is to take less than 10 s; this guards against its order.
    assert seconds < 20.0
