"""What a trace is like, in one pass over it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile

import numpy as np
from msgspec import Struct

from moonpool.trace.hits import PAPER_BLOCK_TOKENS
from moonpool.trace.request import TraceRequest

MOST_FAMILIES = 8


class Spread(Struct, frozen=True):
    """Of one number over all requests."""

    total: int
    mean: float
    median: float
    p90: float
    p99: float
    highest: int


class FamilyFigures(Struct, frozen=True):
    """Of the requests whose prompts have the same first block."""

    first_block: int
    requests: int
    shared_blocks: int
    """That all of them begin with."""
    mean_input: float
    median_output: float


class Description(Struct, frozen=True):
    requests: int
    seconds: float
    """From the first to the last arrival."""
    requests_per_second: float
    most_at_once: int
    """Requests that arrive at the same time."""
    gap_seconds: float
    """Median, from one time at which requests arrive to the next; 0 where there is but one."""
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
    families: tuple[FamilyFigures, ...]
    """The largest ones, of at least one request in a hundred and two requests."""


def describe(requests: Iterable[TraceRequest], block_tokens: int = PAPER_BLOCK_TOKENS) -> Description:
    """Raises ValueError where there are no requests."""
    arrivals: list[float] = []
    inputs: list[int] = []
    outputs: list[int] = []
    uses: Counter[int] = Counter()
    unfit = 0
    families: dict[int, _Family] = {}
    for request in requests:
        arrivals.append(request.arrival)
        inputs.append(request.input_tokens)
        outputs.append(request.output_tokens)
        uses.update(request.blocks)
        if request.blocks:
            families.setdefault(request.blocks[0], _Family()).add(request)
        unfit += bool(request.blocks) and len(request.blocks) != -(-request.input_tokens // block_tokens)
    if not arrivals:
        raise ValueError("no requests to describe")
    times = sorted(set(arrivals))
    seconds = times[-1] - times[0]
    return Description(
        requests=len(arrivals),
        seconds=seconds,
        requests_per_second=len(arrivals) / seconds if seconds else 0.0,
        most_at_once=max(Counter(arrivals).values()),
        gap_seconds=float(np.median(np.diff(times))) if len(times) > 1 else 0.0,
        is_ordered=arrivals == sorted(arrivals),
        input_tokens=_spread(inputs),
        output_tokens=_spread(outputs),
        blocks=uses.total(),
        distinct_blocks=len(uses),
        blocks_used_once=sum(count == 1 for count in uses.values()),
        most_uses_of_a_block=max(uses.values(), default=0),
        block_tokens=block_tokens,
        unfit=unfit,
        families=_largest(families, len(arrivals)),
    )


class _Family:
    def __init__(self) -> None:
        self.shared: tuple[int, ...] | None = None
        self.inputs = 0
        self.outputs: list[int] = []

    def add(self, request: TraceRequest) -> None:
        shared = request.blocks if self.shared is None else self.shared
        if request.blocks[: len(shared)] != shared:
            same = (one == other for one, other in zip(shared, request.blocks, strict=False))
            shared = shared[: sum(takewhile(bool, same))]
        self.shared = shared
        self.inputs += request.input_tokens
        self.outputs.append(request.output_tokens)


def _largest(families: dict[int, _Family], requests: int) -> tuple[FamilyFigures, ...]:
    found = [
        FamilyFigures(
            first, len(f.outputs), len(f.shared or ()), f.inputs / len(f.outputs), float(np.median(f.outputs))
        )
        for first, f in families.items()
        if len(f.outputs) >= max(requests / 100, 2)
    ]
    return tuple(sorted(found, key=lambda family: (-family.requests, family.first_block))[:MOST_FAMILIES])


def _spread(numbers: Sequence[int]) -> Spread:
    median, p90, p99 = np.percentile(numbers, (50, 90, 99)).tolist()
    return Spread(sum(numbers), sum(numbers) / len(numbers), median, p90, p99, max(numbers))
