"""Which prefill and which decode instance: functions `(view, wanted) -> Choice`, one `match` chooses.

The view holds only instances that can take the request now. Ties break by id.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from msgspec import Struct

from moonpool.core.blocks import hit_limit
from moonpool.core.cost import PrefillCost, TransferCost
from moonpool.core.vocabulary import PartId

PlacementPolicy = Literal["random", "load-balance", "cache-aware", "algorithm-1"]
PLACEMENT_POLICIES: tuple[PlacementPolicy, ...] = get_args(PlacementPolicy)
INFINITE = float("inf")


class PrefillOption(Struct, frozen=True):
    id: PartId
    node: PartId
    queue_seconds: float
    """Until what is placed there already is computed."""
    held_blocks: int
    """Leading blocks that its node will hold when this request starts."""
    cost: PrefillCost


class DecodeOption(Struct, frozen=True):
    id: PartId
    node: PartId
    tbt_seconds: float
    """Predicted step with this request in the batch."""
    held_blocks: int
    """Leading blocks on its node: they need not move."""


class Source(Struct, frozen=True):
    """A node that holds a leading run of the prompt's blocks, readable now."""

    node: PartId
    blocks: int
    queued_bytes: int
    """That it still has to send to others."""


class Wanted(Struct, frozen=True):
    tokens: int
    block_tokens: int
    block_bytes: int

    @property
    def hit_limit(self) -> int:
        return hit_limit(self.tokens, self.block_tokens)


class View(Struct, frozen=True):
    """Neither tuple of options is empty; `sources` come longest first."""

    prefill: tuple[PrefillOption, ...]
    decode: tuple[DecodeOption, ...]
    sources: tuple[Source, ...]
    transfer: TransferCost


class FetchPlan(Struct, frozen=True):
    source: PartId
    first: int
    count: int


class Choice(Struct, frozen=True):
    prefill: PrefillOption
    decode: DecodeOption
    hit_blocks: int
    """After the fetch; at most the wanted hit limit."""
    fetch: FetchPlan | None
    prefill_seconds: float
    """Computing alone."""
    ttft_seconds: float
    """From now to the first token."""


def place(policy: PlacementPolicy, view: View, wanted: Wanted, rng: np.random.Generator, threshold: float) -> Choice:
    match policy:
        case "random":
            return place_random(view, wanted, rng)
        case "load-balance":
            return place_load_balance(view, wanted)
        case "cache-aware":
            return place_cache_aware(view, wanted)
        case "algorithm-1":
            return place_algorithm_1(view, wanted, threshold)


def place_random(view: View, wanted: Wanted, rng: np.random.Generator) -> Choice:
    """Both uniformly; whatever the drawn instance's node holds is used."""
    prefill = view.prefill[int(rng.integers(len(view.prefill)))]
    decode = view.decode[int(rng.integers(len(view.decode)))]
    return _recompute(prefill, decode, wanted)


def place_load_balance(view: View, wanted: Wanted) -> Choice:
    """The shortest queue, whatever it holds."""
    prefill = min(view.prefill, key=lambda p: (p.queue_seconds, p.id))
    return _recompute(prefill, best_decode(view), wanted)


def place_cache_aware(view: View, wanted: Wanted) -> Choice:
    """The least TTFT with local hits only."""
    decode = best_decode(view)
    return min((_recompute(p, decode, wanted) for p in view.prefill), key=_by_ttft)


def place_algorithm_1(view: View, wanted: Wanted, threshold: float) -> Choice:
    """The paper's Algorithm 1 (PAPER §4): each instance recomputes or fetches, the least TTFT wins.

    An instance fetches where the pool's longest run is at least `threshold` times its own (equality
    fetches, as in the algorithm's text). An own run of 0 makes the ratio infinite; where the pool has
    nothing either it is 1. Nothing is fetched that is not longer than what is there, whatever the threshold.
    """
    decode = best_decode(view)
    best = view.sources[0] if view.sources else None

    def option(prefill: PrefillOption) -> Choice:
        held = min(prefill.held_blocks, wanted.hit_limit)
        pooled = min(best.blocks, wanted.hit_limit) if best else 0
        if best is None or pooled <= held or _ratio(pooled, held) < threshold:
            return _recompute(prefill, decode, wanted)
        return _fetch(prefill, decode, wanted, view, pooled)

    return min((option(p) for p in view.prefill), key=_by_ttft)


def best_decode(view: View) -> DecodeOption:
    """The least predicted TBT; between equals the one that holds most of the prompt."""
    return min(view.decode, key=lambda d: (d.tbt_seconds, -d.held_blocks, d.id))


def _ratio(best: int, held: int) -> float:
    if held == 0:
        return INFINITE if best else 1.0
    return best / held


def _by_ttft(choice: Choice) -> tuple[float, PartId]:
    return choice.ttft_seconds, choice.prefill.id


def _recompute(prefill: PrefillOption, decode: DecodeOption, wanted: Wanted) -> Choice:
    hit = min(prefill.held_blocks, wanted.hit_limit)
    compute = prefill.cost.seconds(wanted.tokens, hit * wanted.block_tokens)
    return Choice(prefill, decode, hit, None, compute, prefill.queue_seconds + compute)


def _fetch(prefill: PrefillOption, decode: DecodeOption, wanted: Wanted, view: View, pooled: int) -> Choice:
    """Of all nodes with the whole run, the one that has least to send already."""
    sources = [s for s in view.sources if s.blocks >= pooled and s.node != prefill.node]
    source = min(sources, key=lambda s: (s.queued_bytes, s.node))
    held = min(prefill.held_blocks, wanted.hit_limit)
    transfer = view.transfer.seconds((pooled - held) * wanted.block_bytes, source.queued_bytes)
    compute = prefill.cost.seconds(wanted.tokens, pooled * wanted.block_tokens)
    plan = FetchPlan(source.node, held, pooled - held)
    return Choice(prefill, decode, pooled, plan, compute, transfer + prefill.queue_seconds + compute)
