"""What became of the requests of each part of a run, by their time of arrival."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from moonpool.core.vocabulary import Slo
from moonpool.report.outcomes import Floats, Ints, Mask, Outcomes

BINS = 60
CURVE_POINTS = 200


class Bin(Struct, frozen=True):
    """Requests that arrived from `time` to the next bin's; tokens are prompt tokens."""

    time: float
    requests: int
    attained: int
    refused_early: int
    """Before any of them was computed."""
    refused_late: int
    local_tokens: int
    """From the DRAM beside the prefill instance."""
    fetched_tokens: int
    """From other nodes."""
    computed_tokens: int
    wasted_tokens: int
    """Computed for requests that did not attain."""


class Curve(Struct, frozen=True):
    """A distribution: `values` at even steps of the share, from 0 to `share` of all requests."""

    values: tuple[float, ...]
    share: float
    """Of the requests that have a value at all."""


def timeline(outcomes: Outcomes, slo: Slo, bins: int = BINS) -> tuple[Bin, ...]:
    """As many bins of equal length as told, from 0 to the last arrival. Raises ValueError for no outcomes."""
    if not len(outcomes):
        raise ValueError("no request to report on")
    width = float(outcomes.arrived.max()) / bins or 1.0
    at = np.minimum((outcomes.arrived / width).astype(np.int64), bins - 1)

    def sums(of: Ints | Mask) -> list[int]:
        found = np.zeros(bins, np.int64)
        np.add.at(found, at, of)
        return [int(each) for each in found]

    good, refused, computed, fetched = (
        outcomes.attain(slo),
        outcomes.refused,
        outcomes.computed_tokens,
        outcomes.fetched_tokens,
    )
    columns = (
        np.ones(len(outcomes), np.int64),
        good,
        refused & (computed == 0),
        refused & (computed > 0),
        outcomes.cached_tokens - fetched,
        fetched,
        computed,
        np.where(good, 0, computed),
    )
    return tuple(Bin(number * width, *each) for number, each in enumerate(zip(*map(sums, columns), strict=True)))


def curve(values: Floats, requests: int, points: int = CURVE_POINTS) -> Curve:
    """`values`: of those of `requests` that have one."""
    if not len(values):
        return Curve((), 0.0)
    quantiles = np.percentile(values, np.linspace(0, 100, points))
    return Curve(tuple(float(value) for value in quantiles), len(values) / requests)
