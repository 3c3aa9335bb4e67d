"""Simulated coupled workers against arithmetic by hand, a run step by step, and the modes against each other."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.coupled import COUPLED_MODES, CoupledInstance, CoupledMode
from moonpool.sim.coupled_cluster import CoupledSetup, Routing, run_coupled
from moonpool.sim.profile import load_profile
from moonpool.trace.request import TraceRequest
from tests.sim.kept import KeptCoupled

PROFILE = load_profile("a800-llama2-70b")


def small(
    workers: int = 1,
    mode: CoupledMode = "chunked",
    chunk: int = 512,
    routing: Routing = "round-robin",
    **changes: int,
) -> CoupledSetup:
    return CoupledSetup(msgspec.structs.replace(PROFILE, **changes), workers, mode, chunk, routing)


def run(setup: CoupledSetup, trace: list[TraceRequest]) -> KeptCoupled:
    simulation = KeptCoupled(setup, trace)
    simulation.run()
    for worker in simulation.workers:
        worker.check_integrity()
    return simulation


def seconds_of(n: int, cached: int = 0) -> float:
    p = PROFILE.prefill
    return p.per_token * (n - cached) + p.per_token_squared * (n * n - cached * cached)


def test_one_request_takes_what_the_cost_model_says() -> None:
    (request,) = run(small(), [TraceRequest(0.0, 5000, 11, tuple(range(10)))]).requests
    assert request.ttft == pytest.approx(10 * PROFILE.prefill.fixed + seconds_of(5000))
    d = PROFILE.decode
    steps = [d.fixed + d.per_request + d.per_context_token * (5001 + i) for i in range(10)]
    assert request.intervals() == pytest.approx(steps)


def test_a_prompt_in_chunks_slows_the_others_down_and_a_whole_one_stops_them() -> None:
    trace = [TraceRequest(0.0, 512, 200), TraceRequest(1.0, 8192, 2)]
    in_chunks = run(small(), trace).requests[0].outcome()
    whole = run(small(mode="prefill-first"), trace).requests[0].outcome()
    one = run(small(mode="one-at-a-time"), trace)
    assert 0.06 < in_chunks.longest_interval < 0.08
    assert whole.longest_interval == pytest.approx(1.0, abs=0.05)
    assert one.requests[0].outcome().longest_interval < 0.02
    assert (one.requests[1].ttft or 0.0) > 3.5, "it waits until the other is complete"


@pytest.mark.parametrize("mode", COUPLED_MODES)
def test_a_prefix_is_computed_once_by_each_worker(mode: CoupledMode) -> None:
    trace = [TraceRequest(30.0 * i, 2000, 5, (0, 1, 100 + i, 200 + i)) for i in range(4)]
    simulation = run(small(2, mode), trace)
    assert [request.computed_tokens for request in simulation.requests] == [2000, 2000, 976, 976]
    assert [request.cached_tokens for request in simulation.requests] == [0, 0, 1024, 1024]


def test_prefix_affine_routing_follows_the_prefix_until_that_is_too_long_to_wait_for() -> None:
    trace = [TraceRequest(0.5 * i, 2000, 2, (0, 1, 2, 100 + i)) for i in range(4)]
    affine = run(small(4, routing="prefix-affine"), trace)
    assert [request.cached_tokens for request in affine.requests] == [0, 1536, 1536, 1536]
    # All at once: the work is spread, although each worker computes the prefix again.
    burst = [TraceRequest(0.0, 50_000, 2, (*range(40), *(1000 * i + at for at in range(40, 98)))) for i in range(1, 5)]
    spread = run(small(4, routing="prefix-affine"), burst)
    assert len({request.ttft for request in spread.requests}) == 1
    assert all(worker.requests == 0 for worker in spread.workers)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.floats(0, 2), st.integers(1, 4000), st.integers(1, 200), st.integers(0, 3)),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from([6_000, 20_000, 1_400_000]),
    st.sampled_from(COUPLED_MODES),
    st.sampled_from([64, 256, 1000]),
)
def test_many_steps_at_once_are_the_same_as_one_by_one(
    rows: list[tuple[float, int, int, int]], vram: int, mode: CoupledMode, chunk: int
) -> None:
    now, trace = 0.0, []
    for gap, tokens, output, family in rows:
        now += gap
        ids = tuple(10_000 * family + at for at in range(-(-tokens // 512)))
        trace.append(TraceRequest(now, tokens, output, ids))
    setup = small(1, mode, chunk, vram_tokens=vram, context_tokens=8_192)
    at_once = run(setup, trace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CoupledInstance, "steps_ahead", 1)
        one_by_one = run(setup, trace)
    for a, b in zip(at_once.requests, one_by_one.requests, strict=True):
        assert (a.refused, a.output, a.attempt, a.cached_tokens) == (b.refused, b.output, b.attempt, b.cached_tokens)
        assert a.output == trace[a.number - 1].output_tokens
        assert a.computed_tokens == b.computed_tokens
        assert a.intervals() == pytest.approx(b.intervals(), abs=1e-6)
        assert a.first_token == pytest.approx(b.first_token, abs=1e-6)


def test_preempted_requests_finish_and_all_their_tokens_count() -> None:
    trace = [TraceRequest(0.1 * i, 1500, 1200, tuple(range(10 * i, 10 * i + 3))) for i in range(6)]
    simulation = run(small(vram_tokens=6_000, context_tokens=6_000), trace)
    assert simulation.workers[0].preemptions > 0
    for request in simulation.requests:
        assert request.output == 1200
        assert request.finished == pytest.approx((request.first_token or 0.0) + request.intervals().sum())
    assert any(request.attempt > 1 for request in simulation.requests)


def test_what_no_worker_can_hold_is_refused() -> None:
    trace = [TraceRequest(0.0, 200_000, 2), TraceRequest(0.0, 7_000, 2), TraceRequest(0.0, 1_000, 2)]
    done = run_coupled("small", small(vram_tokens=6_000), trace)
    assert done.summary.refused == {"context": 1, "kv-room": 1}
    assert done.summary.completed == 1
    assert 0.5 < done.prefill_busy <= 1.0
