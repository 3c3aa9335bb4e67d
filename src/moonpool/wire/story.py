"""A request's story: what was heard and ordered of it, and when. Live from the driver, or from a journal.

Numbers and names only; the words come when somebody reads it (`tell`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec import Struct

from moonpool.core import actions as act
from moonpool.core import events as ev
from moonpool.core.conductor import Conductor
from moonpool.core.vocabulary import RequestId
from moonpool.core.why import Waiting, Weighing

KEPT_STORIES = 1024
MOST_MOMENTS = 64
"""Of one story; of more the first ones stay, and the last."""
MOST_FOUND = 16
"""Requests of one x-request-id."""

OVER = ("finished", "refused", "cancelled")

Fact = str | int | float | None


class Moment(Struct, frozen=True):
    at: float
    """Of the driver's clock."""
    what: str
    attempt: int
    facts: dict[str, Fact]


class Story(Struct):
    request: RequestId
    label: str
    """The client's x-request-id."""
    arrived_at: float
    moments: list[Moment]
    outcome: str = "waits"
    left_out: int = 0
    """Events in the middle of a long story."""
    weighings: tuple[Weighing, ...] = ()
    waitings: tuple[Waiting, ...] = ()
    """Filled in when it is asked for."""

    @property
    def is_over(self) -> bool:
        return self.outcome in OVER


class Brief(Struct, frozen=True):
    """A line of a list of stories."""

    request: str
    label: str
    seconds_ago: float
    outcome: str
    why: str


class _Kept:
    """A story as it is noted: messages as they came, or facts where a message holds block keys."""

    __slots__ = ("arrived_at", "label", "left_out", "noted", "outcome", "request")

    def __init__(self, arrived: ev.RequestArrived, now: float) -> None:
        self.request = arrived.request
        self.label = arrived.label
        self.arrived_at = now
        self.outcome = "waits"
        self.noted: list[tuple[float, _Told, Any, int]] = []
        self.left_out = 0

    def told(self) -> Story:
        moments = [
            Moment(at, told.what, attempt, noted if told.is_large else told.facts(noted))
            for at, told, noted, attempt in self.noted
        ]
        return Story(self.request, self.label, self.arrived_at, moments, self.outcome, self.left_out)


