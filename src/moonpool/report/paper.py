"""The paper's figures beside ours: paper | ours | comment. Every comment follows from comparing the numbers.

Ours are never adjusted to the paper's, except that the load of an experiment is chosen by one figure, which is named.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from importlib import resources

import msgspec
from msgspec import Struct

from moonpool.core.cost import DecodeCoefficients, PrefillCoefficients
from moonpool.report.estimates import Estimate, estimate, paired_difference
from moonpool.report.run import Run

CLOSE = 1.1
"""Factor within which a figure counts as reproduced."""
NEAR = 1.5
"""Factor within which it counts as about the same."""
DEFAULT = "kvcache-centric"
"""The placement that is not the paper's."""
BATCH_TOKENS = 8192
"""Context of each request in the paper's decode curve."""


class HitRatios(Struct, frozen=True, rename={"length_aware": "length-aware"}):
    capacities: tuple[int | None, ...]
    lru: tuple[float, ...]
    lfu: tuple[float, ...]
    length_aware: tuple[float, ...]

    def of(self, policy: str) -> tuple[float, ...]:
        return {"lru": self.lru, "lfu": self.lfu, "length-aware": self.length_aware}[policy]


class PrefillLatency(Struct, frozen=True):
    thousand_tokens: tuple[float, ...]
    of_the_longest: tuple[float, ...]


class DecodeLatency(Struct, frozen=True):
    batch: tuple[int, ...]
    of_the_largest: tuple[float, ...]


class PaperSwing(Struct, frozen=True):
    prefill_deviation: float
    decode_deviation: float
    correlation: float
    correlation_30_s_later: float


class PaperCoupled(Struct, frozen=True):
    """Separate pools beside coupled vLLM (§6)."""

    real_gain: float
    """Of [10P+10D] over 20, requests within both limits."""
    simulated: dict[str, tuple[float, float]]
    """By thousand tokens: requests a second that [3P+1D] and 4 coupled ones bear, TTFT alone, on a coarse grid."""


class PaperFigures(Struct, frozen=True):
    source: str
    hit_ratios: HitRatios
    prefill_latency: PrefillLatency
    decode_latency: DecodeLatency
    mean_ttft: dict[str, float]
    """Seconds, by placement policy under the names that it has here."""
    median_ttft: dict[str, float]
    refused: dict[str, int]
    """By admission policy, of `requests`."""
    swing: PaperSwing
    """Under `early`."""
    coupled: PaperCoupled


class Finding(Struct, frozen=True):
    what: str
    paper: str
    ours: str
    comment: str


class Chapter(Struct, frozen=True):
    title: str
    note: str
    """What was run."""
    findings: tuple[Finding, ...]


def paper_figures() -> PaperFigures:
    data = (resources.files("moonpool.report") / "paper_figures.json").read_bytes()
    return msgspec.json.decode(data, type=PaperFigures)


# §2: hit ratios


def hit_findings(ours: Mapping[tuple[str, int | None], float], paper: PaperFigures) -> tuple[Finding, ...]:
    """`ours`: ratio by block, by policy and capacity. The traces differ, so shares of the ceiling are compared."""
    findings = []
    for policy in ("lru", "lfu", "length-aware"):
        theirs = paper.hit_ratios.of(policy)
        ceiling, their_ceiling = ours[policy, None], theirs[0]
        shares = []
        for capacity, value in zip(paper.hit_ratios.capacities, theirs, strict=True):
            shares.append((capacity, value / their_ceiling, ours[policy, capacity] / ceiling if ceiling else 0.0))
        apart = [capacity for capacity, their, our in shares if not _within(our, their, CLOSE)]
        findings.append(
            Finding(
                f"hit ratio, {policy}: " + ", ".join(_blocks(capacity) for capacity in paper.hit_ratios.capacities),
                " ".join(f"{value:.2f}" for value in theirs),
                " ".join(f"{ours[policy, capacity]:.2f}" for capacity in paper.hit_ratios.capacities),
                "the same shares of the ceiling"
                if not apart
                else "other shares of the ceiling at "
                + ", ".join(
                    f"{_blocks(capacity)} ({our:.2f}, the paper's {their:.2f})"
                    for capacity, their, our in shares
                    if capacity in apart
                ),
            )
        )
    return tuple(findings)


# §7: the cost model


