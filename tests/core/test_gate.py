"""Admission policies, put to the Conductor: who is refused, who waits, and for how long."""

from __future__ import annotations

import pytest

from moonpool.core import actions as act
from moonpool.core import events as ev
from moonpool.core.admission import AdmissionPolicy
from moonpool.core.cost import DecodeCoefficients, PrefillCoefficients
from moonpool.core.gate import PROBE_SECONDS, TRUSTED_OBSERVATIONS
from moonpool.core.vocabulary import RejectReason, Slo
from tests.core.conductor_scene import arrival
from tests.core.test_conductor import Desk, desk, finished, kinds

LIMITS = Slo(ttft=30.0, tbt=0.1)
STEP = 0.02
EXACT: dict[str, object] = {
    "prefill_cost": PrefillCoefficients(0.001, 1e-3, 1e-12),
    "decode_cost": DecodeCoefficients(STEP, 1e-9, 1e-9),
}


def serve(d: Desk, name: str, tokens: int = 40, output: int = 100, seconds: float | None = None) -> act.Place:
    """One request from arrival to its end; prefill takes what the model says unless told otherwise."""
    place = d.place(arrival(name, tokens=tokens, output=output))
    took = place.compute_seconds if seconds is None else seconds
    ids = place.request, place.attempt
    d.tell(ev.PrefillDone(*ids, place.prefill.id, tokens, 0, 0.0, took), after=took)
    d.tell(ev.DecodeJoined(*ids, place.decode.id))
    d.tell(ev.DecodeStepped(place.decode.id, 1, tokens, STEP))
    d.tell(finished(place, tokens=output), after=output * STEP)
    return place


def warm(admission: AdmissionPolicy, **config: object) -> Desk:
    """A cluster of one pair, of whose costs and answers (100 tokens, 2 s) something is known."""
    d = desk(admission=admission, **{**EXACT, **config})
    for n in range(2 * TRUSTED_OBSERVATIONS):
        serve(d, f"warm-{n}")
    return d


def fill(d: Desk, count: int, tokens: int) -> list[act.Place]:
    """So many are decoding."""
    places = []
    for n in range(count):
        places.append(d.place(arrival(f"full-{n}", tokens=tokens, output=100)))
        d.decode(places[-1])
    return places


def rejected(actions: list[act.Action]) -> act.Reject:
    (reject,) = actions
    assert isinstance(reject, act.Reject)
    return reject


@pytest.mark.parametrize("admission", ["baseline", "early", "predictive", "forecast"])
def test_without_an_slo_nobody_is_refused(admission: AdmissionPolicy) -> None:
    d = warm(admission)
    fill(d, 3, 240)
    assert kinds(d.tell(arrival("b", tokens=260))) == ["Hold"]


@pytest.mark.parametrize(
    ("admission", "answer"),
    [("baseline", "ReserveRoom"), ("early", "ReserveRoom"), ("predictive", "Reject"), ("forecast", "Hold")],
)
def test_who_sees_what_is_on_its_way_to_the_decode_instance(admission: AdmissionPolicy, answer: str) -> None:
    """It has 64 pages of 16 tokens; four prompts of 200 tokens will have joined before the newcomer does."""
    d = warm(admission, slo=LIMITS)
    for n in range(4):
        d.place(arrival(f"coming-{n}", tokens=200, output=100))
    assert kinds(d.tell(arrival("b", tokens=200, output=100))) == [answer]


@pytest.mark.parametrize("admission", ["early", "predictive", "forecast"])
def test_what_runs_now_refuses_where_it_will_not_have_ended(admission: AdmissionPolicy) -> None:
    d = warm(admission, slo=Slo(0.5, 0.1))
    fill(d, 3, 240)
    reject = rejected(d.tell(arrival("b", tokens=240, output=100)))
    assert reject.reason is RejectReason.KV_ROOM
    assert reject.retry_after is not None
    assert 1.0 <= reject.retry_after <= 4.0


