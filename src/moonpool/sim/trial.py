"""A simulated run that ends as soon as it is certain whether enough of its requests attain (DESIGN §1: 90 % point)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

from moonpool.core.vocabulary import RejectReason, Slo
from moonpool.report.summary import intervals_of
from moonpool.sim.cluster import Setup, Simulation
from moonpool.sim.coupled_cluster import CoupledSetup, CoupledSimulation
from moonpool.sim.rates import SHARE
from moonpool.sim.request import SimRequest
from moonpool.trace.arrivals import Arrivals
from moonpool.trace.request import TraceRequest

LOOK_SECONDS = 1.0
"""Simulated, between two looks at what became of the requests."""
Interval = Literal["slowest-tenth", "p90"]
"""Which figure of a request's token intervals is held against its limit: the mean of the longest tenth, or the P90."""
Pool = Literal["prefill", "decode"]
_DECODE_REASONS = (RejectReason.TBT_SLO, RejectReason.KV_ROOM, RejectReason.NEVER_FITS)


class Goal(Struct, frozen=True):
    """How many requests are to attain what."""

    slo: Slo
    share: float = SHARE
    """Of all that are offered."""
    interval: Interval = "slowest-tenth"


class Trial(Struct, frozen=True):
    """What is known when the outcome is certain."""

    passes: bool
    requests: int
    """Offered."""
    simulated: int
    """Those of them that had come by then: what the trial cost."""
    attained: int
    failed: int
    """That did not attain, or could not any more."""
    failed_by_decode: int
    """Those of them that decode was too slow or too full for; the others waited for prefill."""
    seconds: float
    """From the first arrival to the last."""
    prefill_busy: float
    """Share of the time that prefill machines computed."""
    decode_load: float
    """Of decode machines, over time: seconds of a step over the limit, or busy where there is none."""
    cached_tokens: int
    prompt_tokens: int
    """Of those that had a first token."""

    @property
    def goodput(self) -> float:
        """Requests that attain, a second; of a trial that passes, no less than this."""
        return self.attained / self.seconds if self.seconds else 0.0

    @property
    def limit(self) -> Pool:
        """Whose lack fails most of those that fail."""
        return "decode" if 2 * self.failed_by_decode > self.failed else "prefill"


class _CertainError(Exception):
    """No error: no more needs to be simulated."""


def try_out(
    setup: Setup | CoupledSetup,
    requests: Arrivals | Sequence[TraceRequest],
    goal: Goal,
    on_progress: Callable[[int], None] = lambda over: None,
) -> Trial:
    """`requests`: in order of arrival, times from 0. Raises ValueError for none."""
    arrivals = Arrivals.of(requests)
    judge = _Judge(goal, arrivals)
    if isinstance(setup, Setup):
        simulation: Simulation | CoupledSimulation = Simulation(setup, arrivals, on_come=judge.came)
    else:
        simulation = CoupledSimulation(setup, arrivals, on_come=judge.came)
    judge.watch(simulation)
    try:
        simulation.run(on_progress)
        judge.look(simulation.clock.now)
    except _CertainError:
        pass
    return judge.trial(simulation)


class _Judge:
    """Looks now and then, and changes nothing."""

    def __init__(self, goal: Goal, arrivals: Arrivals) -> None:
        self._goal = goal
        self._arrivals = arrivals
        self._come = 0
        self._open: list[SimRequest] = []
        """They have come, and what becomes of them is not known."""
        self._attained = self._failed = self._failed_by_decode = 0
        self._cached = self._prompt = 0
        self._loads = 0.0
        self._looks = 0
        self._needed = math.ceil(goal.share * len(arrivals) - 1e-9)

    def came(self, request: SimRequest) -> None:
        self._come += 1
        self._open.append(request)

    def watch(self, simulation: Simulation | CoupledSimulation) -> None:
        clock = simulation.clock

        def look_again() -> None:
            self.look(clock.now)
            self._loads += _decode_load(simulation, self._goal.slo)
            self._looks += 1
            clock.after(LOOK_SECONDS, look_again)

        clock.after(LOOK_SECONDS, look_again)

    def look(self, now: float) -> None:
        """Raises _CertainError."""
        self._open = [request for request in self._open if not self._judged(request, now)]
        if self._attained >= self._needed or self._failed > len(self._arrivals) - self._needed:
            raise _CertainError

    def _judged(self, request: SimRequest, now: float) -> bool:
        limit = self._goal.slo.ttft
        if (
            limit is not None
            and (now if request.first_token is None else request.first_token) > request.arrived + limit
        ):
            self._count(request, False, False)
        elif request.refused is not None:
            self._count(request, False, request.refused in _DECODE_REASONS)
        elif request.finished is not None:
            tbt = self._goal.slo.tbt
            attains = tbt is None or self._interval(request) <= tbt
            self._count(request, attains, True)
        else:
            return False
        return True

    def _interval(self, request: SimRequest) -> float:
        slowest_tenth, p90, _ = intervals_of(request.intervals())
        return slowest_tenth if self._goal.interval == "slowest-tenth" else p90

    def _count(self, request: SimRequest, attains: bool, by_decode: bool) -> None:
        if request.first_token is not None:
            self._cached += request.cached_tokens
            self._prompt += request.trace.input_tokens
        if attains:
            self._attained += 1
        else:
            self._failed += 1
            self._failed_by_decode += by_decode

    def trial(self, simulation: Simulation | CoupledSimulation) -> Trial:
        now = max(simulation.clock.now, 1e-9)
        return Trial(
            passes=self._attained >= self._needed,
            requests=len(self._arrivals),
            simulated=self._come,
            attained=self._attained,
            failed=self._failed,
            failed_by_decode=self._failed_by_decode,
            seconds=self._arrivals.last - self._arrivals.first,
            prefill_busy=_prefill_busy(simulation) / now,
            decode_load=self._loads / max(self._looks, 1),
            cached_tokens=self._cached,
            prompt_tokens=self._prompt,
        )


def _prefill_busy(simulation: Simulation | CoupledSimulation) -> float:
    """Seconds, mean of all workers."""
    if isinstance(simulation, CoupledSimulation):
        return sum(worker.prefill_seconds for worker in simulation.workers) / len(simulation.workers)
    return sum(worker.busy_seconds for worker in simulation.prefill.values()) / len(simulation.prefill)


def _decode_load(simulation: Simulation | CoupledSimulation, slo: Slo) -> float:
    """Mean of all decode workers; coupled ones have none apart."""
    if isinstance(simulation, CoupledSimulation):
        return 0.0
    steps = [worker.step_seconds for worker in simulation.decode.values()]
    return sum(step / slo.tbt if slo.tbt else step > 0.0 for step in steps) / len(steps)
