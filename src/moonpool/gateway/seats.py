"""The bound on what is in flight at one gateway: the next request is refused at once, never queued."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from moonpool.core.vocabulary import RejectReason
from moonpool.gateway.problem import refused

WEIGHT = 0.1
"""Of the newest interval in the average."""


class Seats:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.taken = 0
        self._last_freed = 0.0
        self._interval = 1.0
        """Seconds between two seats becoming free, averaged: what a refused client should wait."""

    @contextlib.contextmanager
    def take(self) -> Iterator[Booking]:
        """One seat, and as many more as `Booking.extend` asks for, until the block ends. Raises ApiError (429)."""
        booking = Booking(self)
        booking.extend(1)
        try:
            yield booking
        finally:
            booking.free()

    def check(self, count: int = 1) -> None:
        """Whether `count` seats are free now; takes none. Raises ApiError (429)."""
        if self.taken + count > self._limit:
            message = (
                f"{self.taken} choices are in flight at this gateway and its limit is {self._limit}: try again later"
            )
            raise refused(RejectReason.QUEUE_FULL, message, self.wait_seconds(count))

    def wait_seconds(self, count: int) -> float:
        """Until `count` seats can be expected to be free."""
        return max(0, self.taken + count - self._limit) * self._interval

    def freed(self, count: int) -> None:
        self.taken -= count
        now = time.monotonic()
        if self._last_freed and self.taken + count >= self._limit // 2:  # an idle gateway's intervals tell nothing
            interval = (now - self._last_freed) / count
            self._interval += WEIGHT * (min(interval, 60.0) - self._interval)
        self._last_freed = now

    def check_integrity(self) -> None:
        assert 0 <= self.taken <= self._limit, f"{self.taken} of {self._limit} seats are taken"


class Booking:
    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self._count = 0

    def extend(self, count: int) -> None:
        self._seats.check(count)
        self._seats.taken += count
        self._count += count

    def free(self) -> None:
        if self._count:
            self._seats.freed(self._count)
            self._count = 0
