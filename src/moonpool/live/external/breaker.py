"""When to stop sending requests to a server that fails."""

from __future__ import annotations

MOST_FAULTS = 3
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 10.0
STEADY_SECONDS = 30.0


class Breaker:
    """Opens after so many faults in a row. What a client is to blame for is no fault, and no success either."""

    def __init__(self, most: int = MOST_FAULTS) -> None:
        self._most = most
        self._faults = 0

    def fault(self) -> None:
        self._faults += 1

    def success(self) -> None:
        if not self.is_open:
            self._faults = 0

    @property
    def is_open(self) -> bool:
        return self._faults >= self._most


class Pauses:
    """How long to wait before the next attempt: longer each time, until one life was steady."""

    def __init__(self) -> None:
        self._next = FIRST_PAUSE

    def next(self) -> float:
        pause, self._next = self._next, min(self._next * 2.0, LONGEST_PAUSE)
        return pause

    def lived(self, seconds: float) -> None:
        if seconds >= STEADY_SECONDS:
            self._next = FIRST_PAUSE
