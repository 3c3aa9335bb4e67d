"""What this machine's engine, memory, sockets and disk take, and the cost models (`core.cost`) fitted to it."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from moonpool.bench import limits
from moonpool.bench.walk import Buffers
from moonpool.engine.engine import Engine, Row
from moonpool.errors import MoonpoolError
from moonpool.wire.messages import Sampling

Clock = Callable[[], float]

STARTS = (0, 512, 1536)
COUNTS = (64, 256, 512)
"""Prefill steps: so many tokens after so many whose KV is there."""
BATCHES = (1, 4, 8, 16)
CONTEXTS = (64, 384, 1024)
"""Decode steps: so many requests of so many tokens each, where the pages hold them."""
LEAST_ROUNDS = 3
BUFFER_BYTES = 64 << 20
DISK_BLOCK_BYTES = 4 << 20
MEMORY_ROUNDS = 5
PAGE = 4096


class Point(Struct, frozen=True):
    """One step that was measured, as its cost model sees it."""

    what: str
    row: tuple[float, float, float]
    """What the coefficients are multiplied with."""
    seconds: float
    """Median."""


class Fitted(Struct, frozen=True):
    coefficients: tuple[float, float, float]
    errors: tuple[float, ...]
    """Of each point: predicted over measured, less 1."""

    @property
    def largest_error(self) -> float:
        return max(abs(error) for error in self.errors)


class Bandwidths(Struct, frozen=True):
    """Bytes a second."""

    memory: float
    loopback: float
    loopback_latency: float
    """Seconds for a page."""
    disk_read: float
    disk_write: float
    is_direct: bool
    """Whether the disk was read and written past the page cache."""


def pages_needed(block_tokens: int) -> int:
    """For the longest prefill step and some of the decode batches."""
    return -(-max(max(STARTS) + max(COUNTS), 8 * max(CONTEXTS)) // block_tokens) + max(BATCHES)


def measure_engine(
    engine: Engine, seconds: float, clock: Clock = time.perf_counter, on_round: Callable[[int], None] = lambda _: None
) -> tuple[list[Point], list[Point]]:
    """Prefill and decode steps, each at least three times, in rounds until `seconds` have passed.

    Raises MoonpoolError where the engine's pages or context are too small for any of them.
    """
    block = engine.space.block_tokens
    prefill, decode = _steps(engine)
    for page in range(engine.page_count):
        engine.clear(page)
    times: dict[tuple[str, int, int], list[float]] = {}
    began = clock()
    for number in itertools.count(1):
        for start, count in prefill:
            rows = [_row(start, count, range(engine.page_count), None)]
            times.setdefault(("prefill", start, count), []).append(_seconds(engine, rows, clock))
        for batch, context in decode:
            rows = list(_batch(batch, context, block))
            times.setdefault(("decode", batch, context), []).append(_seconds(engine, rows, clock))
        on_round(number)
        if number >= LEAST_ROUNDS and clock() - began >= seconds:
            break
    return (
        [_prefill_point(*at, median(times["prefill", *at])) for at in prefill],
        [_decode_point(*at, median(times["decode", *at])) for at in decode],
    )


def keep_busy(engine: Engine, is_over: Callable[[], bool], clock: Clock = time.perf_counter) -> None:
    """The same steps until then, a prompt's in turn with as many seconds of decoding. Raises as `measure_engine`."""
    prefill, decode = _steps(engine)
    for page in range(engine.page_count):
        engine.clear(page)
    batches = itertools.cycle(decode)
    for start, count in itertools.cycle(prefill):
        left = _seconds(engine, [_row(start, count, range(engine.page_count), None)], clock)
        while left > 0 and not is_over():
            left -= _seconds(engine, list(_batch(*next(batches), engine.space.block_tokens)), clock)
        if is_over():
            return


