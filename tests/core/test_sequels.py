"""How often a prompt's KVCache will be used, from what came before."""

import pytest

from moonpool.core.sequels import REMEMBERED, Sequels
from moonpool.core.vocabulary import BlockKey


def keys(name: str, count: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(f"{name}-{at}".encode().ljust(16)) for at in range(count))


@pytest.fixture
def sequels():
    known = Sequels()
    yield known
    known.check_integrity()


def test_a_prompt_that_goes_on_is_expected_to_go_on_again(sequels: Sequels) -> None:
    for number in range(50):
        sequels.asked(keys(f"single{number}", 4), 2048)
    for number in range(20):
        for turn in range(4):
            sequels.asked(keys(f"talk{number}", 4 + turn), 2048 + 512 * turn)
    assert (sequels.new, sequels.second, sequels.later) == (70.0, 20.0, 40.0)
    assert sequels.uses(True) > sequels.uses(False) > 1.0


def test_the_same_prompt_once_more_tells_nothing(sequels: Sequels) -> None:
    """Whoever was refused comes again and again."""
    first = sequels.asked(keys("a", 4), 2048)
    for _ in range(30):
        assert sequels.asked(keys("a", 4), 2048) == pytest.approx(first)
    assert (sequels.new, sequels.second, sequels.later) == (1.0, 0.0, 0.0)


def test_a_system_prompt_that_all_share_makes_nobody_a_sequel(sequels: Sequels) -> None:
    shared = keys("system", 2)
    sequels.asked(shared, 1024)
    for number in range(10):
        sequels.asked((*shared, *keys(f"user{number}", 6)), 4096)
    assert (sequels.new, sequels.second) == (11.0, 0.0)


def test_a_prompt_without_a_whole_block_is_new(sequels: Sequels) -> None:
    for _ in range(3):
        assert sequels.asked((), 100) == 1.0
    assert sequels.new == 3.0


def test_memory_is_bounded(sequels: Sequels) -> None:
    for number in range(REMEMBERED + 10):
        sequels.asked(keys(f"p{number}", 1), 512)
    sequels.check_integrity()
