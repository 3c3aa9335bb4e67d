"""Hit ratios of one global pool on a trace, by capacity and eviction policy (PAPER §2).

The pool's books are the node's own (`core.eviction`), used as a node uses them: a request pins what it finds, room is
made for what it lacks, and all of it is unpinned from the last block to the first. A hit is a leading block that is
there. Every id counts as one block of the capacity, partial last ones included.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from moonpool.core.eviction import Eviction, EvictionPolicy
from moonpool.trace.request import TraceRequest

PAPER_BLOCK_TOKENS = 512
ALLOCATIONS = 200_000
"""Between two collections of garbage, in a replay."""

Replay = tuple[EvictionPolicy, int | None]
"""Policy and capacity in blocks (None: no limit)."""


class Load(Struct, frozen=True):
    """A trace as the replay needs it: kept in memory, for it is replayed many times."""

    block_tokens: int
    requests: tuple[TraceRequest, ...]
    blocks: int
    """Ids, repeated ones too."""
    whole_blocks: int
    tokens: int
    distinct_blocks: int
    unfit: int
    """Requests whose number of ids is not that of blocks of `block_tokens`."""


class HitRatio(Struct, frozen=True):
    """One policy at one capacity."""

    policy: EvictionPolicy
    capacity: int | None
    """Blocks; None: no limit."""
    by_block: float
    """Of all ids, partial last ones included."""
    by_whole_block: float
    by_token: float
    evictions: int
    holes: int
    """The most blocks without their parent at the end of any request: they take room and can never be hit."""


def load(requests: Iterable[TraceRequest], block_tokens: int = PAPER_BLOCK_TOKENS) -> Load:
    """Raises no error for requests without ids: `blocks` tells."""
    kept = tuple(requests)
    return Load(
        block_tokens,
        kept,
        blocks=sum(len(request.blocks) for request in kept),
        whole_blocks=sum(_whole(request, block_tokens) for request in kept),
        tokens=sum(request.input_tokens for request in kept),
        distinct_blocks=len({block for request in kept for block in request.blocks}),
        unfit=sum(len(request.blocks) != -(-request.input_tokens // block_tokens) for request in kept),
    )


def hit_ratios(load: Load, replays: Sequence[Replay]) -> tuple[HitRatio, ...]:
    """One for each, in order; a replay takes one to two µs a block."""
    ceiling = _ceiling(load)
    return tuple(
        HitRatio(policy, capacity, *ceiling, 0, 0)
        if capacity is None or capacity >= load.distinct_blocks
        else _replay(load, policy, capacity)
        for policy, capacity in replays
    )


@contextlib.contextmanager
def rare_collection() -> Iterator[None]:
    """Looking through a hundred thousand living blocks for garbage, again and again, is a tenth of a replay's time."""
    before = gc.get_threshold()
    gc.set_threshold(ALLOCATIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Pool:
    """A pool that counts in blocks."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.eviction: Eviction[int] = Eviction(policy)
        self.evictions = 0
        self._capacity = capacity
        self._present = self.eviction.keys()

    def serve(self, prompt: Sequence[int]) -> int:
        """How many leading blocks were there; afterwards all are, or as many leading ones as fit."""
        present = self._present
        hit = 0
        for block in prompt:
            if block not in present:
                break
            hit += 1
        if not present.isdisjoint(prompt[hit:]):
            return self._fill_gaps(prompt, hit)
        self.eviction.pin(prompt[:hit])
        end = min(len(prompt), hit + self._room_for(len(prompt) - hit))
        self.eviction.extend(prompt[hit:end], 1, prompt[hit - 1] if hit else None, hit, 0)
        self.eviction.unpin(prompt[:hit])
        return hit

    def _fill_gaps(self, prompt: Sequence[int], hit: int) -> int:
        """The same where blocks beyond the hit are there: holes, and what continues them."""
        found = [block for block in prompt if block in self._present]
        self.eviction.pin(found)
        room = self._room_for(len(prompt) - len(found))
        for position, block in enumerate(prompt):
            if room and block not in self._present:
                self.eviction.add(block, 1, prompt[position - 1] if position else None, position, 1)
                room -= 1
        self.eviction.unpin([block for block in prompt if block in self._present])
        return hit

    def _room_for(self, blocks: int) -> int:
        """Make room for so many; for how many there is room now."""
        free = self._capacity - len(self.eviction)
        if free < blocks:
            self.evictions += len(self.eviction.evict(blocks - free))
        return self._capacity - len(self.eviction)


def _ceiling(load: Load) -> tuple[float, float, float]:
    """The ratios where nothing ever has to go, so that no policy matters: whatever came before is there."""
    counts = _Counts(load)
    seen: set[int] = set()
    for request in load.requests:
        hit = 0
        for block in request.blocks:
            if block not in seen:
                break
            hit += 1
        seen.update(request.blocks[hit:])
        if hit:
            counts.add(request, hit)
    return counts.ratios()


def _replay(load: Load, policy: EvictionPolicy, capacity: int) -> HitRatio:
    pool, counts, holes = Pool(policy, capacity), _Counts(load), 0
    for request in load.requests:
        hit = pool.serve(request.blocks)
        if hit:
            counts.add(request, hit)
        holes = max(holes, pool.eviction.holes)
    return HitRatio(policy, capacity, *counts.ratios(), pool.evictions, holes)


class _Counts:
    """Of hits: blocks, whole ones, tokens."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._blocks = self._whole_blocks = self._tokens = 0

    def add(self, request: TraceRequest, hit: int) -> None:
        block_tokens = self._load.block_tokens
        self._blocks += hit
        self._whole_blocks += min(hit, request.input_tokens // block_tokens)
        self._tokens += min(hit * block_tokens, request.input_tokens)

    def ratios(self) -> tuple[float, float, float]:
        load = self._load
        return (
            self._blocks / max(1, load.blocks),
            self._whole_blocks / max(1, load.whole_blocks),
            self._tokens / max(1, load.tokens),
        )


def _whole(request: TraceRequest, block_tokens: int) -> int:
    return min(len(request.blocks), request.input_tokens // block_tokens)
