"""The Conductor's memory of the requests that are not over.

    held -> room -> prefill -> moving -> decoding -> over
      ^       |        |          |          |
      +-------+        +----------+----------+-> resubmitted -> held (attempt + 1)

`held`: waits for an instance or for room; `room`: the decode node is asked; `prefill`: at a prefill instance;
`moving`: computed, the decode instance has not taken it yet; `resubmitted`: the attempt has failed, the gateway is
asked for the next. From every phase a request may end: finished, rejected, cancelled.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from moonpool.core.classes import Classes, is_batch
from moonpool.core.events import RequestArrived
from moonpool.core.line import AGEING_SECONDS
from moonpool.core.placement import Choice
from moonpool.core.vocabulary import BlockKey, KeySpace, PartId, PriorityClass, RequestId, Slo

REMEMBERED_ENDINGS = 4096
UNHURRIED_SECONDS = 60.0
"""Slack of requests without a limit: they go behind those that must be served sooner."""


class Phase(enum.Enum):
    # Counted by on every step of a request: the hash of `Enum` is written in Python.
    __hash__ = object.__hash__

    HELD = "held"
    ROOM = "room"
    PREFILL = "prefill"
    MOVING = "moving"
    DECODING = "decoding"
    RESUBMITTED = "resubmitted"


WAITING_PHASES = (Phase.HELD, Phase.ROOM, Phase.PREFILL, Phase.RESUBMITTED)
"""These count against the queue bound."""
QUEUED = (Phase.HELD, Phase.ROOM, Phase.PREFILL)
"""These may make way for a request of a sooner rank."""
AT_WORKERS = (Phase.PREFILL, Phase.MOVING, Phase.DECODING)


@dataclass(frozen=True, slots=True)
class Placement:
    """What one attempt was given, and what it booked."""

    choice: Choice
    space: KeySpace
    keys: tuple[BlockKey, ...]
    pages: int
    room_bytes: int
    asked_at: float


@dataclass(slots=True)
class Request:
    arrived: RequestArrived
    """Of the current attempt."""
    serial: int
    """Order of first arrival."""
    first_arrived_at: float
    deadline: float
    phase: Phase
    held_since: float
    priority: PriorityClass
    limits: Slo
    """That it is held to: its own, its class's, those of all."""
    sooner: tuple[PriorityClass, ...] = ()
    """Classes for which something is kept from it."""
    turn: float = 0.0
    """Those that are held are served in order of it."""
    placement: Placement | None = None
    failures: int = 0
    preemptions: int = 0
    avoid: PartId | None = None
    """The instance that failed the last attempt."""
    not_before: float = 0.0
    """Repeated failures wait before they are tried again."""
    accepted: bool = False
    """It has been placed once: no SLO or queue bound refuses it any more."""
    too_small: dict[PartId, str] = field(default_factory=dict)
    """Nodes that have no room for it, whatever else ends, and what they said."""
    hold_sent: bool = False
    uses: float = 0.0
    """What its computing is divided by to have its price (`worth.py`); 0 where nobody has asked yet."""
    joined_at: float = 0.0
    id: RequestId = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.arrived.request

    @property
    def attempt(self) -> int:
        return self.arrived.attempt

    @property
    def total_tokens(self) -> int:
        return self.arrived.prompt_tokens + self.arrived.max_output_tokens

    def keys_in(self, space: KeySpace) -> tuple[BlockKey, ...] | None:
        """None where the gateway computed no keys for this space."""
        return next((c.keys for c in self.arrived.chains if c.space == space.id), None)


