"""A simulated cluster of scaled hardware is the same cluster in slow motion."""

from __future__ import annotations

import pytest
from msgspec import structs

from moonpool.core.conductor import ConductorConfig
from moonpool.core.vocabulary import Slo
from moonpool.report.run import Run
from moonpool.sim.cluster import Setup
from moonpool.sim.coupled_cluster import CoupledSetup, run_coupled
from moonpool.sim.profile import load_profile, scaled
from moonpool.sim.run import run
from moonpool.trace.kinds import parse_kind
from moonpool.trace.request import TraceRequest
from moonpool.trace.synthesize import synthesize

A800 = load_profile("a800-llama2-70b")
TIMES = 8.0
REQUESTS = list(synthesize(parse_kind("poisson?n=150&rate=2&input=6000&output=60&shared=.4&turns=2")))


def slower(requests: list[TraceRequest]) -> list[TraceRequest]:
    return [structs.replace(request, arrival=TIMES * request.arrival) for request in requests]


def simulated(slow_down: float, coupled: bool) -> Run:
    profile, slo = scaled(A800, slow_down, 2560.0 if slow_down > 1 else 1.0), Slo(4 * slow_down, 0.06 * slow_down)
    requests = REQUESTS if slow_down == 1 else slower(REQUESTS)
    if coupled:
        return run_coupled("", CoupledSetup(profile, 3, chunk_tokens=2048, slo=slo), requests)
    # What waits by the clock (reports, heartbeats) is no part of the hardware.
    setup = Setup(profile, 2, 1, ConductorConfig(slo=slo, admission="none", queue_bound=1 << 20))
    return run("", setup, requests)


@pytest.mark.parametrize("coupled", [False, True])
def test_all_times_are_so_many_times_longer_and_nothing_else_changes(coupled: bool) -> None:
    fast, slow = simulated(1.0, coupled).summary, simulated(TIMES, coupled).summary
    assert 0 < fast.attained < len(REQUESTS), "else the limits would not tell"
    assert slow.attained == pytest.approx(fast.attained, abs=2)
    assert slow.ttft.p50 == pytest.approx(TIMES * fast.ttft.p50, rel=0.02)
    assert slow.ttft.p90 == pytest.approx(TIMES * fast.ttft.p90, rel=0.03)
    assert slow.slowest_tenth.p50 == pytest.approx(TIMES * fast.slowest_tenth.p50, rel=0.02)
    assert slow.cached_share == pytest.approx(fast.cached_share, rel=0.02)
