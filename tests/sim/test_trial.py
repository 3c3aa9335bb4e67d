"""A trial against the whole run: the same answer, for less work."""

from __future__ import annotations

import msgspec
import pytest

from moonpool.core.conductor import ConductorConfig
from moonpool.core.vocabulary import Slo
from moonpool.sim.cluster import Setup
from moonpool.sim.coupled_cluster import CoupledSetup, run_coupled
from moonpool.sim.profile import load_profile
from moonpool.sim.run import run
from moonpool.sim.trial import Goal, Interval, Trial, try_out
from moonpool.trace.request import TraceRequest

PROFILE = load_profile("a800-llama2-70b")
SLO = Slo(5.0, 0.1)


def trace(count: int, every: float, output: int = 40) -> list[TraceRequest]:
    return [TraceRequest(every * at, 4000 + 900 * (at % 9), output + at % 7) for at in range(count)]


def setup(admission: str = "forecast") -> Setup:
    return Setup(PROFILE, 2, 1, msgspec.convert({"admission": admission, "slo": SLO}, ConductorConfig))


@pytest.mark.parametrize("admission", ["none", "early", "forecast"])
@pytest.mark.parametrize("every", [0.2, 0.45, 0.5, 0.55, 0.6, 1.0])
def test_the_answer_is_that_of_the_whole_run(admission: str, every: float) -> None:
    requests = trace(200, every)
    summary = run("", setup(admission), requests).summary
    trial = try_out(setup(admission), requests, Goal(SLO))
    assert trial.passes == (summary.attained >= 0.9 * summary.requests)
    assert trial.attained <= summary.attained
    assert trial.failed <= summary.requests - summary.attained
    assert trial.requests == 200
    assert trial.attained >= 180 or trial.failed > 20, "it was certain"


def test_a_hopeless_rate_costs_a_part_of_the_run_only() -> None:
    requests = trace(400, 0.1)
    trial = try_out(setup(), requests, Goal(SLO))
    assert not trial.passes
    assert trial.simulated < 200
    assert trial.limit == "prefill"
    assert trial.prefill_busy > 0.8
    # One that waits for its first token has failed when its limit is over, whatever becomes of it.
    late = try_out(setup("none"), requests, Goal(SLO))
    assert late.simulated < 400


def test_who_lacks_what() -> None:
    requests = [TraceRequest(0.02 * at, 500, 600) for at in range(300)]
    trial = try_out(Setup(PROFILE, 4, 1, ConductorConfig(slo=Slo(5.0, 0.025))), requests, Goal(Slo(5.0, 0.025)))
    assert not trial.passes
    assert trial.limit == "decode"
    assert trial.decode_load > 0.7
    assert trial.prefill_busy < 0.5


@pytest.mark.parametrize("interval", ["slowest-tenth", "p90"])
def test_coupled_workers_are_tried_too(interval: Interval) -> None:
    coupled = CoupledSetup(PROFILE, 2, "prefill-first", slo=SLO)
    verdicts = []
    for every in (0.3, 1.0, 12.0):
        requests = trace(100, every, output=200)
        done = run_coupled("", coupled, requests)
        trial = try_out(coupled, requests, Goal(SLO, interval=interval))
        if interval == "slowest-tenth":
            assert trial.passes == (done.summary.attained >= 90)
        verdicts.append(trial.passes)
    assert (verdicts[0], verdicts[-1]) == (False, True)


def test_both_definitions_of_a_slow_answer_can_be_asked_for() -> None:
    """One long pause in 19 intervals: it is the longest tenth, and not the P90."""
    requests = [TraceRequest(0.0, 500, 20), TraceRequest(0.2, 8000, 2)]
    coupled = CoupledSetup(PROFILE, 1, "prefill-first", slo=SLO)
    attained = [try_out(coupled, requests, Goal(SLO, 1.0, each)).attained for each in ("slowest-tenth", "p90")]
    assert attained == [1, 2]


def test_goodput_is_what_attained_over_the_time_of_the_arrivals() -> None:
    trial = try_out(setup(), trace(101, 2.0), Goal(SLO))
    assert trial.passes
    assert isinstance(trial, Trial)
    assert trial.goodput == pytest.approx(trial.attained / 200.0)
    with pytest.raises(ValueError, match="no request"):
        try_out(setup(), [], Goal(SLO))
