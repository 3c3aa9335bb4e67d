from __future__ import annotations

import errno
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.eviction import Eviction
from moonpool.core.vocabulary import BlockKey, KeySpace, KeySpaceId
from moonpool.errors import ConfigError
from moonpool.store import arena as arena_module
from moonpool.store.arena import Arena, available_memory, map_arena
from moonpool.store.blocks import Block, Blocks
from moonpool.store.extents import PAGE_BYTES, Extents, page_aligned
from tests.soak import often

from .kit import open_descriptors

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


@settings(max_examples=often(200))
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


@pytest.mark.parametrize("nbytes", [0, -1, -PAGE_BYTES])
def test_an_extent_of_nothing_is_none(nbytes: int) -> None:
    extents = Extents(4 * PAGE_BYTES)
    with pytest.raises(ValueError, match="an extent of"):
        extents.allocate(nbytes)
    extents.check_integrity()


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


def test_after_a_long_mix_of_sizes_there_is_a_place_for_each_while_much_is_free() -> None:
    """Nothing is ever moved, so best fit must keep free space together by itself."""
    rng = random.Random(5)
    extents = Extents(1024 * PAGE_BYTES)
    held: list[int] = []
    slowest = 0.0
    for _ in range(often(10_000)):
        size = rng.choice([1, 1, 2, 3, 8, 23, 64]) * PAGE_BYTES
        while extents.free < extents.capacity // 2:
            extents.release(held.pop(rng.randrange(len(held))))
        began = time.thread_time()
        offset = extents.allocate(size)
        slowest = max(slowest, time.thread_time() - began)
        assert offset is not None, f"no {size} bytes with {extents.free} of {extents.capacity} free"
        held.append(offset)
    extents.check_integrity()
    assert len(extents._free) < 200
    assert slowest < 0.01


@pytest.mark.parametrize(("large", "one_in"), [(1, 2), (16, 16), (16, 2), (64, 64)])
def test_a_block_costs_few_others_their_place_however_sizes_mix(large: int, one_in: int) -> None:
    """In a full arena of two models' blocks and of tails, which go by use and not by where they lie."""
    rng = random.Random(6)
    blocks = Blocks(Extents(1024 * PAGE_BYTES), lambda change: None, Eviction())
    spaces = [KeySpace(KeySpaceId(str(pages)), 64, 1, pages * PAGE_BYTES) for pages in (1, large)]
    tails: list[Block] = []
    for number in range(often(3000)):
        space = spaces[not rng.randrange(one_in)]
        before = blocks.evictions
        tail = blocks.allocate_tail(space, 0, rng.randrange(1, space.run_bytes))
        block = blocks.allocate(space, BlockKey(number.to_bytes(16, "big")), None, 0, b"")
        assert block is not None
        assert tail is not None
        tails.append(tail)
        if len(tails) > 4:
            blocks.discard(tails.pop(rng.randrange(4)))
        block.complete = 1
        blocks.promote(space, [block])
        blocks.eviction.unpin([block.name])
        blocks.eviction.touch([rng.choice(list(blocks.resident))])
        # Twice its size by use and by place, and so for the tail.
        assert blocks.evictions - before <= 4 * large
    assert blocks.extents.used > 0.8 * blocks.extents.capacity
    blocks.check_integrity(tails)


@settings(max_examples=often(100))
@given(st.lists(st.integers(1, 6), min_size=4, max_size=24), st.data(), st.integers(1, PAGES))
def test_what_is_in_the_way_is_no_more_than_it_is_said_to_be(
    sizes: list[int], data: st.DataObject, wanted: int
) -> None:
    extents = Extents(PAGES * PAGE_BYTES)
    offsets = [at for size in sizes if (at := extents.allocate(size * PAGE_BYTES)) is not None]
    for at in data.draw(st.sets(st.sampled_from(offsets))):
        extents.release(at)
        offsets.remove(at)
    fixed = data.draw(st.sets(st.sampled_from(offsets))) if offsets else set()
    found = extents.in_the_way(wanted * PAGE_BYTES, lambda at: at not in fixed)
    extents.check_integrity()
    if found is not None:
        assert fixed.isdisjoint(found)
        assert sum(extents._taken[at] for at in found) < wanted * PAGE_BYTES
        for at in found:
            extents.release(at)
        assert extents.allocate(wanted * PAGE_BYTES) is not None


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


def test_without_huge_pages_an_arena_is_of_small_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(arena_module, "_SHARED_HUGE", tmp_path / "absent")
    monkeypatch.setattr(arena_module, "_MEMINFO", meminfo(tmp_path, 0))
    arena = Arena(3 << 20)
    assert (arena.pages, arena.huge_bytes, arena.size) == ("4 KiB pages", 0, 3 << 20)
    arena.close()


def meminfo(folder: Path, huge_pages: int) -> Path:
    path = folder / "meminfo"
    path.write_text(
        f"MemAvailable: 1000000 kB\nHugePages_Free: {huge_pages}\nHugePages_Rsvd: 0\nHugepagesize: 2048 kB\n"
    )
    return path


def test_huge_pages_that_were_set_aside_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whole ones only. A kernel that has none stands for one that has: the flag is what it is asked by."""
    asked: list[int] = []
    really_create = os.memfd_create

    def create(name: str, flags: int) -> int:
        if "arena" in name:
            asked.append(flags & os.MFD_HUGETLB)
        return really_create(name, flags & ~os.MFD_HUGETLB)

    monkeypatch.setattr(os, "memfd_create", create)
    monkeypatch.setattr(arena_module, "_MEMINFO", meminfo(tmp_path, 2))
    arena = Arena((5 << 20) + 1)
    assert (arena.pages, arena.huge_bytes, arena.size) == ("huge pages of 2048 KiB", 4 << 20, 4 << 20)
    arena.slice(0, arena.size)[:] = 7
    arena.close()
    too_large = Arena(6 << 20)
    assert (too_large.huge_bytes, too_large.size) == (0, 6 << 20)
    too_large.close()
    assert asked == [os.MFD_HUGETLB, 0]


def test_huge_pages_that_somebody_else_takes_first_are_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    descriptors = open_descriptors()
    # As the kernel's own list has it, there are none; what is read here says there are.
    monkeypatch.setattr(arena_module, "_MEMINFO", meminfo(tmp_path, 1 << 20))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        patched.setattr(arena_module, "_populate", refuse)
        with pytest.raises(ConfigError, match="no shared memory for an arena of 4 MiB"):
            Arena(4 << 20)
    assert open_descriptors() == descriptors


@pytest.mark.parametrize("can_populate", [True, False])
def test_transparent_huge_pages_are_asked_for_where_they_may_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, can_populate: bool
) -> None:
    (tmp_path / "shmem_enabled").write_text("always within_size [advise] never deny force\n")
    monkeypatch.setattr(arena_module, "_SHARED_HUGE", tmp_path / "shmem_enabled")
    monkeypatch.setattr(arena_module, "_MEMINFO", meminfo(tmp_path, 0))
    if not can_populate:
        monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", 9999)
    arena = Arena(4 << 20)
    assert arena.pages == f"transparent huge pages ({arena.huge_bytes >> 20} of 4 MiB)"
    # All of it is there before anybody writes, whatever its pages are.
    assert os.fstat(arena.fd).st_blocks * 512 == 4 << 20
    arena.close()


def test_available_memory_is_plausible() -> None:
    assert 1 << 20 < available_memory() < 1 << 60
