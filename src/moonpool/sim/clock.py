"""Simulated time: what is to happen, in order of time and, at one time, of scheduling."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Happening = Callable[..., None]
"""Called with what was given beside it: cheaper than a closure for each."""


@dataclass(slots=True)
class Clock:
    now: float = 0.0
    _heap: list[tuple[float, int, Happening, tuple[Any, ...]]] = field(default_factory=list)
    _soon: deque[tuple[Happening, tuple[Any, ...]]] = field(default_factory=deque)
    """What happens at the present time, after all of the heap that was scheduled for it before it came."""
    _scheduled: int = 0

    def at(self, time: float, what: Happening, *of: Any) -> None:
        """Never before now: what is late happens next."""
        if time <= self.now:
            self._soon.append((what, of))
        else:
            self._scheduled += 1
            heapq.heappush(self._heap, (time, self._scheduled, what, of))

    def after(self, seconds: float, what: Happening, *of: Any) -> None:
        self.at(self.now + seconds, what, *of)

    def soon(self, what: Happening, *of: Any) -> None:
        """At this time, but after what happens now."""
        self._soon.append((what, of))

    def step(self) -> bool:
        """Let the next thing happen; False if there is none."""
        heap = self._heap
        if self._soon and not (heap and heap[0][0] <= self.now):
            what, of = self._soon.popleft()
        elif heap:
            self.now, _, what, of = heapq.heappop(heap)
        else:
            return False
        what(*of)
        return True

    def pass_until(self, time: float) -> None:
        """Let all happen that is earlier than `time`, which is now then. What is scheduled for it comes after."""
        heap, soon, pop, next_soon = self._heap, self._soon, heapq.heappop, self._soon.popleft
        # As `step`, written out: this loop turns some twenty times for each request.
        while self.now < time:
            if soon and not (heap and heap[0][0] <= self.now):
                what, of = next_soon()
            elif heap and heap[0][0] < time:
                self.now, _, what, of = pop(heap)
            else:
                self.now = time
                return
            what(*of)


@dataclass(slots=True)
class Link:
    """One machine's way to the others: transfers that leave or arrive there take turns."""

    bytes_per_second: float
    latency: float
    free_at: float = 0.0
    busy_seconds: float = 0.0
    moved_bytes: int = 0


def transfer(source: Link, sink: Link, nbytes: int, now: float) -> float:
    """Books both links, each for its own time; the time at which the last byte has arrived."""
    begin = max(now, source.free_at, sink.free_at)
    for link in (source, sink):
        seconds = nbytes / link.bytes_per_second
        link.free_at = begin + seconds
        link.busy_seconds += seconds
        link.moved_bytes += nbytes
    return max(source.free_at, sink.free_at) + max(source.latency, sink.latency)
