"""Over how many connections a large transfer to one node goes."""

from __future__ import annotations

import os

LANES = 2
"""At most."""
TRIED_EVERY = 12
"""Transfers, of which one goes over the number of connections that was slower so far."""
NEWEST = 0.5
"""The share of the last transfer in what is believed of its number of connections."""


class Spread:
    """The number that was fastest lately, of transfers one way to one node.

    There is no telling beforehand. With a processor for either end of one connection that is faster than two, whose
    four ends take turns. But on virtual processors that the host moves about, one connection between two of them falls
    to less than half for seconds on end, while two, whose ends can do with one processor each, hardly lose anything.

    Any thread may use it: what it forgets when two do at once is of no consequence.
    """

    def __init__(self, is_near: bool) -> None:
        """`is_near`: the node is on this host, and its ends need processors here."""
        processors = len(os.sched_getaffinity(0))
        first = max(1, min(LANES, processors // 2 if is_near else processors))
        self._rates: dict[int, float | None] = {first: None}
        """Bytes/s by number of connections; the one to begin with comes first."""
        if processors > 1:
            self._rates |= {lanes: None for lanes in range(1, LANES + 1) if lanes != first}
        self._transfers = 0

    def choose(self) -> int:
        """Connections for the next transfer."""
        self._transfers += 1
        for lanes, rate in self._rates.items():
            if rate is None:
                return lanes
        ranked = sorted(self._rates, key=lambda lanes: self._rates[lanes] or 0.0)
        return ranked[-1] if self._transfers % TRIED_EVERY else ranked[0]

    def note(self, lanes: int, nbytes: int, seconds: float) -> None:
        """A transfer was over after so long."""
        rate, before = nbytes / max(seconds, 1e-9), self._rates.get(lanes)
        self._rates[lanes] = rate if before is None else before + NEWEST * (rate - before)
