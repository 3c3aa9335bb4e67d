"""Closes in on the highest load that attains, on a grid of loads a factor apart (DESIGN §1: 90 % point)."""

from __future__ import annotations

import math

from moonpool.sim.trial import Trial

GRID = 1.02
"""From one point to the next."""
LIMITS = -400, 400
"""Exponents of GRID: 1/2755 to 2755 times the unit."""


class Bracket:
    """Outwards from where it starts by growing strides, then by halves. Ask `speed`, tell what came of it, until
    `is_over`. Attainment is taken to fall with speed."""

    def __init__(self, start: float, width: int = 1) -> None:
        """`width`: points of the grid that may be left between a load that does and one that does not."""
        self.best: Trial | None = None
        """At the highest speed known to do."""
        self.beyond: Trial | None = None
        """At the lowest known not to."""
        self._low, self._high = LIMITS[0] - 1, LIMITS[1] + 1
        """Their points; beyond the limits there is none yet."""
        self._width = width
        self._at = min(max(_point_of(start), LIMITS[0]), LIMITS[1])
        self._stride = 2 * width

    @property
    def is_over(self) -> bool:
        return self._high - self._low <= self._width or self._low == LIMITS[1] or self._high == LIMITS[0]

    @property
    def speed(self) -> float:
        """To be tried next."""
        return _speed_of(self._at)

    @property
    def best_speed(self) -> float:
        """0.0 where none does."""
        return 0.0 if self.best is None else _speed_of(self._low)

    @property
    def beyond_speed(self) -> float:
        """Infinite where none was looked at that does not."""
        return math.inf if self.beyond is None else _speed_of(self._high)

    def tell(self, trial: Trial) -> None:
        if trial.passes:
            self._low, self.best = self._at, trial
        else:
            self._high, self.beyond = self._at, trial
        if self._low < LIMITS[0]:
            self._at = max(self._high - self._stride, LIMITS[0])
            self._stride *= 2
        elif self._high > LIMITS[1]:
            self._at = min(self._low + self._stride, LIMITS[1])
            self._stride *= 2
        else:
            self._at = (self._low + self._high) // 2


def _speed_of(point: int) -> float:
    return math.pow(GRID, point)


def _point_of(speed: float) -> int:
    return round(math.log(max(speed, 1e-9)) / math.log(GRID))
