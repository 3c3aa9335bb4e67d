from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.errors import ConfigError
from moonpool.store.arena import Arena, available_memory, map_arena
from moonpool.store.extents import PAGE_BYTES, Extents, page_aligned
from tests.soak import often

PAGES = 24


class BytePerPage:
    """The same promises, kept by looking at every page."""

    def __init__(self) -> None:
        self.taken = [False] * PAGES

    def longest(self) -> int:
        best = run = 0
        for is_taken in self.taken:
            run = 0 if is_taken else run + 1
            best = max(best, run)
        return best

    def mark(self, offset: int, nbytes: int, taken: bool) -> None:
        first, count = offset // PAGE_BYTES, page_aligned(nbytes) // PAGE_BYTES
        pages = range(first, first + count)
        assert all(self.taken[page] != taken for page in pages), "handed out twice"
        for page in pages:
            self.taken[page] = taken


@settings(max_examples=often(200), deadline=None)
@given(
    st.lists(st.one_of(st.integers(1, 9 * PAGE_BYTES), st.tuples(st.integers(0, PAGES))), max_size=120),
    st.integers(0, PAGE_BYTES - 1),
)
def test_extents_against_a_bitmap(operations: list[int | tuple[int]], ragged: int) -> None:
    extents, model = Extents(PAGES * PAGE_BYTES + ragged), BytePerPage()
    held: list[tuple[int, int]] = []
    for operation in operations:
        if isinstance(operation, int):
            offset = extents.allocate(operation)
            assert (offset is not None) == (page_aligned(operation) <= model.longest() * PAGE_BYTES)
            if offset is not None:
                assert offset % PAGE_BYTES == 0
                model.mark(offset, operation, True)
                held.append((offset, operation))
        elif held:
            offset, nbytes = held.pop(operation[0] % len(held))
            extents.release(offset)
            model.mark(offset, nbytes, False)
        extents.check_integrity()
        assert extents.used == sum(model.taken) * PAGE_BYTES
        assert extents.free == extents.capacity - extents.used
    for offset, _ in held:
        extents.release(offset)
    assert extents.allocate(PAGES * PAGE_BYTES) == 0, "everything coalesces again"


def test_an_extent_is_released_once() -> None:
    extents = Extents(4 * PAGE_BYTES)
    offset = extents.allocate(1)
    assert offset is not None
    extents.release(offset)
    with pytest.raises(KeyError):
        extents.release(offset)


def test_blocks_of_one_size_leave_no_holes_that_another_cannot_use() -> None:
    extents = Extents(9 * PAGE_BYTES)
    offsets = [extents.allocate(3 * PAGE_BYTES) for _ in range(3)]
    extents.release(offsets[1])  # type: ignore[arg-type]
    assert extents.allocate(3 * PAGE_BYTES) == offsets[1]


def test_an_arena_is_shared_by_descriptor_and_cannot_be_shrunk() -> None:
    arena = Arena(3 * PAGE_BYTES + 17)
    assert arena.size == 3 * PAGE_BYTES
    other = map_arena(arena.fd, arena.size)
    arena.slice(PAGE_BYTES, 4)[:] = [1, 2, 3, 4]
    assert list(other[PAGE_BYTES : PAGE_BYTES + 4]) == [1, 2, 3, 4]
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, PAGE_BYTES)
    arena.close()
    assert np.count_nonzero(other) == 4


@pytest.mark.parametrize(
    ("nbytes", "reason"), [(1 << 60, "does not fit"), (0, "too small"), (PAGE_BYTES - 1, "too small")]
)
def test_an_impossible_arena_is_a_configuration_error(nbytes: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Arena(nbytes)


def test_available_memory_is_plausible() -> None:
    assert 1 << 20 < available_memory() < 1 << 60