def test_forecast_takes_who_finds_room_when_it_joins() -> None:
    """They have produced most of what their kin do; the newcomer's prefill takes longer than the rest."""
    d = warm("forecast", slo=LIMITS)
    fill(d, 3, 240)
    d.now += 1.7
    assert kinds(d.tell(arrival("long", tokens=700, output=100))) == ["ReserveRoom"]
    early = warm("early", slo=LIMITS)
    fill(early, 3, 240)
    early.now += 1.7
    assert kinds(early.tell(arrival("long", tokens=700, output=100))) == ["Reject"]


def test_the_advised_wait_is_enough_and_not_much_more() -> None:
    def answer(after: float) -> list[str]:
        d = warm("forecast", slo=Slo(0.35, 0.1))
        places = fill(d, 3, 240)
        began = d.now
        reject = rejected(d.tell(arrival("b", tokens=240, output=100)))
        assert reject.retry_after is not None
        d.now = began + after * reject.retry_after
        if after * reject.retry_after >= 2.0:
            for place in places:
                d.tell(finished(place, tokens=100))
        return kinds(d.tell(arrival("again", tokens=240, output=100)))

    assert answer(1.0) == ["ReserveRoom"]
    assert answer(0.4) == ["Reject"]


def test_a_held_request_is_placed_when_room_comes() -> None:
    d = warm("forecast", slo=LIMITS)
    places = fill(d, 3, 240)
    assert kinds(d.tell(arrival("b", tokens=240, output=100))) == ["Hold"]
    freed = d.tell(finished(places[0], tokens=100), after=2.0)
    assert [a.request for a in freed if isinstance(a, act.ReserveRoom)] == ["b"]


def test_limits_of_others_are_kept_too() -> None:
    """Steps of two take longer than what the one that runs allows; the newcomer itself would not mind."""
    slow = {"decode_cost": DecodeCoefficients(0.005, 0.015, 1e-9)}
    d = warm("forecast", **slow)
    place = d.place(arrival("strict", tokens=40, output=100, slo=Slo(None, 0.025)))
    d.decode(place)
    assert kinds(d.tell(arrival("easy", tokens=40, output=100, slo=Slo(1.0, 1.0)))) == ["Reject"]
    assert kinds(d.tell(arrival("free", tokens=40, output=100))) == ["Hold"]
    assert {"ReserveRoom"} <= {*kinds(d.tell(finished(place, tokens=100), after=2.0))}


# The decode instance's word


def refuse_late(d: Desk, place: act.Place) -> list[act.Action]:
    ids = place.request, place.attempt
    d.tell(ev.PrefillDone(*ids, place.prefill.id, 40, 0, 0.0, 0.1))
    return d.tell(ev.DecodeRefused(*ids, place.decode.id, "a step would take 0.2 s", limit=True))


def test_a_late_refusal_ends_the_request_and_counts_what_was_wasted() -> None:
    d = warm("baseline", slo=LIMITS)
    place = d.place(arrival("a", tokens=40))
    assert place.tbt_limit == 0.1
    actions = refuse_late(d, place)
    (reject,) = (a for a in actions if isinstance(a, act.Reject))
    assert (reject.reason, reject.request) == (RejectReason.TBT_SLO, "a")
    assert "Resubmit" not in kinds(actions)
    decisions = d.conductor.describe(d.now).decisions
    assert (decisions.late_refusals, decisions.late_refused_tokens) == (1, 40)
    assert decisions.rejected == {"tbt-slo": 1}
    assert d.phase() == {}


def test_who_was_accepted_before_is_not_put_to_the_test_again() -> None:
    d = warm("forecast", slo=LIMITS)
    place = d.place(arrival("a", tokens=40))
    d.decode(place)
    d.tell(ev.Preempted(place.request, place.attempt, place.decode.id))
    assert d.place(arrival("a", tokens=50, attempt=2, output_tokens=10)).tbt_limit is None
    assert warm("none", slo=LIMITS).place(arrival("b")).tbt_limit is None
    assert warm("forecast").place(arrival("c")).tbt_limit is None


