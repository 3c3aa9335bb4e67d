"""One prefill instance: which order loads, which chunks are computed next, when pages are free again.

A pure state machine like the Conductor: `handle(event, now) -> actions`, driven by `live/prefill.py` and the simulator.
An order is in one of these states:

    queued -> loading <-> ready -> draining -> gone
       |         |          |        ^
       |         +----------+--------+   dropped: no more compute, pages stay until the driver's I/O has ended
       +-> gone                          dropped before it had pages

A ready one may be computed while later layers of its prefix still come (PAPER §3); where they do not come in time it
is loading again, and goes on from the blocks that did.

Orders get pages, and ready ones chunks of a step of up to `chunk_tokens`, in the order of their line (`line.py`): short
prompts share a step where that does not make one of them late, and go between the chunks of a long one that can afford
it. Those that wait for blocks which an
order before them computes load when that one is gone, and hold no pages before; they wait for earlier orders only, and
no longer than those live, so nothing waits in a ring or for ever. Layer-wise stores keep a page busy after its last
step: only `KvStored` frees it (PAPER §3). One that has not begun and cannot have its first token in time any more is
given up.

An instance may be a pipeline group: its machines hold some layers each, and steps follow one another through them
(PAPER §3). The next one begins as soon as the first machine has `Passed` the last one on; chunks of one prompt are so
under way in several machines at once, each behind the one that it attends to. Steps are done in the order in which
they began. To the Conductor a group is one instance like any other, with costs of its own. Its chunks are as small as
what is measured of its steps makes worth it (`chunks.py`).
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from dataclasses import dataclass, field

from msgspec import Struct

from moonpool.core.chunks import pipeline_chunk
from moonpool.core.cost import PrefillCoefficients, PrefillCost
from moonpool.core.line import FOREVER, MARGIN, Line, Turn
from moonpool.core.pages import PagePool, pages_for
from moonpool.core.vocabulary import Count, RequestId


class Ordered(Struct, frozen=True):
    """A prompt of `tokens` tokens is to be prefilled here."""

    request: RequestId
    attempt: int
    tokens: int
    rank: int = 0
    """Of its priority class: the smaller, the sooner."""
    seconds: float = 0.0
    """Predicted for computing it; where it is 0 for all, they go in order of arrival."""
    ttft_left: float | None = None
    """Seconds from now until its first token must come; None: it is computed, however late."""
    after: tuple[RequestId, int] | None = None
    """It loads once this order is over, which computes blocks of its prefix; one that is not here is not waited for."""


class Loaded(Struct, frozen=True):
    """The KV of the first `blocks` blocks is in the order's pages, or comes there, layer by layer, before it is needed.

    Once more for an order that was in `StepDone.again`, when no step with it is in flight any more.
    """

    request: RequestId
    attempt: int
    blocks: int


class Passed(Struct, frozen=True):
    """The first machine of a pipeline group has computed its layers of the step that began last."""


class StepDone(Struct, frozen=True):
    """The step that began first of those in flight has ended.

    `failed`: nothing of it counts and its orders are dropped.
    """

    failed: bool = False
    again: tuple[tuple[RequestId, int], ...] = ()
    """Of these a layer of the prefix did not come: what was computed of them, in this step and in those in flight, does
    not count. `Loaded` follows."""
    seconds: float = 0.0
    """That it took the slowest machine; 0 where this says nothing of another step."""


class KvStored(Struct, frozen=True):
    """Answer to `Drain`: no I/O touches the order's pages any more."""

    request: RequestId
    attempt: int


class Dropped(Struct, frozen=True):
    """Cancelled, or replaced by a newer attempt, or its transfers failed."""

    request: RequestId
    attempt: int


class Load(Struct, frozen=True):
    """Bring what the pool has of the prefix into the first of these pages, then say `Loaded`."""

    request: RequestId
    attempt: int
    pages: tuple[int, ...]


