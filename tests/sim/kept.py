"""Simulations whose requests a test looks at afterwards: they are kept, in order of arrival."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.report.outcomes import Outcomes
from moonpool.sim.cluster import Setup, Simulation
from moonpool.sim.coupled_cluster import CoupledSetup, CoupledSimulation
from moonpool.sim.request import SimRequest
from moonpool.trace.request import TraceRequest


class Kept(Simulation):
    def __init__(self, setup: Setup, trace: Sequence[TraceRequest]) -> None:
        self.requests: list[SimRequest] = []
        super().__init__(setup, trace, on_come=self.requests.append)

    def outcomes(self) -> Outcomes:
        return Outcomes.of(request.outcome() for request in self.requests)


class KeptCoupled(CoupledSimulation):
    def __init__(self, setup: CoupledSetup, trace: Sequence[TraceRequest]) -> None:
        self.requests: list[SimRequest] = []
        super().__init__(setup, trace, on_come=self.requests.append)
