"""Equal steps taken at once: each takes `growth` seconds longer than the one before it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Steps:
    began: float
    first: float
    growth: float

    def end_of(self, steps: int) -> float:
        return self.began + steps * self.first + self.growth * (steps * (steps - 1) / 2)

    def steps_until(self, now: float) -> int:
        """The fewest steps whose end is not before `now`, at least one."""
        if self.growth <= 0.0:
            return max(math.ceil((now - self.began) / self.first), 1)
        # n·first + growth·n(n-1)/2 >= elapsed, solved for n; then corrected by what rounding may have taken.
        half = self.first - self.growth / 2
        n = math.ceil((-half + math.sqrt(half * half + 2 * self.growth * (now - self.began))) / self.growth)
        n = max(n, 1)
        while self.end_of(n) < now:
            n += 1
        while n > 1 and self.end_of(n - 1) >= now:
            n -= 1
        return n
