"""One run as it is shown beside others, whether it was simulated or served."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec import Struct

from moonpool.core.settings import Decisions
from moonpool.core.vocabulary import Slo
from moonpool.report.live import Live
from moonpool.report.outcomes import Outcomes, total
from moonpool.report.priorities import ClassWorth
from moonpool.report.samples import Sample, Swing, swing
from moonpool.report.summary import Summary, summarize
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
    live: Live | None = None
    """Of a run on a real endpoint: what happens inside of it is not known then, and 0 in the fields above."""


def live_run(name: str, seed: int, slo: Slo, outcomes: Outcomes, live: Live) -> Run:
    """A run on a real endpoint. Raises ValueError for no outcomes."""
    run = run_of(name, seed, slo, outcomes, (), (), Decisions(), preemptions=0, busy=(0.0, 0.0))
    return msgspec.structs.replace(run, live=live)


def run_of(
    name: str,
    seed: int,
    slo: Slo,
    outcomes: Outcomes,
    samples: Sequence[Sample],
    watched: Sequence[Watched],
    decisions: Decisions,
    preemptions: int,
    busy: tuple[float, float],
) -> Run:
    """`busy`: shares of the time that prefill and decode instances computed. Raises ValueError for no outcomes."""
    summary = summarize(outcomes, slo)
    begun = ~np.isnan(outcomes.ttft)
    return Run(
        name=name,
        seed=seed,
        slo=slo,
        summary=summary,
        decisions=decisions,
        preemptions=preemptions,
        prefill_busy=busy[0],
        decode_busy=busy[1],
        late_refusals=total(outcomes.refused & (outcomes.computed_tokens > 0)),
        swing=swing(samples, slo, float(outcomes.arrived.max())),
        over=Over(
            samples=tuple(samples),
            watched=tuple(watched),
            bins=timeline(outcomes, slo),
            ttft=curve(outcomes.ttft[begun], len(outcomes)),
            slowest_tenth=curve(outcomes.slowest_tenth[begun], len(outcomes)),
        ),
    )
