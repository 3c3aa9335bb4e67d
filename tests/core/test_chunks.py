"""The size of a pipeline's chunks against all sizes there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.core.chunks import FINEST, pipeline_chunk
from moonpool.core.cost import PrefillCoefficients, PrefillCost

STEP = PrefillCost(PrefillCoefficients(fixed=0.01, per_token=1e-3, per_token_squared=1e-7))


def last_has_it(tokens: int, cached: int, machines: int, cost: PrefillCost, chunk: int) -> tuple[float, float]:
    """Seconds until the first and the last machine are through, step by step."""
    fixed, per_token, per_square = cost.fit.coefficients
    free = [0.0] * machines
    for start in range(cached, tokens, chunk):
        end = min(start + chunk, tokens)
        seconds = fixed + per_token * (end - start) + per_square * (end * end - start * start)
        at = 0.0
        for machine in range(machines):
            at = free[machine] = max(at, free[machine]) + seconds
    return free[0], free[-1]


@given(
    tokens=st.integers(1, 3000),
    hit=st.floats(0.0, 0.9),
    machines=st.integers(2, 8),
    fixed=st.sampled_from([0.001, 0.01, 0.1]),
    per_square=st.sampled_from([0.0, 1e-8, 1e-7]),
    waiting=st.integers(0, 5),
)
def test_no_size_of_equal_chunks_is_much_better(
    tokens: int, hit: float, machines: int, fixed: float, per_square: float, waiting: int
) -> None:
    cached = int(tokens * hit)
    cost = PrefillCost(PrefillCoefficients(fixed, 1e-3, per_square))

    def lost(chunk: int) -> float:
        first, last = last_has_it(tokens, cached, machines, cost, chunk)
        return last + waiting * first

    most, left = 1024, tokens - cached
    chosen = pipeline_chunk(tokens, cached, machines, cost, most, waiting)
    assert min(most // FINEST, left) <= chosen <= most
    sizes = [-(-left // steps) for steps in range(-(-left // most), max(2, left // (most // FINEST) + 1))]
    assert lost(chosen) <= 1.05 * min(map(lost, sizes))


def test_one_machine_computes_as_much_at_once_as_it_may() -> None:
    assert pipeline_chunk(5000, 0, 1, STEP, 512) == 512


def test_dear_steps_and_those_who_wait_make_chunks_larger() -> None:
    dear = PrefillCost(PrefillCoefficients(fixed=0.2, per_token=1e-3, per_token_squared=1e-7))
    alone, busy = (pipeline_chunk(4000, 0, 2, STEP, 4096, waiting) for waiting in (0, 20))
    assert 512 <= alone < busy
    assert alone < pipeline_chunk(4000, 0, 2, dear, 4096)


@pytest.mark.parametrize("machines", [2, 8])
def test_steps_that_cost_nothing_by_themselves_are_as_small_as_they_get(machines: int) -> None:
    free = PrefillCost(PrefillCoefficients(fixed=0.0, per_token=1e-3))
    assert pipeline_chunk(4000, 0, machines, free, 512) == 65, "62 equal ones, of at least 64"
    assert pipeline_chunk(10, 10, machines, free, 6) == 6
