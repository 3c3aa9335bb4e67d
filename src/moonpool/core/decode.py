"""One decode instance: who joins the batch, who steps, who gives way when pages run out, when pages are free again.

A pure state machine, driven by `live/decode.py` and the simulator. A request is in one of these states:

    awaiting -> ready -> loading -> running -> draining -> gone
        |         |         |          |  ^
        +---------+-> gone  +----------+--+   dropped / stopped / finished / preempted

`awaiting`: its KV is on the way to this node; `ready`: it is all there, pages and a slot are not. Requests that are
ready join in the order they were handed over. The newest of the last rank is preempted when a running one needs a
page and none is free (DESIGN §4.6); the oldest of the first rank never is, so somebody always gets done.

A step costs no time in proportion to its batch, but for its rows: who steps along is known by the step in which it
began to, its tokens grow with the number of steps, and who needs a page next is at the top of a heap.
"""

from __future__ import annotations

import enum
import heapq
from bisect import insort
from dataclasses import dataclass, field

from msgspec import Struct

from moonpool.core.cost import DecodeCost
from moonpool.core.pages import PagePool, pages_for
from moonpool.core.vocabulary import RequestId


class HandedOver(Struct, frozen=True):
    """A request with `tokens` tokens, the last of which has no KV yet, and at most `most_tokens` in the end."""

    request: RequestId
    attempt: int
    tokens: int
    most_tokens: int
    rank: int = 0
    """Of its priority class: the smaller, the sooner; the largest gives way first."""
    tbt_limit: float | None = None
    """Seconds between tokens; where they could not be kept it is refused. None: it is taken."""


class KvArrived(Struct, frozen=True):
    """All KV of the request is on this node."""

    request: RequestId
    attempt: int


class KvLoaded(Struct, frozen=True):
    """The KV is in the request's pages."""

    request: RequestId
    attempt: int


class Stepped(Struct, frozen=True):
    """The step in flight has ended; each of its requests has one token more, `finished` ones are complete."""

    finished: tuple[RequestId, ...]
    failed: bool = False
    """Nothing of the step counts; its requests are dropped."""
    steps: int = 1
    """The simulator takes several at once, at most `steps_ahead`."""


class KvStored(Struct, frozen=True):
    """Answer to `Drain`: no I/O touches the request's pages any more."""

    request: RequestId
    attempt: int


class Dropped(Struct, frozen=True):
    """Cancelled, replaced by a newer attempt, or its KV did not come."""

    request: RequestId
    attempt: int


class Stopped(Struct, frozen=True):
    """The gateway found a stop string: finish normally."""

    request: RequestId
    attempt: int


class LoadKv(Struct, frozen=True):
    """Copy the KV of `tokens - 1` tokens into these pages, then say `KvLoaded`."""

    request: RequestId
    attempt: int
    pages: tuple[int, ...]


class StepRow(Struct, frozen=True):
    request: RequestId
    attempt: int
    tokens: int
    pages: tuple[int, ...]


class Step(Struct, frozen=True):
    """Compute the last token of each row and draw the next, then say `Stepped`."""

    rows: tuple[StepRow, ...]
    """Empty where the driver keeps up by itself (`DecodeInstance`)."""
    batch: int
    """Rows."""
    tokens: int
    """Of all rows together."""
    joins: tuple[RequestId, ...] = ()
    """Rows that the step before did not have."""
    pauses: tuple[RequestId, ...] = ()
    """Those of the step before that sit this one out. What else is missing has left by a `Drain`."""


class Ending(enum.Enum):
    FINISHED = "finished"
    PREEMPTED = "preempted"
    DROPPED = "dropped"


class Drain(Struct, frozen=True):
    """The request has left the batch. Keep its whole blocks in the pool unless dropped, then say `KvStored`."""

    request: RequestId
    attempt: int
    tokens: int
    pages: tuple[int, ...]
    ending: Ending


class Refuse(Struct, frozen=True):
    request: RequestId
    attempt: int
    reason: str
    limit: bool = False
    """Because of its limit, or of that of others here."""


