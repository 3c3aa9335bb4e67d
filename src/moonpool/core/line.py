"""The line in front of one prefill instance: who goes before whom.

It is kept in order of arrival, but a newcomer passes those at its end that can afford it:

- Of its own rank, one that has more to compute, and as long as that one keeps its limit: its slack (time to its limit
  less everything in front of it and its own work) pays for what the newcomer needs. Short prompts so go between the
  chunks of a long one. And nobody, with or without a limit, is delayed by more than its own work takes: ageing.
- Of a later rank, any one that has not been delayed by AGEING_SECONDS yet. Batch work (rank `BATCH`) always gives way.

So whoever could keep its limit in order of arrival keeps it among its own rank, and nobody but batch work starves. A
newcomer looks at those that it passes and one more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from moonpool.core.classes import BATCH

AGEING_SECONDS = 60.0
"""By so much those of sooner ranks delay one of a later rank at most, beyond its own work."""
MARGIN = 0.5
"""Of what is predicted until an order is computed, kept in hand when its slack is asked for."""
FOREVER = float("inf")

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Turn(Generic[T]):
    """One order's place in line."""

    order: T
    rank: int
    seconds: float
    """Predicted, still to be computed."""
    limit: float
    """On the clock of the caller; FOREVER where there is none."""
    patience: float = field(init=False)
    """By so much its own rank may still delay it."""
    ageing: float = field(init=False)
    """By so much sooner ranks may."""
    before: Turn[T] | None = None
    behind: Turn[T] | None = None

    def __post_init__(self) -> None:
        self.patience = self.seconds
        self.ageing = FOREVER if self.rank >= BATCH.rank else self.seconds + AGEING_SECONDS


class Line(Generic[T]):
    def __init__(self) -> None:
        self.seconds = 0.0
        """Predicted for all in line."""
        self._first: Turn[T] | None = None
        self._last: Turn[T] | None = None

    def __iter__(self) -> Iterator[T]:
        """The first to be computed first. Only the order that came last may leave meanwhile."""
        turn = self._first
        while turn is not None:
            following = turn.behind
            yield turn.order
            turn = following

    def join(self, turn: Turn[T], now: float) -> None:
        ahead = self.seconds
        other = self._last
        while other is not None and _passes(turn, other, ahead, now):
            ahead -= other.seconds
            other = other.before
        behind = self._first if other is None else other.behind
        turn.before, turn.behind = other, behind
        if other is None:
            self._first = turn
        else:
            other.behind = turn
        if behind is None:
            self._last = turn
        else:
            behind.before = turn
        self.seconds += turn.seconds

    def leave(self, turn: Turn[T]) -> None:
        """It must be in this line."""
        before, behind = turn.before, turn.behind
        if before is None:
            assert self._first is turn, "it is not in this line"
            self._first = behind
        else:
            before.behind = behind
        if behind is None:
            assert self._last is turn, "it is not in this line"
            self._last = before
        else:
            behind.before = before
        turn.before = turn.behind = None
        self.seconds = self.seconds - turn.seconds if self._first is not None else 0.0

    def work(self, turn: Turn[T], left: float) -> None:
        """`left` seconds are still to be computed for it."""
        self.seconds += left - turn.seconds
        turn.seconds = left

    def check_integrity(self) -> None:
        """Raises AssertionError where the links or the sum are wrong."""
        turn, before, total = self._first, None, 0.0
        while turn is not None:
            assert turn.before is before
            assert turn.seconds >= 0.0
            total += turn.seconds
            turn, before = turn.behind, turn
        assert self._last is before
        assert abs(self.seconds - total) <= 1e-6 * (1.0 + total)


def _passes(turn: Turn[T], other: Turn[T], ahead: float, now: float) -> bool:
    """Whether `turn` goes before `other`, and makes it pay. `ahead`: seconds until `other` would be computed."""
    if other.rank < turn.rank:
        return False
    if other.rank > turn.rank:
        if other.ageing < turn.seconds:
            return False
        other.ageing -= turn.seconds
        return True
    slack = other.limit - now - (1.0 + MARGIN) * ahead
    if not turn.seconds < other.seconds or min(other.patience, slack) < turn.seconds:
        return False
    other.patience -= turn.seconds
    return True
