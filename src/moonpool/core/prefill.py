"""One prefill instance: which order loads, which chunks are computed next, when pages are free again.

A pure state machine like the Conductor: `handle(event, now) -> actions`, driven by `live/prefill.py` and the simulator.
An order is in one of these states:

    queued -> loading -> ready -> draining -> gone
       |         |          |        ^
       |         +----------+--------+   dropped: no more compute, pages stay until the driver's I/O has ended
       +-> gone                          dropped before it had pages

Orders get pages in arrival order and never overtake each other for them, but for those that wait for blocks which an
earlier order computes: they load when that one is gone, and hold no pages before. An order waits for earlier ones
only, and no longer than those live, so nothing waits in a ring or for ever.
A step packs chunks of ready orders in arrival order up to `chunk_tokens`, so short prompts share a step. Layer-wise
stores keep a page busy after its last step: only `KvStored` frees it (PAPER §3).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from msgspec import Struct

from moonpool.core.pages import PagePool, pages_for
from moonpool.core.vocabulary import RequestId


class Ordered(Struct, frozen=True):
    """A prompt of `tokens` tokens is to be prefilled here."""

    request: RequestId
    attempt: int
    tokens: int
    after: tuple[RequestId, int] | None = None
    """It loads once this order is over, which computes blocks of its prefix; one that is not here is not waited for."""


class Loaded(Struct, frozen=True):
    """The KV of the first `blocks` blocks is in the order's pages."""

    request: RequestId
    attempt: int
    blocks: int


class StepDone(Struct, frozen=True):
    """The step in flight has ended. `failed`: nothing of it counts and its orders are dropped."""

    failed: bool = False


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
    attempt: int
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


PrefillEvent = Ordered | Loaded | StepDone | KvStored | Dropped
PrefillAction = Load | Step | Drain | Refuse


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


_Id = tuple[RequestId, int]


class PrefillInstance:
    def __init__(self, *, pages: int, block_tokens: int, chunk_tokens: int, queue_bound: int) -> None:
        self.pool = PagePool(pages)
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self._queue_bound = queue_bound
        self._orders: dict[_Id, _Order] = {}
        self._stepping: tuple[_Order, ...] = ()

    @property
    def queued(self) -> int:
        return sum(o.state is not _State.DRAINING for o in self._orders.values())

    @property
    def queued_tokens(self) -> int:
        return sum(o.tokens - o.computed for o in self._orders.values() if o.state is not _State.DRAINING)

    def handle(self, event: PrefillEvent, now: float) -> tuple[PrefillAction, ...]:
        del now  # order by slack comes with priority classes
        actions: list[PrefillAction] = []
        match event:
            case Ordered():
                self._take(event, actions)
            case Loaded():
                self._loaded(event, actions)
            case StepDone():
                self._step_done(event, actions)
            case KvStored(request, attempt):
                self._stored((request, attempt))
            case Dropped(request, attempt):
                self._drop(self._orders.get((request, attempt)), actions)
        self._start_loads(actions)
        self._start_step(actions)
        return tuple(actions)

    def _take(self, event: Ordered, actions: list[PrefillAction]) -> None:
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
            after = event.after if event.after in self._orders else None
            self._orders[id_] = _Order(event.request, event.attempt, event.tokens, after)

    def _start_loads(self, actions: list[PrefillAction]) -> None:
        for order in self._orders.values():
            if order.state is not _State.QUEUED or order.after in self._orders:
                continue
            needed = pages_for(order.tokens, self._block_tokens)
            if not self.pool.can_allocate(needed):
                return
            order.pages = self.pool.allocate(needed)
            order.state = _State.LOADING
            actions.append(Load(order.request, order.attempt, tuple(order.pages)))

    def _loaded(self, event: Loaded, actions: list[PrefillAction]) -> None:
        order = self._orders.get((event.request, event.attempt))
        if order is None or order.state is not _State.LOADING:
            return
        order.computed = event.blocks * self._block_tokens
        if order.computed >= order.tokens:
            raise ValueError(f"{order.computed} of {order.tokens} tokens loaded: one must be left to compute")
        order.state = _State.READY

    def _start_step(self, actions: list[PrefillAction]) -> None:
        if self._stepping:
            return
        room = self._chunk_tokens
        chunks: list[Chunk] = []
        orders: list[_Order] = []
        for order in self._orders.values():
            if order.state is not _State.READY or room == 0:
                continue
            count = min(room, order.tokens - order.computed)
            last = order.computed + count == order.tokens
            chunks.append(Chunk(order.request, order.attempt, order.computed, count, last))
            orders.append(order)
            room -= count
        if chunks:
            self._stepping = tuple(orders)
            for order, chunk in zip(orders, chunks, strict=True):
                order.computed += chunk.count
            actions.append(Step(tuple(chunks)))

    def _step_done(self, event: StepDone, actions: list[PrefillAction]) -> None:
        orders, self._stepping = self._stepping, ()
        for order in orders:
            if event.failed:
                order.dropped = True
            if order.dropped or order.computed == order.tokens:
                self._drain(order, actions)

    def _drop(self, order: _Order | None, actions: list[PrefillAction]) -> None:
        if order is None or order.dropped:
            return
        order.dropped = True
        if order.state is _State.QUEUED:
            del self._orders[(order.request, order.attempt)]
        elif order.state is not _State.DRAINING and order not in self._stepping:
            self._drain(order, actions)

    def _drain(self, order: _Order, actions: list[PrefillAction]) -> None:
        order.state = _State.DRAINING
        actions.append(Drain(order.request, order.attempt))

    def _stored(self, id_: _Id) -> None:
        order = self._orders.get(id_)
        if order is not None and order.state is _State.DRAINING:
            self.pool.release(order.pages)
            del self._orders[id_]

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        held = [page for order in self._orders.values() for page in order.pages]
        assert len(held) == len(set(held)) == self.pool.used
        for order in self._orders.values():
            assert 0 <= order.computed <= order.tokens
            assert bool(order.pages) == (order.state is not _State.QUEUED)
        assert all(self._orders.get((o.request, o.attempt)) is o for o in self._stepping)
