"""What a run was worth, live or simulated: goodput, latencies, refusals, reuse, waste. One form for both."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from moonpool.core.vocabulary import Slo
from moonpool.report.outcomes import Outcomes, total

Seconds = npt.NDArray[np.float64]
Intervals = Seconds
"""Between the tokens of one request, the gap after the first token included."""

BUCKETS = (("0-2k", 0), ("2k-8k", 2_000), ("8k-32k", 8_000), ("over 32k", 32_000))
"""Prompt lengths, from so many tokens on."""
LEAST_IN_BUCKET = 200
"""Fewer requests say little; they are counted with their neighbours."""


class Spread(Struct, frozen=True):
    """Of one figure over requests; all 0 where there are none."""

    mean: float
    p25: float
    p50: float
    p75: float
    p90: float
    p99: float
    most: float


class Bucket(Struct, frozen=True):
    """Requests of some prompt lengths."""

    name: str
    requests: int
    attained: int


class Summary(Struct, frozen=True):
    requests: int
    completed: int
    attained: int
    refused: dict[str, int]
    """By reason."""
    seconds: float
    """From the first arrival to the last."""
    goodput_requests: float
    """Requests that attain, a second of `seconds`."""
    goodput_tokens: float
    """Their prompt and output tokens, a second."""
    ttft: Spread
    slowest_tenth: Spread
    p90_interval: Spread
    longest_interval: Spread
    cached_share: float
    """Of the prompt tokens of all that had a first token."""
    computed_tokens: int
    wasted_tokens: int
    """Computed by prefill for requests that did not attain."""
    buckets: tuple[Bucket, ...]
    output_tokens: int = 0
    """Produced, for whomever."""


def summarize(outcomes: Outcomes, slo: Slo) -> Summary:
    """Raises ValueError for no outcomes."""
    if not len(outcomes):
        raise ValueError("no request to report on")
    good = outcomes.attain(slo)
    ttft = outcomes.ttft
    begun = ~np.isnan(ttft)
    seconds = float(outcomes.arrived.max() - outcomes.arrived.min())
    per_second = 1 / seconds if seconds else 0.0
    computed = total(outcomes.computed_tokens)
    prompt = total(outcomes.input_tokens[begun])
    return Summary(
        requests=len(outcomes),
        completed=total(outcomes.completed),
        attained=total(good),
        refused=outcomes.refusals(),
        seconds=seconds,
        goodput_requests=total(good) * per_second,
        goodput_tokens=total(outcomes.input_tokens[good] + outcomes.output_tokens[good]) * per_second,
        ttft=spread(ttft[begun]),
        slowest_tenth=spread(outcomes.slowest_tenth[begun]),
        p90_interval=spread(outcomes.p90_interval[begun]),
        longest_interval=spread(outcomes.longest_interval[begun]),
        cached_share=total(outcomes.cached_tokens[begun]) / prompt if prompt else 0.0,
        computed_tokens=computed,
        wasted_tokens=computed - total(outcomes.computed_tokens[good]),
        buckets=buckets(outcomes, slo),
        output_tokens=total(outcomes.output_tokens),
    )


def spread(values: Seconds) -> Spread:
    if not len(values):
        return Spread(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    return Spread(float(values.mean()), *(float(v) for v in np.percentile(values, (25, 50, 75, 90, 99, 100))))


def intervals_of(intervals: Intervals) -> tuple[float, float, float]:
    """Mean of the longest 10 % (at least one), P90 and the longest; zeros for a request of one token."""
    total = len(intervals)
    if not total:
        return 0.0, 0.0, 0.0
    ordered = np.sort(intervals)
    longest = ordered[-max(total // 10, 1) :]
    # As numpy's percentile, which takes several times as long for so few.
    below, share = divmod(0.9 * (total - 1), 1)
    low, high = ordered[int(below)], ordered[min(int(below) + 1, total - 1)]
    return float(longest.sum()) / len(longest), float(low + (high - low) * share), float(ordered[-1])


def buckets(outcomes: Outcomes, slo: Slo) -> tuple[Bucket, ...]:
    """By prompt length; a bucket of less than LEAST_IN_BUCKET requests goes into the next shorter one, the first into
    the next longer one, and both names are given."""
    starts = [start for _, start in BUCKETS]
    at = np.searchsorted(starts, outcomes.input_tokens, side="right") - 1
    requests = np.bincount(at, minlength=len(BUCKETS)).tolist()
    attained = np.bincount(at[outcomes.attain(slo)], minlength=len(BUCKETS)).tolist()
    found = [Bucket(name, *counts) for (name, _), *counts in zip(BUCKETS, requests, attained, strict=True)]
    place = len(found) - 1
    while place >= 0 and len(found) > 1:
        if found[place].requests < LEAST_IN_BUCKET:
            left = max(place - 1, 0)
            a, b = found[left], found[left + 1]
            merged = Bucket(f"{a.name} + {b.name}", a.requests + b.requests, a.attained + b.attained)
            found[left : left + 2] = [merged]
        place = min(place, len(found)) - 1
    return tuple(found)
