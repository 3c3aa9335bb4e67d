from __future__ import annotations

import pytest

from moonpool.core.admission import (
    NO_MARGIN,
    DecodeLoad,
    Margin,
    Prediction,
    Refusal,
    admit,
    check_context,
    check_queue,
    check_room,
)
from moonpool.core.vocabulary import RejectReason, Slo

CALM = Prediction(1.0, DecodeLoad(0.05, room=0.5))


def judge(predicted: Prediction, slo: Slo, margin: Margin = NO_MARGIN) -> Refusal | None:
    return admit(predicted, slo, lambda: 4.0, margin)


def test_without_an_slo_nothing_is_refused() -> None:
    assert judge(Prediction(1e6, DecodeLoad(1e6)), Slo()) is None


def test_exactly_at_the_limit_is_taken() -> None:
    assert judge(CALM, Slo(1.0, 0.05)) is None


@pytest.mark.parametrize(
    ("slo", "reason", "wait"),
    [
        (Slo(ttft=0.25), RejectReason.TTFT_SLO, 1.0),
        (Slo(tbt=0.04), RejectReason.TBT_SLO, 4.0),
        (Slo(0.9, 0.01), RejectReason.TBT_SLO, 4.0),
        (Slo(0.1, 0.04), RejectReason.TTFT_SLO, 4.0),
    ],
)
def test_the_larger_load_refuses(slo: Slo, reason: RejectReason, wait: float) -> None:
    """The wait is until both limits would be kept."""
    refusal = judge(CALM, slo)
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after) == (reason, wait)


def test_a_full_decode_instance_refuses_whatever_its_steps_take() -> None:
    refusal = judge(Prediction(1.0, DecodeLoad(0.01, room=1.2)), Slo(2.0, 1.0))
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after) == (RejectReason.KV_ROOM, 4.0)


def test_a_margin_lowers_both_limits() -> None:
    predicted = Prediction(0.95, DecodeLoad(0.09))
    assert judge(predicted, Slo(1.0, 0.1), Margin(0.04, 0.09)) is None
    late, slow = (
        judge(predicted, Slo(1.0, 0.1), Margin(ttft=0.06)),
        judge(predicted, Slo(1.0, 0.1), Margin(decode=0.11)),
    )
    assert late is not None
    assert late.reason is RejectReason.TTFT_SLO
    assert slow is not None
    assert slow.reason is RejectReason.TBT_SLO


def test_the_wait_is_how_far_the_first_token_is_too_late() -> None:
    refusal = judge(Prediction(50.0), Slo(ttft=20.0))
    assert refusal is not None
    assert refusal.retry_after == 30.0


def test_no_wait_is_advised_where_none_helps() -> None:
    refusal = judge(Prediction(50.0, alone_seconds=21.0), Slo(ttft=20.0))
    assert refusal is not None
    assert refusal.retry_after is None


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
