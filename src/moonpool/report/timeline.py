"""What became of the requests of each part of a run, by their time of arrival."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from moonpool.core.vocabulary import Slo
from moonpool.report.summary import Outcome

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


def timeline(outcomes: Sequence[Outcome], slo: Slo, bins: int = BINS) -> tuple[Bin, ...]:
    """As many bins of equal length as told, from 0 to the last arrival. Raises ValueError for no outcomes."""
    if not outcomes:
        raise ValueError("no request to report on")
    last = max(outcome.arrived for outcome in outcomes)
    width = last / bins or 1.0
    members: list[list[Outcome]] = [[] for _ in range(bins)]
    for outcome in outcomes:
        members[min(int(outcome.arrived / width), bins - 1)].append(outcome)
    return tuple(_bin(at * width, members[at], slo) for at in range(bins))


def curve(values: Sequence[float], requests: int, points: int = CURVE_POINTS) -> Curve:
    """`values`: of those of `requests` that have one."""
    if not values:
        return Curve((), 0.0)
    quantiles = np.percentile(np.asarray(values), np.linspace(0, 100, points))
    return Curve(tuple(float(value) for value in quantiles), len(values) / requests)


def _bin(time: float, members: Sequence[Outcome], slo: Slo) -> Bin:
    good = [outcome for outcome in members if outcome.attains(slo)]
    refused = [outcome for outcome in members if outcome.refusal]
    early = sum(not outcome.computed_tokens for outcome in refused)
    computed = sum(outcome.computed_tokens for outcome in members)
    fetched = sum(outcome.fetched_tokens for outcome in members)
    return Bin(
        time=time,
        requests=len(members),
        attained=len(good),
        refused_early=early,
        refused_late=len(refused) - early,
        local_tokens=sum(outcome.cached_tokens for outcome in members) - fetched,
        fetched_tokens=fetched,
        computed_tokens=computed,
        wasted_tokens=computed - sum(outcome.computed_tokens for outcome in good),
    )