def _steps(engine: Engine) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Starts and counts of prefill steps, batches and contexts of decode steps, that its pages and context hold.

    Raises MoonpoolError where they are too few to fit anything to.
    """
    block = engine.space.block_tokens
    most = min(engine.context_tokens, engine.page_count * block)
    prefill = [(start, count) for start in STARTS for count in COUNTS if start + count <= most]
    decode = [
        (batch, context)
        for batch in BATCHES
        for context in CONTEXTS
        if context <= engine.context_tokens and batch * -(-context // block) <= engine.page_count
    ]
    if len(prefill) < 4 or len(decode) < 4:
        raise MoonpoolError(
            f"the engine's {engine.page_count} pages of {block} tokens, or its context of {engine.context_tokens}, "
            f"are too small to be measured; {pages_needed(block)} pages and {STARTS[1] + COUNTS[-1]} tokens would do"
        )
    return prefill, decode


def _prefill_point(start: int, count: int, seconds: float) -> Point:
    squares = float((start + count) ** 2 - start**2)
    return Point(f"{count} tokens after {start}", (1.0, float(count), squares), seconds)


def _decode_point(batch: int, context: int, seconds: float) -> Point:
    return Point(f"{batch} of {context} tokens", (1.0, float(batch), float(batch * context)), seconds)


def _row(start: int, count: int, pages: Sequence[int], sampling: Sampling | None) -> Row:
    end = start + count
    return Row([1 + at % 1000 for at in range(end)], end, start, count, pages, sampling)


def _batch(batch: int, context: int, block: int) -> Iterator[Row]:
    """Each request on pages of its own, as in a real batch: caches see as much memory."""
    each = -(-context // block)
    for number in range(batch):
        pages = range(number * each, (number + 1) * each)
        yield _row(context - 1, 1, pages, Sampling(seed=number, max_tokens=context + 1, ignore_eos=True))


def _seconds(engine: Engine, rows: Sequence[Row], clock: Clock) -> float:
    began = clock()
    engine.step(rows)
    return clock() - began


def fit(points: Sequence[Point]) -> Fitted:
    """The non-negative coefficients with the least sum of squared relative errors."""
    seconds = np.array([point.seconds for point in points])
    rows = np.array([point.row for point in points]) / seconds[:, None]
    best: npt.NDArray[np.float64] = np.zeros(rows.shape[1])
    least = float("inf")
    for size in range(1, rows.shape[1] + 1):
        for chosen in itertools.combinations(range(rows.shape[1]), size):
            part = rows[:, chosen]
            found = np.linalg.lstsq(part, np.ones(len(seconds)), rcond=None)[0]
            error = float(np.sum((part @ found - 1) ** 2))
            if found.min() >= 0 and error < least:
                best, least = np.zeros(rows.shape[1]), error
                best[list(chosen)] = found
    first, second, third = best.tolist()
    return Fitted((first, second, third), tuple((rows @ best - 1).tolist()))


def measure_machine(folder: Path) -> Bandwidths:
    """Memory, loopback, and the disk under `folder`. Raises MoonpoolError or OSError where one cannot be measured."""
    buffers = Buffers(BUFFER_BYTES)
    memory = min(limits.copy_seconds(buffers) for _ in range(MEMORY_ROUNDS))
    with tempfile.TemporaryDirectory(prefix="calibrate-", dir=folder) as own:
        with limits.loopback(buffers, DISK_BLOCK_BYTES, Path(own)) as sockets:
            loopback = min(sockets.seconds(verify=False) for _ in range(MEMORY_ROUNDS))
        with limits.loopback(Buffers(2 * PAGE), PAGE, Path(own)) as sockets:
            latency = min(sockets.seconds(verify=False) for _ in range(MEMORY_ROUNDS))
        read, write, is_direct = _disk(Path(own) / "disk", buffers)
    return Bandwidths(
        memory=BUFFER_BYTES / memory,
        loopback=BUFFER_BYTES / loopback,
        loopback_latency=latency,
        disk_read=BUFFER_BYTES / read,
        disk_write=BUFFER_BYTES / write,
        is_direct=is_direct,
    )


def _disk(path: Path, buffers: Buffers) -> tuple[float, float, bool]:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, BUFFER_BYTES)
    for is_direct in (True, False):
        with contextlib.suppress(OSError):
            file_ = limits.RawFile(path, is_direct)
            try:
                write = file_.write_seconds(buffers.source, DISK_BLOCK_BYTES)
                return file_.read_seconds(buffers.target, DISK_BLOCK_BYTES), write, is_direct
            finally:
                file_.close()
    raise MoonpoolError(f"{path.parent} cannot be written and read back")
