from __future__ import annotations

import pytest

from moonpool.core.admission import Prediction, admit, check_context, check_queue, check_room
from moonpool.core.vocabulary import RejectReason, Slo

CALM = Prediction(1.0, 0.05, 4.0)


def test_without_an_slo_nothing_is_refused() -> None:
    assert admit("early", Prediction(1e6, 1e6, 0.0), Slo()) is None


def test_exactly_at_the_limit_is_taken() -> None:
    assert admit("early", CALM, Slo(1.0, 0.05)) is None


@pytest.mark.parametrize(
    ("slo", "reason", "wait"),
    [
        (Slo(ttft=0.25), RejectReason.TTFT_SLO, 1.0),
        (Slo(tbt=0.04), RejectReason.TBT_SLO, 4.0),
        (Slo(0.9, 0.01), RejectReason.TBT_SLO, 4.0),
        (Slo(0.1, 0.04), RejectReason.TTFT_SLO, 1.0),
    ],
)
def test_early_refuses_by_the_larger_load(slo: Slo, reason: RejectReason, wait: float) -> None:
    refusal = admit("early", CALM, slo)
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after) == (reason, wait)
    assert admit("none", CALM, slo) is None


def test_the_wait_is_how_far_the_first_token_is_too_late() -> None:
    refusal = admit("early", Prediction(50.0, 0.0, 0.0), Slo(ttft=20.0))
    assert refusal is not None
    assert refusal.retry_after == 30.0


def test_queue_bound() -> None:
    assert check_queue(9, 10, 100.0) is None
    refusal = check_queue(10, 10, 100.0)
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after) == (RejectReason.QUEUE_FULL, 50.0)


def test_what_can_never_fit_has_no_retry() -> None:
    assert check_context(60, 40, 100) is None
    assert check_room("pages", 7, 7) is None
    for refusal in (check_context(61, 40, 100), check_room("pages", 8, 7)):
        assert refusal is not None
        assert refusal.retry_after is None
