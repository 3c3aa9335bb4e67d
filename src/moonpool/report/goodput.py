"""Goodput of configurations at a load of each one's own: where 90 % of what is offered attains, or any given one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec import Struct

from moonpool.report.estimates import Estimate, estimate, paired_difference
from moonpool.report.run import Run
from moonpool.report.summary import Summary

WANTED_SHARE = 0.9
TOLERANCE = 0.02
"""Relative, between the highest speed known to do and the lowest known not to."""
MOST_STEPS = 16


class Search:
    """For the highest speed at which a share of the offered requests attains; halves in logarithms.

    Ask `speed`, tell what came of it, until `is_over`. Attainment is taken to fall with speed.
    """

    def __init__(
        self, start: float = 1.0, wanted: float = WANTED_SHARE, tolerance: float = TOLERANCE, stride: float = 2.0
    ) -> None:
        """`stride`: factor from one speed to the next until the point lies between two."""
        self.speed = start
        self.is_over = False
        self._stride = stride
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
            self.speed /= self._stride
        elif self._bad is None:
            self.speed *= self._stride
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


class Gain(Struct, frozen=True):
    """Of one line over another, seed by seed; shares of the other's mean."""

    name: str
    against: str
    requests: Estimate
    tokens: Estimate
    buckets: tuple[Share, ...]
    """Points of attainment, as differences of shares."""


def gain(name: str, runs: Sequence[Run], against: str, others: Sequence[Run]) -> Gain:
    """`runs` and `others`: with the same seeds in the same order. Raises ValueError for none."""

    def relative(of: Callable[[Summary], float]) -> Estimate:
        mine, theirs = [of(run.summary) for run in runs], [of(run.summary) for run in others]
        base = sum(theirs) / len(theirs) or 1.0
        found = paired_difference(mine, theirs)
        return Estimate(found.mean / base, None if found.half_width is None else found.half_width / base)

    shares = []
    for bucket in runs[0].summary.buckets if runs else ():
        mine, theirs = _attained(runs, bucket.name), _attained(others, bucket.name)
        if len(mine) == len(theirs) == len(runs):
            shares.append(Share(bucket.name, bucket.requests, paired_difference(mine, theirs)))
    return Gain(
        name,
        against,
        relative(lambda summary: summary.goodput_requests),
        relative(lambda summary: summary.goodput_tokens),
        tuple(shares),
    )


def _attained(runs: Sequence[Run], bucket: str) -> list[float]:
    found = [each for run in runs for each in run.summary.buckets if each.name == bucket]
    return [each.attained / each.requests for each in found]