@dataclass(slots=True)
class Requests:
    classes: Classes
    _live: dict[RequestId, Request] = field(default_factory=dict)
    _held: list[tuple[float, int, RequestId]] = field(default_factory=list)
    """By turn, then by first arrival: a preempted request comes before those that arrived after it."""
    _held_kinds: dict[tuple[str, int], int] = field(default_factory=dict)
    """How many of each model and rank are held."""
    _queued: dict[int, dict[RequestId, None]] = field(default_factory=dict)
    """By rank, the newest last: those that no decode instance has been given yet."""
    _in_room: dict[RequestId, None] = field(default_factory=dict)
    """In the order in which they asked."""
    _phases: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))
    _over: OrderedDict[RequestId, int] = field(default_factory=OrderedDict)
    """The last attempt of requests that are over."""
    _serial: int = 0
    _held_batch: int = 0

    def __len__(self) -> int:
        return len(self._live)

    def get(self, id_: RequestId) -> Request | None:
        return self._live.get(id_)

    def all(self) -> list[Request]:
        return list(self._live.values())

    def is_over(self, id_: RequestId, attempt: int) -> bool:
        """Whether this is a late copy. A bounded memory: the newest REMEMBERED_ENDINGS.

        A higher attempt is news: the gateway went on before it knew that the request was over.
        """
        return attempt <= self._over.get(id_, 0)

    def add(self, event: RequestArrived, now: float) -> Request:
        self._serial += 1
        priority = self.classes.of(event.priority)
        limits = self.classes.limits(event.slo, priority)
        came = now - event.waited
        request = Request(event, self._serial, came, now + event.time_left, Phase.HELD, now, priority, limits)
        request.accepted = event.attempt > 1
        request.sooner = self.classes.sooner(priority)
        # Not less its own prefill: those that are held wait for room in the decode pool, and long prompts would always
        # have it before short ones.
        slack = UNHURRIED_SECONDS if limits.ttft is None else limits.ttft
        request.turn = came + slack + AGEING_SECONDS * self.classes.place(priority)
        self._over.pop(request.id, None)
        self._live[request.id] = request
        self._enter(request, Phase.HELD)
        return request

    def renew(self, request: Request, event: RequestArrived, now: float) -> None:
        """The gateway's next attempt; the phase becomes held."""
        if request.phase is Phase.HELD:
            # It asks for another model, perhaps.
            self._count_held(request, -1)
            request.arrived = event
            self._count_held(request, 1)
        request.arrived = event
        request.deadline = now + event.time_left
        request.placement = None
        request.hold_sent = False
        request.held_since = now
        self.move(request, Phase.HELD)

    def move(self, request: Request, phase: Phase) -> None:
        if phase is not request.phase:
            self._leave(request)
            self._enter(request, phase)

    def end(self, request: Request) -> None:
        self._leave(request)
        del self._live[request.id]
        self.remember(request.id, request.attempt)

    def remember(self, id_: RequestId, attempt: int) -> None:
        self._over[id_] = attempt
        if len(self._over) > REMEMBERED_ENDINGS:
            self._over.popitem(last=False)

    def held(self) -> Iterator[Request]:
        """In order of their turns; those that leave meanwhile may be among them, as long as they are not over."""
        for _, _, id_ in self._held.copy():
            if (request := self._live.get(id_)) is not None:
                yield request

    def none_held_but(self, closed: Mapping[str, int]) -> bool:
        """Whether all that are held are of these models, and of the rank given for theirs or a later one."""
        return all(model in closed and rank >= closed[model] for model, rank in self._held_kinds)

    def first_in_room(self) -> Request | None:
        """The one that asked first."""
        id_ = next(iter(self._in_room), None)
        return None if id_ is None else self._live[id_]

    def in_room(self) -> list[Request]:
        return [self._live[id_] for id_ in self._in_room]

    def queued(self, rank: int) -> int:
        """How many of this rank are held, reserving or in prefill."""
        return len(self._queued.get(rank, ()))

    def newest_behind(self, rank: int) -> Request | None:
        """Of those that are queued and of a later rank: the newest of the last rank."""
        last = max((other for other, ids in self._queued.items() if ids and other > rank), default=None)
        return None if last is None else self._live[next(reversed(self._queued[last]))]

    @property
    def held_before_batch(self) -> int:
        """How many are held that are no batch work."""
        return len(self._held) - self._held_batch

    def count(self, phase: Phase) -> int:
        return self._phases[phase]

    @property
    def waiting(self) -> int:
        return sum(self._phases[phase] for phase in WAITING_PHASES)

    def _enter(self, request: Request, phase: Phase) -> None:
        request.phase = phase
        self._phases[phase] += 1
        if phase in QUEUED:
            self._queued.setdefault(request.priority.rank, {})[request.id] = None
        if phase is Phase.HELD:
            self._count_held(request, 1)
            insort(self._held, (request.turn, request.serial, request.id))
        elif phase is Phase.ROOM:
            self._in_room[request.id] = None

    def _leave(self, request: Request) -> None:
        self._phases[request.phase] -= 1
        if request.phase in QUEUED:
            del self._queued[request.priority.rank][request.id]
        if request.phase is Phase.HELD:
            self._count_held(request, -1)
            del self._held[bisect_left(self._held, (request.turn, request.serial, request.id))]
        elif request.phase is Phase.ROOM:
            del self._in_room[request.id]

    def _count_held(self, request: Request, by: int) -> None:
        self._held_batch += by * is_batch(request.priority)
        kind = request.arrived.model, request.priority.rank
        count = self._held_kinds[kind] = self._held_kinds.get(kind, 0) + by
        if not count:
            del self._held_kinds[kind]

    def check_integrity(self) -> None:
        """Raises AssertionError where a request is in no or in two phases."""
        for phase in Phase:
            assert self._phases[phase] == sum(r.phase is phase for r in self._live.values()), phase
        held = [r for r in self._live.values() if r.phase is Phase.HELD]
        assert list(self.held()) == sorted(held, key=lambda r: (r.turn, r.serial))
        assert self._held_kinds == Counter((r.arrived.model, r.priority.rank) for r in held)
        assert self._held_batch == sum(is_batch(r.priority) for r in held)
        queued = {r.id for r in self._live.values() if r.phase in QUEUED}
        assert sorted(id_ for ids in self._queued.values() for id_ in ids) == sorted(queued)
        assert sorted(self._in_room) == sorted(r.id for r in self._live.values() if r.phase is Phase.ROOM)
        for request in self._live.values():
            placed = request.phase in (Phase.ROOM, Phase.PREFILL, Phase.MOVING, Phase.DECODING)
            assert placed == (request.placement is not None), f"{request.id} is {request.phase.value}"
            assert request.id not in self._over
        assert len(self._over) <= REMEMBERED_ENDINGS
