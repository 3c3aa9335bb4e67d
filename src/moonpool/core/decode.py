"""One decode instance: who joins the batch, who steps, who gives way when pages run out, when pages are free again.

A pure state machine, driven by `live/decode.py` and the simulator. A request is in one of these states:

    awaiting -> ready -> loading -> running -> draining -> gone
        |         |         |          |  ^
        +---------+-> gone  +----------+--+   dropped / stopped / finished / preempted

`awaiting`: its KV is on the way to this node; `ready`: it is all there, pages and a slot are not. Requests that are
ready join in the order they were handed over. The newest of the last rank is preempted when a running one needs a
page and none is free (DESIGN §4.6); the oldest of the first rank never is, so somebody always gets done.
"""

from __future__ import annotations

import enum
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


class DecodeInstance:
    def __init__(
        self, *, pages: int, block_tokens: int, slots: int, queue_bound: int, cost: DecodeCost | None = None
    ) -> None:
        """`cost`: fed by the driver with measured steps; without it no step is too slow."""
        self.pool = PagePool(pages)
        self._cost = cost
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
        self._loading = 0
        self._draining = 0
        self._context_tokens = 0
        """Of the batch."""
        self._stepping: tuple[_Request, ...] = ()
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
        size = self._block_tokens
        return min([len(r.pages) * size - r.tokens for r in self._stepping]) + 1

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
                    insort(self._batch, r, key=_precedence)
                    self._context_tokens += r.tokens
                    if r.ending is not None:
                        self._drain(r, r.ending, actions)
            case Stepped():
                self._stepped(event, actions)
            case KvStored():
                if (r := self._find(event)) and r.state is _State.DRAINING:
                    self._draining -= 1
                    self.pool.release(r.pages)
                    self._note_stay(now - r.since, r.tokens - r.came)
                    del self._requests[r.request]
            case Dropped():
                self._end(self._find(event), Ending.DROPPED, actions)
            case Stopped():
                self._end(self._find(event), Ending.FINISHED, actions)
        self._admit(actions, now)
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

    def _breaks_limit(self, event: HandedOver) -> str | None:
        """Why the newcomer's time between tokens could not be kept, or not that of those that are here with it."""
        here = [r for r in self._requests.values() if r.state is not _State.DRAINING]
        if event.tbt_limit is None or not here:
            return None
        limit = min([event.tbt_limit] + [r.tbt_limit for r in here if r.tbt_limit is not None])
        batch, tokens = len(here) + 1, sum(r.tokens for r in here) + event.tokens
        if self._cost is not None and self._cost.fit.observations >= LEAST_STEPS:
            step = self._cost.seconds(batch, tokens)
            if step > limit:
                return f"a step would take {step:.3f} s with it, the limit is {limit:g} s"
        wait = self._wait_for_room(here, event.tokens)
        if wait > self._patience(event.tbt_limit, batch, tokens):
            return f"room for it is expected in {wait:.1f} s, its limit is {event.tbt_limit:g} s between tokens"
        return None

    def _wait_for_room(self, here: list[_Request], tokens: int) -> float:
        """Seconds until pages and a slot have come free for one more: in the time of a stay all of them do.

        0 as long as nobody has left: nothing is known then.
        """
        if self._stay is None:
            return 0.0
        needed = sum(pages_for(r.tokens, self._block_tokens) for r in here) + len(here)
        lacking = needed + pages_for(tokens, self._block_tokens) - self.pool.count
        inside = [r for r in here if r.state in (_State.LOADING, _State.RUNNING)]
        share = max(lacking / max(self.pool.used, 1), (len(here) + 1 - self._slots) / max(len(inside), 1), 0.0)
        return self._stay * share

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
            r.state = _State.LOADING
            r.since, r.came = now, r.tokens
            self._loading += 1
            actions.append(LoadKv(r.request, r.attempt, tuple(r.pages)))

    def _start_step(self, actions: list[DecodeAction]) -> None:
        if self._stepping:
            return
        # Oldest first: when pages run out it is the newest that give way, so they run no more when their turn comes.
        size, batch = self._block_tokens, self._batch
        if any(len(r.pages) * size < r.tokens for r in batch):
            batch = [r for r in list(batch) if r.state is _State.RUNNING and self._grow(r, actions)]
        if batch:
            self._stepping = tuple(batch)
            actions.append(Step(tuple([StepRow(r.request, r.attempt, r.tokens, tuple(r.pages)) for r in batch])))

    def _grow(self, r: _Request, actions: list[DecodeAction]) -> bool:
        """A page for the token to compute; False if the request must sit this step out."""
        if len(r.pages) * self._block_tokens >= r.tokens:
            return True
        if not self.pool.can_allocate(1):
            # Pages of who is leaving come free soon, and who is loading can be asked to leave once it runs.
            if not self._draining and not self._loading and len(self._batch) > 1:
                self.preemptions += 1
                self._drain(self._batch[-1], Ending.PREEMPTED, actions)
            return False
        r.pages += self.pool.allocate(1)
        return True

    def _stepped(self, event: Stepped, actions: list[DecodeAction]) -> None:
        batch, self._stepping = self._stepping, ()
        finished = set(event.finished)
        for r in batch:
            if event.failed:
                self._drain(r, Ending.DROPPED, actions)
                continue
            r.tokens += event.steps
            self._context_tokens += event.steps
            if r.ending is not None:
                self._drain(r, r.ending, actions)
            elif r.request in finished:
                self._drain(r, Ending.FINISHED, actions)

    def _end(self, r: _Request | None, ending: Ending, actions: list[DecodeAction]) -> None:
        if r is None or r.state is _State.DRAINING:
            return
        if r.state in (_State.AWAITING, _State.READY):
            if r.state is _State.READY:
                self._ready.remove(r)
            del self._requests[r.request]
            actions.append(Drain(r.request, r.attempt, r.tokens, (), ending))
        elif r.state is _State.LOADING or r in self._stepping:
            r.ending = ending
        else:
            self._drain(r, ending, actions)

    def _drain(self, r: _Request, ending: Ending, actions: list[DecodeAction]) -> None:
        """Out of the batch."""
        self._batch.remove(r)
        self._context_tokens -= r.tokens
        self._draining += 1
        r.state = _State.DRAINING
        r.ending = ending
        actions.append(Drain(r.request, r.attempt, r.tokens, tuple(r.pages), ending))

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        held = [page for r in self._requests.values() for page in r.pages]
        assert len(held) == len(set(held)) == self.pool.used
        requests = self._requests.values()
        running = [r for r in requests if r.state is _State.RUNNING]
        assert self._batch == sorted(running, key=_precedence)
        assert self._context_tokens == sum(r.tokens for r in running)
        assert self._ready == sorted((r for r in requests if r.state is _State.READY), key=_serial)
        assert self._loading == sum(r.state is _State.LOADING for r in requests)
        assert self._draining == sum(r.state is _State.DRAINING for r in requests)
        for r in requests:
            assert bool(r.pages) == (r.state in (_State.LOADING, _State.RUNNING, _State.DRAINING))
        assert all(self._requests.get(r.request) is r and r.state is _State.RUNNING for r in self._stepping)


def _serial(r: _Request) -> int:
    return r.serial


def _precedence(r: _Request) -> tuple[int, int]:
    """Sorts who keeps its pages first: sooner rank, then earlier hand-over."""
    return (r.rank, r.serial)
