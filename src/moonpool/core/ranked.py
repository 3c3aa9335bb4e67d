"""Queues by rank: the lowest rank first, within a rank first in, first out.

Many items share few ranks, so an order is kept only between ranks (a heap). A queue is a row of *pages*: plain dicts,
which keep the order of arrival and let go of any item at once. What has become empty stays until it is met or until as
much is useless as is in use, so an item that comes or goes costs O(1), or O(log ranks) where a rank appears: amortized.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

Page = dict[T, None]

PAGE_ITEMS = 64
"""A page with so many takes no more: whoever looks for its first item walks over all that was deleted before it."""
SPARE_PAGES = 64
"""So many pages may be empty, besides as many as are not."""


@dataclass(slots=True)
class Ranked(Generic[T]):
    """An item is in one page at a time; its owner knows in which, and takes it out by `del page[item]`."""

    pages: dict[int, Page[T]] = field(default_factory=dict)
    """By rank: where items that come now belong, at the end, as long as it has fewer than PAGE_ITEMS."""
    _full: dict[int, deque[Page[T]]] = field(default_factory=dict)
    """By rank, where there are any: the pages before that one, the oldest first. They were full once."""
    _heap: list[int] = field(default_factory=list)
    """The ranks that have a page."""
    _count: int = 0
    """Of all pages."""
    _most: int = SPARE_PAGES

    def page(self, rank: int) -> Page[T]:
        """The page of `pages`, or a new one in its place. Good until the next call."""
        page = self.pages.get(rank)
        if page is not None and len(page) < PAGE_ITEMS:
            return page
        if self._count >= self._most:
            self._clear_away()
        if page is None:
            heapq.heappush(self._heap, rank)
        else:
            self._full.setdefault(rank, deque()).append(page)
        page = self.pages[rank] = {}
        self._count += 1
        return page

    def first(self) -> Page[T] | None:
        """A page that is not empty, and whose items go before all others, in its order. None: there are no items."""
        heap = self._heap
        while heap:
            rank = heap[0]
            if full := self._full.get(rank):
                page = full[0]
                if page:
                    return page
                full.popleft()
            else:
                page = self.pages[rank]
                if page:
                    return page
                del self.pages[rank]
                self._full.pop(rank, None)
                heapq.heappop(heap)
            self._count -= 1
        return None

    def ascending(self) -> Iterator[tuple[int, T]]:
        """All items with their ranks, the first to go first. Nothing may change meanwhile."""
        heap = self._heap
        # The heap is a tree in an array: what comes next is always a child of what came before.
        next_up = [(heap[0], 0)] if heap else []
        while next_up:
            rank, at = heapq.heappop(next_up)
            for page in (*self._full.get(rank, ()), self.pages[rank]):
                for item in page:
                    yield rank, item
            for below in (2 * at + 1, 2 * at + 2):
                if below < len(heap):
                    heapq.heappush(next_up, (heap[below], below))

    def _clear_away(self) -> None:
        """Let go of empty pages."""
        self._full = {rank: left for rank, full in self._full.items() if (left := deque(page for page in full if page))}
        for rank in [rank for rank, page in self.pages.items() if not page and rank not in self._full]:
            del self.pages[rank]
        self._heap = sorted(self.pages)
        self._count = len(self.pages) + sum(len(full) for full in self._full.values())
        self._most = 2 * self._count + SPARE_PAGES

    def check_integrity(self) -> None:
        """Raises AssertionError where heap and pages do not agree."""
        assert len(set(self._heap)) == len(self._heap), "a rank is in the heap twice"
        assert set(self._heap) == self.pages.keys() >= self._full.keys()
        assert all(self._heap[(at - 1) // 2] <= rank for at, rank in enumerate(self._heap) if at)
        assert self._count == len(self.pages) + sum(len(full) for full in self._full.values()) <= self._most
