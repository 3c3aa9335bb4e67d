"""Queues by rank: the lowest rank first, within a rank first in, first out.

Many items share few ranks, so an order is kept only between ranks (a heap); within one it is that of a linked list.
Adding and removing take O(1), or O(log ranks) where a rank appears or goes: amortized, as emptied ranks are cleared
away later.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

SPARE_RANKS = 64
"""So many emptied ranks stay in the heap, besides as many as have items; so many empty queues wait for a new rank."""


@dataclass(slots=True)
class Ranked(Generic[T]):
    """An item is in one rank at a time; its owner knows in which."""

    queues: dict[int, OrderedDict[T, None]] = field(default_factory=dict)
    """By rank; none is empty. The owner may put an item at the end of a queue by itself."""
    _heap: list[int] = field(default_factory=list)
    """All ranks that have a queue, and the emptied ones."""
    _emptied: set[int] = field(default_factory=set)
    _spare: list[OrderedDict[T, None]] = field(default_factory=list)

    def add(self, rank: int, item: T) -> None:
        """The item is the last of its rank."""
        queue = self.queues.get(rank)
        if queue is None:
            queue = self.queues[rank] = self._spare.pop() if self._spare else OrderedDict()
            if rank in self._emptied:
                self._emptied.remove(rank)
            else:
                heapq.heappush(self._heap, rank)
        queue[item] = None

    def remove(self, rank: int, item: T) -> None:
        """Raises KeyError where the item is not in that rank."""
        queue = self.queues[rank]
        del queue[item]
        if not queue:
            self._retire(rank)
            self._emptied.add(rank)
            if len(self._emptied) > len(self.queues) + SPARE_RANKS:
                self._heap = sorted(self.queues)
                self._emptied.clear()

    def lowest(self) -> OrderedDict[T, None] | None:
        """The queue of the lowest rank. Whoever takes its last item away must call `drop_lowest` at once."""
        heap = self._heap
        while heap:
            queue = self.queues.get(heap[0])
            if queue is not None:
                return queue
            self._emptied.remove(heapq.heappop(heap))
        return None

    def drop_lowest(self) -> None:
        """The queue of the lowest rank is empty."""
        self._retire(heapq.heappop(self._heap))

    def ascending(self) -> Iterator[tuple[int, T]]:
        """All items with their ranks, the first to go first. Nothing may change meanwhile."""
        heap = self._heap
        # The heap is a tree in an array: what comes next is always a child of what came before.
        next_up = [(heap[0], 0)] if heap else []
        while next_up:
            rank, at = heapq.heappop(next_up)
            for item in self.queues.get(rank, ()):
                yield rank, item
            for below in (2 * at + 1, 2 * at + 2):
                if below < len(heap):
                    heapq.heappush(next_up, (heap[below], below))

    def _retire(self, rank: int) -> None:
        """Its queue is empty."""
        queue = self.queues.pop(rank)
        if len(self._spare) < SPARE_RANKS:
            self._spare.append(queue)

    def check_integrity(self) -> None:
        """Raises AssertionError where heap and queues do not agree."""
        assert all(self.queues.values()), "an empty queue was kept"
        assert not any(self._spare), "a spare queue has items"
        assert len(set(self._heap)) == len(self._heap), "a rank is in the heap twice"
        assert set(self._heap) == self.queues.keys() | self._emptied
        assert not self.queues.keys() & self._emptied
        assert len(self._emptied) <= len(self.queues) + SPARE_RANKS
