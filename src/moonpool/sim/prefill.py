"""A simulated prefill worker: the real state machine, with seconds from a cost model where the engine would compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moonpool.core.actions import Place
from moonpool.core.blocks import hit_limit
from moonpool.core.cost import PrefillCoefficients
from moonpool.core.events import Event, PrefillDone, PrefillFailed
from moonpool.core.prefill import (
    Chunk,
    Drain,
    Dropped,
    GiveUp,
    KvStored,
    Load,
    Loaded,
    Ordered,
    Passed,
    PrefillEvent,
    PrefillInstance,
    Refuse,
    Step,
    StepDone,
)
from moonpool.core.vocabulary import BlockKey, PartId, RequestId
from moonpool.sim.clock import Clock, transfer
from moonpool.sim.node import SimNode
from moonpool.sim.pipeline import Stages, of_group
from moonpool.sim.profile import Profile
from moonpool.sim.request import SimRequest

_Id = tuple[RequestId, int]


@dataclass(slots=True)
class Order:
    """One attempt at this worker."""

    request: SimRequest
    place: Place
    tokens: int
    node: SimNode
    """Where it will be decoded."""
    came: float
    began: float | None = None
    """When it got pages."""
    pinned: tuple[BlockKey, ...] = ()
    hit: int = 0
    fetched: int = 0
    """Blocks that came from another node."""
    compute_seconds: float = 0.0
    arrived: float = 0.0
    """When all of its KV that was sent so far is on the decode node."""


class SimPrefill:
    def __init__(
        self,
        id_: PartId,
        node: SimNode,
        profile: Profile,
        clock: Clock,
        nodes: dict[PartId, SimNode],
        queue_bound: int,
        tell: Callable[[Event], None],
        hand_over: Callable[[Order, float], None],
        on_finished: Callable[[Order, PartId], None],
        machines: int = 1,
    ) -> None:
        """`profile`: of each of its machines, which form a pipeline where there are several.

        `hand_over(order, when its KV is all there)`: the prompt is computed and its first token is out.

        `on_finished(order, id)`: that token was the last one.
        """
        self.id = id_
        self.node = node
        self.busy_seconds = 0.0
        self._stages = Stages(profile, machines) if machines > 1 else None
        self._profile = profile = of_group(profile, machines)
        self._costs: PrefillCoefficients = profile.prefill
        self._clock = clock
        self._nodes = nodes
        self._tell = tell
        self._hand_over = hand_over
        self._on_finished = on_finished
        self._orders: dict[_Id, Order] = {}
        # Layer-wise prefill leaves VRAM out of the question as long as each prompt fits alone (PAPER §3).
        pages = 4 * (profile.context_tokens // profile.block_tokens + 1)
        self._instance = PrefillInstance(
            pages=pages,
            block_tokens=profile.block_tokens,
            chunk_tokens=profile.chunk_tokens,
            queue_bound=queue_bound,
            machines=machines,
            step=profile.prefill,
        )

    def order(self, order: Order) -> None:
        id_ = order.request.id, order.place.attempt
        self._orders[id_] = order
        place = order.place
        self._feed(Ordered(*id_, order.tokens, place.rank, place.compute_seconds, place.ttft_left, place.awaits))

    def has(self, request: RequestId) -> bool:
        """Whether it is here, in any attempt."""
        return any(id_ == request for id_, _ in self._orders)

    def cancel(self, request: RequestId, attempt: int) -> None:
        if (request, attempt) in self._orders:
            self._feed(Dropped(request, attempt))
            order = self._orders.get((request, attempt))
            if order is not None and order.began is None:
                # It was dropped from the queue: no `Drain` follows.
                self._forget((request, attempt))

    def _feed(self, event: PrefillEvent) -> None:
        for action in self._instance.handle(event, self._clock.now):
            match action:
                case Load(request, attempt):
                    self._load(self._orders[request, attempt])
                case Step(chunks):
                    self._step(chunks)
                case Drain(request, attempt):
                    self._clock.soon(self._drained, (request, attempt))
                case GiveUp(request, attempt, reason):
                    if self._orders[request, attempt].began is None:
                        self._forget((request, attempt))
                    self._tell(PrefillFailed(request, attempt, self.id, reason, late=True))
                case Refuse(request, attempt, reason):
                    del self._orders[request, attempt]
                    self._tell(PrefillFailed(request, attempt, self.id, reason))

    def _load(self, order: Order) -> None:
        """Fetch what was ordered, then copy what the node has into VRAM."""
        now = order.began = self._clock.now
        fetch, keys = order.place.fetch, order.request.keys
        self.node.load(keys, now)
        if fetch is not None:
            wanted = keys[: fetch.first + fetch.count]
            order.fetched = self.node.fetch(self._nodes[fetch.source.id], wanted, now)
        order.pinned = keys[: self.node.leading(keys)]
        self.node.pin(order.pinned)
        order.hit = min(len(order.pinned), hit_limit(order.tokens, self._profile.block_tokens))
        ready = self.node.arrival(keys[: order.hit], now)
        ready += order.hit * self._profile.block_bytes / self._profile.host_bytes_per_second
        self._clock.at(ready, self._feed, Loaded(order.request.id, order.place.attempt, order.hit))

    def _step(self, chunks: tuple[Chunk, ...]) -> None:
        costs, seconds = self._costs, self._costs.fixed
        for chunk in chunks:
            end = chunk.start + chunk.count
            seconds += costs.per_token * chunk.count + costs.per_token_squared * (end * end - chunk.start * chunk.start)
        self.busy_seconds += seconds
        tokens = sum(chunk.count for chunk in chunks)
        for chunk in chunks:
            order = self._orders[chunk.request, chunk.attempt]
            order.compute_seconds += seconds * chunk.count / tokens
            self._stream(order, chunk)
        if self._stages is None:
            done = self._clock.now + seconds
        else:
            passed, done = self._stages.take(seconds, tokens, self._clock.now)
            self._clock.at(passed, self._feed, Passed())
        self._clock.at(done, self._done, chunks, seconds)

    def _stream(self, order: Order, chunk: Chunk) -> None:
        """Layer by layer, while the chunk computes: the links are booked from its start on."""
        if order.node is self.node:
            return
        start = 0 if chunk.start == order.hit * self._profile.block_tokens else chunk.start
        nbytes = (chunk.start + chunk.count - start) * self._profile.kv_bytes_per_token
        order.arrived = transfer(self.node.link, order.node.link, nbytes, self._clock.now)

    def _done(self, chunks: tuple[Chunk, ...], seconds: float) -> None:
        for chunk in chunks:
            order = self._orders[chunk.request, chunk.attempt]
            order.request.computed_tokens += chunk.count
            if chunk.last and order.place.attempt == order.request.attempt:
                self._finish(order)
        self._feed(StepDone(seconds=seconds))

    def _finish(self, order: Order) -> None:
        now, request = self._clock.now, order.request
        cached = order.hit * self._profile.block_tokens
        request.take_first(now, cached, min(order.fetched, order.hit) * self._profile.block_tokens)
        self.node.store(request.keys)
        computed = order.tokens - cached
        queued = now - order.came - order.compute_seconds
        attempt = order.place.attempt
        self._tell(PrefillDone(request.id, attempt, self.id, computed, cached, queued, order.compute_seconds))
        if request.output >= request.output_tokens:
            self._on_finished(order, self.id)
        else:
            self._hand_over(order, max(now, order.arrived))

    def _drained(self, id_: _Id) -> None:
        self._forget(id_)
        self._feed(KvStored(*id_))

    def _forget(self, id_: _Id) -> None:
        order = self._orders.pop(id_)
        self.node.unpin(order.pinned)
