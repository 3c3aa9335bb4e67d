"""Looks for a live cluster's 90 % point (DESIGN §1) in few runs: a bracket, and what lies between.

The simulator's searches (`sim/bracket.py`, `sim/rates.py`) look at dozens of rates until two neighbours of a fine grid
differ. Here a rate that does and one that does not, a step apart, are enough: between them the share of requests that
attain is taken to fall evenly over the rate's logarithm.
"""

from __future__ import annotations

import math

from msgspec import Struct

SHARE = 0.9
FAR = 0.15
"""A share so far from SHARE says that the next rate may be two steps away."""


class Found(Struct, frozen=True):
    """Rates in requests a second."""

    rate: float
    """The 90 % point; 0.0 where no rate did. Without a bracket the nearest that was looked at."""
    low: float
    """The highest that does and is below every one that does not; 0.0: none."""
    high: float
    """The lowest that does not; infinite: none."""
    tried: tuple[tuple[float, float], ...]
    """Each rate in rising order, and the share of its requests that attained."""

    @property
    def is_bracketed(self) -> bool:
        return self.low > 0.0 and self.high < math.inf


class Search:
    """Ask `rate`, tell what share attained there, until `is_over`."""

    def __init__(self, start: float, step: float, most: int) -> None:
        """`step`: between two rates, a factor above 1. `most` rates are looked at."""
        self._step = step
        self._most = most
        self._shares: dict[float, float] = {}
        self.rate = start
        """To be looked at next."""

    @property
    def is_over(self) -> bool:
        return len(self._shares) >= self._most or self.found.is_bracketed

    def tell(self, share: float) -> None:
        """Of the requests at `rate`."""
        self._shares[self.rate] = share
        found = self.found
        stride = self._step ** (2 if abs(share - SHARE) > FAR else 1)
        if not found.is_bracketed:
            self.rate = max(self._shares) * stride if found.high == math.inf else min(self._shares) / stride

    @property
    def found(self) -> Found:
        tried = tuple(sorted(self._shares.items()))
        high = min((rate for rate, share in tried if share < SHARE), default=math.inf)
        low = max((rate for rate, share in tried if rate < high), default=0.0)
        if not low or high == math.inf:
            return Found(low, low, high, tried)
        above, below = self._shares[low] - SHARE, SHARE - self._shares[high]
        return Found(low * (high / low) ** (above / (above + below)), low, high, tried)
