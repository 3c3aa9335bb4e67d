"""A trace that is read, or drawn, over and over in order of arrival, in little memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import numpy as np

from moonpool.errors import TraceError
from moonpool.trace.read import TraceFile
from moonpool.trace.request import TraceRequest

MOST_KEPT = 1 << 20
"""Numbers: what has fewer block ids, and lengths, is kept, for to read them again takes longer."""
NUMBERS_BESIDE_IDS = 4
"""Of a request, about."""


class Few:
    """Takes requests as long as they are few enough to be kept."""

    def __init__(self) -> None:
        self.kept: list[TraceRequest] | None = []
        """None: they are too many."""
        self._numbers = 0

    def take(self, request: TraceRequest) -> None:
        if self.kept is not None:
            self._numbers += len(request.blocks) + NUMBERS_BESIDE_IDS
            self.kept.append(request)
            if self._numbers > MOST_KEPT:
                self.kept = None


def few(requests: Iterable[TraceRequest]) -> list[TraceRequest] | None:
    """All of them; None where they are too many, of which no more are looked at than that takes."""
    found = Few()
    for request in requests:
        found.take(request)
        if found.kept is None:
            break
    return found.kept


class Index:
    """Where a file's requests stand, in order of arrival: 16 bytes of memory for each; all of a small file."""

    def __init__(self, trace: TraceFile) -> None:
        """Reads it once. Requests of one arrival stay in the order of the file, which may have any.

        Raises TraceError, also for a prompt without tokens.
        """
        self._trace = trace
        arrivals, places, found = array("d"), array("q"), Few()
        for place, request in trace.located():
            if request.input_tokens < 1:
                raise TraceError(f"{trace.path} has a request without input tokens; a prompt has at least one")
            arrivals.append(request.arrival)
            places.append(place)
            found.take(request)
        times = np.frombuffer(arrivals)
        if (np.diff(times) < 0.0).any():
            order = np.argsort(times, kind="stable")
            arrivals = array("d", times[order].tobytes())
            places = array("q", np.frombuffer(places, np.int64)[order].tobytes())
            if found.kept is not None:
                found.kept.sort(key=lambda request: request.arrival)
        self._arrivals, self._places, self._kept = arrivals, places, found.kept

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self._kept) if self._kept is not None else self._trace.at(self._places)

    def times(self) -> Iterator[TraceRequest]:
        """The same with nothing but their arrivals, without a look at the file."""
        return (TraceRequest(arrival, 1, 1) for arrival in self._arrivals)
