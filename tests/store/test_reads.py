"""Reads of a slab: every byte of every block is read once, and each block's end is told once."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.vocabulary import BlockKey, KeySpace, KeySpaceId
from moonpool.messenger.transfer import Bytes, checksum
from moonpool.store.extents import PAGE_BYTES, page_aligned
from moonpool.store.index import Shelved
from moonpool.store.reads import PART_BYTES, Load, Outcome, Read, reads_of

MIB = 1 << 20


def load_of(offset: int, runs: int, run_bytes: int, volume: int = 0) -> tuple[Load, Bytes]:
    """A load of random bytes, and the bytes as they lie on the disk."""
    space = KeySpace(KeySpaceId("ab" * 16), 1, runs, run_bytes)
    content = np.random.default_rng(offset).integers(0, 256, page_aligned(space.block_bytes), np.uint8)
    sums = [checksum(run) for run in content[: space.block_bytes].reshape(runs, -1)]
    key = BlockKey(offset.to_bytes(16, "little"))
    shelved = Shelved(offset, space, key, None, np.array(sums, "<u8").tobytes(), content.nbytes, volume)
    return Load(shelved, np.zeros_like(content), lambda *_: None), content


def carry_out(read: Read, content: Bytes) -> None:
    at = 0
    for target in read.targets():
        target[:] = content[at : at + target.nbytes]
        at += target.nbytes
    read.sum_up()


def outcomes(reads: Sequence[Read]) -> list[Outcome]:
    return [outcome for read in reads for _, outcome in read.end()]


@settings(max_examples=40)
@given(
    st.integers(1, 4),
    st.sampled_from([512, PAGE_BYTES, 3 * PAGE_BYTES, 100_000, MIB, 3 * MIB, 3 * MIB + 512]),
    st.randoms(),
)
def test_one_block_arrives_whole_in_whatever_order_its_parts_end(runs: int, run_bytes: int, random: Random) -> None:
    load, content = load_of(8 * PAGE_BYTES, runs, run_bytes)
    reads = list(reads_of([load]))
    random.shuffle(reads)
    told = []
    for read in reads:
        assert (read.offset % PAGE_BYTES, sum(t.nbytes for t in read.targets()) % PAGE_BYTES) == (0, 0)
        carry_out(read, content[read.offset - load.shelved.offset :])
        told += read.end()
    assert np.array_equal(load.target, content)
    assert told == [(load, Outcome.GOOD)]


def test_a_large_block_is_cut_and_small_neighbours_are_read_together() -> None:
    large, _ = load_of(0, 8, MIB)
    small = [load_of(8 * MIB + number * MIB // 4, 1, MIB // 4)[0] for number in range(10)]
    apart, _ = load_of(32 * MIB, 1, MIB // 4)
    other, _ = load_of(32 * MIB + MIB // 4, 1, MIB // 4, volume=1)
    reads = list(reads_of([apart, *reversed(small), other, large]))
    assert [(read.volume, read.offset, len(read.arrivals)) for read in reads] == [
        *[(0, part * PART_BYTES, 1) for part in range(4)],
        (0, 8 * MIB, 8),
        (0, 10 * MIB, 2),
        (0, 32 * MIB, 1),
        (1, 32 * MIB + MIB // 4, 1),
    ]


@pytest.mark.parametrize("position", [0, 3 * MIB, 8 * MIB - 1])
def test_one_wrong_byte_in_any_part_damages_the_block(position: int) -> None:
    load, content = load_of(0, 8, MIB)
    content[position] ^= 1
    reads = list(reads_of([load]))
    for read in reads:
        carry_out(read, content[read.offset :])
    assert outcomes(reads) == [Outcome.DAMAGED]


def test_of_a_block_that_cannot_be_read_only_the_first_failure_counts() -> None:
    load, content = load_of(0, 8, MIB)
    reads = list(reads_of([load]))
    carry_out(reads[1], content[reads[1].offset :])
    assert all(read.is_wanted for read in reads)
    assert [read.lose() for read in reads[2:]] == [True, False]
    assert not reads[0].is_wanted
    assert outcomes(reads) == [Outcome.LOST]