class Chunk(Struct, frozen=True):
    request: RequestId
    attempt: Count
    start: int
    count: int
    last: bool
    """The chunk ends the prompt: draw the next token."""


class Step(Struct, frozen=True):
    """Compute these chunks as one packed batch, then say `StepDone`."""

    chunks: tuple[Chunk, ...]


class Drain(Struct, frozen=True):
    """No more compute for this order: finish its I/O, then say `KvStored`."""

    request: RequestId
    attempt: int


class Refuse(Struct, frozen=True):
    """The order cannot be taken."""

    request: RequestId
    attempt: int
    reason: str


class GiveUp(Struct, frozen=True):
    """The order cannot be computed in time any more; `Drain` follows if it has pages, else it is gone."""

    request: RequestId
    attempt: int
    reason: str


PrefillEvent = Ordered | Loaded | Passed | StepDone | KvStored | Dropped
PrefillAction = Load | Step | Drain | Refuse | GiveUp


class _State(enum.Enum):
    QUEUED = "queued"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class _Order:
    request: RequestId
    attempt: int
    tokens: int
    after: tuple[RequestId, int] | None
    state: _State = _State.QUEUED
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    dropped: bool = False
    came: float = 0.0
    begun: bool = False
    """A chunk of it has been computed, or is."""
    flying: int = 0
    """Steps in flight with a chunk of it."""
    per_token: float = 0.0
    """Predicted seconds of each token to compute."""
    loaded: int = 0
    """Tokens."""

    @property
    def is_computable(self) -> bool:
        return self.state is _State.READY and self.computed < self.tokens and not self.dropped


TRUST = 0.8
"""Of the predicted work, when it is asked whether an order is too late: predictions are not exact."""

