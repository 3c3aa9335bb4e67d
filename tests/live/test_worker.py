"""What workers remember of requests and gateways."""

from __future__ import annotations

from moonpool.core.vocabulary import Incarnation, PartId, Peer, RequestId
from moonpool.live.worker import GATEWAY_SECONDS, REMEMBERED_ENDINGS, Absences, Endings


def gateway(n: int) -> Peer:
    return Peer(PartId("gateway-0"), Incarnation(str(n)), "tcp://127.0.0.1:1")


def test_an_attempt_that_ended_covers_the_earlier_ones() -> None:
    endings = Endings()
    endings.add(RequestId("a"), 2)
    endings.add(RequestId("a"), 1)
    assert endings.has(RequestId("a"), 1)
    assert endings.has(RequestId("a"), 2)
    assert not endings.has(RequestId("a"), 3)
    assert not endings.has(RequestId("b"), 1)


def test_memory_of_endings_is_bounded() -> None:
    endings = Endings()
    for n in range(REMEMBERED_ENDINGS + 1):
        endings.add(RequestId(str(n)), 1)
    assert not endings.has(RequestId("0"), 1)
    assert endings.has(RequestId(str(REMEMBERED_ENDINGS)), 1)


def test_a_gateway_is_gone_only_after_an_unbroken_absence() -> None:
    absences = Absences()
    assert absences.over({gateway(1)}, 0.0) == []
    assert absences.over(set(), GATEWAY_SECONDS - 1) == [], "it came back"
    assert absences.over({gateway(1)}, GATEWAY_SECONDS + 1) == []
    assert absences.over({gateway(1), gateway(2)}, 2 * GATEWAY_SECONDS + 1) == [gateway(1)]
