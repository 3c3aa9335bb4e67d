"""A simulated run from its setup to its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from moonpool.core.classes import Classes
from moonpool.report.priorities import by_class
from moonpool.report.run import Run, Watched, run_of
from moonpool.sim.cluster import Setup, Simulation
from moonpool.sim.ended import Ended
from moonpool.sim.recorder import Recorder
from moonpool.trace.arrivals import Arrivals
from moonpool.trace.request import TraceRequest


def run(
    name: str,
    setup: Setup,
    requests: Arrivals | Sequence[TraceRequest],
    on_progress: Callable[[int], None] = lambda over: None,
) -> Run:
    """`requests`: in order of arrival, times from 0. `on_progress`: how many are over, now and then.

    Raises ValueError for no requests.
    """
    arrivals, ended = Arrivals.of(requests), Ended()
    simulation = Simulation(setup, arrivals, on_over=ended.end)
    recorder = Recorder(simulation, arrivals)
    simulation.run(on_progress)
    seconds = max(simulation.clock.now, 1e-9)
    prefill, decode = simulation.prefill.values(), simulation.decode.values()
    outcomes = ended.outcomes()
    classes = Classes(setup.conductor.classes, setup.conductor.slo)
    found = run_of(
        name,
        setup.seed,
        setup.conductor.slo,
        outcomes,
        recorder.samples,
        [Watched(f"block {prefix.depth} of {prefix.prompts} prompts", prefix.prompts) for prefix in recorder.watched],
        simulation.decisions,
        preemptions=sum(worker.preemptions for worker in decode),
        busy=(
            sum(worker.busy_seconds for worker in prefill) / len(prefill) / seconds,
            sum(worker.busy_seconds for worker in decode) / len(decode) / seconds,
        ),
    )
    return msgspec.structs.replace(found, classes=by_class(outcomes, classes) if setup.mix else ())
