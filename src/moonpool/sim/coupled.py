"""A simulated coupled worker: the real state machine; seconds from the cost model (`core.coupled.step_seconds`).

Equal steps are taken at once, as a decode worker's are: a prompt's chunks but the last ones too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moonpool.core.blocks import hit_limit
from moonpool.core.coupled import (
    CoupledEvent,
    CoupledInstance,
    CoupledMode,
    Ordered,
    Step,
    step_growth,
    step_seconds,
)
from moonpool.core.decode import Drain, Ending, KvStored, Refuse, Stepped
from moonpool.core.prefill import Chunk, Load, Loaded
from moonpool.core.vocabulary import RejectReason, RequestId
from moonpool.sim.clock import Clock
from moonpool.sim.node import SimNode
from moonpool.sim.profile import Profile
from moonpool.sim.request import Run as Tokens
from moonpool.sim.request import SimRequest, own_keys
from moonpool.sim.steps import Steps


@dataclass(slots=True)
class _Run(Steps):
    """Steps under way."""

    chunks: tuple[Chunk, ...]
    requests: list[SimRequest]
    """Of the rows."""
    steps: int


class SimCoupled:
    def __init__(
        self,
        node: SimNode,
        profile: Profile,
        clock: Clock,
        mode: CoupledMode,
        step_tokens: int,
        queue_bound: int,
        on_over: Callable[[SimRequest], None],
    ) -> None:
        """`on_over`: a request is complete or refused."""
        self.node = node
        self.prefill_seconds = 0.0
        """In steps with prompt tokens."""
        self.decode_seconds = 0.0
        """In steps without."""
        self._profile = profile
        self._clock = clock
        self._on_over = on_over
        self._requests: dict[RequestId, SimRequest] = {}
        self._pinned: dict[RequestId, int] = {}
        """Leading blocks that each holds in the node."""
        self._run: _Run | None = None
        self._instance = CoupledInstance(
            pages=profile.vram_tokens // profile.block_tokens,
            block_tokens=profile.block_tokens,
            slots=profile.slots,
            step_tokens=step_tokens,
            mode=mode,
            queue_bound=queue_bound,
        )

    @property
    def requests(self) -> int:
        return len(self._requests)

    @property
    def queued_tokens(self) -> int:
        return self._instance.queued_tokens

    @property
    def preemptions(self) -> int:
        return self._instance.preemptions

    def order(self, request: SimRequest) -> None:
        self._requests[request.id] = request
        prompt = request.trace.input_tokens
        self._feed(Ordered(request.id, request.attempt, prompt + request.output, prompt + request.output_tokens))

    def _feed(self, event: CoupledEvent) -> None:
        if isinstance(event, Loaded) or self._instance.is_starved:
            self._cut()
        for action in self._instance.handle(event, self._clock.now):
            match action:
                case Load():
                    self._load(action)
                case Step():
                    self._start(action)
                case Drain():
                    self._drain(action)
                case Refuse(request):
                    refused = self._requests.pop(request)
                    refused.refused = RejectReason.KV_ROOM
                    self._on_over(refused)

    def _load(self, action: Load) -> None:
        """Copy what the node has of the prefix into VRAM."""
        request = self._requests[action.request]
        profile, keys = self._profile, request.keys
        tokens = request.trace.input_tokens + request.output
        hit = min(self.node.leading(keys), hit_limit(tokens, profile.block_tokens))
        self.node.pin(keys[:hit])
        self._pinned[request.id] = hit
        loaded = Loaded(action.request, action.attempt, hit)
        seconds = hit * profile.block_bytes / profile.host_bytes_per_second
        self._clock.after(seconds, lambda: self._feed(loaded))

    # Steps

    def _start(self, step: Step) -> None:
        profile, chunks = self._profile, step.chunks
        requests = [self._requests[row.request] for row in step.rows]
        context = sum(row.tokens for row in step.rows)
        first = step_seconds(profile.prefill, profile.decode, chunks, len(requests), context)
        growth = step_growth(profile.prefill, profile.decode, chunks, len(requests))
        ahead = self._instance.steps_ahead
        steps = min(ahead, min((r.output_tokens - r.output for r in requests), default=ahead))
        run = self._run = _Run(self._clock.now, first, growth, chunks, requests, steps)
        self._clock.at(run.end_of(steps), lambda: self._ended(run, steps))

    def _cut(self) -> None:
        """Something comes that may change the step: the run goes on to the end of the step under way."""
        run = self._run
        if run is None:
            return
        steps = run.steps_until(self._clock.now)
        if steps < run.steps:
            run.steps = steps
            self._clock.at(run.end_of(steps), lambda: self._ended(run, steps))

    def _ended(self, run: _Run, steps: int) -> None:
        if self._run is not run or run.steps != steps:
            return
        self._run = None
        now = self._clock.now
        if run.chunks:
            self.prefill_seconds += now - run.began
        else:
            self.decode_seconds += now - run.began
        finished = []
        taken = Tokens(run.began, run.first, run.growth, steps)
        for request in run.requests:
            request.take(taken, steps)
            if request.output >= request.output_tokens:
                finished.append(request.id)
        for chunk in run.chunks:
            request = self._requests[chunk.request]
            request.computed_tokens += chunk.count * steps
            if chunk.last:
                request.take_first(now, self._pinned[request.id] * self._profile.block_tokens)
                self.node.store(request.keys)
                if request.output >= request.output_tokens:
                    finished.append(request.id)
        self._feed(Stepped(tuple(finished), steps=steps))

    def _drain(self, action: Drain) -> None:
        request = self._requests.pop(action.request)
        self.node.unpin(request.keys[: self._pinned.pop(request.id)])
        again = action.ending is Ending.PREEMPTED
        if again:
            # What it has produced so far is prompt now; those blocks are nobody else's.
            size = self._profile.block_tokens
            request.keys += own_keys(request.number, len(request.keys), (action.tokens - 1) // size)
            self.node.store(request.keys[: (action.tokens - 1) // size])
        else:
            request.finished = self._clock.now
            self._on_over(request)
        self._clock.after(0.0, lambda: self._left(request, action, again))

    def _left(self, request: SimRequest, action: Drain, again: bool) -> None:
        self._feed(KvStored(action.request, action.attempt))
        if again:
            request.attempt += 1
            self.order(request)

    def check_integrity(self) -> None:
        self._instance.check_integrity()
        self.node.check_integrity()
