"""Finds the load of an experiment: where one of its figures, which rises with load, has a wanted value."""

from __future__ import annotations

import math

STRIDE = 1.25
"""Factor from one speed to the next until the wanted value lies between two."""
EDGE = 0.1
"""Of what lies between two speeds: no nearer to either is looked at."""
NARROW = 1.005
"""Two speeds that are no further apart: the figure jumps between them, and the nearer one is taken."""
MOST_LOOKS = 12


class Aim:
    """Ask `speed`, tell what the figure was there, until `is_over`: by straight lines between the nearest two, and in
    the middle after two that were off on the same side, for the figure may be nowhere near a straight line."""

    def __init__(self, wanted: float, tolerance: float, start: float = 1.0) -> None:
        """`tolerance`: relative to `wanted`, how far off the figure may be."""
        self.speed = start
        self.is_over = False
        self.found = start
        """Of the speeds so far, the one with the nearest figure."""
        self._wanted = wanted
        self._tolerance = tolerance
        self._off = math.inf
        self._below: tuple[float, float] | None = None
        """(speed, figure): the highest known with too little."""
        self._above: tuple[float, float] | None = None
        self._looks = 0
        self._on_one_side = 0
        """So many looks in a row were too low, or minus so many too high."""

    def tell(self, figure: float) -> None:
        """What came at `speed`."""
        self._looks += 1
        off = abs(figure / self._wanted - 1)
        if off < self._off:
            self._off, self.found = off, self.speed
        if figure <= self._wanted:
            self._below = (self.speed, figure)
            self._on_one_side = max(self._on_one_side, 0) + 1
        else:
            self._above = (self.speed, figure)
            self._on_one_side = min(self._on_one_side, 0) - 1
        self.is_over = off <= self._tolerance or self._looks >= MOST_LOOKS
        if self._below is None:
            self.speed /= STRIDE
        elif self._above is None:
            self.speed *= STRIDE
        else:
            (low, less), (high, more) = self._below, self._above
            share = (self._wanted - less) / (more - less) if more > less and abs(self._on_one_side) < 2 else 0.5
            self.speed = low + (high - low) * min(max(share, EDGE), 1 - EDGE)
            self.is_over |= high <= low * NARROW
