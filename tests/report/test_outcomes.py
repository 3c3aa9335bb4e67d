"""Columns say what the outcomes say one by one."""

from __future__ import annotations

import random

import msgspec
import pytest

from moonpool.core.vocabulary import Slo
from moonpool.report.outcomes import Outcome, Outcomes
from moonpool.report.summary import summarize
from moonpool.report.timeline import timeline


def drawn(count: int) -> list[Outcome]:
    rng = random.Random(count)
    return [
        Outcome(
            arrived=0.1 * at,
            input_tokens=rng.randrange(1, 1 << 40),
            output_tokens=rng.randrange(500),
            completed=rng.random() < 0.7,
            ttft=rng.choice((None, 1.0, 2.0, 2.1)),
            slowest_tenth=rng.choice((0.0, 0.1, 0.11)),
            p90_interval=rng.random(),
            longest_interval=rng.random(),
            cached_tokens=rng.randrange(500),
            computed_tokens=rng.choice((0, 70)),
            refusal=rng.choice(("", "", "ttft-slo", "kv-room")),
            fetched_tokens=rng.randrange(500),
            priority=rng.choice(("", "high", "low")),
        )
        for at in range(count)
    ]


@pytest.mark.parametrize("slo", [Slo(), Slo(2.0), Slo(None, 0.1), Slo(2.0, 0.1)])
def test_what_attains_does_so_in_a_column_too(slo: Slo) -> None:
    outcomes = drawn(300)
    assert Outcomes.of(outcomes).attain(slo).tolist() == [each.attains(slo) for each in outcomes]


def test_columns_are_the_fields() -> None:
    outcomes = drawn(3000)
    columns = Outcomes.of(outcomes)
    assert len(columns) == 3000
    for name in ("arrived", "slowest_tenth", "p90_interval", "longest_interval", "input_tokens", "output_tokens"):
        assert getattr(columns, name).tolist() == [getattr(each, name) for each in outcomes]
    for name in ("cached_tokens", "fetched_tokens", "computed_tokens", "completed"):
        assert getattr(columns, name).tolist() == [getattr(each, name) for each in outcomes]
    assert columns.refused.tolist() == [each.refusal != "" for each in outcomes]
    assert columns.refusals() == {
        reason: sum(each.refusal == reason for each in outcomes) for reason in ("kv-room", "ttft-slo")
    }
    assert sorted(columns.priorities()) == ["", "high", "low"]


def test_the_order_in_which_they_end_does_not_matter() -> None:
    outcomes, slo = drawn(2500), Slo(2.0, 0.1)
    order = list(range(len(outcomes)))
    random.Random(1).shuffle(order)
    shuffled = Outcomes()
    for at in order:
        shuffled.put(at, outcomes[at])
    plain = Outcomes.of(outcomes)
    assert msgspec.json.encode(summarize(shuffled, slo)) == msgspec.json.encode(summarize(plain, slo))
    assert timeline(shuffled, slo) == timeline(plain, slo)


def test_those_of_a_class_by_themselves() -> None:
    outcomes = drawn(400)
    columns = Outcomes.of(outcomes)
    high = columns.where(columns.of_priorities(["high", "unknown"]))
    own = [each for each in outcomes if each.priority == "high"]
    assert summarize(high, Slo()) == summarize(Outcomes.of(own), Slo())
    assert len(columns.where(columns.of_priorities(["unknown"]))) == 0
