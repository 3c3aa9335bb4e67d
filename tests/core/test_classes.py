"""Which class a request is in, and which limits it has."""

from __future__ import annotations

import pytest

from moonpool.core.classes import BATCH, Classes, check_classes
from moonpool.core.settings import ConductorConfig
from moonpool.core.vocabulary import PriorityClass, Slo

HIGH = PriorityClass("high", 0, Slo(2.0, 0.1), 0.3)
MIDDLE = PriorityClass("middle", 10, Slo(ttft=30.0))
LOW = PriorityClass("low", 20)
KNOWN = Classes((LOW, HIGH, MIDDLE), Slo(60.0, 0.5))


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("high", "high"),
        ("batch", "batch"),
        ("", "low"),
        ("unknown", "low"),
        ("-7", "high"),
        ("0", "high"),
        ("1", "middle"),
        ("10", "middle"),
        ("11", "low"),
        ("999999999999999", "low"),
    ],
)
def test_a_request_goes_never_sooner_than_it_asks_for(asked: str, name: str) -> None:
    assert KNOWN.of(asked).name == name


def test_who_asks_for_nothing_is_in_the_class_default_if_there_is_one() -> None:
    assert Classes((HIGH, PriorityClass("default", 5), LOW), Slo()).of("").name == "default"


def test_without_classes_all_are_alike_but_batch() -> None:
    none = Classes((), Slo(1.0, 0.2))
    assert {none.of(asked).name for asked in ("", "high", "-3", "7")} == {"default"}
    assert none.of("batch") is BATCH
    assert none.limits(Slo(), none.of("")) == Slo(1.0, 0.2)


def test_limits_of_the_request_go_before_those_of_its_class_before_those_of_all() -> None:
    assert KNOWN.limits(Slo(), HIGH) == Slo(2.0, 0.1)
    assert KNOWN.limits(Slo(tbt=0.3), HIGH) == Slo(2.0, 0.3)
    assert KNOWN.limits(Slo(), MIDDLE) == Slo(30.0, 0.5)
    assert KNOWN.limits(Slo(1.0, 1.0), BATCH) == Slo(), "batch work has no limits, whatever it asks for"


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ((HIGH, HIGH), "'high' is there twice"),
        ((PriorityClass("batch"),), "'batch' is built in"),
        ((PriorityClass("-12"),), "is no number"),
        ((PriorityClass("a b"),), "letters, digits"),
        ((PriorityClass("a", 1 << 40),), "rank is"),
        ((PriorityClass("a", slo=Slo(ttft=0.0)),), "a limit is 0 s"),
        ((PriorityClass("a", share=1.0),), "share is 1"),
        ((PriorityClass("a", share=0.5), PriorityClass("b", share=0.5)), "add up to 1"),
        (tuple(PriorityClass(f"c{n}") for n in range(33)), "at most 32"),
    ],
)
def test_what_cannot_work_is_named(classes: tuple[PriorityClass, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_classes(classes)
    with pytest.raises(ValueError, match=message):
        ConductorConfig(classes=classes)
