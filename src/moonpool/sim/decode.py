"""A simulated decode worker: the real state machine; steps between two changes of the batch are taken at once.

A step of a batch of b requests with c tokens takes d0 + d1·b + d2·c, and the next one d2·b longer. Until a request
ends, needs a page, or something comes that changes the batch, the times of all steps are known; the run is cut at the
first step that ends after such an event. A request is told its tokens when it leaves the batch: all runs since it came.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from moonpool.core.actions import Place
from moonpool.core.cost import DecodeCoefficients, DecodeCost
from moonpool.core.decode import (
    DecodeEvent,
    DecodeInstance,
    Drain,
    Dropped,
    Ending,
    HandedOver,
    KvArrived,
    KvLoaded,
    KvStored,
    LoadKv,
    Refuse,
    Step,
    Stepped,
)
from moonpool.core.events import DecodeJoined, DecodeRefused, DecodeStepped, Event, Finished, Preempted, Reported
from moonpool.core.vocabulary import PartId, RequestId
from moonpool.sim.clock import Clock
from moonpool.sim.node import SimNode
from moonpool.sim.profile import Profile
from moonpool.sim.request import SimRequest
from moonpool.sim.steps import Steps

MOST_RUNS = 4096
"""Numbers that are kept beyond twice those that are needed."""


_CUTS = (KvLoaded, Dropped)


@dataclass(slots=True)
class _Run(Steps):
    """Steps under way."""

    batch: int
    context: int
    steps: int


@dataclass(slots=True, eq=False)
class _Row:
    """A request that takes part in the steps."""

    request: SimRequest
    first: int
    """The place of its first run among those that are kept."""
    began: int
    """How many steps had been taken then."""
    ends_at: int
    """So many will have been when it is complete."""
    here: bool = True


class SimDecode:
    def __init__(
        self,
        id_: PartId,
        node: SimNode,
        profile: Profile,
        clock: Clock,
        tell: Callable[[Event], None],
        on_finished: Callable[[SimRequest], None],
    ) -> None:
        """`on_finished`: a request has all its tokens."""
        self.id = id_
        self.node = node
        self.busy_seconds = 0.0
        self.steps = 0
        self._profile = profile
        self._costs: DecodeCoefficients = profile.decode
        self._clock = clock
        self._tell = tell
        self._on_finished = on_finished
        self._requests: dict[RequestId, SimRequest] = {}
        self._rows: dict[RequestId, _Row] = {}
        self._ends: list[tuple[int, int, _Row]] = []
        """A heap of rows, by `ends_at`. Some have left."""
        self._runs = array("d")
        """The numbers of one run after another, from the first that a row has taken part in."""
        self._most_runs = MOST_RUNS
        self._run: _Run | None = None
        self._measured: DecodeStepped | None = None
        self._cost = DecodeCost(profile.decode)
        self._instance = DecodeInstance(
            pages=profile.vram_tokens // profile.block_tokens,
            block_tokens=profile.block_tokens,
            slots=profile.slots,
            queue_bound=4 * profile.slots,
            cost=self._cost,
            tells_rows=False,
        )

    @property
    def running(self) -> int:
        return self._instance.running

    @property
    def step_seconds(self) -> float:
        """Of the batch that runs, as the cost model has it; 0 where none does."""
        costs, running = self._costs, self._instance.running
        if not running:
            return 0.0
        return costs.fixed + costs.per_request * running + costs.per_context_token * self._instance.context_tokens

    @property
    def preemptions(self) -> int:
        return self._instance.preemptions

    def hand_over(self, request: SimRequest, place: Place, tokens: int, arrives: float) -> None:
        """`tokens`: with the newest, whose KV is not there yet; the others' is at time `arrives`."""
        self._requests[request.id] = request
        most = tokens + request.output_tokens - request.output
        self._feed(HandedOver(request.id, place.attempt, tokens, most, place.rank, place.tbt_limit))
        self._clock.at(arrives, self._feed, KvArrived(request.id, place.attempt))

    def has(self, request: RequestId) -> bool:
        return request in self._requests

    def cancel(self, request: RequestId, attempt: int) -> None:
        self._feed(Dropped(request, attempt))

    def report(self) -> None:
        """Its load, and its last steps for the cost model."""
        instance, incarnation = self._instance, self.node.peer.incarnation
        free, context = instance.pool.free, instance.context_tokens
        self._tell(Reported(self.id, incarnation, instance.queued, instance.running, free, context))
        if self._measured is not None:
            self._tell(self._measured)
            self._cost.observe(self._measured.batch, self._measured.context_tokens, self._measured.seconds)
            self._measured = None

    def _feed(self, event: DecodeEvent) -> None:
        # What else comes changes neither the batch nor, before the run's end, who needs a page.
        if isinstance(event, _CUTS):
            self._cut()
        for action in self._instance.handle(event, self._clock.now):
            match action:
                case LoadKv(request, attempt):
                    self._load(request, attempt)
                case Step():
                    self._start(action)
                case Drain():
                    self._drain(action)
                case Refuse(request, attempt, reason, limit):
                    self._requests.pop(request, None)
                    self._tell(DecodeRefused(request, attempt, self.id, reason, limit))

    def _load(self, request: RequestId, attempt: int) -> None:
        sim = self._requests[request]
        tokens = sim.trace.input_tokens + sim.output - 1
        seconds = tokens * self._profile.kv_bytes_per_token / self._profile.host_bytes_per_second
        self._clock.after(seconds, self._loaded, request, attempt)

    def _loaded(self, request: RequestId, attempt: int) -> None:
        self.node.close(request, attempt, arrived=True)
        self._tell(DecodeJoined(request, attempt, self.id))
        self._feed(KvLoaded(request, attempt))

    # Steps

    def _start(self, step: Step) -> None:
        for id_ in step.pauses:
            self._leave(id_)
        for id_ in step.joins:
            self._join(self._requests[id_])
        while not self._ends[0][2].here:
            heapq.heappop(self._ends)
        costs = self._costs
        first = costs.fixed + costs.per_request * step.batch + costs.per_context_token * step.tokens
        steps = min(self._ends[0][0] - self.steps, self._instance.steps_ahead)
        growth = costs.per_context_token * step.batch
        run = self._run = _Run(self._clock.now, first, growth, step.batch, step.tokens, steps)
        self._clock.at(run.end_of(steps), self._ended, run, steps)

    def _join(self, request: SimRequest) -> None:
        ends_at = self.steps + request.output_tokens - request.output
        row = self._rows[request.id] = _Row(request, len(self._runs), self.steps, ends_at)
        heapq.heappush(self._ends, (ends_at, request.number, row))

    def _leave(self, id_: RequestId) -> None:
        row = self._rows.pop(id_)
        row.here = False
        row.request.take(self._runs[row.first :], self.steps - row.began)

    def _cut(self) -> None:
        """Something comes that may change the batch: the run goes on to the end of the step under way."""
        run = self._run
        if run is None:
            return
        steps = run.steps_until(self._clock.now)
        if steps < run.steps:
            run.steps = steps
            self._clock.at(run.end_of(steps), self._ended, run, steps)

    def _ended(self, run: _Run, steps: int) -> None:
        if self._run is not run or run.steps != steps:
            return
        self._run = None
        self.steps += steps
        self.busy_seconds += self._clock.now - run.began
        if len(self._runs) >= self._most_runs:
            self._forget()
        self._runs.extend((run.began, run.first, run.growth, steps))
        middle = run.context + run.batch * (steps - 1) // 2
        self._measured = DecodeStepped(self.id, run.batch, middle, (self._clock.now - run.began) / steps)
        finished, ends = [], self._ends
        while ends and ends[0][0] <= self.steps:
            row = heapq.heappop(ends)[2]
            if row.here:
                finished.append(row.request.id)
        self._feed(Stepped(tuple(finished), steps=steps))

    def _forget(self) -> None:
        """Runs before all rows."""
        first = min([row.first for row in self._rows.values()])
        del self._runs[:first]
        for row in self._rows.values():
            row.first -= first
        self._most_runs = 2 * len(self._runs) + MOST_RUNS

    def _drain(self, action: Drain) -> None:
        if action.request in self._rows:
            self._leave(action.request)
        request = self._requests.pop(action.request)
        stored = KvStored(action.request, action.attempt)
        match action.ending:
            case Ending.FINISHED:
                self._tell(Finished(request.id, action.attempt, self.id, request.output, "length"))
                self._on_finished(request)
            case Ending.PREEMPTED:
                self._tell(Preempted(request.id, action.attempt, self.id))
            case Ending.DROPPED:
                self.node.close(request.id, action.attempt, arrived=False)
        if action.pages:
            self._clock.soon(self._feed, stored)
