"""The SSD tier in `make bench-store`: blocks through DRAM onto the slab and back, against plain I/O on that file.

A put counts when the node has written as many bytes to the slab as were put; a get finds its blocks on the SSD alone.
The raw passes read the slab and write the very same bytes back, while the node is at rest.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from moonpool.bench.figures import BATCH, OURS, Case, Figures
from moonpool.bench.limits import RawFile
from moonpool.bench.pool import NODE, running_pool
from moonpool.bench.pool_side import PoolSide
from moonpool.bench.walk import Buffers, Bytes, Call
from moonpool.errors import MoonpoolError
from moonpool.store.slab import Slab

PLACE = "SSD tier"
RAW_WRITE, RAW_READ = "sequential write of the slab", "sequential read of the slab"
SETS = 4
"""Walks that the slab holds, beside one in the making: DRAM holds two, so the next one to be read is never there."""
SAVE_SECONDS = 60.0
REST_SECONDS = 0.3
"""Without a write: the node is at rest."""


def measure(
    figures: Figures, buffers: Buffers, block: int, repetitions: int, above: Path, step: Callable[[], None]
) -> str:
    """Adds the rows to `figures` and says what file system it was. A directory in `above` is made and removed."""
    above.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-ssd-", dir=above))
    try:
        walk = buffers.source.nbytes
        slab_bytes = (SETS + 1) * walk
        is_direct = _fill(folder / NODE / "slab", slab_bytes, buffers)
        options = ("--ssd-dir", str(folder), "--ssd-per-node", f"{slab_bytes >> 20}MiB")
        with (
            running_pool(folder, 2 * walk, *options) as pool,
            contextlib.closing(PoolSide(pool.socket_path)) as side,
            contextlib.closing(RawFile(folder / NODE / "slab", is_direct)) as raw,
        ):
            passes = _Passes(figures, buffers, block, side, raw, step)
            passes.puts(repetitions)
            passes.gets(repetitions)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return f"{_filesystem(above)}, {'O_DIRECT' if is_direct else 'no O_DIRECT: through the page cache'}"


def _fill(slab: Path, nbytes: int, buffers: Buffers) -> bool:
    """Write all of the file once, so that no pass pays for its first allocation; whether it was past the page cache."""
    slab.parent.mkdir(mode=0o700)
    with contextlib.closing(Slab(slab, nbytes)) as file:
        for offset in range(0, nbytes, buffers.source.nbytes):
            file.write(offset, [buffers.source])
        return file.is_direct


class _Passes:
    """Walks of puts and gets, each under its own keys, beside raw ones."""

    def __init__(
        self, figures: Figures, buffers: Buffers, block: int, side: PoolSide, raw: RawFile, step: Callable[[], None]
    ) -> None:
        self._figures = figures
        self._buffers = buffers
        self._block = block
        self._side = side
        self._raw = raw
        self._step = step
        self._sets = 0
        """Walks put so far."""

    def put(self, batch: int, saves: int) -> list[float]:
        """Seconds of every call and, as the last, until the slab has taken `saves` bytes more than before."""
        wanted = self._side.saved_bytes() + saves
        seconds = [_timed(self._side.put(*group)) for group in self._groups(self._sets, self._buffers.source, batch)]
        self._sets += 1
        began = time.perf_counter()
        while self._side.saved_bytes() < wanted:
            if time.perf_counter() - began > SAVE_SECONDS:
                raise MoonpoolError(f"the node has not saved what was put {SAVE_SECONDS:g} s ago")
            time.sleep(0.001)
        return [*seconds, time.perf_counter() - began]

    def get(self, number: int, batch: int) -> list[float]:
        self._buffers.target.fill(0)
        seconds = [_timed(self._side.get(*group)) for group in self._groups(number, self._buffers.target, batch)]
        if not np.array_equal(self._buffers.source, self._buffers.target):
            raise MoonpoolError("the SSD tier gave other bytes than were put")
        return seconds

    def puts(self, repetitions: int) -> None:
        walk = self._buffers.source.nbytes
        # DRAM full, its older half on the SSD: from here on each walk pushes out one that is there.
        self.put(BATCH, 0)
        self.put(BATCH, walk)
        for warm_up in (True, *[False] * repetitions):
            self._raw.read_seconds(self._buffers.target, self._block)
            raw = self._raw.write_seconds(self._buffers.target, self._block)
            for batch in (1, BATCH):
                seconds = self.put(batch, walk)
                if not warm_up:
                    self._figures.add(Case(PLACE, "put", self._block, batch), OURS, seconds)
            if not warm_up:
                self._figures.add_limit(RAW_WRITE, raw)
            self._step()

    def gets(self, repetitions: int) -> None:
        # The walks that the slab holds, the one that was read or put last at the end. The first reading saves the rest.
        held = list(range(self._sets - SETS - 1, self._sets))
        for warm_up in (True, *[False] * repetitions):
            raw = self._raw.read_seconds(self._buffers.target, self._block)
            for batch in (1, BATCH):
                held.append(held.pop(0))
                seconds = self.get(held[-1], batch)
                if warm_up:
                    self._settle()
                else:
                    self._figures.add(Case(PLACE, "get", self._block, batch), OURS, seconds)
            if not warm_up:
                self._figures.add_limit(RAW_READ, raw)
            self._step()

    def _groups(self, number: int, buffer: Bytes, batch: int) -> Iterator[tuple[list[str], list[Bytes]]]:
        """Keys and pieces of each call of a walk."""
        starts = range(0, buffer.nbytes, self._block)
        keys = [f"ssd/{number}/{index}" for index in range(len(starts))]
        pieces = [buffer[start : start + self._block] for start in starts]
        for first in range(0, len(starts), batch):
            yield keys[first : first + batch], pieces[first : first + batch]

    def _settle(self) -> None:
        """Until the node writes no more to the slab."""
        until = time.perf_counter() + SAVE_SECONDS
        before = -1.0
        while (now := self._side.saved_bytes()) != before and time.perf_counter() < until:
            before = now
            time.sleep(REST_SECONDS)


def _timed(call: Call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _filesystem(path: Path) -> str:
    """Type and device of what holds `path`, as the kernel names them."""
    found = ("", "unknown file system")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, mount, kind = line.split()[:3]
        mount = mount.replace("\\040", " ")
        if path.resolve().is_relative_to(mount) and len(mount) >= len(found[0]):
            found = mount, f"{kind} on {device}"
    return found[1]
