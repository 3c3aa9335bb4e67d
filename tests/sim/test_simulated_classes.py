"""Priority classes under load, on the simulated cluster: who is served, who is refused, who starves."""

from __future__ import annotations

import msgspec
import pytest

from moonpool.core.admission import AdmissionPolicy
from moonpool.core.conductor import ConductorConfig
from moonpool.core.vocabulary import PriorityClass, Slo
from moonpool.report.priorities import ClassWorth
from moonpool.sim.cluster import Setup
from moonpool.sim.profile import load_profile
from moonpool.sim.run import run
from moonpool.trace.request import TraceRequest

LIMITS = Slo(20.0, 0.1)
CLASSES = (PriorityClass("high", 0, LIMITS, 0.3), PriorityClass("low", 10, LIMITS))
# Two prefill instances compute some 16,000 tokens a second, one decode instance holds some 25 of these requests.
PROFILE = msgspec.structs.replace(load_profile("a800-llama2-70b"), vram_tokens=300_000)
LENGTHS = (1_000, 4_000, 9_000, 30_000)


def trace(count: int, every: float) -> list[TraceRequest]:
    return [TraceRequest(every * at, LENGTHS[at * 7 % 11 % 4], 60 + 30 * (at % 5)) for at in range(count)]


def worths(
    every: float, mix: tuple[tuple[str, float], ...], admission: AdmissionPolicy = "early"
) -> dict[str, ClassWorth]:
    config = ConductorConfig(admission=admission, queue_bound=10_000, slo=LIMITS, classes=CLASSES)
    found = run("", Setup(PROFILE, 2, 1, config, mix=mix), trace(300, every)).classes
    return {worth.name: worth for worth in found}


def attained(worth: ClassWorth) -> float:
    return worth.attained / worth.requests


def refused(worth: ClassWorth) -> float:
    return sum(worth.refused.values()) / worth.requests


@pytest.mark.parametrize("admission", ["early", "forecast"])
def test_in_overload_the_high_class_keeps_its_attainment_and_the_low_one_is_refused_first(
    admission: AdmissionPolicy,
) -> None:
    mix = (("high", 0.3), ("low", 0.7))
    calm, stormy = worths(0.8, mix, admission), worths(0.4, mix, admission)
    assert attained(calm["high"]) > 0.95
    assert attained(calm["low"]) > 0.9, "no class starves at 1x"
    assert attained(stormy["high"]) >= 0.99 * attained(calm["high"])
    assert refused(stormy["low"]) > 0.1, "twice the load is too much"
    assert refused(stormy["high"]) <= 0.01


def test_batch_work_costs_the_others_nothing_and_gets_done() -> None:
    alone = worths(0.8, (("high", 1.0),))
    beside = worths(0.8, (("high", 0.7), ("batch", 0.3)))
    assert attained(beside["high"]) >= attained(alone["high"])
    assert beside["batch"].completed == beside["batch"].requests
    assert beside["batch"].ttft.mean > beside["high"].ttft.mean


@pytest.mark.parametrize("every", [0.4, 0.8])
def test_a_class_of_all_requests_is_as_good_as_none(every: float) -> None:
    config = ConductorConfig(admission="early", queue_bound=10_000, slo=LIMITS)
    none = run("", Setup(PROFILE, 2, 1, config), trace(200, every))
    one = msgspec.structs.replace(config, classes=CLASSES[:1])
    same = run("", Setup(PROFILE, 2, 1, one, mix=(("high", 1.0),)), trace(200, every))
    assert same.summary == none.summary
