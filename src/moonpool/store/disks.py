"""The SSD tier's threads: for each directory one that saves blocks from the arena, and some that load them back.

A disk that fails or stands still is given up until the node restarts: its blocks are gone for good (they may be removed
or replaced meanwhile), DRAM goes on alone. So is one that a node finds unusable that has run before; where it is new,
that is a mistake to be told at once.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from moonpool.errors import ConfigError
from moonpool.store.arena import Arena
from moonpool.store.extents import page_aligned
from moonpool.store.index import Index
from moonpool.store.reads import Load, Outcome, Read, adjoining, layered_reads_of, reads_of
from moonpool.store.shelf import Saves, Shelf
from moonpool.store.slab import Slab
from moonpool.store.volumes import (
    Opened,
    OpenSlab,
    begin_opening,
    close_late,
    discard_late,
    not_open,
    open_volumes,
    opening_by,
)

log = logging.getLogger(__name__)

READERS = 4
"""Threads a disk."""
BATCH_BLOCKS = 32
BATCH_BYTES = 16 << 20
MAX_FAILURES = 3
"""Failed operations in a row, before a disk is given up."""
CLOSE_SECONDS = 5.0
OPEN_SECONDS = 600.0
"""For a directory: a filesystem without fallocate writes the whole slab, and an index may be of gigabytes."""
PATIENCE_SECONDS = 10.0
"""A restarted node serves without its SSD from then on, until that is open: a disk that stands still must not keep it
from its DRAM."""


@dataclass(slots=True, eq=False)
class _Volume:
    number: int
    opened: Opened
    slab: Slab
    index: Index
    failures: int = 0
    is_pressed: bool = True
    """There may be something to save."""
    is_lost: bool = False
    queue: deque[Read] = field(default_factory=deque)
    busy: dict[int, float] = field(default_factory=dict)
    """When the operation that runs now began, by thread."""
    threads: list[threading.Thread] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Opening:
    """A directory that the node does not wait for any more."""

    directory: Path
    opened: Future[Opened]
    until: float


class Disks:
    def __init__(
        self,
        arena: Arena,
        shelf: Shelf,
        directories: Sequence[Path],
        nbytes: int,
        stall_seconds: float = 10.0,
        open_slab: OpenSlab = Slab,
        is_restart: bool = False,
        open_seconds: float = OPEN_SECONDS,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        """`nbytes` in all, the same in each directory.

        A directory that cannot be used is given up where the node `is_restart`ed, and one that is not open after
        `patience` joins when it is; else ConfigError is raised, and nothing is left of any of them.
        """
        self._arena = arena
        self._shelf = shelf
        self._stall_seconds = stall_seconds
        self._changed = threading.Condition()
        self._closed = False
        self._read_bytes = self._written_bytes = self._errors = 0
        self._volumes: dict[int, _Volume] = {}
        self._opening: list[_Opening] = []
        self._open_seconds = open_seconds
        shelf.on_pressure = self._on_pressure
        with _kept_for_good():
            each = nbytes // max(1, len(directories))
            if is_restart:
                self._open_again(directories, each, open_slab, patience)
            else:
                self._open_all(directories, each, open_slab)
        for opening in list(self._opening):
            opening.opened.add_done_callback(partial(self._came_late, opening))

    def load(self, loads: Sequence[Load], by_layers: bool = False) -> None:
        """Begin to load. `by_layers`: the first layers of all of them come before the next ones of any."""
        refused: list[Read] = []
        with self._changed:
            for read in layered_reads_of(loads) if by_layers else reads_of(loads):
                # One that has just come may be on the shelf a moment before it is here.
                volume = self._volumes.get(read.volume)
                if volume is None or volume.is_lost or self._closed:
                    refused.append(read)
                else:
                    volume.queue.append(read)
            self._changed.notify_all()
        _fail(refused)

    def check(self, now: float) -> None:
        """Give up a disk on which an operation does not end. `now` is of the monotonic clock; call it now and then."""
        with self._changed:
            volumes = list(self._volumes.values())
            late = [opening for opening in self._opening if opening.until <= now]
            self._opening = [opening for opening in self._opening if opening.until > now]
        for opening in late:
            self._add(opening.directory, not_open(opening.directory, self._open_seconds))
            self._shelf.late_is_over()
        for volume in volumes:
            with self._changed:
                began = min(volume.busy.values(), default=now)
            if now - began > self._stall_seconds:
                self._lose(volume, f"an operation has not ended for {now - began:.0f} s")

    def counters(self) -> dict[str, float]:
        with self._changed:
            return {
                "ssd_opening_volumes": float(len(self._opening)),
                "ssd_read_bytes": float(self._read_bytes),
                "ssd_written_bytes": float(self._written_bytes),
                "ssd_errors": float(self._errors),
                "ssd_direct_volumes": float(
                    sum(volume.slab.is_direct and not volume.is_lost for volume in self._volumes.values())
                ),
            }

    def close(self) -> None:
        """Whatever is queued fails; what runs is awaited for a few seconds."""
        with self._changed:
            self._closed = True
            volumes = list(self._volumes.values())
            queued = [read for volume in volumes for read in volume.queue]
            for volume in volumes:
                volume.queue.clear()
            self._changed.notify_all()
        _fail(queued)
        until = time.monotonic() + CLOSE_SECONDS
        for volume in volumes:
            for thread in volume.threads:
                thread.join(max(0.0, until - time.monotonic()))
            if not any(thread.is_alive() for thread in volume.threads):
                volume.opened.close()

    def _open_all(self, directories: Sequence[Path], nbytes: int, open_slab: OpenSlab) -> None:
        found = open_volumes(directories, nbytes, open_slab, self._open_seconds)
        failed = next((opened for opened in found if isinstance(opened, ConfigError)), None)
        if failed is not None:
            for opened in reversed(found):
                if isinstance(opened, Opened):
                    opened.undo()
            raise failed
        for directory, each in zip(directories, found, strict=True):
            self._add(directory, each)

    def _open_again(self, directories: Sequence[Path], nbytes: int, open_slab: OpenSlab, patience: float) -> None:
        began = time.monotonic()
        for opening in [
            _Opening(directory, begin_opening(directory, nbytes, open_slab), began + self._open_seconds)
            for directory in directories
        ]:
            found = opening_by(opening.opened, min(began + patience, opening.until))
            if found is not None:
                self._add(opening.directory, found)
            elif patience >= self._open_seconds:
                opening.opened.add_done_callback(discard_late)
                self._add(opening.directory, not_open(opening.directory, self._open_seconds))
            else:
                self._opening.append(opening)
                self._shelf.expect_late()
                log.warning(
                    "SSD %s: not open in %g s; this node serves without it until it is", opening.directory, patience
                )

    def _came_late(self, opening: _Opening, opened: Future[Opened]) -> None:
        """On the thread that opened it."""
        with self._changed:
            is_closed, is_wanted = self._closed, opening in self._opening and not self._closed
            self._opening = [other for other in self._opening if other is not opening]
        found = opening_by(opened, 0.0)
        if is_wanted and found is not None:
            self._add(opening.directory, found, is_late=True)
            self._shelf.late_is_over()
        elif is_closed:
            close_late(opened)
        else:
            discard_late(opened)

    def _add(self, directory: Path, opened: Opened | ConfigError, is_late: bool = False) -> None:
        if isinstance(opened, ConfigError):
            self._shelf.lose(self._shelf.add_volume(0, ()))
            log.error("SSD %s is given up until this node restarts: %s", directory, opened)
            return
        number = self._shelf.add_volume(opened.slab.size, opened.recovered.entries, is_late)
        volume = _Volume(number, opened, opened.slab, opened.index)
        for at, target in enumerate((self._save_all, *[self._load_all] * READERS)):
            name = f"ssd {number} {'load' if at else 'save'}"
            volume.threads.append(threading.Thread(target=target, args=(volume,), name=name, daemon=True))
        with self._changed:
            if not self._closed:
                self._volumes[number] = volume
                for thread in volume.threads:
                    thread.start()
                return
        opened.close()

    def _on_pressure(self) -> None:
        # Under the ledger's lock, which is never taken while this one is held.
        with self._changed:
            for volume in self._volumes.values():
                volume.is_pressed = True
            self._changed.notify_all()

    def _save_all(self, volume: _Volume) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: volume.is_pressed or self._closed or volume.is_lost)
                volume.is_pressed = False
                if self._closed or volume.is_lost:
                    return
            while (saves := self._shelf.next_saves(volume.number, BATCH_BLOCKS, BATCH_BYTES)) is not None:
                is_written = False
                try:
                    is_written = self._save(volume, saves)
                finally:
                    self._shelf.saved(saves, is_written)
                if self._closed or not is_written:
                    break

    def _save(self, volume: _Volume, saves: Saves) -> bool:
        saves.blocks.sort(key=lambda item: item[0].offset)
        try:
            with self._timed(volume):
                # First: entries of what these bytes were before must not be believed any more.
                if saves.removed:
                    volume.index.append((), saves.removed)
                for group in adjoining([shelved for shelved, _ in saves.blocks], BATCH_BYTES):
                    chosen = {id(shelved) for shelved in group}
                    blocks = [block for shelved, block in saves.blocks if id(shelved) in chosen]
                    volume.slab.write(
                        group[0].offset, [self._arena.slice(b.offset, page_aligned(b.nbytes)) for b in blocks]
                    )
                volume.index.append([shelved for shelved, _ in saves.blocks], ())
                if volume.index.has_waste(self._shelf.blocks_on(volume.number)):
                    live = self._shelf.entries(volume.number)
                    volume.index.rewrite([*live, *(shelved for shelved, _ in saves.blocks)])
        except OSError as e:
            self._failed(volume, f"cannot save {len(saves.blocks)} blocks: {e.strerror or e}")
            return False
        with self._changed:
            volume.failures = 0
            self._written_bytes += sum(shelved.nbytes for shelved, _ in saves.blocks)
        return True

    def _load_all(self, volume: _Volume) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: volume.queue or self._closed or volume.is_lost)
                if self._closed or volume.is_lost:
                    return
                read = volume.queue.popleft()
            self._load(volume, read)

    def _load(self, volume: _Volume, read: Read) -> None:
        try:
            if read.is_wanted:
                with self._timed(volume):
                    volume.slab.read(read.offset, read.targets())
                read.sum_up()
                with self._changed:
                    self._read_bytes += sum(target.nbytes for target in read.targets())
        except OSError as e:
            if read.lose():
                self._failed(volume, f"cannot read {len(read.arrivals)} blocks: {e.strerror or e}")
        for load, outcome in read.end():
            if outcome is not Outcome.LOST:
                with self._changed:
                    volume.failures = 0
            if outcome is Outcome.DAMAGED:
                self._shelf.count("ssd_checksum_failures")
                log.warning("a block on SSD %s has a wrong checksum: dropped", volume.slab.path)
            load.done(outcome is Outcome.GOOD, outcome is Outcome.DAMAGED)

    @contextlib.contextmanager
    def _timed(self, volume: _Volume) -> Iterator[None]:
        thread = threading.get_ident()
        with self._changed:
            volume.busy[thread] = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                del volume.busy[thread]

    def _failed(self, volume: _Volume, what: str) -> None:
        with self._changed:
            self._errors += 1
            volume.failures += 1
            is_hopeless = volume.failures >= MAX_FAILURES
        log.warning("SSD %s: %s", volume.slab.path, what)
        if is_hopeless:
            self._lose(volume, f"{MAX_FAILURES} operations in a row failed")

    def _lose(self, volume: _Volume, why: str) -> None:
        with self._changed:
            volume.is_lost = True
            queued = list(volume.queue)
            volume.queue.clear()
            self._changed.notify_all()
        _fail(queued)
        if self._shelf.lose(volume.number):
            log.error("SSD %s is given up until this node restarts, its blocks are gone: %s", volume.slab.path, why)
            # A disk that stands still must hold up nobody.
            discarding = threading.Thread(target=_discard, args=(volume,), name=f"ssd {volume.number} end", daemon=True)
            discarding.start()


@contextlib.contextmanager
def _kept_for_good() -> Iterator[None]:
    """A million objects come into being and none of them is garbage: looking for it would take half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # What a node has found lives as long as the node.
        gc.freeze()
        if was_enabled:
            gc.enable()


def _discard(volume: _Volume) -> None:
    try:
        volume.index.discard()
    except OSError as e:
        log.error(
            "SSD %s: its index cannot be removed (%s): remove it before this node restarts, or blocks that are removed "
            "or replaced meanwhile may be back then",
            volume.slab.path.with_name("index"),
            e.strerror or e,
        )


def _fail(reads: Sequence[Read]) -> None:
    for read in reads:
        read.lose()
        for load, _ in read.end():
            load.done(False, False)