# Costs that are wrong


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_a_rate_ten_times_off_is_corrected_within_fifty_requests_and_refuses_nobody(factor: float) -> None:
    """Prompts of 100 to 500 tokens take 0.1 to 0.5 s, the limit is 1 s; the model begins with ten times that."""
    d = desk(
        admission="forecast", slo=Slo(1.0, 0.1), prefill_cost=PrefillCoefficients(0.001 * factor, 1e-3 * factor, 1e-12)
    )
    for n in range(50):
        tokens = 100 + 97 * n % 400
        serve(d, f"r{n}", tokens=tokens, seconds=0.001 + 1e-3 * tokens)
    assert d.conductor.describe(d.now).decisions.rejected == {}
    for tokens in (100, 300, 500):
        place = d.place(arrival(f"last-{tokens}", tokens=tokens))
        assert place.compute_seconds == pytest.approx(1e-3 * tokens, rel=0.1)
        d.tell(ev.RequestCancelled(place.request, "test"))


def test_a_gate_on_a_wrong_model_would_refuse_them_all() -> None:
    """What the trust in new models is for: `early` has none, learns nothing, and goes on refusing."""
    d = desk(admission="early", slo=Slo(1.0, 0.1), prefill_cost=PrefillCoefficients(0.01, 1e-2, 1e-12))
    for n in range(50):
        assert kinds(d.tell(arrival(f"r{n}", tokens=200))) == ["Reject"]


def test_a_model_that_refuses_everybody_is_put_to_the_test_now_and_then() -> None:
    d = desk(admission="forecast", slo=Slo(1.0, 0.1), **EXACT)  # type: ignore[arg-type]
    for n in range(2 * TRUSTED_OBSERVATIONS):
        (answer,) = d.tell(arrival(f"slow-{n}", tokens=40))
        if isinstance(answer, act.Reject):
            break
        assert isinstance(answer, act.ReserveRoom)
        (place,) = d.tell(d.confirm(answer))
        assert isinstance(place, act.Place)
        d.tell(ev.PrefillDone(place.request, 1, place.prefill.id, 40, 0, 0.0, 5.0), after=0.5)
        d.tell(finished(place, place.prefill.id, tokens=1))
    assert kinds(d.tell(arrival("a", tokens=40))) == ["Reject"]
    d.wait(PROBE_SECONDS + 1.0)
    assert kinds(d.tell(arrival("b", tokens=40))) == ["ReserveRoom"]


def test_so_is_a_decode_instance_whose_steps_once_were_slow() -> None:
    d = warm("forecast", slo=Slo(30.0, 2 * STEP))
    decode = serve(d, "last").decode.id
    for _ in range(8 * TRUSTED_OBSERVATIONS):
        d.tell(ev.DecodeStepped(decode, 1, 40, 3 * STEP))
    assert rejected(d.tell(arrival("a"))).reason is RejectReason.TBT_SLO
    d.wait(PROBE_SECONDS + 1.0)
    busy = d.place(arrival("b"))
    assert rejected(d.tell(arrival("c"))).reason is RejectReason.TBT_SLO, "one is enough to learn from"
    d.tell(ev.RequestCancelled(busy.request, "test"))
    for _ in range(8 * TRUSTED_OBSERVATIONS):
        d.tell(ev.DecodeStepped(decode, 1, 40, STEP))
    assert kinds(d.tell(arrival("d"))) == ["ReserveRoom"]


def test_what_passes_at_the_gateway_counts_for_the_first_token() -> None:
    d = warm("forecast", slo=Slo(2.0, 0.1))
    assert kinds(d.tell(arrival("in-time", waited=1.0))) == ["ReserveRoom"]
    reject = rejected(d.tell(arrival("late", waited=1.9999)))
    assert reject.reason is RejectReason.TTFT_SLO
    assert reject.retry_after == 1.0, "who comes again has not waited"


def test_one_that_was_held_until_it_was_too_late_is_told_when_to_come_again() -> None:
    d = warm("forecast", slo=Slo(3.0, 0.1))
    fill(d, 3, 240)
    assert kinds(d.tell(arrival("b", tokens=260))) == ["Hold"]
    d.now += 3.1
    (reject,) = [a for a in d.tell(ev.Woke()) if isinstance(a, act.Reject)]
    assert reject.reason is RejectReason.TTFT_SLO
    assert reject.retry_after == pytest.approx(3.1)
