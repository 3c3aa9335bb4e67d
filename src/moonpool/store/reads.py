"""How blocks are read from a slab: in parts that go on beside each other, verified as they come.

A disk gives more to several reads at a time than to one, and while one part is read another is summed up. So a large
block is cut, and small neighbours are read together.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from moonpool.messenger.transfer import Bytes, checksum
from moonpool.store.extents import PAGE_BYTES
from moonpool.store.index import Shelved

PART_BYTES = 2 << 20
"""Of one read."""
LAYERED_BYTES = 256 << 10
"""Of one where the layers of a prompt are wanted one after the other."""


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """A block to be brought into the arena."""

    shelved: Shelved
    target: Bytes
    """Whole pages."""
    done: Callable[[bool, bool], None]
    """(is it there and verified, is it damaged on the disk); exactly once, on whatever thread."""
    landed: Callable[[int, Sequence[int]], None] = lambda first, checksums: None
    """Runs from the first one on are there and verified, with their checksums; on whatever thread, before `done`."""


class Outcome(Enum):
    GOOD = "good"
    DAMAGED = "damaged"
    """It is not what was put."""
    LOST = "lost"
    """It could not be read."""


class Arrival:
    """A load on its way. Its parts end on different threads."""

    def __init__(self, load: Load, parts: int) -> None:
        self.load = load
        self._lock = threading.Lock()
        self._left = parts
        self._is_lost = False
        self._sums: list[int | None] = [None] * load.shelved.space.runs

    @property
    def is_lost(self) -> bool:
        """A part of it could not be read: the others need not be."""
        return self._is_lost

    def lose(self) -> bool:
        """A part of it could not be read. Whether that is the first."""
        with self._lock:
            was_lost, self._is_lost = self._is_lost, True
            return not was_lost

    def sum_up(self, start: int, stop: int) -> None:
        """The bytes from `start` to `stop` are there: take the checksums of the runs that lie between them."""
        run_bytes = self.load.shelved.space.run_bytes
        runs = range(-(-start // run_bytes), min(stop // run_bytes, len(self._sums)))
        if not runs:
            return
        sums = [self._checksum(run) for run in runs]
        self._sums[runs.start : runs.stop] = sums
        expected = np.frombuffer(self.load.shelved.checksums, "<u8")[runs.start : runs.stop]
        if sums == expected.tolist():
            self.load.landed(runs.start, sums)

    def end_part(self) -> Outcome | None:
        """What has become of the block, when this was the last part."""
        with self._lock:
            self._left -= 1
            if self._left:
                return None
        if self._is_lost:
            return Outcome.LOST
        expected = np.frombuffer(self.load.shelved.checksums, "<u8")
        is_good = all(
            (self._checksum(run) if found is None else found) == int(wanted)
            for run, (found, wanted) in enumerate(zip(self._sums, expected, strict=True))
        )
        return Outcome.GOOD if is_good else Outcome.DAMAGED

    def _checksum(self, run: int) -> int:
        run_bytes = self.load.shelved.space.run_bytes
        return checksum(self.load.target[run * run_bytes : (run + 1) * run_bytes])


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """One call: blocks that are neighbours on the disk, or a part of one block."""

    arrivals: Sequence[Arrival]
    start: int
    """Bytes into the first block."""
    stop: int
    """Bytes into the last one."""

    @property
    def volume(self) -> int:
        return self.arrivals[0].load.shelved.volume

    @property
    def offset(self) -> int:
        return self.arrivals[0].load.shelved.offset + self.start

    @property
    def is_wanted(self) -> bool:
        return not all(arrival.is_lost for arrival in self.arrivals)

    def targets(self) -> list[Bytes]:
        if len(self.arrivals) == 1:
            return [self.arrivals[0].load.target[self.start : self.stop]]
        return [arrival.load.target for arrival in self.arrivals]

    def sum_up(self) -> None:
        """The bytes are there."""
        is_whole = len(self.arrivals) > 1
        for arrival in self.arrivals:
            arrival.sum_up(*((0, arrival.load.target.nbytes) if is_whole else (self.start, self.stop)))

    def lose(self) -> bool:
        """It failed. Whether that was not known yet of one of its blocks."""
        return sum(arrival.lose() for arrival in self.arrivals) > 0

    def end(self) -> list[tuple[Load, Outcome]]:
        """It is over, and so are these."""
        ended = [(arrival.load, arrival.end_part()) for arrival in self.arrivals]
        return [(load, outcome) for load, outcome in ended if outcome is not None]


def reads_of(loads: Sequence[Load]) -> Iterator[Read]:
    """In the order of their places."""
    by_block = {id(load.shelved): load for load in loads}
    ordered = sorted((load.shelved for load in loads), key=lambda shelved: (shelved.volume, shelved.offset))
    for group in adjoining(ordered, PART_BYTES):
        chosen = [by_block[id(shelved)] for shelved in group]
        if len(chosen) > 1:
            yield Read([Arrival(load, 1) for load in chosen], 0, chosen[-1].target.nbytes)
        else:
            yield from _parts(chosen[0])


def layered_reads_of(loads: Sequence[Load]) -> Iterator[Read]:
    """The first layers of all blocks before the next ones of any: computing on them may begin while the rest comes."""
    parts = [list(_parts(load, LAYERED_BYTES)) for load in loads]
    for together in itertools.zip_longest(*parts):
        yield from (read for read in together if read is not None)


def adjoining(shelved: Sequence[Shelved], most_bytes: int) -> Iterator[list[Shelved]]:
    """Runs of neighbours in a slab, of blocks sorted by offset; at most `most_bytes` together, or one."""
    group: list[Shelved] = []
    size = 0
    for block in shelved:
        is_next = group and group[-1].volume == block.volume and group[-1].offset + group[-1].nbytes == block.offset
        if group and (not is_next or size + block.nbytes > most_bytes):
            yield group
            group, size = [], 0
        group.append(block)
        size += block.nbytes
    if group:
        yield group


def _parts(load: Load, part_bytes: int = PART_BYTES) -> Iterator[Read]:
    """Whole runs where these are whole pages, so that no run is left to be summed up at the end."""
    run_bytes, size = load.shelved.space.run_bytes, load.target.nbytes
    step = max(1, part_bytes // run_bytes) * run_bytes
    if step % PAGE_BYTES or step > PART_BYTES:
        step = PART_BYTES
    starts = range(0, size, step)
    arrival = Arrival(load, len(starts))
    for start in starts:
        yield Read([arrival], start, min(start + step, size))
