"""What workers remember of requests."""

from __future__ import annotations

from moonpool.core.vocabulary import RequestId
from moonpool.live.worker import REMEMBERED_ENDINGS, Endings


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
