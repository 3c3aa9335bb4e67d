"""The default placement: the cheapest way to a first token over all prefill instances, jointly with who decodes.

At each prefill instance the prompt's missing prefix is recomputed, fetched, or fetched in part. A fetch goes on while
what is queued there computes (workers load an order's blocks as soon as it has pages), so the first token comes after
`max(queue, fetch) + computing the rest` (PAPER §3: layer-wise). Fetching one block more never costs less than the last
one, computing one less saves ever more: so the best end of a fetch is either all that a source has, or what comes in
the time for which the queue keeps the instance busy anyway (the block then on its way included), or nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from moonpool.core.choice import Choice, DecodeOption, FetchPlan, PrefillOption, View, Wanted, chosen
from moonpool.core.vocabulary import PartId

INFINITE = float("inf")
LATE = 1e6
"""Seconds that a first token beyond its limit counts more."""
NEAR = 0.02
"""Predictions that differ by less than this share are equal: then the least work decides."""
WORK_WEIGHT = 8.0
"""What a second of computing counts beside a second of waiting, where no instance comes to it soon ..."""
BUSY_SECONDS = 5.0
"""... that is, in so many seconds; less where one does, nothing where one is idle."""
PAUSE_SHARE = 0.1
"""What a second of waiting for KV before the second token counts beside a second of every step."""


class _Reach(NamedTuple):
    """A source that no other beats in both length and delay."""

    node: PartId
    end: int
    """It has the blocks before this one, of those that count as hits."""
    fast: int
    """Up to here they are in DRAM."""
    wait: float


class _Way(NamedTuple):
    """How an instance comes to the first token; in this order where several come to it at nearly the same time."""

    compute_seconds: float
    placed: int
    id: PartId
    ttft_seconds: float
    hit: int
    prefill: PrefillOption
    source: PartId | None
    """Of a fetch, from the first block that is not resident up to `hit`."""
    fetch_seconds: float


class _Terms(NamedTuple):
    """What all instances have in common."""

    tokens: int
    size: int
    """Tokens of a block."""
    limit: int
    """Blocks that may be taken as cached."""
    block: float
    """Seconds of one block on the way."""
    reading: float
    """And from an SSD before."""
    latency: float
    waits: dict[PartId, float]


def place_kvcache_centric(view: View, wanted: Wanted) -> Choice:
    """The least predicted TTFT; among near equals the least computing, then who got fewest requests, then the id.

    Where all instances are busy, computing weighs more than waiting: it delays whoever comes later, so a prompt rather
    waits for an instance that has, or is computing, its prefix than to compute it once more where the queue is shorter.

    The decode instance is the one with the shortest predicted step, a pause before the second token added where its
    node lacks so much that the KV comes later than it is computed. One predicted beyond the TBT limit is avoided.
    """
    tokens, size, limit, nbytes = wanted.tokens, wanted.block_tokens, wanted.hit_limit, wanted.block_bytes
    transfer = view.transfer
    moving, reading = nbytes / transfer.bytes_per_second, nbytes / transfer.ssd_bytes_per_second
    terms = _Terms(tokens, size, limit, moving, reading, transfer.latency, view.link_waits)
    reaches = _reaches(view, terms)
    longest = reaches[0].end if reaches else 0
    ways: list[tuple[float, _Way]] = []
    bar, weight = INFINITE, _weight_of_work(view)
    left = INFINITE if wanted.ttft_left is None else wanted.ttft_left
    for option in view.prefill:
        queue, held = option.queue_seconds, option.held_blocks
        if queue > bar:
            continue
        most = min(held, limit) if held > longest else longest
        if queue + (1.0 + weight) * option.cost.seconds(tokens, most * size) <= bar:
            way = _way(option, terms, reaches)
            score = way.ttft_seconds + weight * way.compute_seconds
            if way.ttft_seconds > left:
                score += LATE
            ways.append((score, way))
            bar = min(bar, score * (1.0 + NEAR))
    best = min([way for score, way in ways if score <= bar])
    decode = _decode_for(best, view, wanted)
    fetch = None
    if best.source is not None:
        resident = best.prefill.resident_blocks
        fetch = FetchPlan(best.source, resident, best.hit - resident)
    seconds = best.compute_seconds, best.ttft_seconds
    return chosen(best.prefill, decode, best.hit, seconds, fetch, best.fetch_seconds)


def _weight_of_work(view: View) -> float:
    least = min([option.queue_seconds for option in view.prefill])
    return WORK_WEIGHT * min(least / BUSY_SECONDS, 1.0)


def _reaches(view: View, terms: _Terms) -> list[_Reach]:
    """Longest first; each further one is shorter and its blocks come sooner."""
    found: list[_Reach] = []
    least, waits, slow = INFINITE, terms.waits, view.slow
    for node, blocks in view.held.items():
        wait, slow_blocks = waits.get(node, 0.0), slow.get(node, 0)
        delay = wait + slow_blocks * terms.reading
        if delay < least:
            least = delay
            end = min(blocks, terms.limit)
            if found and found[-1].end == end:
                found.pop()
            found.append(_Reach(node, end, min(blocks - slow_blocks, end), wait))
        if delay <= 0.0:
            break
    return found


def _way(option: PrefillOption, terms: _Terms, reaches: list[_Reach]) -> _Way:
    """The quickest at this instance."""
    tokens, size, limit, _, reading, latency, waits = terms
    queue, cost, held, resident = option.queue_seconds, option.cost, option.held_blocks, option.resident_blocks
    if held > limit:
        held, resident = limit, min(resident, limit)
    hit, source, fetched = held, None, 0.0
    compute = cost.seconds(tokens, hit * size)
    own = option.slow_blocks * reading
    ttft = (queue if queue > own else own) + compute
    sink_wait = waits.get(option.node, 0.0) if waits else 0.0
    for reach in reaches:
        if reach.end <= held:
            break
        wait = (reach.wait if reach.wait > sink_wait else sink_wait) + latency
        for end in _ends(reach, resident, queue - wait, terms):
            arrival = wait + _moving(reach, resident, end, terms)
            if arrival < own:
                arrival = own
            less = cost.seconds(tokens, end * size)
            begins = queue if queue > arrival else arrival
            if begins + less < ttft:
                ttft, compute, hit, source, fetched = begins + less, less, end, reach.node, arrival
    return _Way(compute, option.placed, option.id, ttft, hit, option, source, fetched)


def _ends(reach: _Reach, first: int, spare: float, terms: _Terms) -> tuple[int, ...]:
    """Where a fetch from block `first` on may best end: all, or what comes within `spare` seconds, or one more."""
    if _moving(reach, first, reach.end, terms) <= spare:
        return (reach.end,)
    free = min(first + int(spare / terms.block), reach.fast) if spare > 0.0 else first
    if free >= reach.end:
        return (reach.end,)
    return tuple([end for end in (free, free + 1) if first < end < reach.end] + [reach.end])


def _moving(reach: _Reach, first: int, end: int, terms: _Terms) -> float:
    """Seconds on the way of blocks `first .. end`, those on SSD read before."""
    seconds = (end - first) * terms.block
    if end > reach.fast:
        seconds += (end - max(reach.fast, first)) * terms.reading
    return seconds


def _decode_for(way: _Way, view: View, wanted: Wanted) -> DecodeOption:
    seconds = wanted.block_bytes / view.transfer.bytes_per_second
    # What has to move beyond this many blocks comes later than the prompt is computed.
    blocks = wanted.tokens / wanted.block_tokens - way.compute_seconds / seconds
    node, pause = way.prefill.node, PAUSE_SHARE * seconds
    limit = INFINITE if wanted.tbt_limit is None else wanted.tbt_limit

    best, least = view.decode[0], (True, INFINITE, 0)
    for option in view.decode:
        step, held = option.tbt_seconds, option.held_blocks
        late = blocks - held
        score = step if late <= 0.0 or option.node == node else step + pause * late
        rank = step > limit, score, -held
        if rank < least or (rank == least and option.id < best.id):
            best, least = option, rank
    return best
