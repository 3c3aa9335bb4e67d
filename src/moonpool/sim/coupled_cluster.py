"""A simulated cluster of coupled workers, each with a prefix cache of its own: what separate pools are compared with.

No Conductor: a router sends each request to one worker, which serves it to its end; nothing is refused for being slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Literal, get_args

from msgspec import Struct

from moonpool.core.coupled import CoupledMode
from moonpool.core.eviction import EvictionPolicy
from moonpool.core.settings import Decisions
from moonpool.core.vocabulary import BlockKey, KeySpace, KeySpaceId, RejectReason, Slo
from moonpool.report.run import Run, run_of
from moonpool.sim.clock import Clock, Link
from moonpool.sim.coupled import SimCoupled
from moonpool.sim.ended import Ended
from moonpool.sim.flow import Flow, Told, nobody
from moonpool.sim.node import SimNode
from moonpool.sim.profile import Profile
from moonpool.sim.request import SimRequest
from moonpool.trace.arrivals import Arrivals
from moonpool.trace.request import TraceRequest

Routing = Literal["round-robin", "prefix-affine"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)

QUEUE_BOUND = 1 << 20


class CoupledSetup(Struct, frozen=True, tag=True):
    """What is simulated: workers on machines of `profile`, each with its DRAM as prefix cache."""

    profile: Profile
    workers: int = 16
    mode: CoupledMode = "chunked"
    chunk_tokens: int = 512
    """Most tokens of a `chunked` step. Whole prompts share a step up to the longest context, as in the paper's vLLM."""
    routing: Routing = "prefix-affine"
    eviction: EvictionPolicy = "lru"
    slo: Slo = Slo()
    """What attains; nothing is refused for it."""
    seed: int = 0
    """Of the arrivals; nothing is drawn here."""


class CoupledSimulation:
    """`run` once."""

    def __init__(
        self, setup: CoupledSetup, trace: Iterable[TraceRequest], on_come: Told = nobody, on_over: Told = nobody
    ) -> None:
        """`trace`: in order of arrival, times from 0; it is read as time goes on. `on_come`: a request has come.
        `on_over`: it is complete or refused."""
        self.setup = setup
        self.clock = Clock()
        self.decisions = Decisions()
        profile = setup.profile
        step_tokens = setup.chunk_tokens if setup.mode == "chunked" else profile.context_tokens
        self.workers = [
            SimCoupled(self._node(number), profile, self.clock, setup.mode, step_tokens, QUEUE_BOUND, self._over)
            for number in range(setup.workers)
        ]
        self._flow = Flow(self.clock, trace, profile.block_tokens, repeat(""), on_come)
        self._on_over = on_over
        self._coming: list[dict[BlockKey, int]] = [{} for _ in self.workers]
        """For each worker: the blocks of requests that are not over, and of how many."""
        self._at: dict[int, int] = {}
        """Request number -> worker."""
        self._turn = 0

    def run(self, on_progress: Callable[[int], None] = lambda over: None) -> None:
        """Until every request is over. `on_progress`: how many are, now and then."""
        self._flow.run(self._arrive, on_progress)

    def _node(self, number: int) -> SimNode:
        profile = self.setup.profile
        space = KeySpace(KeySpaceId("51"), profile.block_tokens, 1, profile.block_bytes)
        link = Link(profile.link_bytes_per_second, profile.link_latency)
        dram = profile.dram_tokens * profile.kv_bytes_per_token
        return SimNode(f"node-{number}", space, dram, self.setup.eviction, link, lambda event: None)

    def _arrive(self, request: SimRequest) -> None:
        self.decisions.arrived += 1
        if request.trace.input_tokens + request.output_tokens > self.setup.profile.context_tokens:
            request.refused = RejectReason.CONTEXT
            self._over(request)
            return
        number = self._choose(request)
        self._at[request.number] = number
        coming = self._coming[number]
        for key in request.keys:
            coming[key] = coming.get(key, 0) + 1
        self.decisions.placed += 1
        self.decisions.prompt_blocks += len(request.keys)
        self.workers[number].order(request)

    def _choose(self, request: SimRequest) -> int:
        """`prefix-affine`: where the fewest prompt tokens, its own among them, come before its first token;
        of equal ones where the fewest requests are. What is being computed there counts as cached."""
        if self.setup.routing == "round-robin":
            self._turn += 1
            return (self._turn - 1) % len(self.workers)
        size = self.setup.profile.block_tokens

        def load(number: int) -> tuple[int, int, int]:
            worker = self.workers[number]
            lacking = request.trace.input_tokens - size * self._held(number, request.keys)
            return worker.queued_tokens + lacking, worker.requests, number

        return min(range(len(self.workers)), key=load)

    def _held(self, number: int, keys: Sequence[BlockKey]) -> int:
        """Leading blocks."""
        first = self.workers[number].node.leading(keys)
        coming = self._coming[number]
        while first < len(keys) and keys[first] in coming:
            first += 1
        return first

    def _over(self, request: SimRequest) -> None:
        self._flow.end(request)
        number = self._at.pop(request.number, None)
        if number is not None:
            self._leave(request, number)
        self._on_over(request)

    def _leave(self, request: SimRequest, number: int) -> None:
        """A worker."""
        coming = self._coming[number]
        for key in request.keys:
            left = coming.get(key, 0) - 1
            if left > 0:
                coming[key] = left
            else:
                coming.pop(key, None)
        self.decisions.finished += request.finished is not None
        self.decisions.hit_blocks += request.cached_tokens // self.setup.profile.block_tokens


def run_coupled(
    name: str,
    setup: CoupledSetup,
    requests: Arrivals | Sequence[TraceRequest],
    on_progress: Callable[[int], None] = lambda over: None,
) -> Run:
    """As `sim.run.run`: `requests` in order of arrival, times from 0. Raises ValueError for no requests."""
    ended = Ended()
    simulation = CoupledSimulation(setup, Arrivals.of(requests), on_over=ended.end)
    simulation.run(on_progress)
    workers = simulation.workers
    seconds = max(simulation.clock.now, 1e-9) * len(workers)
    return run_of(
        name,
        setup.seed,
        setup.slo,
        ended.outcomes(),
        (),
        (),
        simulation.decisions,
        preemptions=sum(worker.preemptions for worker in workers),
        busy=(
            sum(worker.prefill_seconds for worker in workers) / seconds,
            sum(worker.decode_seconds for worker in workers) / seconds,
        ),
    )
