"""One run as it is shown beside others, whether it was simulated or served."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from moonpool.core.settings import Decisions
from moonpool.core.vocabulary import Slo
from moonpool.report.priorities import ClassWorth
from moonpool.report.samples import Sample, Swing, swing
from moonpool.report.summary import Outcome, Summary, summarize
from moonpool.report.timeline import Bin, Curve, curve, timeline


class Watched(Struct, frozen=True):
    """A prefix whose replicas are counted in `Sample.replicas`."""

    name: str
    prompts: int
    """That begin with it."""


class Over(Struct, frozen=True):
    """What a run looked like over time, and its distributions."""

    samples: tuple[Sample, ...]
    watched: tuple[Watched, ...]
    bins: tuple[Bin, ...]
    ttft: Curve
    slowest_tenth: Curve


class Run(Struct, frozen=True):
    """One column of a report, and one element of `runs` in its JSON."""

    name: str
    seed: int
    slo: Slo
    summary: Summary
    decisions: Decisions
    preemptions: int
    prefill_busy: float
    """Share of the time that prefill instances computed."""
    decode_busy: float
    late_refusals: int
    """Requests refused after some of them was computed."""
    swing: Swing
    over: Over
    classes: tuple[ClassWorth, ...] = ()
    """Where there are any."""


def run_of(
    name: str,
    seed: int,
    slo: Slo,
    outcomes: Sequence[Outcome],
    samples: Sequence[Sample],
    watched: Sequence[Watched],
    decisions: Decisions,
    preemptions: int,
    busy: tuple[float, float],
) -> Run:
    """`busy`: shares of the time that prefill and decode instances computed. Raises ValueError for no outcomes."""
    begun = [outcome for outcome in outcomes if outcome.ttft is not None]
    last = max((outcome.arrived for outcome in outcomes), default=0.0)
    return Run(
        name=name,
        seed=seed,
        slo=slo,
        summary=summarize(outcomes, slo),
        decisions=decisions,
        preemptions=preemptions,
        prefill_busy=busy[0],
        decode_busy=busy[1],
        late_refusals=sum(bool(outcome.refusal and outcome.computed_tokens) for outcome in outcomes),
        swing=swing(samples, slo, last),
        over=Over(
            samples=tuple(samples),
            watched=tuple(watched),
            bins=timeline(outcomes, slo),
            ttft=curve([outcome.ttft for outcome in begun if outcome.ttft is not None], len(outcomes)),
            slowest_tenth=curve([outcome.slowest_tenth for outcome in begun], len(outcomes)),
        ),
    )
