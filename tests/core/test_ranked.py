from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonpool.core.ranked import PAGE_ITEMS, SPARE_PAGES, Page, Ranked
from tests.soak import often

T = TypeVar("T", bound=Hashable)


class Row(Generic[T]):
    """Ranked as its owner uses it."""

    def __init__(self) -> None:
        self.ranked: Ranked[T] = Ranked()
        self.where: dict[T, Page[T]] = {}

    def add(self, rank: int, item: T) -> None:
        page = self.where[item] = self.ranked.page(rank)
        page[item] = None

    def remove(self, item: T) -> None:
        del self.where.pop(item)[item]

    def pop(self) -> T | None:
        page = self.ranked.first()
        if page is None:
            return None
        item = next(iter(page))
        self.remove(item)
        return item


def test_ranks_that_come_and_go_leave_nothing_behind() -> None:
    """A block that is used ever more often passes through ever more ranks."""
    row: Row[str] = Row()
    row.add(0, "rare")
    for rank in range(1, 5000):
        row.add(rank, "hot")
        row.ranked.check_integrity()
        if rank % 7:
            assert [item for _, item in row.ranked.ascending()] == ["rare", "hot"]
        row.remove("hot")
    assert len(row.ranked._heap) <= SPARE_PAGES + 2
    assert (row.pop(), row.pop()) == ("rare", None)


def test_items_that_come_and_go_within_a_rank_leave_nothing_behind() -> None:
    """In a pool that is never full nothing is ever taken from the front."""
    row: Row[int] = Row()
    row.add(0, -1)
    for item in range(200 * PAGE_ITEMS):
        row.add(0, item)
        if item >= PAGE_ITEMS:
            row.remove(item - PAGE_ITEMS)
    row.ranked.check_integrity()
    assert row.ranked._count <= SPARE_PAGES + 4
    assert [row.pop(), row.pop()] == [-1, 199 * PAGE_ITEMS]


class AgainstSorting(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.row: Row[int] = Row()
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
            self.row.add(rank, self.count)

    @rule(which=st.lists(st.integers(0, 1 << 16), max_size=30))
    def remove(self, which: list[int]) -> None:
        for number in which:
            if self.items:
                item = list(self.items)[number % len(self.items)]
                del self.items[item]
                self.row.remove(item)

    @rule(count=st.integers(1, 20))
    def pop(self, count: int) -> None:
        for _ in range(count):
            expected = self._sorted()[0][1] if self.items else None
            assert self.row.pop() == expected
            self.items.pop(expected or 0, None)

    @invariant()
    def agrees(self) -> None:
        self.row.ranked.check_integrity()
        assert list(self.row.ranked.ascending()) == self._sorted()


TestAgainstSorting = AgainstSorting.TestCase
TestAgainstSorting.settings = settings(max_examples=often(60))