_Id = tuple[RequestId, int]


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step."""

    chunks: tuple[Chunk, ...]
    orders: tuple[_Order, ...]


class PrefillInstance:
    def __init__(
        self,
        *,
        pages: int,
        block_tokens: int,
        chunk_tokens: int,
        queue_bound: int,
        machines: int = 1,
        step: PrefillCoefficients | None = None,
    ) -> None:
        """`chunk_tokens`: most of a step. `step`: what one of a pipeline's `machines` is thought to take for one."""
        self.pool = PagePool(pages)
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self._queue_bound = queue_bound
        self._orders: dict[_Id, _Order] = {}
        self._machines = machines
        self._step_cost = PrefillCost(step or PrefillCoefficients())
        self._flying: deque[_Flight] = deque()
        """Steps in the order in which they began."""
        self._is_entered = False
        """The last of them has not left the first machine, which is all there is where there is no pipeline."""
        self._line: Line[_Order] = Line()
        self._turns: dict[_Id, Turn[_Order]] = {}
        """Of the orders in line: all but those that drain."""
        self._without_pages = 0
        self._computable = 0
        """Orders with tokens that are in no step yet."""
        self._latest: list[tuple[float, _Id]] = []
        """A heap: when they must begin at the latest. Some have begun or are gone."""

    @property
    def queued(self) -> int:
        return len(self._turns)

    @property
    def queued_tokens(self) -> int:
        return sum(order.tokens - order.computed for order in self._line)

    def handle(self, event: PrefillEvent, now: float) -> tuple[PrefillAction, ...]:
        actions: list[PrefillAction] = []
        match event:
            case Ordered():
                self._take(event, actions, now)
            case Loaded():
                self._loaded(event, actions)
            case Passed():
                self._is_entered = False
            case StepDone():
                self._step_done(event, actions)
            case KvStored(request, attempt):
                self._stored((request, attempt))
            case Dropped(request, attempt):
                self._drop(self._orders.get((request, attempt)), actions)
        if self._latest and self._latest[0][0] < now:
            self._give_up_late(actions, now)
        if self._without_pages:
            self._start_loads(actions)
        self._start_step(actions, now)
        return tuple(actions)

    def _take(self, event: Ordered, actions: list[PrefillAction], now: float) -> None:
        id_ = (event.request, event.attempt)
        if id_ in self._orders:
            return
        needed = pages_for(event.tokens, self._block_tokens)
        if needed > self.pool.count:
            reason = f"the prompt needs {needed} pages, this instance has {self.pool.count}"
            actions.append(Refuse(*id_, reason))
        elif self.queued >= self._queue_bound:
            actions.append(Refuse(*id_, f"{self._queue_bound} prompts wait here already"))
        else:
            after = self._waits_for(event)
            order = _Order(event.request, event.attempt, event.tokens, after, came=now)
            order.per_token = event.seconds / event.tokens
            limit = FOREVER if event.ttft_left is None else now + event.ttft_left
            turn = Turn(order, event.rank, event.seconds, limit)
            self._orders[id_], self._turns[id_] = order, turn
            self._line.join(turn, now)
            self._without_pages += 1
            if limit < FOREVER:
                heapq.heappush(self._latest, (limit - TRUST * event.seconds, id_))

    def _waits_for(self, event: Ordered) -> _Id | None:
        """One of a later rank is not waited for: others pass it."""
        if event.after is None or event.after not in self._orders:
            return None
        turn = self._turns.get(event.after)
        return event.after if turn is None or turn.rank <= event.rank else None

    def _give_up_late(self, actions: list[PrefillAction], now: float) -> None:
        latest = self._latest
        while latest and latest[0][0] < now:
            _, id_ = heapq.heappop(latest)
            order = self._orders.get(id_)
            if order is None or order.begun or order.dropped:
                continue
            reason = f"it has waited {now - order.came:.1f} s here and cannot have its first token in time any more"
            actions.append(GiveUp(*id_, reason))
            self._drop(order, actions)

    def _start_loads(self, actions: list[PrefillAction]) -> None:
        for order in self._line:
            if order.state is not _State.QUEUED or order.after in self._orders:
                continue
            needed = pages_for(order.tokens, self._block_tokens)
            if not self.pool.can_allocate(needed):
                return
            order.pages = self.pool.allocate(needed)
            order.state = _State.LOADING
            self._without_pages -= 1
            actions.append(Load(order.request, order.attempt, tuple(order.pages)))

    def _loaded(self, event: Loaded, actions: list[PrefillAction]) -> None:
        order = self._orders.get((event.request, event.attempt))
        if order is None or order.state is not _State.LOADING:
            return
        order.computed = order.loaded = event.blocks * self._block_tokens
        if order.computed >= order.tokens:
            raise ValueError(f"{order.computed} of {order.tokens} tokens loaded: one must be left to compute")
        if order.flying:
            raise ValueError(f"order {event.request} is in {order.flying} steps while it says what it loaded")
        order.state = _State.READY
        self._computable += not order.dropped
        turn, left = self._turns[(event.request, event.attempt)], order.tokens - order.computed
        if order.begun:
            self._line.work(turn, order.per_token * left)
        else:
            order.per_token = turn.seconds / left

    def _start_step(self, actions: list[PrefillAction], now: float) -> None:
        """A prompt that ends in the step has its first token when all of the step is computed: the others in it are so
        few that this is in time."""
        left = self._computable
        if self._is_entered or not left:
            return
        room, seconds, spare = self._chunk_tokens, 0.0, FOREVER
        chunks: list[Chunk] = []
        orders: list[_Order] = []
        for order in self._line:
            if room == 0 or not left:
                break
            if not order.is_computable:
                continue
            left -= 1
            if not chunks:
                room = self._most_tokens(order)
            count = min(room, order.tokens - order.computed)
            seconds += order.per_token * count
            if seconds > spare:
                break
            last = order.computed + count == order.tokens
            if last:
                spare = min(spare, self._spare(order, seconds, now))
            chunks.append(Chunk(order.request, order.attempt, order.computed, count, last))
            orders.append(order)
            room -= count
        if chunks:
            self._flying.append(_Flight(tuple(chunks), tuple(orders)))
            self._is_entered = True
            for order, chunk in zip(orders, chunks, strict=True):
                order.computed += chunk.count
                self._computable -= chunk.last
                order.begun = True
                order.flying += 1
            actions.append(Step(tuple(chunks)))

    def _most_tokens(self, first: _Order) -> int:
        """Of a step that this one is the first in."""
        waiting = len(self._turns) - 1
        return pipeline_chunk(first.tokens, first.loaded, self._machines, self._step_cost, self._chunk_tokens, waiting)

    def _spare(self, order: _Order, seconds: float, now: float) -> float:
        """That a step may take which ends this prompt after so many; one that is late anyway does not keep others."""
        left = self._turns[(order.request, order.attempt)].limit - now
        return FOREVER if seconds > left else max(left / (1.0 + MARGIN), seconds)

    def _step_done(self, event: StepDone, actions: list[PrefillAction]) -> None:
        flight = self._flying.popleft() if self._flying else _Flight((), ())
        if not self._flying:
            self._is_entered = False
        if self._machines > 1 and event.seconds:
            self._measure(flight, event.seconds)
        for order in flight.orders:
            order.flying -= 1
            if event.failed:
                self._computable -= order.is_computable
                order.dropped = True
            elif (order.request, order.attempt) in event.again and order.state is _State.READY:
                self._computable -= order.is_computable
                order.state = _State.LOADING
            if order.dropped or (order.computed == order.tokens and order.state is not _State.LOADING):
                if not order.flying:
                    self._drain(order, actions)
            elif order.state is _State.READY:
                left = order.per_token * (order.tokens - order.computed)
                self._line.work(self._turns[(order.request, order.attempt)], left)

    def _measure(self, flight: _Flight, seconds: float) -> None:
        tokens = sum(chunk.count for chunk in flight.chunks)
        squares = sum((chunk.start + chunk.count) ** 2 - chunk.start**2 for chunk in flight.chunks)
        self._step_cost.fit.observe(1.0, tokens, squares, seconds)

    def _drop(self, order: _Order | None, actions: list[PrefillAction]) -> None:
        if order is None or order.dropped:
            return
        self._computable -= order.is_computable
        order.dropped = True
        if order.state is _State.QUEUED:
            self._without_pages -= 1
            self._leave_line(order)
            del self._orders[(order.request, order.attempt)]
        elif order.state is not _State.DRAINING and not order.flying:
            self._drain(order, actions)

    def _drain(self, order: _Order, actions: list[PrefillAction]) -> None:
        order.state = _State.DRAINING
        self._leave_line(order)
        actions.append(Drain(order.request, order.attempt))

    def _leave_line(self, order: _Order) -> None:
        self._line.leave(self._turns.pop((order.request, order.attempt)))

    def _stored(self, id_: _Id) -> None:
        order = self._orders.get(id_)
        if order is not None and order.state is _State.DRAINING:
            self.pool.release(order.pages)
            del self._orders[id_]

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        self._line.check_integrity()
        waiting = [o for o in self._orders.values() if o.state is not _State.DRAINING]
        assert sorted(self._turns) == sorted((o.request, o.attempt) for o in waiting)
        assert sorted(map(id, self._line)) == sorted(map(id, waiting))
        assert self._without_pages == sum(o.state is _State.QUEUED for o in waiting)
        assert self._computable == sum(o.is_computable for o in waiting)
        held = [page for order in self._orders.values() for page in order.pages]
        assert len(held) == len(set(held)) == self.pool.used
        for order in self._orders.values():
            assert 0 <= order.computed <= order.tokens
            assert bool(order.pages) == (order.state is not _State.QUEUED)
        flying = [order for flight in self._flying for order in flight.orders]
        assert all(self._orders.get((o.request, o.attempt)) is o for o in flying)
        assert all(order.flying == flying.count(order) for order in self._orders.values())
        assert self._flying or not self._is_entered
