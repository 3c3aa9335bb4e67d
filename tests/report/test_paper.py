"""What is said of our figures beside the paper's follows from the numbers."""

from __future__ import annotations

import msgspec

from moonpool.core.cost import DecodeCoefficients, PrefillCoefficients
from moonpool.core.settings import Decisions
from moonpool.core.vocabulary import Slo
from moonpool.report.outcomes import Outcome, Outcomes
from moonpool.report.overload import overload_findings
from moonpool.report.paper import (
    Finding,
    cost_findings,
    hit_findings,
    paper_figures,
    placement_findings,
)
from moonpool.report.run import Run, run_of
from moonpool.report.samples import Sample

PAPER = paper_figures()
PREFILL = PrefillCoefficients(fixed=1e-3, per_token=1.1458e-4, per_token_squared=9.002e-10)
DECODE = DecodeCoefficients(fixed=0.019, per_request=1e-6, per_context_token=4.52e-8)


def run(ttft: float, refused: int = 0, anti: bool = True, late: int = 0) -> Run:
    """100 requests; loads that move against each other, or together. `late`: so many are late."""
    good = Outcome(0.0, 100, 10, True, ttft, 0.05, 0.05, 0.05, 0, 100)
    no = msgspec.structs.replace(good, completed=False, ttft=None, refusal="ttft-slo", computed_tokens=0)
    outcomes = [msgspec.structs.replace(no if at < refused else good, arrived=float(at)) for at in range(100)]
    slow = msgspec.structs.replace(good, ttft=31.0)
    outcomes[refused : refused + late] = [msgspec.structs.replace(slow, arrived=float(at)) for at in range(late)]
    sign = -1 if anti else 1
    samples = [
        Sample(float(at), 10.0 + at % 8, 20.0, 0.05 + sign * (at % 8) / 400, 0.1, batch=1.0, assigned=1.0)
        for at in range(100)
    ]
    return run_of(
        "x", 0, Slo(30.0, 0.1), Outcomes.of(outcomes), samples, [], Decisions(), preemptions=0, busy=(0.0, 0.0)
    )


def told(findings: tuple[Finding, ...], what: str) -> str:
    return next(finding.comment for finding in findings if finding.what == what)


def shown(findings: tuple[Finding, ...], what: str) -> str:
    return next(finding.ours for finding in findings if finding.what == what)


def placements(**ttft: float) -> dict[str, list[Run]]:
    return {name.replace("_", "-"): [run(value), run(value * 1.01)] for name, value in ttft.items()}


def test_the_papers_own_ratios_count_as_reproduced_and_others_do_not() -> None:
    same = placements(random=92.07, load_balance=60.41, cache_aware=14.36, algorithm_1=6.26, kvcache_centric=5.0)
    found = placement_findings(same, PAPER)
    assert told(found, "mean TTFT, load-balance") == "reproduced"
    assert told(found, "order of mean TTFT") == "the same order"
    assert told(found, "mean TTFT, kvcache-centric") == "less than algorithm-1"
    assert shown(found, "order of mean TTFT").startswith("kvcache-centric < algorithm-1 < cache-aware")
    slower = placements(random=92.07, load_balance=60.41, cache_aware=14.36, algorithm_1=6.26, kvcache_centric=7.0)
    order = told(placement_findings(slower, PAPER), "order of mean TTFT")
    assert order == "does not reproduce: kvcache-centric is slower than algorithm-1"
    other = placements(random=50.0, load_balance=60.41, cache_aware=5.0, algorithm_1=6.26)
    found = placement_findings(other, PAPER)
    assert told(found, "mean TTFT, cache-aware") == "does not reproduce: the other way round"
    assert told(found, "mean TTFT, load-balance") == "reproduced"
    order = told(found, "order of mean TTFT")
    assert "does not reproduce: cache-aware is no slower than algorithm-1" in order
    assert "random is no slower than load-balance" in order


