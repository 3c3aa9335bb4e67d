"""Requests come when it is their time, and are forgotten when they are over."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from moonpool.core.conductor import ConductorConfig
from moonpool.core.cost import DecodeCoefficients
from moonpool.sim.cluster import CLASS_DRAWS, DRAWN_AT_ONCE, Setup, Simulation, _draw_classes
from moonpool.sim.coupled_cluster import CoupledSetup, CoupledSimulation
from moonpool.sim.profile import load_profile
from moonpool.sim.request import SimRequest
from moonpool.trace.request import TraceRequest
from tests.sim.kept import Kept

PROFILE = load_profile("a800-llama2-70b")
NONE = ConductorConfig(admission="none", queue_bound=10_000)
COUNT = 500


def requests() -> int:
    # By type: `isinstance` asks objects of other libraries for their class, and some of them warn then.
    return sum(type(each) is SimRequest for each in gc.get_objects())


class Source:
    """Tells how many have been drawn."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[TraceRequest]:
        for at in range(COUNT):
            self.drawn += 1
            yield TraceRequest(2.0 * at, 3000, 40, (0, *range(5 * at + 1, 5 * at + 6)))


@pytest.mark.parametrize("setup", [Setup(PROFILE, 2, 1, NONE), CoupledSetup(PROFILE, 2)])
def test_memory_does_not_grow_with_the_trace(setup: Setup | CoupledSetup) -> None:
    source = Source()
    simulation = Simulation(setup, source) if isinstance(setup, Setup) else CoupledSimulation(setup, source)
    alive: list[int] = []
    ahead: list[int] = []

    def look(over: int) -> None:
        alive.append(requests() - before)
        ahead.append(source.drawn - over)

    before = requests()
    simulation.run(look)
    assert len(alive) >= COUNT // 100 - 1
    assert max(alive) <= 10, "only those that are served"
    assert max(ahead) <= 10


def test_classes_are_drawn_as_if_all_at_once() -> None:
    setup = Setup(PROFILE, 1, 1, NONE, seed=5, mix=(("high", 0.3), ("low", 0.5), ("batch", 0.4)))
    count = 2 * DRAWN_AT_ONCE + 100
    drawn = [name for name, _ in zip(_draw_classes(setup), range(count), strict=False)]
    rng = np.random.Generator(np.random.PCG64([5, CLASS_DRAWS]))
    at_once = rng.choice(3, size=count, p=np.array([0.3, 0.5, 0.4]) / 1.2)
    assert drawn == [setup.mix[at][0] for at in at_once]


def test_a_request_that_is_refused_in_its_last_step_ends_once() -> None:
    """Its deadline passes while the step that gives its last token is under way."""
    slow = msgspec.structs.replace(PROFILE, decode=DecodeCoefficients(10.0, 0.0, 0.0))
    trace = [TraceRequest(0.0, 3000, 2), TraceRequest(9.0, 3000, 2)]
    simulation = Kept(Setup(slow, 1, 1, NONE, deadline=3.0), trace)
    simulation.run()
    first, second = (request.outcome() for request in simulation.requests)
    assert (first.refusal, first.completed, first.output_tokens) == ("deadline", False, 2)
    assert (second.refusal, second.completed) == ("deadline", False), "the run has gone on to its end"
