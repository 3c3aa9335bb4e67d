"""Hit ratios of one global pool on a trace, by capacity and eviction policy (PAPER §2).

The pool's books are the node's own (`core.eviction`), used as a node uses them: a request pins what it finds, room is
made for what it lacks, and all of it is unpinned from the last block to the first. A hit is a leading block that is
there. Every id counts as one block of the capacity, partial last ones included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from moonpool.core.eviction import Eviction, EvictionPolicy
from moonpool.trace.request import TraceRequest

PAPER_BLOCK_TOKENS = 512


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


def hit_ratios(load: Load, capacities: Sequence[int | None], policies: Sequence[EvictionPolicy]) -> Iterator[HitRatio]:
    """One for each policy and capacity, policies outermost; a replay takes about 2 µs a block."""
    limitless: HitRatio | None = None
    for policy in policies:
        for capacity in capacities:
            if capacity is not None and capacity < load.distinct_blocks:
                yield _replay(load, policy, capacity)
                continue
            # Where nothing has to go, the policy does not matter.
            limitless = limitless or _replay(load, policy, load.distinct_blocks)
            yield HitRatio(
                policy, capacity, limitless.by_block, limitless.by_whole_block, limitless.by_token, 0, limitless.holes
            )


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


def _replay(load: Load, policy: EvictionPolicy, capacity: int) -> HitRatio:
    pool = Pool(policy, capacity)
    blocks = whole_blocks = tokens = holes = 0
    for request in load.requests:
        hit = pool.serve(request.blocks)
        if hit:
            blocks += hit
            whole_blocks += min(hit, request.input_tokens // load.block_tokens)
            tokens += min(hit * load.block_tokens, request.input_tokens)
        holes = max(holes, pool.eviction.holes)
    return HitRatio(
        policy,
        capacity,
        blocks / max(1, load.blocks),
        whole_blocks / max(1, load.whole_blocks),
        tokens / max(1, load.tokens),
        pool.evictions,
        holes,
    )


def _whole(request: TraceRequest, block_tokens: int) -> int:
    return min(len(request.blocks), request.input_tokens // block_tokens)
