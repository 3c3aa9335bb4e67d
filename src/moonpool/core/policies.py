"""The placement policies besides the default: functions `(view, wanted) -> Choice`. Ties break by id."""

from __future__ import annotations

import numpy as np

from moonpool.core.choice import Choice, DecodeOption, FetchPlan, PrefillOption, View, Wanted, chosen
from moonpool.core.vocabulary import PartId

INFINITE = float("inf")
DYNAMO_OVERLAP_WEIGHT = 1.0
"""Its router's default `kv-overlap-score-weight`."""


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


def place_round_robin(view: View, wanted: Wanted) -> Choice:
    """In turn: whoever was given the fewest requests so far. Decode as `load-balance`."""
    return _recompute(min(view.prefill, key=lambda p: (p.placed, p.id)), best_decode(view), wanted)


def place_prefix_affine(view: View, wanted: Wanted) -> Choice:
    """As routers before engines with prefix caches of their own: where the fewest prompt tokens, this prompt's among
    them, are to be computed before its first token, of equal ones where the fewest requests are. Nothing is fetched.

    A coupled instance's batch counts among its requests. The simulator's `--routing prefix-affine` is the same rule.
    """
    batches = {option.id: option.requests for option in view.decode}

    def load(option: PrefillOption) -> tuple[int, int, PartId]:
        lacking = wanted.tokens - min(option.held_blocks, wanted.hit_limit) * wanted.block_tokens
        return option.tokens + lacking, batches.get(option.id, option.requests), option.id

    return _recompute(min(view.prefill, key=load), best_decode(view), wanted)


def place_lmetric(view: View, wanted: Wanted) -> Choice:
    """LMetric (arXiv 2603.15202): the least product of new prefill tokens and batch size, with no weights to tune.

    Both count what is at the instance already and this request. A decode instance has nothing to prefill, so there the
    batch alone decides.
    """

    def score(option: PrefillOption) -> tuple[int, PartId]:
        new = wanted.tokens - min(option.held_blocks, wanted.hit_limit) * wanted.block_tokens
        return (option.tokens + new) * (option.requests + 1), option.id

    decode = min(view.decode, key=lambda d: (d.requests, d.tbt_seconds, d.id))
    return _recompute(min(view.prefill, key=score), decode, wanted)


def place_dynamo(view: View, wanted: Wanted) -> Choice:
    """NVIDIA Dynamo's router at temperature 0: the least `weight * prefill blocks + decode blocks`.

    Prefill blocks are those to compute, queued ones included; decode blocks are those in use, this request's included.
    A prefill instance has none of the latter in use and a decode instance computes none of the former.
    """
    size = wanted.block_tokens

    def prefill_cost(option: PrefillOption) -> tuple[float, PartId]:
        new = wanted.tokens - min(option.held_blocks, wanted.hit_limit) * size
        return DYNAMO_OVERLAP_WEIGHT * (option.tokens + new) / size, option.id

    decode = min(view.decode, key=lambda d: (d.pages, d.id))
    return _recompute(min(view.prefill, key=prefill_cost), decode, wanted)


def place_algorithm_1(view: View, wanted: Wanted, threshold: float) -> Choice:
    """The paper's Algorithm 1 (PAPER §4): each instance recomputes or fetches, the least TTFT wins.

    An instance fetches where the pool's longest run is at least `threshold` times its own (equality
    fetches, as in the algorithm's text). An own run of 0 makes the ratio infinite; where the pool has
    nothing either it is 1. Nothing is fetched that is not longer than what is there, whatever the threshold.
    A fetch leaves its copy at the chosen node: that is the paper's rule to copy a prefix where the ratio is
    above the threshold (decision 0008).
    """
    decode = best_decode(view)
    limit = wanted.hit_limit
    pooled = min(next(iter(view.held.values()), 0), limit)

    def option(prefill: PrefillOption) -> Choice:
        held = min(prefill.held_blocks, limit)
        if pooled <= held or _ratio(pooled, held) < threshold:
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
    return chosen(prefill, decode, hit, (compute, prefill.queue_seconds + compute))


def _fetch(prefill: PrefillOption, decode: DecodeOption, wanted: Wanted, view: View, pooled: int) -> Choice:
    """Of all nodes with the whole run, the one whose link is free first; the sum of all times, as the paper has it."""
    sources = [node for node, blocks in view.held.items() if blocks >= pooled and node != prefill.node]
    source = min(sources, key=lambda node: (view.link_waits.get(node, 0.0), node))
    held = min(prefill.held_blocks, wanted.hit_limit)
    transfer = fetch_seconds(view, source, prefill.node, held, pooled, wanted.block_bytes)
    compute = prefill.cost.seconds(wanted.tokens, pooled * wanted.block_tokens)
    plan = FetchPlan(source, held, pooled - held)
    seconds = compute, transfer + prefill.queue_seconds + compute
    return chosen(prefill, decode, pooled, seconds, plan, transfer)


def fetch_seconds(view: View, source: PartId, sink: PartId, first: int, end: int, block_bytes: int) -> float:
    """From now until blocks `first .. end` have come: both links' queues, the SSD where they are there, the way."""
    waits, cost = view.link_waits, view.transfer
    wait = max(waits.get(source, 0.0), waits.get(sink, 0.0)) if waits else 0.0
    slow = max(end - max(view.held[source] - view.slow.get(source, 0), first), 0)
    return wait + cost.seconds((end - first) * block_bytes) + slow * block_bytes / cost.ssd_bytes_per_second
