"""A decode pool that is too small: what each admission policy makes of it."""

from __future__ import annotations

import random

import msgspec
import pytest

from moonpool.core.admission import AdmissionPolicy
from moonpool.core.conductor import ConductorConfig
from moonpool.core.vocabulary import Slo
from moonpool.report.summary import Summary, summarize
from moonpool.sim.cluster import Setup
from moonpool.sim.profile import load_profile
from moonpool.trace.request import TraceRequest
from tests.sim.kept import Kept

LIMITS = Slo(30.0, 0.1)
# Room for some thirty requests: steps stay far below the limit, KV room is what runs out.
PROFILE = msgspec.structs.replace(load_profile("a800-llama2-70b"), vram_tokens=60_000)


def trace(count: int = 300) -> list[TraceRequest]:
    """Twice what one decode instance can take."""
    rng = random.Random(5)
    return [TraceRequest(0.14 * n, rng.randint(1000, 3000), rng.randint(100, 500), ()) for n in range(count)]


def simulate(admission: AdmissionPolicy, slo: Slo = LIMITS) -> tuple[Kept, Summary]:
    config = ConductorConfig(placement="load-balance", admission=admission, slo=slo, queue_bound=10_000)
    simulation = Kept(Setup(PROFILE, 2, 1, config), trace())
    simulation.run()
    return simulation, summarize(simulation.outcomes(), LIMITS)


def test_forecast_serves_more_and_wastes_little() -> None:
    runs: dict[str, tuple[Kept, Summary]] = {}
    policies: tuple[AdmissionPolicy, ...] = ("baseline", "early", "forecast")
    for admission in policies:
        runs[admission] = simulate(admission)
    late = {name: simulation.decisions.late_refusals for name, (simulation, _) in runs.items()}
    wasted = {name: summary.wasted_tokens for name, (_, summary) in runs.items()}
    attained = {name: summary.attained for name, (_, summary) in runs.items()}
    assert late["baseline"] > 10 * late["forecast"]
    assert wasted["baseline"] > 10 * wasted["forecast"]
    assert attained["forecast"] > 1.2 * attained["early"] > 1.2 * attained["baseline"]
    assert runs["baseline"][0].decisions.late_refused_tokens > 0


@pytest.mark.parametrize("admission", ["baseline", "early", "predictive", "forecast"])
def test_without_limits_all_are_served(admission: AdmissionPolicy) -> None:
    simulation, summary = simulate(admission, Slo())
    assert summary.completed == summary.requests
    assert simulation.decisions.rejected == {}