class Stories:
    """Of the most recent requests."""

    def __init__(self, kept: int = KEPT_STORIES, only: str = "") -> None:
        """`only`: of requests of this id or x-request-id, and no others."""
        self._kept = kept
        self._only = only
        self._stories: OrderedDict[RequestId, _Kept] = OrderedDict()

    def note(self, now: float, event: ev.Event, actions: tuple[act.Action, ...]) -> bool:
        """Tell of every call of the core. True: something of it is part of a story."""
        told, noted = _TOLD.get(type(event)), False
        if told is not None:
            message: Any = event.arrived if isinstance(event, ev.PlacedBefore) else event
            if told.begins:
                self._open(message, now)
            noted = self._note(now, told, event, message)
        for action in actions:
            if (told := _TOLD.get(type(action))) is not None:
                noted |= self._note(now, told, action, action)
        return noted

    def find(self, name: str, conductor: Conductor) -> list[Story]:
        """By the request's own id, else all whose x-request-id it is; oldest first."""
        own = self._stories.get(RequestId(name))
        found = [own] if own is not None else [s for s in self._stories.values() if name and s.label == name]
        stories = [kept.told() for kept in found[-MOST_FOUND:]]
        for story in stories:
            story.weighings, story.waitings = conductor.weighings(story.request), conductor.waitings(story.request)
        return stories

    def latest(self, count: int, now: float) -> tuple[Brief, ...]:
        """The newest first."""
        stories = [kept.told() for kept, _ in zip(reversed(self._stories.values()), range(count), strict=False)]
        return tuple(Brief(s.request, s.label, now - s.arrived_at, s.outcome, _briefly(s)) for s in stories)

    def all(self) -> list[Story]:
        return [kept.told() for kept in self._stories.values()]

    @property
    def are_none(self) -> bool:
        return not self._stories

    @property
    def are_over(self) -> bool:
        return all(kept.outcome in OVER for kept in self._stories.values())

    def _open(self, arrived: ev.RequestArrived, now: float) -> None:
        if self._only and self._only not in (arrived.request, arrived.label):
            return
        if arrived.request not in self._stories:
            self._stories[arrived.request] = _Kept(arrived, now)
            if len(self._stories) > self._kept:
                self._stories.popitem(last=False)

    def _note(self, now: float, told: _Told, message: Any, source: Any) -> bool:
        kept = self._stories.get(source.request)
        if kept is None:
            return False
        noted = kept.noted
        noted.append((now, told, told.facts(message) if told.is_large else message, getattr(source, "attempt", 0)))
        kept.outcome = told.outcome or kept.outcome
        if len(noted) > MOST_MOMENTS:
            del noted[MOST_MOMENTS // 2]
            kept.left_out += 1
        return True


def _arrived(m: Any) -> dict[str, Fact]:
    return {
        "prompt_tokens": m.prompt_tokens,
        "output_tokens": m.output_tokens,
        "max_output_tokens": m.max_output_tokens,
        "time_left": m.time_left,
        "slo_ttft": m.slo.ttft,
        "slo_tbt": m.slo.tbt,
        "priority": m.priority,
        "model": m.model,
    }


def _placed(m: Any) -> dict[str, Fact]:
    return {
        "prefill": m.prefill.id,
        "decode": m.decode.id,
        "hit_blocks": m.hit_blocks,
        "fetched_blocks": m.fetch.count if m.fetch is not None else 0,
        "fetched_from": m.fetch.source.id if m.fetch is not None else "",
        "lacking_blocks": len(m.lacking),
        "expected_ttft": m.expected_ttft,
        "index": m.index.value,
    }


def _taken_over(m: Any) -> dict[str, Fact]:
    return {**_placed(m.place), "tokens": m.tokens}


def _reserved(m: Any) -> dict[str, Fact]:
    return {"node": m.node.id, "blocks": len(m.keys)}


def _room(m: Any) -> dict[str, Fact]:
    return {"node": m.node, "lacking_blocks": len(m.lacking)}


def _prefilled(m: Any) -> dict[str, Fact]:
    return {
        "instance": m.instance,
        "computed_tokens": m.computed_tokens,
        "cached_tokens": m.cached_tokens,
        "queue_seconds": m.queue_seconds,
        "compute_seconds": m.compute_seconds,
    }


def _refused(m: Any) -> dict[str, Fact]:
    return {"reason": m.reason.value, "message": m.message, "retry_after": m.retry_after}


def _some(*names: str) -> Callable[[Any], dict[str, Fact]]:
    return lambda m: {name: getattr(m, name) for name in names}


class _Told(NamedTuple):
    what: str
    facts: Callable[[Any], dict[str, Fact]]
    outcome: str = ""
    """What has become of the request by it; empty where that stays as it was."""
    is_large: bool = False
    """The message is not held on to."""
    begins: bool = False


_TOLD: dict[type, _Told] = {
    ev.RequestArrived: _Told("arrived", _arrived, "waits", is_large=True, begins=True),
    ev.PlacedBefore: _Told("taken over", _taken_over, "in prefill", is_large=True, begins=True),
    ev.RequestCancelled: _Told("cancelled", _some("reason"), "cancelled"),
    ev.RoomConfirmed: _Told("room confirmed", _room, is_large=True),
    ev.RoomRefused: _Told("room refused", _some("node", "reason")),
    ev.PrefillDone: _Told("prefill done", _prefilled, "moves to decode"),
    ev.PrefillFailed: _Told("prefill failed", _some("instance", "reason")),
    ev.DecodeJoined: _Told("joined", _some("instance"), "decodes"),
    ev.DecodeRefused: _Told("decode refused", _some("instance", "reason")),
    ev.Preempted: _Told("preempted", _some("instance")),
    ev.Finished: _Told("finished", _some("instance", "output_tokens", "reason"), "finished"),
    act.ReserveRoom: _Told("room asked", _reserved, "asks for room", is_large=True),
    act.Place: _Told("placed", _placed, "in prefill", is_large=True),
    act.Hold: _Told("held", _some("reason"), "held"),
    act.Reject: _Told("refused", _refused, "refused"),
    act.Resubmit: _Told("placed again", _some("reason"), "is placed again"),
}


def _briefly(story: Story) -> str:
    """The last thing that decided its fate."""
    for moment in reversed(story.moments):
        facts = moment.facts
        match moment.what:
            case "refused":
                return f"{facts['reason']}: {facts['message']}"
            case "held" | "placed again":
                return str(facts["reason"])
            case "placed" | "taken over":
                hit, fetched = facts["hit_blocks"], facts["fetched_blocks"]
                expected = f"first token expected after {facts['expected_ttft']:.3f} s"
                return f"{facts['prefill']}, {facts['decode']}: {hit} blocks hit, {fetched} of them fetched, {expected}"
    return ""
