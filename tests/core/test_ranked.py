from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonpool.core.ranked import SPARE_RANKS, Ranked

T = TypeVar("T", bound=Hashable)


def pop(ranked: Ranked[T]) -> T | None:
    queue = ranked.lowest()
    if queue is None:
        return None
    item, _ = queue.popitem(last=False)
    if not queue:
        ranked.drop_lowest()
    return item


def test_ranks_that_come_and_go_leave_nothing_behind() -> None:
    """A block that is used ever more often passes through ever more ranks."""
    ranked: Ranked[str] = Ranked()
    ranked.add(0, "rare")
    for rank in range(1, 5000):
        ranked.add(rank, "hot")
        ranked.check_integrity()
        if rank % 7:
            assert [item for _, item in ranked.ascending()] == ["rare", "hot"]
        ranked.remove(rank, "hot")
    assert len(ranked._heap) <= SPARE_RANKS + 1
    assert (pop(ranked), pop(ranked)) == ("rare", None)


class AgainstSorting(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ranked: Ranked[int] = Ranked()
        self.items: dict[int, int] = {}
        """Item -> rank; items are numbered as they come, so within a rank they are in order."""
        self.count = 0

    def _sorted(self) -> list[tuple[int, int]]:
        return sorted((rank, item) for item, rank in self.items.items())

    @rule(ranks=st.lists(st.integers(0, 200), max_size=30))
    def add(self, ranks: list[int]) -> None:
        for rank in ranks:
            self.count += 1
            self.items[self.count] = rank
            self.ranked.add(rank, self.count)

    @rule(which=st.lists(st.integers(0, 1 << 16), max_size=30))
    def remove(self, which: list[int]) -> None:
        for number in which:
            if self.items:
                item = list(self.items)[number % len(self.items)]
                self.ranked.remove(self.items.pop(item), item)

    @rule(count=st.integers(1, 20))
    def pop(self, count: int) -> None:
        for _ in range(count):
            expected = self._sorted()[0][1] if self.items else None
            assert pop(self.ranked) == expected
            self.items.pop(expected or 0, None)

    @invariant()
    def agrees(self) -> None:
        self.ranked.check_integrity()
        assert list(self.ranked.ascending()) == self._sorted()


TestAgainstSorting = AgainstSorting.TestCase
TestAgainstSorting.settings = settings(max_examples=60, deadline=None)
