"""Who goes before whom in front of a prefill instance, and what it may cost the others."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.classes import BATCH
from moonpool.core.line import AGEING_SECONDS, FOREVER, Line, Turn


def line(*turns: Turn[str], now: float = 0.0) -> str:
    made: Line[str] = Line()
    for turn in turns:
        made.join(turn, now)
        made.check_integrity()
    return "".join(made)


def turn(name: str, seconds: float, limit: float = FOREVER, rank: int = 0) -> Turn[str]:
    return Turn(name, rank, seconds, limit)


def test_equals_go_in_order_of_arrival() -> None:
    assert line(turn("a", 1), turn("b", 1), turn("c", 1)) == "abc"
    assert line(turn("a", 0), turn("b", 0), turn("c", 0)) == "abc", "nothing is predicted"


def test_a_short_prompt_passes_a_long_one_that_keeps_its_limit() -> None:
    assert line(turn("L", 20, limit=32), turn("s", 1, limit=32)) == "sL"
    assert line(turn("L", 20, limit=20.5), turn("s", 1, limit=30)) == "Ls", "it would be late"
    assert line(turn("L", 20, limit=30), turn("s", 1, limit=30)) == "Ls", "predictions are not exact"


def test_what_stands_before_the_long_one_counts() -> None:
    assert line(turn("a", 9, limit=32), turn("L", 20, limit=32), turn("s", 1, limit=32)) == "aLs"


def test_a_long_prompt_is_delayed_by_its_own_work_at_most() -> None:
    shorts = [turn(name, 1) for name in "abcdefgh"]
    assert line(turn("L", 5), *shorts) == "abcdeLfgh"


def test_a_sooner_rank_passes_a_later_one_whatever_its_limit_until_that_has_aged() -> None:
    many = [turn(str(at), AGEING_SECONDS / 4) for at in range(6)]
    assert line(turn("l", 1, limit=2, rank=5), *many) == "0123l45"
    assert line(turn("h", 10), turn("l", 1, rank=5)) == "hl", "a later rank passes nobody of a sooner one"


def test_batch_work_always_gives_way() -> None:
    many = [turn(str(at), AGEING_SECONDS) for at in range(5)]
    assert line(turn("b", 1, rank=BATCH.rank), *many) == "01234b"


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.sampled_from([0.1, 1.0, 5.0, 25.0]), st.sampled_from([3.0, 30.0, FOREVER])),
        max_size=25,
    )
)
def test_nobody_of_one_rank_misses_a_limit_that_it_would_keep_in_order_of_arrival(
    rows: list[tuple[float, float, float]],
) -> None:
    """Each is computed to its end without a break; a newcomer may pass all but the one being computed."""
    now = 0.0
    turns: list[Turn[int]] = []
    arrivals: list[float] = []
    for number, (gap, seconds, allowed) in enumerate(rows):
        now += gap
        arrivals.append(now)
        turns.append(Turn(number, 0, seconds, now + allowed))
    free, in_order = 0.0, []
    for arrived, one in zip(arrivals, turns, strict=True):
        free = max(free, arrived) + one.seconds
        in_order.append(free)
    works = [one.seconds for one in turns]
    made: Line[int] = Line()
    clock, done = 0.0, dict.fromkeys(range(len(rows)), 0.0)

    def compute_until(end: float) -> None:
        nonlocal clock
        while (first := next(iter(made), None)) is not None and clock < end:
            one = turns[first]
            spent = min(one.seconds, end - clock)
            clock += spent
            made.work(one, one.seconds - spent)
            if one.seconds <= 1e-12:
                made.leave(one)
                done[first] = clock
        clock = max(clock, end)

    for number, arrived in enumerate(arrivals):
        compute_until(arrived)
        made.join(turns[number], arrived)
        made.check_integrity()
    compute_until(1e9)
    for number, one in enumerate(turns):
        if in_order[number] <= one.limit:
            assert done[number] <= one.limit + 1e-6
        assert done[number] <= in_order[number] + works[number] + 1e-6, "delayed by more than its own work"
