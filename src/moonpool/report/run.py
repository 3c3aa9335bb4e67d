"""One run as it is shown beside others, whether it was simulated or served."""

from __future__ import annotations

from msgspec import Struct

from moonpool.core.settings import Decisions
from moonpool.core.vocabulary import Slo
from moonpool.report.summary import Summary


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
