"""A cluster's load over time, live or simulated: sampled, in bounded memory, and what can be told from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from moonpool.core.state import ConductorState
from moonpool.core.vocabulary import PartKind, Slo

MOST_SAMPLES = 600
"""One more, and every other one goes; from then on they are taken half as often."""


class Sample(Struct, frozen=True):
    """One moment. Means are over the instances of a pool; an idle one counts as 0."""

    time: float
    """Seconds since the first request could have come."""
    prefill_seconds: float
    """Predicted until an instance's queue is computed: when the last one there has its first token."""
    prefill_seconds_most: float
    decode_seconds: float
    """Predicted for one step of an instance's batch."""
    decode_seconds_most: float
    batch: float
    """Requests in an instance's batch."""
    assigned: float
    """Requests meant for a decode instance, those still in prefill included."""
    link_use: float = 0.0
    """Mean share of the time since the last sample in which a node's link was busy."""
    link_use_most: float = 0.0
    replicas: tuple[int, ...] = ()
    """Nodes that hold each of the watched prefixes."""


class Swing(Struct, frozen=True):
    """How the loads of the two pools move, and whether against each other (PAPER §5, §9)."""

    prefill_mean: float
    decode_mean: float
    prefill_deviation: float
    decode_deviation: float
    correlation: float
    """Of both at the same time; 0 where one of them never changes."""
    lagged: tuple[tuple[float, float], ...]
    """(seconds, correlation of prefill with decode so much later)."""


def sample_of(state: ConductorState, time: float) -> Sample:
    """What the Conductor knows; links and replicas are for those who can see them."""
    waits, steps, batches, assigned = [], [], [], []
    for part in state.parts:
        if part.kind == PartKind.PREFILL.value:
            waits.append(part.queue_seconds or 0.0)
        elif part.kind == PartKind.DECODE.value and part.cost is not None:
            running, (fixed, per_request, per_token) = part.running or 0, part.cost
            step = fixed + per_request * running + per_token * (part.context_tokens or 0)
            steps.append(step if running else 0.0)
            batches.append(running)
            assigned.append(part.assigned or 0)
    return Sample(
        time=time,
        prefill_seconds=_mean(waits),
        prefill_seconds_most=max(waits, default=0.0),
        decode_seconds=_mean(steps),
        decode_seconds_most=max(steps, default=0.0),
        batch=_mean(batches),
        assigned=_mean(assigned),
    )


def loads(samples: Iterable[Sample], slo: Slo) -> tuple[list[float], list[float]]:
    """Of prefill and decode: the predicted TTFT and TBT over their limits; seconds where there is no limit."""
    kept = list(samples)
    prefill = [sample.prefill_seconds / (slo.ttft or 1.0) for sample in kept]
    return prefill, [sample.decode_seconds / (slo.tbt or 1.0) for sample in kept]


def swing(samples: Sequence[Sample], slo: Slo, until: float, lags: Sequence[float] = (10.0, 20.0, 30.0, 60.0)) -> Swing:
    """`until`: only while requests come; the end of a run, when all that is left drains, would look like a swing.

    `lags`: seconds, each taken to the nearest sample; those of more than half the time are left out.
    """
    kept = [sample for sample in samples if sample.time <= until]
    prefill, decode = (np.asarray(load) for load in loads(kept, slo))
    period = (kept[-1].time - kept[0].time) / (len(kept) - 1) if len(kept) > 1 else 1.0
    shifts = sorted({round(lag / period) for lag in lags}) if period > 0 else []
    return Swing(
        prefill_mean=_mean(prefill),
        decode_mean=_mean(decode),
        prefill_deviation=float(prefill.std()) if len(prefill) else 0.0,
        decode_deviation=float(decode.std()) if len(decode) else 0.0,
        correlation=correlation(prefill, decode),
        lagged=tuple(
            (shift * period, correlation(prefill, decode, shift)) for shift in shifts if 0 < shift < len(kept) / 2
        ),
    )


def correlation(first: npt.ArrayLike, second: npt.ArrayLike, shift: int = 0) -> float:
    """Pearson's, of each value of `first` with the one `shift` samples later in `second`; 0 where it is not defined."""
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    a, b = a[: max(len(a) - shift, 0)], b[shift:]
    if len(a) < 2 or a.std() == 0.0 or b.std() == 0.0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


class Recording:
    """Samples of a run of unknown length: at most MOST_SAMPLES, evenly spaced."""

    def __init__(self, period: float) -> None:
        """`period`: seconds between samples at first."""
        self.period = period
        self.samples: list[Sample] = []

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        if len(self.samples) > MOST_SAMPLES:
            del self.samples[1::2]
            self.period *= 2


def _mean(values: Sequence[float] | npt.NDArray[np.float64]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
