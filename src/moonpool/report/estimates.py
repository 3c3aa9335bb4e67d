"""Means of a few runs that differ by their seed, with 95 % intervals; differences of runs that share theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)
"""Student's t for two-sided 95 %, by degrees of freedom from 1."""
T95_MANY = 2.1
"""For more; never too small."""


class Estimate(Struct, frozen=True):
    mean: float
    half_width: float | None
    """Of the 95 % interval; None where one value tells nothing of its spread."""

    @property
    def is_clear(self) -> bool:
        """Whether 0 lies outside the interval."""
        return self.half_width is not None and abs(self.mean) > self.half_width


def estimate(values: Sequence[float]) -> Estimate:
    """Raises ValueError for none."""
    count = len(values)
    if not count:
        raise ValueError("no values to take the mean of")
    mean = sum(values) / count
    if count == 1:
        return Estimate(mean, None)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    t = T95[count - 2] if count - 2 < len(T95) else T95_MANY
    return Estimate(mean, t * deviation / math.sqrt(count))


def paired_difference(values: Sequence[float], against: Sequence[float]) -> Estimate:
    """Of values with the same seeds in the same order: what all seeds do to both cancels out.

    Raises ValueError for none, or for different numbers of them.
    """
    return estimate([a - b for a, b in zip(values, against, strict=True)])
