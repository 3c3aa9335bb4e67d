"""Which bytes of an arena are in use: page-aligned extents, best fit, neighbours coalesce."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

PAGE_BYTES = 4096
PLACES_TRIED = 16


def page_aligned(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class Extents:
    """Offsets only, no memory. O(log n) an operation (finding a neighbour and an exact fit is O(1)).

    Best fit: blocks of one key space are all of one size, so what one of them leaves fits the next exactly.
    """

    def __init__(self, capacity: int, taken: Sequence[tuple[int, int]] = ()) -> None:
        """`capacity` in bytes; what is beyond the last whole page is not used.

        `taken`: extents (offset, bytes) that are allocated already, in whole pages, by offset, without overlaps.
        """
        self.capacity = capacity // PAGE_BYTES * PAGE_BYTES
        self.used = 0
        self._taken: dict[int, int] = {}
        self._free: dict[int, int] = {}
        """Size by offset."""
        self._free_until: dict[int, int] = {}
        """Offset by end."""
        self._free_of_size: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []
        """The different sizes of free extents, ascending."""
        end = 0
        for offset, size in taken:
            if offset > end:
                self._add_free(end, offset - end)
            self._taken[offset] = size
            self.used += size
            end = offset + size
        if self.capacity > end:
            self._add_free(end, self.capacity - end)

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def allocate(self, nbytes: int) -> int | None:
        """The offset of an extent of at least `nbytes`, or None where no free extent is long enough.

        Raises ValueError for less than a byte: two such extents would lie in one place.
        """
        if nbytes < 1:
            raise ValueError(f"an extent of {nbytes} bytes")
        size = page_aligned(nbytes)
        position = bisect_left(self._sizes, size)
        if position == len(self._sizes):
            return None
        found = self._sizes[position]
        offset = next(iter(self._free_of_size[found]))
        self._remove_free(offset, found)
        if found > size:
            self._add_free(offset + size, found - size)
        self._taken[offset] = size
        self.used += size
        return offset

    def allocate_row(self, nbytes: int, count: int) -> range | None:
        """Offsets of so many extents of `nbytes` one behind the other; each is released by itself.

        None where no free extent is long enough, or where single ones would fit exactly: those are better used first.
        """
        size = page_aligned(nbytes)
        position = bisect_left(self._sizes, size * count)
        if position == len(self._sizes) or size in self._free_of_size:
            return None
        found = self._sizes[position]
        offset = next(iter(self._free_of_size[found]))
        self._remove_free(offset, found)
        end = offset + size * count
        if found > end - offset:
            self._add_free(end, found - (end - offset))
        row = range(offset, end, size)
        self._taken.update(dict.fromkeys(row, size))
        self.used += size * count
        return row

    def release(self, offset: int) -> None:
        """Raises KeyError for what is not the offset of an allocated extent."""
        size = self._taken.pop(offset)
        self.used -= size
        if (before := self._free_until.get(offset)) is not None:
            length = self._free[before]
            self._remove_free(before, length)
            offset, size = before, size + length
        if (length_after := self._free.get(offset + size)) is not None:
            self._remove_free(offset + size, length_after)
            size += length_after
        self._add_free(offset, size)

    def in_the_way(self, nbytes: int, may_go: Callable[[int], bool]) -> list[int] | None:
        """Allocated extents (offsets) without which there would be `nbytes` in one piece; all of them `may_go`.

        From some of the longest free extents on upwards; of these places the one where the least is lost. None: at none
        of them it can be had.
        """
        size = page_aligned(nbytes)
        best: list[int] | None = None
        least = size
        for begin in self._longest(PLACES_TRIED):
            found, lost, end = [], 0, begin
            while end - begin < size and lost < least:
                if (length := self._free.get(end)) is None:
                    length = self._taken.get(end)
                    if length is None or not may_go(end):
                        break
                    found.append(end)
                    lost += length
                end += length
            else:
                if lost < least:
                    best, least = found, lost
        return best

    def _longest(self, count: int) -> Iterator[int]:
        """Offsets of free extents, the longest first."""
        return islice((at for size in reversed(self._sizes) for at in self._free_of_size[size]), count)

    def _add_free(self, offset: int, size: int) -> None:
        self._free[offset] = size
        self._free_until[offset + size] = offset
        same = self._free_of_size.get(size)
        if same is None:
            same = self._free_of_size[size] = {}
            insort(self._sizes, size)
        same[offset] = None

    def _remove_free(self, offset: int, size: int) -> None:
        del self._free[offset]
        del self._free_until[offset + size]
        same = self._free_of_size[size]
        del same[offset]
        if not same:
            del self._free_of_size[size]
            del self._sizes[bisect_left(self._sizes, size)]

    def check_integrity(self) -> None:
        """Raises AssertionError unless free and taken extents tile the arena and no two free ones touch."""
        extents = sorted(
            [(o, s, True) for o, s in self._free.items()] + [(o, s, False) for o, s in self._taken.items()]
        )
        end, was_free = 0, False
        for offset, size, is_free in extents:
            assert offset == end, f"extents overlap or leave a gap at {end}"
            assert size > 0, f"an empty extent at {offset}"
            assert size % PAGE_BYTES == 0, f"the extent at {offset} is not whole pages"
            assert not (is_free and was_free), f"free extents on both sides of {offset}"
            end, was_free = offset + size, is_free
        assert end == self.capacity
        assert self.used == sum(self._taken.values())
        assert self._free_until == {offset + size: offset for offset, size in self._free.items()}
        by_size = {(size, offset) for size, same in self._free_of_size.items() for offset in same}
        assert by_size == {(size, offset) for offset, size in self._free.items()}
        assert self._sizes == sorted(self._free_of_size)
