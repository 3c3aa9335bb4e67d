"""Simulated time: a heap of what is to happen, in order of time and, at one time, of scheduling."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

Happening = Callable[[], None]


@dataclass(slots=True)
class Clock:
    now: float = 0.0
    _heap: list[tuple[float, int, Happening]] = field(default_factory=list)
    _scheduled: int = 0

    def at(self, time: float, what: Happening) -> None:
        """Never before now: what is late happens next."""
        self._scheduled += 1
        heapq.heappush(self._heap, (max(time, self.now), self._scheduled, what))

    def after(self, seconds: float, what: Happening) -> None:
        self.at(self.now + seconds, what)

    def step(self) -> bool:
        """Let the next thing happen; False if there is none."""
        if not self._heap:
            return False
        self.now, _, what = heapq.heappop(self._heap)
        what()
        return True


@dataclass(slots=True)
class Link:
    """One machine's way to the others: transfers that leave or arrive there take turns."""

    bytes_per_second: float
    latency: float
    free_at: float = 0.0
    busy_seconds: float = 0.0
    moved_bytes: int = 0


def transfer(source: Link, sink: Link, nbytes: int, now: float) -> float:
    """Books both links; the time at which the last byte has arrived."""
    seconds = nbytes / min(source.bytes_per_second, sink.bytes_per_second)
    end = max(now, source.free_at, sink.free_at) + seconds
    for link in (source, sink):
        link.free_at = end
        link.busy_seconds += seconds
        link.moved_bytes += nbytes
    return end + max(source.latency, sink.latency)
