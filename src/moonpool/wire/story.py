"""A request's story: what was heard and ordered of it, and when. Live from the driver, or from a journal.

Numbers and names only; the words come when somebody reads it (`tell`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

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
    weighings: tuple[Weighing, ...] = ()
    waitings: tuple[Waiting, ...] = ()
    """Filled in when it is asked for."""

    def add(self, moment: Moment) -> None:
        if len(self.moments) >= MOST_MOMENTS:
            del self.moments[MOST_MOMENTS // 2]
            self.left_out += 1
        self.moments.append(moment)
        self.outcome = _OUTCOMES.get(moment.what, self.outcome)

    @property
    def is_over(self) -> bool:
        return self.outcome in ("finished", "refused", "cancelled")


class Brief(Struct, frozen=True):
    """A line of a list of stories."""

    request: str
    label: str
    seconds_ago: float
    outcome: str
    why: str


class Stories:
    """Of the most recent requests."""

    def __init__(self, kept: int = KEPT_STORIES, only: str = "") -> None:
        """`only`: of requests of this id or x-request-id, and no others."""
        self._kept = kept
        self._only = only
        self._stories: OrderedDict[RequestId, Story] = OrderedDict()

    def note(self, now: float, event: ev.Event, actions: Iterable[act.Action]) -> None:
        """Tell of every call of the core."""
        if isinstance(event, ev.RequestArrived):
            self._open(event, now)
        elif isinstance(event, ev.PlacedBefore):
            self._open(event.arrived, now)
        self._note(now, event)
        for action in actions:
            self._note(now, action)

    def find(self, name: str, conductor: Conductor) -> list[Story]:
        """By the request's own id, else all whose x-request-id it is; oldest first."""
        own = self._stories.get(RequestId(name))
        found = [own] if own is not None else [s for s in self._stories.values() if name and s.label == name]
        for story in found[-MOST_FOUND:]:
            complete(story, conductor)
        return found[-MOST_FOUND:]

    def latest(self, count: int, now: float) -> tuple[Brief, ...]:
        """The newest first."""
        stories = [story for story, _ in zip(reversed(self._stories.values()), range(count), strict=False)]
        return tuple(Brief(s.request, s.label, now - s.arrived_at, s.outcome, _briefly(s)) for s in stories)

    def all(self) -> list[Story]:
        return list(self._stories.values())

    def _open(self, arrived: ev.RequestArrived, now: float) -> None:
        if self._only and self._only not in (arrived.request, arrived.label):
            return
        if arrived.request not in self._stories:
            self._stories[arrived.request] = Story(arrived.request, arrived.label, now, [])
            if len(self._stories) > self._kept:
                self._stories.popitem(last=False)

    def _note(self, now: float, message: ev.Event | act.Action) -> None:
        tell_of = _TOLD.get(type(message))
        if tell_of is None:
            return
        source: Any = message.arrived if isinstance(message, ev.PlacedBefore) else message
        story = self._stories.get(source.request)
        if story is not None:
            what, facts = tell_of
            story.add(Moment(now, what, getattr(source, "attempt", 0), facts(message)))


def complete(story: Story, conductor: Conductor) -> None:
    """With what the core still knows of the costs that it weighed. What it knew before and does not now, stays."""
    story.weighings = conductor.weighings(story.request) or story.weighings
    story.waitings = conductor.waitings(story.request) or story.waitings


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
    }


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


_TOLD: dict[type, tuple[str, Callable[[Any], dict[str, Fact]]]] = {
    ev.RequestArrived: ("arrived", _arrived),
    ev.PlacedBefore: ("taken over", lambda m: _placed(m.place) | {"tokens": m.tokens}),
    ev.RequestCancelled: ("cancelled", _some("reason")),
    ev.RoomConfirmed: ("room confirmed", lambda m: {"node": m.node, "lacking_blocks": len(m.lacking)}),
    ev.RoomRefused: ("room refused", _some("node", "reason")),
    ev.PrefillDone: ("prefill done", _prefilled),
    ev.PrefillFailed: ("prefill failed", _some("instance", "reason")),
    ev.DecodeJoined: ("joined", _some("instance")),
    ev.DecodeRefused: ("decode refused", _some("instance", "reason")),
    ev.Preempted: ("preempted", _some("instance")),
    ev.Finished: ("finished", _some("instance", "output_tokens", "reason")),
    act.ReserveRoom: ("room asked", lambda m: {"node": m.node.id, "blocks": len(m.keys)}),
    act.Place: ("placed", _placed),
    act.Hold: ("held", _some("reason")),
    act.Reject: ("refused", _refused),
    act.Resubmit: ("placed again", _some("reason")),
}
_OUTCOMES = {
    "arrived": "waits",
    "held": "held",
    "room asked": "asks for room",
    "placed": "in prefill",
    "taken over": "in prefill",
    "prefill done": "moves to decode",
    "joined": "decodes",
    "finished": "finished",
    "refused": "refused",
    "cancelled": "cancelled",
    "placed again": "is placed again",
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
