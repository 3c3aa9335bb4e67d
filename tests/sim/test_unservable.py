from __future__ import annotations

from moonpool.core.vocabulary import Slo
from moonpool.sim.cluster import Setup
from moonpool.sim.profile import load_profile
from moonpool.sim.run import run
from moonpool.sim.unservable import unservable
from moonpool.trace.request import TraceRequest

PROFILE = load_profile("a800-llama2-70b")


def test_what_an_idle_cluster_serves_in_time_is_not_listed() -> None:
    long, short = TraceRequest(0.0, 40_000, 10), TraceRequest(100.0, 8_000, 10)
    alone = run("x", Setup(PROFILE, 1, 1), [long]).summary.ttft.mean
    just = Slo(alone * 1.0001, None)
    assert unservable([long, short], PROFILE, just) == []
    assert unservable([long, short], PROFILE, Slo(alone * 0.999, None)) == [long]
    assert unservable([long], PROFILE, Slo()) == []


def test_a_prompt_whose_beginning_came_before_may_be_in_time() -> None:
    blocks = tuple(range(80))
    first, again = TraceRequest(0.0, 40_000, 10, blocks[:79]), TraceRequest(1.0, 40_000, 10, blocks[:79])
    assert unservable([first, again], PROFILE, Slo(2.0, None)) == [first]


def test_a_context_whose_steps_alone_are_too_slow() -> None:
    wide, one = TraceRequest(0.0, 100_000, 10), TraceRequest(0.0, 100_000, 1)
    assert unservable([wide, one], PROFILE, Slo(None, 0.02)) == [wide]
