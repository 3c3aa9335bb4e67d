"""All times between tokens of a run, however many: counted in bins of one per cent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moonpool.report.summary import Spread

LEAST = 1e-6
"""Seconds: what is shorter counts as 0."""
STEP = 1.01
BINS = 2084
"""Up to 1000 s."""


class Intervals:
    """Their mean and their longest are exact, percentiles within half a per cent."""

    def __init__(self) -> None:
        self.count = 0
        self._counts = np.zeros(BINS, np.int64)
        self._sum = 0.0
        self._most = 0.0

    def add(self, values: Sequence[float]) -> None:
        """Seconds."""
        if not values:
            return
        found = np.maximum(np.asarray(values), LEAST)
        at = np.ceil(np.log(found / LEAST) / np.log(STEP)).astype(np.int64)
        np.add.at(self._counts, np.minimum(at, BINS - 1), 1)
        self.count += len(values)
        self._sum += sum(values)
        self._most = max(self._most, max(values))

    def spread(self) -> Spread:
        """All 0 where there are none."""
        if not self.count:
            return Spread(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        p25, p50, p75, p90, p99 = (self._percentile(percent) for percent in (25, 50, 75, 90, 99))
        return Spread(self._sum / self.count, p25, p50, p75, p90, p99, self._most)

    def _percentile(self, percent: float) -> float:
        """The middle of the bin in which the smallest lies that so many per cent are not above."""
        wanted = int(np.ceil(self.count * percent / 100))
        at = int(np.searchsorted(np.cumsum(self._counts), wanted))
        return min(LEAST * STEP ** (at - 0.5), self._most) if at else 0.0
