"""How long a default cluster takes to come up and to go: part of `make bench`."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable

import psutil

from moonpool.bench.cluster import RunningCluster, running_cluster
from moonpool.bench.result import Bar, bar
from moonpool.interrupts import heed_interrupts

REPETITIONS = 3
START = "start to ready, the model in the cache (s)"
STOP = "Ctrl-C to the last process's end (s)"
ORPHANED = "kill -9 of the supervisor to the last process's end (s)"
LIMITS = {START: 40.0, STOP: 5.0, ORPHANED: 5.0}
GUARD_FACTOR = 5


def seconds_to_end(cluster: RunningCluster, sign: signal.Signals) -> float:
    """Signal the supervisor; seconds until it and all parts are gone. Raises TimeoutError past the guard."""
    parts = psutil.Process(cluster.process.pid).children(recursive=True)
    began = time.monotonic()
    os.kill(cluster.process.pid, sign)
    cluster.process.wait(GUARD_FACTOR * LIMITS[STOP])
    _, alive = psutil.wait_procs(parts, GUARD_FACTOR * LIMITS[STOP])
    if alive:
        raise TimeoutError(f"{len(alive)} parts outlived their supervisor")
    return time.monotonic() - began


def measure_lifetime(add: Callable[[str, float], None]) -> None:
    """Start the cluster again and again, end it in turn by Ctrl-C and by killing its supervisor."""
    heed_interrupts()
    for _ in range(REPETITIONS):
        for name, sign in ((STOP, signal.SIGINT), (ORPHANED, signal.SIGKILL)):
            began = time.monotonic()
            with running_cluster() as cluster:
                add(START, time.monotonic() - began)
                add(name, seconds_to_end(cluster, sign))


def lifetime_bars(rows: dict[str, list[float]]) -> list[Bar]:
    """The median of each against its limit."""
    return [bar(name, statistics.median(rows[name]), limit, at_most=True) for name, limit in LIMITS.items()]
