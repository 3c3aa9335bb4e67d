"""What a trace is like, in one pass over it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from moonpool.trace.hits import PAPER_BLOCK_TOKENS
from moonpool.trace.request import TraceRequest


class Spread(Struct, frozen=True):
    """Of one number over all requests."""

    total: int
    mean: float
    median: float
    p90: float
    p99: float
    highest: int


class Description(Struct, frozen=True):
    requests: int
    seconds: float
    """From the first to the last arrival."""
    requests_per_second: float
    most_at_once: int
    """Requests that arrive at the same time."""
    is_ordered: bool
    """By arrival."""
    input_tokens: Spread
    output_tokens: Spread
    blocks: int
    """Ids, repeated ones too. 0 where the format has none."""
    distinct_blocks: int
    blocks_used_once: int
    most_uses_of_a_block: int
    block_tokens: int
    unfit: int
    """Requests with ids, but not as many as blocks of `block_tokens` would be."""


def describe(requests: Iterable[TraceRequest], block_tokens: int = PAPER_BLOCK_TOKENS) -> Description:
    """Raises ValueError where there are no requests."""
    arrivals: list[float] = []
    inputs: list[int] = []
    outputs: list[int] = []
    uses: Counter[int] = Counter()
    unfit = 0
    for request in requests:
        arrivals.append(request.arrival)
        inputs.append(request.input_tokens)
        outputs.append(request.output_tokens)
        uses.update(request.blocks)
        unfit += bool(request.blocks) and len(request.blocks) != -(-request.input_tokens // block_tokens)
    if not arrivals:
        raise ValueError("no requests to describe")
    seconds = max(arrivals) - min(arrivals)
    return Description(
        requests=len(arrivals),
        seconds=seconds,
        requests_per_second=len(arrivals) / seconds if seconds else 0.0,
        most_at_once=max(Counter(arrivals).values()),
        is_ordered=arrivals == sorted(arrivals),
        input_tokens=_spread(inputs),
        output_tokens=_spread(outputs),
        blocks=uses.total(),
        distinct_blocks=len(uses),
        blocks_used_once=sum(count == 1 for count in uses.values()),
        most_uses_of_a_block=max(uses.values(), default=0),
        block_tokens=block_tokens,
        unfit=unfit,
    )


def _spread(numbers: Sequence[int]) -> Spread:
    median, p90, p99 = np.percentile(numbers, (50, 90, 99)).tolist()
    return Spread(sum(numbers), sum(numbers) / len(numbers), median, p90, p99, max(numbers))
