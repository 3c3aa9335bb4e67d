"""A part of a trace, faster, longer, with arrivals that differ from seed to seed; a request at a time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator

import numpy as np
from msgspec import Struct

from moonpool.trace.request import TraceRequest


class Shape(Struct, frozen=True):
    """In the order in which it is applied; times are seconds of the trace before it is sped up."""

    begin: float = 0.0
    """Since the trace's first request."""
    until: float | None = None
    first: int | None = None
    """Only so many of what is left."""
    scale_input: float = 1.0
    """Of prompt lengths; what prompts share is scaled with them."""
    scale_output: float = 1.0
    jitter: float = 0.0
    """Each request arrives up to so much later, evenly drawn, in the order that then results."""
    speed: float = 1.0


def reshape(requests: Iterable[TraceRequest], shape: Shape, block_tokens: int, seed: int = 0) -> Iterator[TraceRequest]:
    """`requests`: in order of arrival. The first one taken arrives at 0 (before jitter). `seed`: of the jitter alone.

    It holds no more than what arrives within the jitter.
    """
    taken = _taken(requests, shape)
    if (shape.scale_input, shape.scale_output) != (1.0, 1.0):
        taken = (_scaled(request, shape, block_tokens) for request in taken)
    if shape.jitter > 0.0:
        taken = _jittered(taken, shape.jitter, seed)
    return (_at(request, request.arrival / shape.speed) for request in taken)


def split_blocks(requests: Iterable[TraceRequest], block_tokens: int, into: int) -> Iterator[TraceRequest]:
    """The same prompts with ids for blocks of `into` tokens, which must divide `block_tokens`.

    What prompts share, they share whole old blocks of it: new ones show no more.
    """
    parts, rest = divmod(block_tokens, into)
    if rest:
        raise ValueError(f"blocks of {block_tokens} tokens cannot be split into blocks of {into}")
    for request in requests:
        ids = [block * parts + part for block in request.blocks for part in range(parts)]
        count = -(-request.input_tokens // into)
        yield TraceRequest(request.arrival, request.input_tokens, request.output_tokens, tuple(ids[:count]))


def _taken(requests: Iterable[TraceRequest], shape: Shape) -> Iterator[TraceRequest]:
    trace_began = began = None
    left = shape.first
    for request in requests:
        trace_began = request.arrival if trace_began is None else trace_began
        since = request.arrival - trace_began
        if since < shape.begin:
            continue
        if left == 0 or (shape.until is not None and since >= shape.until):
            return
        began = request.arrival if began is None else began
        left = left if left is None else left - 1
        yield _at(request, request.arrival - began)


def _at(request: TraceRequest, arrival: float) -> TraceRequest:
    return TraceRequest(arrival, request.input_tokens, request.output_tokens, request.blocks)


def _scaled(request: TraceRequest, shape: Shape, block_tokens: int) -> TraceRequest:
    """Block j of the longer prompt ends where block ⌈(j+1)/scale⌉ − 1 of the old one does, at the latest."""
    scale = shape.scale_input
    tokens = _scaled_length(request.input_tokens, scale)
    blocks = request.blocks
    if blocks and scale != 1.0:
        of_one = math.ceil(scale) + 1
        count = min(-(-tokens // block_tokens), math.ceil(len(blocks) * scale))
        old = [min(math.ceil((at + 1) / scale), len(blocks)) - 1 for at in range(count)]
        first = {index: at for at, index in reversed(list(enumerate(old)))}
        blocks = tuple([blocks[index] * of_one + at - first[index] for at, index in enumerate(old)])
    return TraceRequest(request.arrival, tokens, _scaled_length(request.output_tokens, shape.scale_output), blocks)


def _scaled_length(tokens: int, scale: float) -> int:
    """None of something becomes nothing."""
    return max(round(tokens * scale), min(tokens, 1))


def _jittered(requests: Iterable[TraceRequest], most: float, seed: int) -> Iterator[TraceRequest]:
    rng = np.random.default_rng(seed)
    waiting: list[tuple[float, int, TraceRequest]] = []
    for number, request in enumerate(requests):
        while waiting and waiting[0][0] <= request.arrival:
            yield _popped(waiting)
        heapq.heappush(waiting, (request.arrival + most * rng.random(), number, request))
    while waiting:
        yield _popped(waiting)


def _popped(waiting: list[tuple[float, int, TraceRequest]]) -> TraceRequest:
    arrival, _, request = heapq.heappop(waiting)
    return _at(request, arrival)
