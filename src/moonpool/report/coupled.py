"""Separate pools beside coupled workers on as many machines: the rates that both bear, and the gains (PAPER §6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from moonpool.report.paper import Finding

CRITERIA = ("TTFT alone", "both, longest tenth", "both, P90")
"""What a request has to keep. TBT is held against the mean of the longest tenth of its intervals, or their P90."""


class Borne(Struct, frozen=True):
    """The highest rates, requests a second, at which the wanted share attains, in the order of CRITERIA."""

    name: str
    rates: tuple[float, ...]
    """0.0: not even the lowest that was tried."""


def coupled_findings(
    separate: Sequence[Borne], coupled: Sequence[Borne], theirs: Mapping[str, str]
) -> tuple[Finding, ...]:
    """`theirs`: what the paper gives, by the names of the rows."""
    findings = [Finding(each.name, theirs.get(each.name, "-"), _rates(each), "") for each in separate]
    for other in coupled:
        comment = "; ".join(f"{each.name} {_gains(each, other)}" for each in separate)
        findings.append(Finding(other.name, theirs.get(other.name, "-"), _rates(other), comment))
    best = [max((each.rates[at] for each in coupled), default=0.0) for at in range(len(CRITERIA))]
    comment = "; ".join(f"{each.name} {_gains(each, Borne('', tuple(best)))}" for each in separate)
    return (*findings, Finding("the best of the coupled at each", "-", _rates(Borne("", tuple(best))), comment))


def _rates(each: Borne) -> str:
    return " · ".join(f"{rate:.3g}" for rate in each.rates)


def _gains(separate: Borne, coupled: Borne) -> str:
    """`+75 % · +10 % · -3 %`."""
    gains = []
    for mine, other in zip(separate.rates, coupled.rates, strict=True):
        gains.append(f"{mine / other - 1:+.0%}" if other else "from none")
    return " · ".join(gains)
