"""What is recorded of a simulated run."""

from __future__ import annotations

import msgspec
import pytest

from moonpool.core.conductor import ConductorConfig
from moonpool.core.vocabulary import Slo
from moonpool.report.outcomes import Outcome
from moonpool.report.samples import MOST_SAMPLES
from moonpool.sim.cluster import Setup, Simulation
from moonpool.sim.profile import load_profile
from moonpool.sim.recorder import Recorder, hottest_prefixes
from moonpool.sim.request import SimRequest, key_of
from moonpool.sim.run import run
from moonpool.trace.arrivals import Arrivals
from moonpool.trace.request import TraceRequest
from tests.sim.kept import Kept

PROFILE = load_profile("a800-llama2-70b")
SETUP = Setup(PROFILE, 2, 2, ConductorConfig(admission="none", queue_bound=10_000, slo=Slo(30.0, 0.1)))
TRACE = [
    TraceRequest(0.5 * at, 9000, 400, (0, *range(1000 + 20 * (at % 7), 1016 + 20 * (at % 7)), 5000 + at))
    for at in range(40)
]
"""Seven families of prompts, more than two instances keep apart: some prefixes have to be fetched."""


def test_recording_changes_nothing() -> None:
    watched, alone = Kept(SETUP, TRACE), Kept(SETUP, TRACE)
    recorder = Recorder(watched, Arrivals.of(TRACE))
    watched.run()
    alone.run()
    assert [r.outcome() for r in watched.requests] == [r.outcome() for r in alone.requests]
    assert 100 < len(recorder.samples) <= MOST_SAMPLES


OVERLOAD = msgspec.structs.replace(
    SETUP, decode=1, conductor=msgspec.structs.replace(SETUP.conductor, admission="baseline", slo=Slo(4.0, 0.02))
)


@pytest.mark.parametrize("deadline", [600.0, 6.0])
def test_what_is_told_of_a_request_at_its_end_stays_so(deadline: float) -> None:
    """Also of one that is refused while workers compute for it."""
    setup = msgspec.structs.replace(OVERLOAD, deadline=deadline, profile=msgspec.structs.replace(PROFILE, slots=8))
    trace = [TraceRequest(0.25 * at, 9000 + 500 * (at % 5), 90, ()) for at in range(80)]
    told: dict[int, Outcome] = {}
    kept: list[SimRequest] = []
    simulation = Simulation(
        setup, trace, kept.append, lambda request: told.setdefault(request.number, request.outcome()) and None
    )
    simulation.run()
    assert [told[request.number] for request in kept] == [request.outcome() for request in kept]
    assert any(outcome.refusal and outcome.computed_tokens for outcome in told.values())


def test_loads_links_and_replicas_are_those_of_the_cluster() -> None:
    done = run("x", SETUP, TRACE)
    samples, summary = done.over.samples, done.summary
    assert done.over.watched[0].prompts == 40
    assert samples[0].replicas[0] <= 2 < samples[-1].replicas[0], "the shared prefix spreads"
    assert max(s.prefill_seconds_most for s in samples) > 0.5, "a prompt takes more than a second"
    assert max(s.batch for s in samples) >= 1
    steps = [s.decode_seconds for s in samples if s.batch]
    assert 0.009 < min(steps) <= max(steps) < 0.1
    assert 0 < max(s.link_use for s in samples) <= max(s.link_use_most for s in samples) <= 1
    assert sum(b.computed_tokens for b in done.over.bins) == summary.computed_tokens
    fetched = sum(b.fetched_tokens for b in done.over.bins)
    assert fetched == _fetched()
    assert fetched > 0
    assert done.over.ttft.share == 1.0


def test_a_prefix_that_all_go_on_with_is_one() -> None:
    prompts = [(0, 1, 2, 10 + at) for at in range(10)] + [(0, 50)] * 3
    found = hottest_prefixes(prompts, 3)
    assert [(p.key, p.depth, p.prompts) for p in found] == [(key_of(0), 1, 13), (key_of(1), 2, 10), (key_of(50), 2, 3)]
    assert hottest_prefixes([], 3) == ()


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_of_very_few_requests(count: int) -> None:
    done = run("x", SETUP, TRACE[:count])
    assert done.summary.completed == count


def _fetched() -> int:
    simulation = Kept(SETUP, TRACE)
    simulation.run()
    return sum(request.fetched_tokens for request in simulation.requests)