def test_overload_is_told_by_paired_differences_and_by_the_sign_of_the_correlation() -> None:
    runs = {"baseline": [run(1.0, 18), run(1.0, 20)], "early": [run(1.0, 15), run(1.0, 17)]}
    found = overload_findings(runs, PAPER)
    assert told(found, "refused, early") == "fewer than baseline; ttft-slo 16.0%"
    assert told(found, "early less baseline: refused; attain; prefill for nothing").startswith("fewer refused; ")
    assert told(found, "correlation of the loads, early").startswith("anti-phase")
    together = overload_findings({"early": [run(1.0, 15, anti=False)]}, PAPER)
    assert told(together, "correlation of the loads, early").startswith("does not reproduce")
    more = {"baseline": [run(1.0, 18), run(1.0, 20)], "early": [run(1.0, 17), run(1.0, 25)]}
    assert told(overload_findings(more, PAPER), "refused, early") == (
        "more than baseline, may be chance; ttft-slo 21.0%"
    )
    said = told(overload_findings(more, PAPER), "early less baseline: refused; attain; prefill for nothing")
    assert said.startswith("does not reproduce: no fewer refused (may be chance); ")
    assert said.endswith("its mean TTFT is 1.0 s, that of early 1.0 s")


def test_forecast_is_held_against_early() -> None:
    moved, price = (
        f"forecast less early: {what}"
        for what in ("deviation of prefill, decode load", "refused; attain; prefill for nothing")
    )
    early = [run(1.0, 15), run(1.0, 17)]
    found = overload_findings({"early": early, "forecast": [run(1.0, 10), run(1.0, 12)]}, PAPER)
    assert told(found, moved) == "prefill load moves as much; decode load moves as much"
    assert told(found, price) == "no more refused; no fewer attain; no less for nothing"
    found = overload_findings({"early": early, "forecast": [run(1.0, 18), run(1.0, 40)]}, PAPER)
    assert told(found, price).startswith("more refused (may be chance); fewer attain (may be chance); no less")


def test_it_is_said_what_refusing_fewer_buys() -> None:
    """Early takes ten more, and all of them are late: no fewer attain where those are refused."""
    early, forecast = [run(1.0, 10, late=10), run(1.0, 12, late=10)], [run(1.0, 20), run(1.0, 22)]
    found = overload_findings({"early": early, "forecast": forecast}, PAPER)
    said = told(found, "forecast less early: refused; attain; prefill for nothing")
    assert said.startswith(
        "more refused; no fewer attain; less for nothing; early takes 10 of 100 requests more, and 10 "
    )
    assert said.endswith("those that it refuses more would not have attained")
    assert shown(found, "taken, but a limit missed, early").startswith("10.0%")
    assert shown(found, "attain, forecast").startswith("79.0%")
    good = [run(1.0, 10), run(1.0, 12)]
    found = overload_findings({"early": good, "forecast": forecast}, PAPER)
    said = told(found, "forecast less early: refused; attain; prefill for nothing")
    assert said.endswith("early takes 10 of 100 requests more, and 0 more miss a limit after they were taken")


def test_the_cost_model_is_held_against_the_papers_curves() -> None:
    prefill, decode = cost_findings(PREFILL, DECODE, 4096, PAPER)
    assert prefill.comment == "within 1.3% at every point"
    assert decode.comment.startswith("within")
    linear = PrefillCoefficients(fixed=1e-3, per_token=1e-4, per_token_squared=0.0)
    assert "another machine" in cost_findings(linear, DECODE, 4096, PAPER)[0].comment


def test_hit_ratios_are_compared_by_their_share_of_the_ceiling() -> None:
    ratios = PAPER.hit_ratios
    half = {
        (policy, capacity): value / 2
        for policy in ("lru", "lfu", "length-aware")
        for capacity, value in zip(ratios.capacities, ratios.of(policy), strict=True)
    }
    assert {finding.comment for finding in hit_findings(half, PAPER)} == {"the same shares of the ceiling"}
    half["lru", 1000] /= 2
    assert "other shares of the ceiling at 1k (0.29, the paper's 0.59)" in hit_findings(half, PAPER)[0].comment
