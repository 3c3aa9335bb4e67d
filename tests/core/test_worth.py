"""What is refused first in overload: by what its computing costs for its worth."""

import pytest

from moonpool.core.vocabulary import BlockKey
from moonpool.core.worth import SPARE_PROMPTS, Worth

LIMIT = 30.0
MODEL = "m"


class Queue:
    """A prefill instance with so much to do."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.until = seconds

    def seconds_before(self, rank: int, now: float) -> float:
        return max(self.until - now, 0.0)


def offered(worth: Worth, each: list[float], per_second: float, seconds: float, rank: int = 0) -> float:
    """So many a second of each of these, with nothing shared; the time when the last came."""
    now = 0.0
    while now < seconds:
        for cost in each:
            worth.asked(MODEL, rank, (), 1000, cost, now)
        now += 1.0 / per_second
        worth.cutoff(MODEL, rank, [Queue()], LIMIT, now)
    return now


@pytest.fixture
def worth():
    known = Worth()
    yield known
    known.check_integrity()


def test_below_capacity_everything_is_taken(worth: Worth) -> None:
    now = offered(worth, [0.2, 0.6], per_second=1.0, seconds=120.0)
    assert worth.cutoff(MODEL, 0, [Queue()], LIMIT, now + 1.0) == float("inf")


def test_in_overload_the_dearest_go_first_and_the_rest_fits(worth: Worth) -> None:
    now = offered(worth, [0.2, 0.6, 2.0], per_second=1.0, seconds=120.0)
    assert worth.cutoff(MODEL, 0, [Queue(LIMIT + 500)], LIMIT, now + 1.0) < 0.2
    # 30 s of computing in the time to the limit, and 24 s are asked for by those of 0.2 and 0.6 s.
    wanted = LIMIT - SPARE_PROMPTS * 1.57
    found = worth.cutoff(MODEL, 0, [Queue(now + 2.0 + wanted)], LIMIT, now + 2.0)
    assert 0.6 < found < 2.1
    assert worth.cutoff(MODEL, 0, [Queue(now + 3.0 + wanted + 10.0)], LIMIT, now + 3.0) <= 0.65


def test_more_instances_take_more(worth: Worth) -> None:
    now = offered(worth, [0.2, 0.6, 2.0], per_second=1.0, seconds=120.0)
    assert worth.cutoff(MODEL, 0, [Queue()] * 4, LIMIT, now + 1.0) == float("inf")


def test_what_will_be_used_again_costs_less(worth: Worth) -> None:
    for number in range(200):
        worth.asked(MODEL, 0, (BlockKey(f"alone-{number}".encode().ljust(16)),), 600, 1.0, 0.0)
    for number in range(40):
        for turn in range(4):
            keys = tuple(BlockKey(f"{number}-{at}".encode().ljust(16)) for at in range(4 + turn))
            uses = worth.asked(MODEL, 0, keys, 2048 + 512 * turn, 1.0, float(number))
    assert uses > worth.asked(MODEL, 0, (), 2048, 1.0, 41.0) > 1.0


def test_work_of_later_classes_takes_no_room_from_sooner_ones(worth: Worth) -> None:
    offered(worth, [5.0], per_second=2.0, seconds=60.0, rank=1)
    worth.asked(MODEL, 0, (), 1000, 0.5, 61.0)
    assert worth.cutoff(MODEL, 0, [Queue()], LIMIT, 62.0) == float("inf")
    assert worth.cutoff(MODEL, 1, [Queue()], LIMIT, 62.0) < float("inf")


def test_work_of_sooner_classes_does(worth: Worth) -> None:
    now = offered(worth, [5.0], per_second=1.0, seconds=60.0, rank=0)
    worth.asked(MODEL, 1, (), 1000, 0.5, now)
    assert worth.cutoff(MODEL, 1, [Queue()], LIMIT, now + 1.0) < 0.5


def test_overload_is_forgotten(worth: Worth) -> None:
    now = offered(worth, [0.2, 2.0], per_second=2.0, seconds=120.0)
    assert worth.cutoff(MODEL, 0, [Queue(now + 20)], LIMIT, now + 1.0) < 2.0
    assert worth.cutoff(MODEL, 0, [Queue(now)], LIMIT, now + 600.0) == float("inf")


def test_the_advice_is_when_it_would_be_taken(worth: Worth) -> None:
    now = offered(worth, [0.2, 2.0], per_second=2.0, seconds=120.0)
    queue = [Queue(now + 20)]
    wait = worth.wait(2.0, MODEL, 0, queue, LIMIT, now)
    assert wait is not None
    assert worth.cutoff(MODEL, 0, queue, LIMIT, now + wait + 1.0) >= 2.0
    assert worth.wait(1e9, MODEL, 0, [Queue(1e9)], LIMIT, now) is None


def test_a_first_burst_is_no_overload(worth: Worth) -> None:
    """Before anything is known of the rate, a few prompts at once must not look like many a second."""
    for _ in range(5):
        worth.asked(MODEL, 0, (), 1000, 2.0, 0.1)
    assert worth.cutoff(MODEL, 0, [Queue(10.0)], LIMIT, 0.2) == float("inf")