LEAST_STEPS = 4
"""Measurements before the cost model may refuse anybody."""
LEAST_PATIENCE_INTERVALS = 10
"""So many intervals a newcomer may wait for room, however short answers are: in one of a hundred tokens it attains."""
_STAY_WEIGHT = 0.1

DecodeEvent = HandedOver | KvArrived | KvLoaded | Stepped | KvStored | Dropped | Stopped
DecodeAction = LoadKv | Step | Drain | Refuse


class _State(enum.Enum):
    AWAITING = "awaiting"
    READY = "ready"
    LOADING = "loading"
    RUNNING = "running"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class _Request:
    request: RequestId
    attempt: int
    tokens: int
    """While it steps along: when it began to."""
    rank: int
    serial: int
    tbt_limit: float | None = None
    state: _State = _State.AWAITING
    since: float = 0.0
    """When it got its pages."""
    came: int = 0
    """Its tokens at that time."""
    pages: list[int] = field(default_factory=list)
    ending: Ending | None = None
    """Set while a step or load still touches the pages; it drains when that has ended."""
    steps: bool = False
    """It takes part in the steps."""
    began: int = 0
    """With step number so much."""
    full_at: int = 0
    """The number of the step for which it will need a page more."""


class DecodeInstance:
    def __init__(
        self,
        *,
        pages: int,
        block_tokens: int,
        slots: int,
        queue_bound: int,
        cost: DecodeCost | None = None,
        tells_rows: bool = True,
    ) -> None:
        """`cost`: fed by the driver with measured steps; without it no step is too slow.

        `tells_rows`: False for a driver that knows them from `joins`, `pauses` and `Drain`.
        """
        self.pool = PagePool(pages)
        self._cost = cost
        self._tells_rows = tells_rows
        self._stay: float | None = None
        """Seconds that a request has its pages, of late."""
        self._produced = 0.0
        """Tokens that it produces in that time."""
        self._block_tokens = block_tokens
        self._slots = slots
        self._queue_bound = queue_bound
        self._requests: dict[RequestId, _Request] = {}
        self._ready: list[_Request] = []
        """In the order in which they were handed over."""
        self._batch: list[_Request] = []
        """Who is running, by precedence."""
        self._came: list[_Request] = []
        """Those of the batch that have not stepped yet."""
        self._short: dict[_Request, None] = {}
        """Those of the batch that wait for a page."""
        self._paused: list[_Request] = []
        """Those that have sat out since the last step began, and that no `Step` has told of."""
        self._filling: list[tuple[int, int, _Request]] = []
        """A heap of those that step, by `full_at`. Some have left since, or have got their page."""
        self._rows = 0
        """How many step."""
        self._steps = 0
        """That have ended."""
        self._in_step = False
        self._ending: dict[_Request, None] = {}
        """Those that leave when the step has ended, whatever it brings."""
        self._loading = 0
        self._draining = 0
        self._draining_pages = 0
        self._context_tokens = 0
        """Of the batch."""
        self._outside_tokens = 0
        """Of those that do not run yet."""
        self._outside_pages = 0
        """That those need which have none yet."""
        self._limits: dict[float, int] = {}
        """TBT limits of all that do not drain, and how many have each."""
        self._serial = 0
        self.preemptions = 0

    @property
    def running(self) -> int:
        return len(self._batch)

    @property
    def queued(self) -> int:
        return len(self._requests) - len(self._batch) - self._draining

    @property
    def context_tokens(self) -> int:
        return self._context_tokens

    @property
    def steps_ahead(self) -> int:
        """How often the step in flight could be repeated, itself counted, before a request needs another page."""
        filling = self._filling
        while not (filling[0][2].steps and filling[0][2].full_at == filling[0][0]):
            heapq.heappop(filling)
        return filling[0][0] - self._steps

    def handle(self, event: DecodeEvent, now: float) -> tuple[DecodeAction, ...]:
        actions: list[DecodeAction] = []
        match event:
            case HandedOver():
                self._take(event, actions)
            case KvArrived():
                if (r := self._find(event)) and r.state is _State.AWAITING:
                    r.state = _State.READY
                    insort(self._ready, r, key=_serial)
            case KvLoaded():
                if (r := self._find(event)) and r.state is _State.LOADING:
                    r.state = _State.RUNNING
                    self._loading -= 1
                    self._outside_tokens -= r.tokens
                    self._context_tokens += r.tokens
                    insort(self._batch, r, key=_precedence)
                    self._came.append(r)
                    if r.ending is not None:
                        self._drain(r, r.ending, actions)
            case Stepped():
                self._stepped(event, actions)
            case KvStored():
                if (r := self._find(event)) and r.state is _State.DRAINING:
                    self._draining -= 1
                    self._draining_pages -= len(r.pages)
                    self.pool.release(r.pages)
                    self._note_stay(now - r.since, r.tokens - r.came)
                    del self._requests[r.request]
            case Dropped():
                self._end(self._find(event), Ending.DROPPED, actions)
            case Stopped():
                self._end(self._find(event), Ending.FINISHED, actions)
        if self._ready:
            self._admit(actions, now)
        if not self._in_step and self._batch:
            self._start_step(actions)
        return tuple(actions)

    def _find(self, event: KvArrived | KvLoaded | KvStored | Dropped | Stopped) -> _Request | None:
        r = self._requests.get(event.request)
        return r if r is not None and r.attempt == event.attempt else None

    def _take(self, event: HandedOver, actions: list[DecodeAction]) -> None:
        known = self._requests.get(event.request)
        if known is not None:
            if known.attempt != event.attempt:
                actions.append(Refuse(event.request, event.attempt, f"attempt {known.attempt} is still leaving"))
            return
        most = pages_for(event.most_tokens, self._block_tokens)
        if most > self.pool.count:
            actions.append(
                Refuse(event.request, event.attempt, f"it may need {most} pages, this instance has {self.pool.count}")
            )
        elif self.queued >= self._queue_bound:
            actions.append(Refuse(event.request, event.attempt, f"{self._queue_bound} requests wait here already"))
        elif (reason := self._breaks_limit(event)) is not None:
            actions.append(Refuse(event.request, event.attempt, reason, limit=True))
        else:
            self._serial += 1
            self._requests[event.request] = _Request(
                event.request, event.attempt, event.tokens, event.rank, self._serial, event.tbt_limit
            )
            self._outside_tokens += event.tokens
            self._outside_pages += pages_for(event.tokens, self._block_tokens)
            self._count_limit(event.tbt_limit, 1)

    def _breaks_limit(self, event: HandedOver) -> str | None:
        """Why the newcomer's time between tokens could not be kept, or not that of those that are here with it."""
        here = len(self._requests) - self._draining
        if event.tbt_limit is None or not here:
            return None
        limit = min(event.tbt_limit, min(self._limits, default=event.tbt_limit))
        batch, tokens = here + 1, self._context_tokens + self._outside_tokens + event.tokens
        if self._cost is not None and self._cost.fit.observations >= LEAST_STEPS:
            step = self._cost.seconds(batch, tokens)
            if step > limit:
                return f"a step would take {step:.3f} s with it, the limit is {limit:g} s"
        wait = self._wait_for_room(here, event.tokens)
        if wait > self._patience(event.tbt_limit, batch, tokens):
            return f"room for it is expected in {wait:.1f} s, its limit is {event.tbt_limit:g} s between tokens"
        return None

    def _wait_for_room(self, here: int, tokens: int) -> float:
        """Seconds until pages and a slot have come free for one more: in the time of a stay all of them do.

        `here`: how many do not drain. 0 as long as nobody has left: nothing is known then.
        """
        if self._stay is None:
            return 0.0
        needed = self._pages_needed() + here + pages_for(tokens, self._block_tokens)
        lacking, inside = needed - self.pool.count, len(self._batch) + self._loading
        share = max(lacking / max(self.pool.used, 1), (here + 1 - self._slots) / max(inside, 1), 0.0)
        return self._stay * share

    def _pages_needed(self) -> int:
        """By the tokens of all that do not drain."""
        return self.pool.used - self._draining_pages + self._outside_pages + len(self._short)

    def _patience(self, limit: float, batch: int, tokens: int) -> float:
        """Seconds that it may wait: the slowest tenth of an answer's intervals holds that, the others being a step."""
        spare = limit if self._cost is None else max(limit - self._cost.seconds(batch, tokens), 0.0)
        return spare * max(self._produced / 10, LEAST_PATIENCE_INTERVALS)

    def _note_stay(self, seconds: float, produced: int) -> None:
        if self._stay is None:
            self._stay, self._produced = seconds, float(produced)
        else:
            self._stay += _STAY_WEIGHT * (seconds - self._stay)
            self._produced += _STAY_WEIGHT * (produced - self._produced)

    def _admit(self, actions: list[DecodeAction], now: float) -> None:
        """Load what is ready while slots and pages last, leaving each running request a page to grow into."""
        ready = self._ready
        while ready:
            r, inside = ready[0], len(self._batch) + self._loading
            needed = pages_for(r.tokens, self._block_tokens)
            if inside >= self._slots or not self.pool.can_allocate(needed + inside):
                return
            del ready[0]
            r.pages = self.pool.allocate(needed)
            self._outside_pages -= needed
            r.state = _State.LOADING
            r.since, r.came = now, r.tokens
            self._loading += 1
            actions.append(LoadKv(r.request, r.attempt, tuple(r.pages)))

    def _start_step(self, actions: list[DecodeAction]) -> None:
        self._give_pages(actions)
        joins, self._came = self._came, []
        for r in joins:
            r.steps, r.began = True, self._steps
            self._note_full(r)
        self._rows += len(joins)
        if self._rows:
            self._in_step = True
            actions.append(self._step(joins))

    def _give_pages(self, actions: list[DecodeAction]) -> None:
        """To those that need one more; who finds none sits out."""
        full, filling = dict(self._short), self._filling
        while filling and filling[0][0] <= self._steps:
            at, _, r = heapq.heappop(filling)
            if r.steps and r.full_at == at:
                full[r] = None
        # Oldest first: when pages run out it is the newest that give way, so they run no more when their turn comes.
        for r in sorted(full, key=_precedence) if full else ():
            if r.state is not _State.RUNNING:
                continue
            if self._grow(r, actions):
                if r.steps:
                    self._note_full(r)
                else:
                    del self._short[r]
                    self._came.append(r)
            elif r.state is _State.RUNNING and r.steps:
                self._pause(r)
                self._short[r] = None
                self._paused.append(r)

    def _step(self, joins: list[_Request]) -> Step:
        rows: tuple[StepRow, ...] = ()
        if self._tells_rows:
            rows = tuple(
                [StepRow(r.request, r.attempt, self._tokens(r), tuple(r.pages)) for r in self._batch if r.steps]
            )
        tokens = self._context_tokens - sum([r.tokens for r in self._short])
        pauses = tuple([r.request for r in self._paused if r.state is _State.RUNNING])
        self._paused.clear()
        return Step(rows, self._rows, tokens, tuple([r.request for r in joins]), pauses)

    def _tokens(self, r: _Request) -> int:
        return r.tokens + self._steps - r.began if r.steps else r.tokens

    def _note_full(self, r: _Request) -> None:
        """Its pages hold so many tokens; the step after that needs one more."""
        r.full_at = r.began + len(r.pages) * self._block_tokens - r.tokens + 1
        heapq.heappush(self._filling, (r.full_at, r.serial, r))

    def _pause(self, r: _Request) -> None:
        """It takes part in the steps no more."""
        r.tokens, r.steps = self._tokens(r), False
        self._rows -= 1

    def _grow(self, r: _Request, actions: list[DecodeAction]) -> bool:
        """A page for the token to compute; False if the request must sit this step out."""
        if not self.pool.can_allocate(1):
            # Pages of who is leaving come free soon, and who is loading can be asked to leave once it runs.
            if not self._draining and not self._loading and len(self._batch) > 1:
                self.preemptions += 1
                self._drain(self._batch[-1], Ending.PREEMPTED, actions)
            return False
        r.pages += self.pool.allocate(1)
        return True

    def _stepped(self, event: Stepped, actions: list[DecodeAction]) -> None:
        if not self._in_step:
            return
        self._in_step = False
        leaving, self._ending = self._ending, {}
        if event.failed:
            for r in [r for r in self._batch if r.steps]:
                self._drain(r, Ending.DROPPED, actions)
            return
        self._steps += event.steps
        self._context_tokens += event.steps * self._rows
        for id_ in event.finished:
            done = self._requests.get(id_)
            if done is not None and done.steps:
                leaving[done] = None
        for r in sorted(leaving, key=_precedence):
            self._drain(r, r.ending or Ending.FINISHED, actions)

    def _end(self, r: _Request | None, ending: Ending, actions: list[DecodeAction]) -> None:
        if r is None or r.state is _State.DRAINING:
            return
        if r.state in (_State.AWAITING, _State.READY):
            if r.state is _State.READY:
                self._ready.remove(r)
            del self._requests[r.request]
            self._outside_tokens -= r.tokens
            self._outside_pages -= pages_for(r.tokens, self._block_tokens)
            self._count_limit(r.tbt_limit, -1)
            actions.append(Drain(r.request, r.attempt, r.tokens, (), ending))
        elif r.state is _State.LOADING:
            r.ending = ending
        elif r.steps and self._in_step:
            r.ending = ending
            self._ending[r] = None
        else:
            self._drain(r, ending, actions)

    def _drain(self, r: _Request, ending: Ending, actions: list[DecodeAction]) -> None:
        """Out of the batch."""
        self._batch.remove(r)
        if r.steps:
            self._pause(r)
        elif r in self._short:
            del self._short[r]
        else:
            self._came.remove(r)
        self._context_tokens -= r.tokens
        self._draining += 1
        self._draining_pages += len(r.pages)
        self._count_limit(r.tbt_limit, -1)
        r.state = _State.DRAINING
        r.ending = ending
        actions.append(Drain(r.request, r.attempt, r.tokens, tuple(r.pages), ending))

    def _count_limit(self, limit: float | None, count: int) -> None:
        if limit is not None:
            left = self._limits[limit] = self._limits.get(limit, 0) + count
            if not left:
                del self._limits[limit]

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        held = [page for r in self._requests.values() for page in r.pages]
        assert len(held) == len(set(held)) == self.pool.used
        requests = self._requests.values()
        running = [r for r in requests if r.state is _State.RUNNING]
        outside = [r for r in requests if r.state in (_State.AWAITING, _State.READY)]
        assert self._batch == sorted(running, key=_precedence)
        assert self._context_tokens == sum(self._tokens(r) for r in running)
        assert self._ready == sorted((r for r in requests if r.state is _State.READY), key=_serial)
        assert self._loading == sum(r.state is _State.LOADING for r in requests)
        assert self._draining == sum(r.state is _State.DRAINING for r in requests)
        for r in requests:
            assert bool(r.pages) == (r.state in (_State.LOADING, _State.RUNNING, _State.DRAINING))
        steps = [r for r in requests if r.steps]
        assert self._rows == len(steps)
        assert self._in_step == bool(steps)
        assert all(r.state is _State.RUNNING and self._tokens(r) <= len(r.pages) * self._block_tokens for r in steps)
        assert sorted(map(_serial, [*steps, *self._short, *self._came])) == sorted(map(_serial, running))
        assert all(r.steps for r in self._ending)
        assert all((r.full_at, r.serial, r) in self._filling for r in steps)
        loading = sum(r.tokens for r in requests if r.state is _State.LOADING)
        assert self._outside_tokens == sum(r.tokens for r in outside) + loading
        assert self._outside_pages == sum(pages_for(r.tokens, self._block_tokens) for r in outside)
        here = [r for r in requests if r.state is not _State.DRAINING]
        assert self._pages_needed() == sum(pages_for(self._tokens(r), self._block_tokens) for r in here)
        limits = [r.tbt_limit for r in here if r.tbt_limit is not None]
        assert self._limits == {limit: limits.count(limit) for limit in limits}


def _serial(r: _Request) -> int:
    return r.serial


def _precedence(r: _Request) -> tuple[int, int]:
    """Sorts who keeps its pages first: sooner rank, then earlier hand-over."""
    return (r.rank, r.serial)
