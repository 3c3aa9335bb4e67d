"""Outcomes of requests that are over, computed some dozens at once."""

from __future__ import annotations

from moonpool.report.outcomes import Outcomes
from moonpool.report.summary import intervals_of
from moonpool.sim.request import SimRequest, intervals_of_each

AT_ONCE = 32


class Ended:
    """Requests may end in any order; each is told of once."""

    def __init__(self) -> None:
        self._outcomes = Outcomes()
        self._waiting: list[SimRequest] = []

    def end(self, request: SimRequest) -> None:
        """Nothing changes in it from now on."""
        self._waiting.append(request)
        if len(self._waiting) >= AT_ONCE:
            self._compute()

    def outcomes(self) -> Outcomes:
        """By the requests' numbers. When all are over."""
        self._compute()
        return self._outcomes

    def _compute(self) -> None:
        for request, intervals in zip(self._waiting, intervals_of_each(self._waiting), strict=True):
            self._outcomes.put(request.number - 1, request.outcome(intervals_of(intervals)))
        self._waiting.clear()
