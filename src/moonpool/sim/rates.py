"""The 90 % point (DESIGN §1): the highest rate on a fine grid at which enough of the offered requests attain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

SHARE = 0.9


class RatePoint(Struct, frozen=True):
    """What a search found."""

    rate: float
    """The highest rate of the grid that attains; 0.0 where even the lowest does not."""
    attained: float
    """Share of the requests at that rate."""
    tried: tuple[tuple[float, float], ...]
    """Each rate that was looked at, in rising order, with its share."""
    is_open: bool
    """The grid's end attains as well: the limit lies beyond it."""


def one_by_one(attainment: Callable[[float], float]) -> Callable[[Sequence[float]], list[float]]:
    """For `highest_rate`, where there is one core."""
    return lambda rates: [attainment(rate) for rate in rates]


def highest_rate(
    attainments: Callable[[Sequence[float]], Sequence[float]],
    step: float,
    most: float,
    *,
    start: float | None = None,
    share: float = SHARE,
    width: int = 1,
) -> RatePoint:
    """Search the grid step, 2·step, … up to `most`.

    `attainments(rates)`: the share of offered requests that attain at each rate, 0 to 1; it gets up to `width` rates at
    a time, and may look at them side by side (`ProcessPoolExecutor.map`). It is taken to fall with the rate: a search
    from `start` outwards by doubling, then by halving what is left, never looks at most of the grid. `rate` is a unit
    of the caller's choice: requests a second, or how many times as fast a trace is replayed.

    Raises ValueError for a grid without points.
    """
    last = int(most / step + 1e-9)
    if step <= 0 or last < 1 or width < 1:
        raise ValueError(f"no rate lies on a grid of {step:g} up to {most:g}, looked at {width} at a time")
    found: dict[int, float] = {}

    def look(points: Sequence[int]) -> None:
        new = [at for at in dict.fromkeys(points) if at not in found]
        found.update(zip(new, attainments([at * step for at in new]), strict=True))

    low, high = 0, last + 1
    """The highest point that attains, or the one before the grid; the lowest that does not, or the one after it."""
    at = min(max(round((start or most / 2) / step), 1), last)
    stride = max(at // 4, 1)
    while True:
        look(_outwards(at, stride, low, high, width))
        low, high = _narrowed(found, share, last)
        if (low and high <= last) or low == last or high == 1:
            break
        at = min(low + stride, last) if low else max(high - stride, 1)
        stride *= 2
    while high - low > 1:
        look(_between(low, high, width))
        low, high = _narrowed(found, share, last)
    tried = tuple((at * step, found[at]) for at in sorted(found))
    return RatePoint(low * step, found.get(low, 0.0), tried, low == last)


def _narrowed(found: dict[int, float], share: float, last: int) -> tuple[int, int]:
    """Where noise makes a point attain above one that does not, the lower one decides."""
    high = min((at for at, attained in found.items() if attained < share), default=last + 1)
    return max((at for at in found if at < high), default=0), high


def _outwards(at: int, stride: int, low: int, high: int, width: int) -> list[int]:
    """`at`, and further on in the direction that is open."""
    points = [at]
    step = -stride if high <= at + stride else stride
    while len(points) < width and low < points[-1] + step < high:
        points.append(points[-1] + step)
    return points


def _between(low: int, high: int, width: int) -> list[int]:
    count = min(width, high - low - 1)
    return [low + (high - low) * (n + 1) // (count + 1) for n in range(count)]
