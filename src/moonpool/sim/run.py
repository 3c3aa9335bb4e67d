"""A simulated run from its setup to its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.report.run import Run
from moonpool.report.summary import summarize
from moonpool.sim.cluster import Setup, Simulation
from moonpool.trace.request import TraceRequest


def run(
    name: str,
    setup: Setup,
    requests: Sequence[TraceRequest],
    on_progress: Callable[[int], None] = lambda over: None,
) -> Run:
    """`requests`: in order of arrival, times from 0. `on_progress`: how many are over, now and then.

    Raises ValueError for no requests.
    """
    simulation = Simulation(setup, requests)
    simulation.run(on_progress)
    seconds = max(simulation.clock.now, 1e-9)
    prefill, decode = simulation.prefill.values(), simulation.decode.values()
    slo = setup.conductor.slo
    return Run(
        name=name,
        seed=setup.seed,
        slo=slo,
        summary=summarize([request.outcome() for request in simulation.requests], slo),
        decisions=simulation.decisions,
        preemptions=sum(worker.preemptions for worker in decode),
        prefill_busy=sum(worker.busy_seconds for worker in prefill) / len(prefill) / seconds,
        decode_busy=sum(worker.busy_seconds for worker in decode) / len(decode) / seconds,
    )
