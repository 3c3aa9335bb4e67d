"""Traces made shorter, faster, longer and jittered: what they share and their order stay right."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.trace.request import TraceRequest
from moonpool.trace.shape import Shape, reshape, split_blocks

BLOCK = 4
TRACE = [TraceRequest(100.0 + at, 10 + at, 5, (0, 1, 2 + at)) for at in range(10)]


def arrivals(shape: Shape, seed: int = 0) -> list[float]:
    return [request.arrival for request in reshape(TRACE, shape, BLOCK, seed)]


def test_the_first_request_comes_at_0() -> None:
    assert arrivals(Shape()) == [float(at) for at in range(10)]


def test_times_are_the_traces_own_and_the_end_is_out() -> None:
    assert arrivals(Shape(begin=2.5, until=6.0)) == [0.0, 1.0, 2.0]
    assert arrivals(Shape(begin=2.5, until=6.0, first=2, speed=4.0)) == [0.0, 0.25]
    assert arrivals(Shape(begin=10.0)) == []


def test_a_slice_reads_no_further_than_its_end() -> None:
    def endless() -> Iterator[TraceRequest]:
        yield from TRACE[:5]
        raise AssertionError("read on")

    assert len(list(reshape(endless(), Shape(until=4.0), BLOCK))) == 4


def test_jitter_moves_by_less_than_its_length_and_differs_by_seed_alone() -> None:
    shape = Shape(jitter=3.0, speed=2.0)
    by_seed = [list(reshape(TRACE, shape, BLOCK, seed)) for seed in range(5)]
    for requests in by_seed:
        assert [request.arrival for request in requests] == sorted(request.arrival for request in requests)
        moved = {request.input_tokens: request.arrival * 2 for request in requests}
        assert all(at <= moved[10 + at] < at + 3 for at in range(10))
    assert by_seed[1] == list(reshape(TRACE, shape, BLOCK, 1))
    assert len({tuple(request.arrival for request in requests) for requests in by_seed}) == 5


PROMPTS = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 60)), min_size=2, max_size=6)
"""(blocks shared with all others that long, tokens)"""


def shared(a: TraceRequest, b: TraceRequest) -> int:
    """Leading blocks that are the same."""
    count = 0
    for one, other in zip(a.blocks, b.blocks, strict=False):
        if one != other:
            break
        count += 1
    return count


@given(PROMPTS, st.floats(0.1, 7.0))
def test_longer_prompts_share_as_much_longer_parts(rows: list[tuple[int, int]], scale: float) -> None:
    trace = []
    for number, (common, tokens) in enumerate(rows):
        count = -(-tokens // BLOCK)
        own = tuple(1000 * (number + 1) + at for at in range(min(common, count), count))
        trace.append(TraceRequest(float(number), tokens, tokens, (*range(min(common, count)), *own)))
    scaled = list(reshape(trace, Shape(scale_input=scale, scale_output=0.5), BLOCK))
    for before, after in zip(trace, scaled, strict=True):
        assert after.input_tokens == max(round(before.input_tokens * scale), 1)
        assert after.output_tokens == max(round(before.output_tokens * 0.5), 1)
        assert len(set(after.blocks)) == len(after.blocks) == -(-after.input_tokens // BLOCK)
    for (a, a2), (b, b2) in pairwise(zip(trace, scaled, strict=True)):
        # Both ends of a prompt are rounded, by less than a block each.
        whole = min(shared(a, b), min(a.input_tokens, b.input_tokens) // BLOCK)
        assert whole * scale - 1 <= shared(a2, b2) <= math.ceil(shared(a, b) * scale) + 1


def test_ids_of_larger_blocks_are_split() -> None:
    split = list(split_blocks([TraceRequest(0.0, 10, 1, (7, 9)), TraceRequest(0.0, 16, 1, (7, 8))], 8, 4))
    assert [request.blocks for request in split] == [(14, 15, 18), (14, 15, 16, 17)]
    with pytest.raises(ValueError, match="blocks of 8 tokens cannot be split into blocks of 3"):
        list(split_blocks([], 8, 3))


def test_what_is_empty_stays_empty() -> None:
    scaled = next(reshape([TraceRequest(0.0, 100, 0)], Shape(scale_input=1e-3, scale_output=5.0), BLOCK))
    assert (scaled.input_tokens, scaled.output_tokens, scaled.blocks) == (1, 0, ())
