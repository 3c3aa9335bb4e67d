"""Goodput of configurations at a load of each one's own: where 90 % of what is offered attains, or any given one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from moonpool.report.estimates import Estimate, estimate
from moonpool.report.run import Run

WANTED_SHARE = 0.9
TOLERANCE = 0.02
"""Relative, between the highest speed known to do and the lowest known not to."""
MOST_STEPS = 16


class Search:
    """For the highest speed at which a share of the offered requests attains; halves in logarithms.

    Ask `speed`, tell what came of it, until `is_over`. Attainment is taken to fall with speed.
    """

    def __init__(self, start: float = 1.0, wanted: float = WANTED_SHARE, tolerance: float = TOLERANCE) -> None:
        self.speed = start
        self.is_over = False
        self._wanted = wanted
        self._tolerance = tolerance
        self._good: float | None = None
        self._bad: float | None = None
        self._steps = 0

    @property
    def found(self) -> float | None:
        """The highest speed that did; None where none did."""
        return self._good

    def tell(self, share: float) -> None:
        """What attained of all at `speed`."""
        self._steps += 1
        if share >= self._wanted:
            self._good = self.speed
        else:
            self._bad = self.speed
        if self._good is None:
            self.speed /= 2
        elif self._bad is None:
            self.speed *= 2
        else:
            self.speed = math.sqrt(self._good * self._bad)
            self.is_over = self._bad / self._good <= 1 + self._tolerance
        self.is_over |= self._steps >= MOST_STEPS


class Share(Struct, frozen=True):
    """Of a prompt-length bucket."""

    name: str
    requests: int
    attained: Estimate


class Goodput(Struct, frozen=True):
    """One line of the table: one configuration at one load, over seeds."""

    name: str
    speed: float
    offered: Estimate
    """Requests a second."""
    attained: Estimate
    """Share of the offered requests."""
    requests: Estimate
    """That attain, a second."""
    tokens: Estimate
    """Prompt and output tokens of those, a second."""
    buckets: tuple[Share, ...]


def goodput(name: str, speed: float, runs: Sequence[Run]) -> Goodput:
    """`runs`: of one configuration at this speed, one a seed. Raises ValueError for none."""
    summaries = [run.summary for run in runs]
    names = [bucket.name for bucket in summaries[0].buckets] if summaries else []
    shares = []
    for bucket in names:
        found = [each for summary in summaries for each in summary.buckets if each.name == bucket]
        shares.append(Share(bucket, found[0].requests, estimate([each.attained / each.requests for each in found])))
    return Goodput(
        name=name,
        speed=speed,
        offered=estimate([s.requests / s.seconds if s.seconds else 0.0 for s in summaries]),
        attained=estimate([s.attained / s.requests for s in summaries]),
        requests=estimate([s.goodput_requests for s in summaries]),
        tokens=estimate([s.goodput_tokens for s in summaries]),
        buckets=tuple(shares),
    )
