"""What a run was worth to each priority class: every request judged by its class's limits."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from moonpool.core.classes import Classes
from moonpool.core.vocabulary import Slo
from moonpool.report.summary import Outcome, Spread, summarize


class ClassWorth(Struct, frozen=True):
    """The requests of one class."""

    name: str
    requests: int
    completed: int
    attained: int
    refused: dict[str, int]
    """By reason."""
    ttft: Spread


def by_class(outcomes: Sequence[Outcome], classes: Classes) -> tuple[ClassWorth, ...]:
    """The soonest first; classes without requests are left out."""
    found = []
    for priority in classes.all:
        own = [outcome for outcome in outcomes if classes.of(outcome.priority) == priority]
        if own:
            s = summarize(own, classes.limits(Slo(), priority))
            found.append(ClassWorth(priority.name, s.requests, s.completed, s.attained, s.refused, s.ttft))
    return tuple(found)
