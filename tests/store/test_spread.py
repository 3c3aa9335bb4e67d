"""Over how many connections a large transfer goes follows what was fast lately."""

from __future__ import annotations

from collections import Counter

import pytest

from moonpool.store.spread import LANES, TRIED_EVERY, Spread


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    count: int = getattr(request, "param", 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(count)))
    return count


def moved(spread: Spread, seconds: dict[int, float], transfers: int) -> Counter[int]:
    """How many of so many transfers went over which number of connections, each of which takes so long."""
    chosen = [0] * transfers
    for at in range(transfers):
        chosen[at] = spread.choose()
        spread.note(chosen[at], 1 << 20, seconds[chosen[at]])
    return Counter(chosen)


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("fast", [1, 2])
def test_most_go_over_what_is_faster_and_some_try_the_other(fast: int) -> None:
    slow = LANES + 1 - fast
    chosen = moved(Spread(is_near=True), {fast: 1.0, slow: 1.4}, 10 * TRIED_EVERY)
    assert 10 <= chosen[slow] <= 12


@pytest.mark.usefixtures("processors")
def test_what_became_slow_is_left_at_once_and_taken_again_when_it_recovers() -> None:
    spread = Spread(is_near=True)
    moved(spread, {1: 1.0, 2: 1.3}, 20)
    assert moved(spread, {1: 2.5, 2: 1.3}, 10)[1] <= 3
    moved(spread, {1: 1.0, 2: 1.3}, 4 * TRIED_EVERY)
    assert moved(spread, {1: 1.0, 2: 1.3}, TRIED_EVERY)[1] >= TRIED_EVERY - 1


@pytest.mark.parametrize(
    ("processors", "is_near", "first"), [(2, True, 1), (2, False, 2), (4, True, 2)], indirect=["processors"]
)
def test_the_first_goes_over_as_many_as_there_are_processors_for(processors: int, is_near: bool, first: int) -> None:
    assert Spread(is_near).choose() == first


@pytest.mark.parametrize("processors", [1], indirect=True)
@pytest.mark.parametrize("is_near", [True, False])
def test_one_processor_has_one_connection(processors: int, is_near: bool) -> None:
    assert moved(Spread(is_near), {1: 1.0}, 50) == {1: 50}
