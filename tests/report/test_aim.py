from __future__ import annotations

from collections.abc import Callable

import pytest

from moonpool.report.aim import MOST_LOOKS, Aim


def looks(aim: Aim, figure: Callable[[float], float]) -> int:
    count = 0
    while not aim.is_over:
        count += 1
        aim.tell(figure(aim.speed))
    return count


@pytest.mark.parametrize("start", [1.0, 2.9, 8.0])
def test_a_figure_that_rises_late_and_fast_is_found(start: float) -> None:
    aim = Aim(60.0, 0.05, start)
    assert looks(aim, lambda speed: 1.0 + 200.0 * max(speed - 3.0, 0.0)) <= 9
    assert 3.28 < aim.found < 3.31


def test_the_nearest_is_taken_where_the_figure_jumps() -> None:
    aim = Aim(60.0, 0.05)
    assert looks(aim, lambda speed: 59.0 if speed <= 2.0 else 100.0) <= MOST_LOOKS
    assert aim.found <= 2.0
    jump = Aim(60.0, 0.001)
    assert looks(jump, lambda speed: 10.0 if speed <= 2.0 else 70.0) <= MOST_LOOKS
    assert jump.found > 2.0


def test_a_figure_that_never_gets_there_ends() -> None:
    aim = Aim(60.0, 0.05)
    assert looks(aim, lambda speed: 1.0) == MOST_LOOKS


def test_a_figure_that_is_no_straight_line_takes_few_looks() -> None:
    """Refusals begin late and then rise fast: from one side alone a straight line would creep."""
    aim = Aim(0.182, 0.05, 3.31)
    assert looks(aim, lambda speed: min(0.16 + 4.0 * max(speed - 3.32, 0.0) ** 2, 0.9)) <= 7
