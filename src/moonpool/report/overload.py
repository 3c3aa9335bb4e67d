"""The paper's overload experiment beside ours (§5): who refuses how many, at what price, and how the loads move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from moonpool.report.estimates import Estimate, estimate, paired_difference
from moonpool.report.paper import Finding, PaperFigures, against, factor, show
from moonpool.report.run import Run

Figure = Callable[[Run], float]
LAG = 20.0, 40.0
"""Seconds: a correlation so much later is held against the paper's, which is 30 s later."""


def refused(run: Run) -> float:
    """Share of all requests."""
    return sum(run.summary.refused.values()) / run.summary.requests


def attained(run: Run) -> float:
    """Share of all requests."""
    return run.summary.attained / run.summary.requests


def missed(run: Run) -> float:
    """Share of all requests: taken, and not served within both limits."""
    return 1.0 - refused(run) - attained(run)


def wasted(run: Run) -> float:
    """Share of the prompt tokens that prefill computed: for requests that did not attain."""
    return run.summary.wasted_tokens / max(run.summary.computed_tokens, 1)


def overload_findings(runs: Mapping[str, Sequence[Run]], paper: PaperFigures) -> tuple[Finding, ...]:
    """`runs`: by admission policy, a run for each seed; the first one is what the others are held against."""
    first, offered = next(iter(runs)), paper.refused["requests"]
    shares: tuple[tuple[str, Figure], ...] = (
        ("refused", refused),
        ("taken, but a limit missed", missed),
        ("attain", attained),
        ("prefill for nothing", wasted),
    )
    findings = []
    for what, figure in shares:
        base = [figure(run) for run in runs[first]]
        for name, each in runs.items():
            values = [figure(run) for run in each]
            theirs = f"{paper.refused[name] / offered:.1%}" if figure is refused and name in paper.refused else "-"
            said = [] if name == first else [against(values, base, first, number=figure is not wasted)]
            if figure is refused:
                said.append(_reasons(each))
            elif figure is wasted:
                late = estimate([run.late_refusals for run in each])
                said.append(f"{late.mean:.0f} refused after prefill")
            comment = "; ".join(said)
            findings.append(Finding(f"{what}, {name}", theirs, show(estimate(values), percent=True), comment))
    if "early" in runs and first != "early":
        findings.append(_early(runs["early"], runs[first], first))
    for name, each in runs.items():
        findings += _swing(name, each, paper)
    if "early" in runs and "forecast" in runs:
        findings += _beside_early(runs["forecast"], runs["early"])
    return tuple(findings)


def _reasons(runs: Sequence[Run]) -> str:
    """`kv-room 15.1 %, tbt-slo 4.9 %`, the most first."""
    found: Counter[str] = Counter()
    for run in runs:
        found.update(run.summary.refused)
    offered = sum(run.summary.requests for run in runs)
    return ", ".join(f"{reason} {count / offered:.1%}" for reason, count in found.most_common())


def _early(early: Sequence[Run], others: Sequence[Run], other: str) -> Finding:
    """What the paper says of it: fewer refused, and less computed for nothing. Where it is not so, why."""

    def of(figure: Figure) -> Estimate:
        return paired_difference([figure(run) for run in early], [figure(run) for run in others])

    refuses, attains, wastes = of(refused), of(attained), of(wasted)
    waits = [estimate([run.summary.ttft.mean for run in runs]).mean for runs in (early, others)]
    said = ["fewer refused" if refuses.mean < 0 else "does not reproduce: no fewer refused"]
    said[0] += _chance(refuses)
    said.append(f"{'less' if wastes.mean < 0 else 'no less'} for nothing{_chance(wastes)}")
    if refuses.mean >= 0:
        said.append(
            f"{'more' if attains.mean > 0 else 'no more'} attain all the same{_chance(attains)}; whom {other} takes "
            f"waits: its mean TTFT is {waits[1]:.1f} s, that of early {waits[0]:.1f} s"
        )
    ours = "; ".join(f"{each.mean:+.1%}" for each in (refuses, attains, wastes))
    return Finding(f"early less {other}: refused; attain; prefill for nothing", "-", ours, "; ".join(said))


