"""What a run was worth to each priority class: every request judged by its class's limits."""

from __future__ import annotations

from msgspec import Struct

from moonpool.core.classes import Classes
from moonpool.core.vocabulary import Slo
from moonpool.report.outcomes import Outcomes
from moonpool.report.summary import Spread, summarize


class ClassWorth(Struct, frozen=True):
    """The requests of one class."""

    name: str
    requests: int
    completed: int
    attained: int
    refused: dict[str, int]
    """By reason."""
    ttft: Spread


def by_class(outcomes: Outcomes, classes: Classes) -> tuple[ClassWorth, ...]:
    """The soonest first; classes without requests are left out."""
    asked = {name: classes.of(name) for name in outcomes.priorities()}
    found = []
    for priority in classes.all:
        own = outcomes.where(outcomes.of_priorities([name for name, of in asked.items() if of == priority]))
        if len(own):
            s = summarize(own, classes.limits(Slo(), priority))
            found.append(ClassWorth(priority.name, s.requests, s.completed, s.attained, s.refused, s.ttft))
    return tuple(found)
