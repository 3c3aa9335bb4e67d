"""What a run was worth, live or simulated: goodput, latencies, refusals, reuse, waste. One form for both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from moonpool.core.vocabulary import Slo

Intervals = npt.NDArray[np.float64]
"""Seconds between the tokens of one request, the gap after the first token included."""

BUCKETS = (("0-2k", 0), ("2k-8k", 2_000), ("8k-32k", 8_000), ("over 32k", 32_000))
"""Prompt lengths, from so many tokens on."""
LEAST_IN_BUCKET = 200
"""Fewer requests say little; they are counted with their neighbours."""


class Outcome(Struct, frozen=True):
    """One request that is over. Times in seconds, lengths in tokens."""

    arrived: float
    input_tokens: int
    output_tokens: int
    """Produced."""
    completed: bool
    ttft: float | None
    """None: there was no first token."""
    slowest_tenth: float
    """The mean of the longest 10 % of its token intervals, at least one; 0 where it has none."""
    p90_interval: float
    longest_interval: float
    cached_tokens: int
    computed_tokens: int
    """By prefill, over all attempts."""
    refusal: str = ""
    """Why it was not served, empty if it was."""
    fetched_tokens: int = 0
    """Those of `cached_tokens` that came from another node."""
    priority: str = ""
    """What it asked for."""

    def attains(self, slo: Slo) -> bool:
        """It is complete and within both limits (DESIGN: words)."""
        if not self.completed or self.ttft is None:
            return False
        in_time = slo.ttft is None or self.ttft <= slo.ttft
        return in_time and (slo.tbt is None or self.slowest_tenth <= slo.tbt)


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


def summarize(outcomes: Sequence[Outcome], slo: Slo) -> Summary:
    """Raises ValueError for no outcomes."""
    if not outcomes:
        raise ValueError("no request to report on")
    good = [outcome for outcome in outcomes if outcome.attains(slo)]
    begun = [outcome for outcome in outcomes if outcome.ttft is not None]
    seconds = max(outcome.arrived for outcome in outcomes) - min(outcome.arrived for outcome in outcomes)
    per_second = 1 / seconds if seconds else 0.0
    computed = sum(outcome.computed_tokens for outcome in outcomes)
    prompt = sum(outcome.input_tokens for outcome in begun)
    return Summary(
        requests=len(outcomes),
        completed=sum(outcome.completed for outcome in outcomes),
        attained=len(good),
        refused=dict(sorted(Counter(outcome.refusal for outcome in outcomes if outcome.refusal).items())),
        seconds=seconds,
        goodput_requests=len(good) * per_second,
        goodput_tokens=sum(outcome.input_tokens + outcome.output_tokens for outcome in good) * per_second,
        ttft=spread([outcome.ttft for outcome in begun if outcome.ttft is not None]),
        slowest_tenth=spread([outcome.slowest_tenth for outcome in begun]),
        p90_interval=spread([outcome.p90_interval for outcome in begun]),
        longest_interval=spread([outcome.longest_interval for outcome in begun]),
        cached_share=sum(outcome.cached_tokens for outcome in begun) / prompt if prompt else 0.0,
        computed_tokens=computed,
        wasted_tokens=computed - sum(outcome.computed_tokens for outcome in good),
        buckets=buckets(outcomes, slo),
    )


def spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    array = np.asarray(values)
    return Spread(float(array.mean()), *(float(v) for v in np.percentile(array, (25, 50, 75, 90, 99, 100))))


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


def buckets(outcomes: Sequence[Outcome], slo: Slo) -> tuple[Bucket, ...]:
    """By prompt length; a bucket of less than LEAST_IN_BUCKET requests goes into the next shorter one, the first into
    the next longer one, and both names are given."""
    starts = [start for _, start in BUCKETS]
    found = [Bucket(name, 0, 0) for name, _ in BUCKETS]
    for outcome in outcomes:
        at = sum(outcome.input_tokens >= start for start in starts) - 1
        old = found[at]
        found[at] = Bucket(old.name, old.requests + 1, old.attained + outcome.attains(slo))
    at = len(found) - 1
    while at >= 0 and len(found) > 1:
        if found[at].requests < LEAST_IN_BUCKET:
            left = max(at - 1, 0)
            a, b = found[left], found[left + 1]
            merged = Bucket(f"{a.name} + {b.name}", a.requests + b.requests, a.attained + b.attained)
            found[left : left + 2] = [merged]
        at = min(at, len(found)) - 1
    return tuple(found)
