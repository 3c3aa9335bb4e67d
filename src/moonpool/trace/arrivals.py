"""Requests as they are sent to a cluster: in order of arrival, anew as often as they are asked for; none is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from moonpool.trace.request import TraceRequest


class Arrivals:
    """Each iteration begins anew. How many they are, and from when to when they come, is known beforehand."""

    def __init__(
        self, begin_anew: Callable[[], Iterator[TraceRequest]], requests: int, first: float, last: float
    ) -> None:
        """`begin_anew`: `requests` of them, at least one; seconds of the first and the last arrival."""
        self.first = first
        self.last = last
        self._begin_anew = begin_anew
        self._requests = requests

    @classmethod
    def of(cls, requests: Arrivals | Sequence[TraceRequest]) -> Arrivals:
        """Of what is kept anyway. Raises ValueError for no requests."""
        if isinstance(requests, Arrivals):
            return requests
        if not requests:
            raise ValueError("no request arrives")
        return cls(lambda: iter(requests), len(requests), requests[0].arrival, requests[-1].arrival)

    def __iter__(self) -> Iterator[TraceRequest]:
        return self._begin_anew()

    def __len__(self) -> int:
        return self._requests


def extent(requests: Iterable[TraceRequest]) -> tuple[int, float, float]:
    """How many, and the first and the last arrival; zeros for none."""
    count, first, last = 0, 0.0, 0.0
    for request in requests:
        last = request.arrival
        first = first if count else last
        count += 1
    return count, first, last