def _beside_early(forecast: Sequence[Run], early: Sequence[Run]) -> list[Finding]:
    """Whether `forecast` moves the loads less than `early`, and what it refuses for that."""

    def of(figure: Figure) -> Estimate:
        return paired_difference([figure(run) for run in forecast], [figure(run) for run in early])

    prefill, decode = of(lambda run: run.swing.prefill_deviation), of(lambda run: run.swing.decode_deviation)
    refuses, attains, wastes = of(refused), of(attained), of(wasted)
    what = "forecast less early: "
    return [
        Finding(
            what + "deviation of prefill, decode load",
            "-",
            f"{_signed(prefill)}, {_signed(decode)}",
            f"prefill load {_moved(prefill)}; decode load {_moved(decode)}",
        ),
        Finding(
            what + "refused; attain; prefill for nothing",
            "-",
            "; ".join(f"{each.mean:+.1%}" for each in (refuses, attains, wastes)),
            _price(refuses, attains, wastes, sum(run.summary.requests for run in early) / len(early)),
        ),
    ]


def _price(refuses: Estimate, attains: Estimate, wastes: Estimate, requests: float) -> str:
    """What it means that one refuses more or fewer than the other, of so many requests."""
    said = [
        f"{'more' if refuses.mean > 0 else 'no more'} refused{_chance(refuses)}",
        f"{'fewer' if attains.mean < 0 else 'no fewer'} attain{_chance(attains)}",
        f"{'less' if wastes.mean < 0 else 'no less'} for nothing{_chance(wastes)}",
    ]
    more = refuses.mean * requests
    if more >= 0.5:
        gone = f"early takes {more:.0f} of {requests:.0f} requests more, and {more + attains.mean * requests:.0f} more "
        said.append(gone + "miss a limit after they were taken")
        if attains.mean >= 0 or not attains.is_clear:
            said.append("does not reproduce as fewer refusals: those that it refuses more would not have attained")
    return "; ".join(said)


def _swing(name: str, runs: Sequence[Run], paper: PaperFigures) -> list[Finding]:
    swing = paper.swing if name == "early" else None
    correlation = estimate([run.swing.correlation for run in runs])
    if swing is None:
        comment = ""
    elif correlation.mean < 0:
        comment = f"anti-phase, {factor(correlation.mean, swing.correlation)}"
    else:
        comment = "does not reproduce: the loads do not move against each other; see how far each moves at all"
    prefill = estimate([run.swing.prefill_deviation for run in runs])
    decode = estimate([run.swing.decode_deviation for run in runs])
    theirs = f"{swing.prefill_deviation:.2f}, {swing.decode_deviation:.2f}" if swing else "-"
    moved = ""
    if swing:
        moved = f"{factor(prefill.mean, swing.prefill_deviation)}, {factor(decode.mean, swing.decode_deviation)}"
    findings = [
        Finding(
            f"correlation of the loads, {name}",
            f"{swing.correlation:+.2f}" if swing else "-",
            show(correlation),
            comment,
        ),
        Finding(f"deviation of prefill, decode load, {name}", theirs, f"{show(prefill)}, {show(decode)}", moved),
    ]
    least, most = LAG
    lagged = [value for run in runs for seconds, value in run.swing.lagged if least <= seconds <= most]
    if lagged and swing:
        later, their = estimate(lagged), swing.correlation_30_s_later
        said = "positive, as in the paper" if later.mean * their > 0 else "does not reproduce: another sign"
        findings.append(Finding(f"correlation, decode 30 s later, {name}", f"{their:+.2f}", show(later), said))
    return findings


def _signed(found: Estimate) -> str:
    half = "" if found.half_width is None else f" ± {found.half_width:.3f}"
    return f"{found.mean:+.3f}{half}"


def _moved(found: Estimate) -> str:
    return ("calmer" if found.mean < 0 else "moves more") + _chance(found) if found.mean else "moves as much"


def _chance(found: Estimate) -> str:
    return "" if found.half_width is None or found.is_clear or not found.mean else " (may be chance)"
