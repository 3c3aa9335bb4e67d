"""Engines that compute beside the one that is measured: workers of one machine make each other slower."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event

from moonpool.bench.calibrate import keep_busy
from moonpool.engine.engine import Engine
from moonpool.errors import MoonpoolError

START_SECONDS = 120.0
END_SECONDS = 20.0
POLL_SECONDS = 0.1


@contextlib.contextmanager
def busy_neighbours(count: int, open_engine: Callable[[], Engine]) -> Iterator[None]:
    """So many processes with an engine each, which compute until the block ends.

    `open_engine` goes to other processes, so it must be picklable. Raises MoonpoolError where one does not come up
    in START_SECONDS, or does not last as long as the block.
    """
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    ready = [context.Event() for _ in range(count)]
    processes = [
        context.Process(target=_compute, args=(open_engine, mine, stop, os.getpid()), daemon=True) for mine in ready
    ]
    try:
        for process in processes:
            process.start()
        until = time.monotonic() + START_SECONDS
        for process, mine in zip(processes, ready, strict=True):
            while not mine.wait(POLL_SECONDS):
                if not process.is_alive() or time.monotonic() > until:
                    raise MoonpoolError("an engine beside the measured one did not come up: is there memory for it?")
        yield
        if not all(process.is_alive() for process in processes):
            raise MoonpoolError("an engine beside the measured one ended too soon: is there memory for it?")
    finally:
        stop.set()
        until = time.monotonic() + END_SECONDS
        for process in processes:
            if process.pid is not None:
                process.join(max(until - time.monotonic(), 0.0))
                process.kill()
                process.join()


def _compute(open_engine: Callable[[], Engine], ready: Event, stop: Event, parent: int) -> None:
    """In a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engine = open_engine()
    ready.set()
    keep_busy(engine, lambda: stop.is_set() or os.getppid() != parent)