def cost_findings(
    prefill: PrefillCoefficients, decode: DecodeCoefficients, chunk_tokens: int, paper: PaperFigures
) -> tuple[Finding, ...]:
    """How the hardware's cost model follows the paper's curves, each relative to its own end."""

    def prefill_seconds(tokens: float) -> float:
        steps = -(-tokens // chunk_tokens)
        return steps * prefill.fixed + prefill.per_token * tokens + prefill.per_token_squared * tokens * tokens

    def decode_seconds(batch: int) -> float:
        return decode.fixed + batch * (decode.per_request + decode.per_context_token * BATCH_TOKENS)

    lengths = paper.prefill_latency.thousand_tokens
    ours = [prefill_seconds(1000 * k) / prefill_seconds(1000 * lengths[-1]) for k in lengths]
    batches = paper.decode_latency.batch
    steps = [decode_seconds(batch) / decode_seconds(batches[-1]) for batch in batches]
    # The paper's points are relative to its largest, which is not its last one.
    theirs = [value / paper.decode_latency.of_the_largest[-1] for value in paper.decode_latency.of_the_largest]
    return (
        _curve("prefill time by length, 8k to 128k", paper.prefill_latency.of_the_longest, ours),
        _curve("decode step by batch, 1 to 16 at 8k", theirs, steps),
    )


def _curve(what: str, theirs: Sequence[float], ours: Sequence[float]) -> Finding:
    worst = max(max(a / b, b / a) for a, b in zip(ours, theirs, strict=True)) - 1
    comment = (
        f"within {worst:.1%} at every point" if worst < CLOSE - 1 else f"off by up to {worst:.0%}: another machine"
    )
    return Finding(what, f"{theirs[0]:.3f} … {theirs[-1]:.3f}", f"{ours[0]:.3f} … {ours[-1]:.3f}", comment)


# Figure 8: placement


def placement_findings(runs: Mapping[str, Sequence[Run]], paper: PaperFigures) -> tuple[Finding, ...]:
    """`runs`: by placement policy, a run for each seed; with `algorithm-1`, which the others are held against."""
    means = {name: [run.summary.ttft.mean for run in each] for name, each in runs.items()}
    base = means["algorithm-1"]
    findings = []
    for name, values in means.items():
        times, theirs = estimate([a / b for a, b in zip(values, base, strict=True)]), paper.mean_ttft.get(name)
        ours = f"{show(estimate(values))} s" + ("" if name == "algorithm-1" else f" ({show(times)} times)")
        if theirs is None:
            findings.append(Finding(f"mean TTFT, {name}", "-", ours, against(values, base, "algorithm-1")))
            continue
        their_times = theirs / paper.mean_ttft["algorithm-1"]
        comment = "the measure of the others" if name == "algorithm-1" else _ratio(times.mean, their_times)
        their = f"{theirs:.2f} s" + ("" if name == "algorithm-1" else f" ({their_times:.2f} times)")
        findings.append(Finding(f"mean TTFT, {name}", their, ours, comment))
    for name, theirs in paper.median_ttft.items():
        if name in runs:
            found = estimate([run.summary.ttft.p50 for run in runs[name]])
            ratio = found.mean / theirs
            findings.append(
                Finding(f"median TTFT, {name}", f"{theirs:.2f} s", f"{show(found)} s", f"{ratio:.2f} times the paper's")
            )
    return (*findings, _order(means, paper))


def _order(means: Mapping[str, Sequence[float]], paper: PaperFigures) -> Finding:
    """The default, which the paper does not have, is to be no slower than the paper's own policy."""
    theirs = sorted((name for name in means if name in paper.mean_ttft), key=lambda name: paper.mean_ttft[name])
    known = [*(name for name in (DEFAULT,) if name in means), *theirs]
    wrong, chance = [], []
    for better, worse in itertools.pairwise(known):
        found = paired_difference(means[worse], means[better])
        unclear = found.half_width is not None and not found.is_clear
        if better == DEFAULT:
            if found.mean < 0 and not unclear:
                wrong.append(f"{better} is slower than {worse}")
        elif found.mean <= 0:
            wrong.append(f"{worse} is no slower than {better}")
        elif unclear:
            chance.append(f"{better} before {worse} may be chance")
    ours = sorted(known, key=lambda name: estimate(means[name]).mean)
    comment = "; ".join([*(f"does not reproduce: {each}" for each in wrong), *chance]) or "the same order"
    return Finding("order of mean TTFT", " < ".join(theirs), " < ".join(ours), comment)


def show(found: Estimate, percent: bool = False) -> str:
    """`2.31 ± 0.05`."""
    form = "{:.1%}" if percent else "{:.2f}"
    half = "" if found.half_width is None else f" ± {form.format(found.half_width)}"
    return form.format(found.mean) + half


def against(values: Sequence[float], base: Sequence[float], name: str, number: bool = False) -> str:
    """`fewer than baseline`, by paired differences. `number`: of requests, not of an amount."""
    found = paired_difference(values, base)
    said = f"{'fewer' if number else 'less'} than" if found.mean < 0 else "more than"
    if found.half_width is not None and not found.is_clear:
        return f"{said} {name}, may be chance"
    return f"{said} {name}" if found.mean else f"the same as {name}"


def _ratio(ours: float, theirs: float) -> str:
    if (ours - 1) * (theirs - 1) < 0:
        return "does not reproduce: the other way round"
    if _within(ours, theirs, CLOSE):
        return "reproduced"
    return f"the same direction, {'less' if ours < theirs else 'more'} of it: {factor(ours, theirs)}"


def factor(ours: float, theirs: float) -> str:
    if _within(ours, theirs, NEAR):
        return "about the paper's"
    return f"{ours / theirs:.2g} times the paper's"


def _within(ours: float, theirs: float, factor: float) -> bool:
    if ours * theirs <= 0:
        return ours == theirs
    return 1 / factor <= ours / theirs <= factor


def _blocks(capacity: int | None) -> str:
    return "inf" if capacity is None else f"{capacity // 1000}k"
