"""What became of this gateway's newest requests: a bounded memory of which the dashboard makes its percentiles.

It costs a few microseconds a request, and nothing a token; all else is worked out when somebody looks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from moonpool.core.classes import BATCH
from moonpool.core.vocabulary import Slo
from moonpool.gateway.generation import Completed, Generation, Refused
from moonpool.report.summary import intervals_of

KEPT = 4096
"""With more in a window, that window is shorter."""


class Ended(NamedTuple):
    at: float
    kind: str
    """`completed`, `refused` or `cancelled`."""
    reason: str
    priority: str
    """The class it was placed in; empty where it was not."""
    slo: Slo
    """Its own limits."""
    ttft: float | None
    slowest_tenth: float
    """Mean seconds of the longest tenth of its token intervals (DESIGN: attains)."""
    output_tokens: int


class Spread(Struct, frozen=True):
    """Seconds; by nearest rank. None of nothing."""

    count: int
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Window(Struct, frozen=True):
    """Of the requests that ended, or had a first token, in the last `seconds`."""

    seconds: float
    completed: int
    attained: int
    """Of the completed: within both limits."""
    refused: dict[str, int]
    """By reason."""
    cancelled: int
    ttft: Spread
    """Of all that had a first token."""
    tbt: Spread
    """Of the completed ones with two tokens: the mean of each one's slowest tenth."""


class Outcomes:
    def __init__(self) -> None:
        self._first: deque[tuple[float, float, str]] = deque(maxlen=KEPT)
        """When a first token came, after how many seconds, in which class."""
        self._ended: deque[Ended] = deque(maxlen=KEPT)

    def began(self, generation: Generation) -> None:
        """Its first token has come."""
        at = generation.first_token_at
        self._first.append((at, at - generation.job.arrived, generation.priority))

    def ended(self, generation: Generation, now: float) -> None:
        ending = generation.ending
        completed, refused = isinstance(ending, Completed), isinstance(ending, Refused)
        ended = Ended(
            now,
            "completed" if completed else "refused" if refused else "cancelled",
            ending.reason.value if isinstance(ending, Refused) else "",
            generation.priority,
            generation.job.slo,
            generation.first_token_at - generation.job.arrived if generation.output else None,
            intervals_of(np.asarray(generation.gaps))[0] if completed else 0.0,
            len(generation.output),
        )
        self._ended.append(ended)

    def window(self, seconds: float, now: float, limits: Mapping[str, Slo], only: str | None = None) -> Window:
        """`limits`: by class, of requests without their own; of a class that is not there there are none.

        `only`: of this class.
        """
        since = now - seconds
        for memory in (self._first, self._ended):
            if len(memory) == KEPT:
                since = max(since, memory[0][0])
        ended = [e for e in self._ended if e.at >= since and only in (None, e.priority)]
        completed = [e for e in ended if e.kind == "completed"]
        refused: dict[str, int] = {}
        for e in ended:
            if e.kind == "refused":
                refused[e.reason] = refused.get(e.reason, 0) + 1
        return Window(
            now - since,
            len(completed),
            sum(_attains(e, limits.get(e.priority, Slo())) for e in completed),
            refused,
            sum(e.kind == "cancelled" for e in ended),
            _spread([ttft for at, ttft, priority in self._first if at >= since and only in (None, priority)]),
            _spread([e.slowest_tenth for e in completed if e.output_tokens > 1]),
        )


def _attains(ended: Ended, of_class: Slo) -> bool:
    if ended.priority == BATCH.name:
        return True
    ttft = of_class.ttft if ended.slo.ttft is None else ended.slo.ttft
    tbt = of_class.tbt if ended.slo.tbt is None else ended.slo.tbt
    in_time = ttft is None or (ended.ttft is not None and ended.ttft <= ttft)
    return in_time and (tbt is None or ended.slowest_tenth <= tbt)


def _spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread(0)
    ordered = sorted(values)
    ranks = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99))
    return Spread(len(ordered), *ranks)
