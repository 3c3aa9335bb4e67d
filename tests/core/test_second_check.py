"""The decode instance looks at its load again when a request is handed over (DESIGN §4.4)."""

from __future__ import annotations

from moonpool.core.cost import DecodeCoefficients, DecodeCost
from moonpool.core.decode import (
    LEAST_STEPS,
    DecodeAction,
    DecodeInstance,
    HandedOver,
    KvArrived,
    KvLoaded,
    KvStored,
    Refuse,
    Stepped,
)
from moonpool.core.vocabulary import RequestId

BLOCK = 4
COST = DecodeCoefficients(0.01, 0.01, 1e-9)
"""A step of a batch of n takes (n + 1)/100 s."""


def rid(n: int) -> RequestId:
    return RequestId(f"r{n}")


def instance(pages: int = 100, slots: int = 16, measured: int = LEAST_STEPS) -> DecodeInstance:
    cost = DecodeCost(COST)
    for _ in range(measured):
        cost.observe(1, 4, 0.02)
    return DecodeInstance(pages=pages, block_tokens=BLOCK, slots=slots, queue_bound=64, cost=cost)


def hand_over(d: DecodeInstance, n: int, limit: float | None, tokens: int = 8, now: float = 0.0) -> bool:
    """Whether it is taken; if so it runs."""
    answer: tuple[DecodeAction, ...] = d.handle(HandedOver(rid(n), 1, tokens, tokens + 8, tbt_limit=limit), now)
    if answer:
        (refuse,) = answer
        assert isinstance(refuse, Refuse)
        assert refuse.limit
        return False
    d.handle(KvArrived(rid(n), 1), now)
    d.handle(KvLoaded(rid(n), 1), now)
    return True


def test_steps_that_would_take_too_long_refuse() -> None:
    d = instance()
    taken = [hand_over(d, n, 0.0551) for n in range(8)]
    assert taken == [True] * 4 + [False] * 4
    assert hand_over(d, 9, 0.2) is False, "those that are there would have to wait longer"
    assert hand_over(d, 10, None) is True
    d.check_integrity()


def test_whoever_is_alone_is_taken_and_so_is_everybody_before_a_step_was_measured() -> None:
    assert hand_over(instance(), 1, 0.001) is True
    d = instance(measured=LEAST_STEPS - 1)
    assert all(hand_over(d, n, 0.0551) for n in range(8))


def test_a_short_wait_for_room_is_taken_and_a_long_one_refused() -> None:
    """Sixty pages hold two requests of 26 pages, each of which leaves one to grow into."""

    def full(stay: float) -> DecodeInstance:
        d = instance(pages=60)
        for n in range(8):
            assert hand_over(d, n, None, tokens=101, now=stay * n)
            d.handle(Stepped((rid(n),)), stay * (n + 1))
            d.handle(KvStored(rid(n), 1), stay * (n + 1))
        for n in (8, 9):
            assert hand_over(d, n, 10.0, tokens=101, now=stay * 8)
        d.check_integrity()
        return d

    assert hand_over(full(stay=1.0), 99, 0.1, tokens=101) is True
    assert hand_over(full(stay=5.0), 99, 0.1, tokens=101) is False
    assert hand_over(full(stay=5.0), 99, 1.0, tokens=101) is True
