"""Replays of one trace on several cores: each core takes some of the capacities, in a process of this same command."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from moonpool.core.eviction import EvictionPolicy
from moonpool.errors import TraceError
from moonpool.trace.hits import HitRatio, Load, hit_ratios

COMMAND = (sys.executable, "-P", "-m", "moonpool", "trace", "hits")
BLOCKS_A_JOB = 1_000_000
"""Replays of fewer blocks are done before another process is up and has read the trace."""

ALLOCATIONS = 200_000
"""Between two collections of garbage."""


class _Answer(msgspec.Struct):
    """What is needed of the other process's `--json`."""

    hit_ratios: tuple[HitRatio, ...]


def replay(
    loaded: Load,
    file: Path,
    skip_bad: bool,
    capacities: Sequence[int | None],
    policies: Sequence[EvictionPolicy],
    jobs: int,
) -> tuple[HitRatio, ...]:
    """`hit_ratios` of a trace that was loaded from `file`, by up to `jobs` processes. Raises TraceError."""
    visits = loaded.blocks * len(capacities) * len(policies)
    # What is no regular file cannot be read again.
    jobs = min(jobs, len(capacities), max(1, visits // BLOCKS_A_JOB)) if file.is_file() else 1
    options = ["--policy", ",".join(policies), "--block-size", str(loaded.block_tokens), *["--skip-bad"] * skip_bad]
    others: list[subprocess.Popen[bytes]] = []
    try:
        for job in range(1, jobs):
            share = ",".join("inf" if capacity is None else str(capacity) for capacity in capacities[job::jobs])
            command = [*COMMAND, "--json", "--jobs", "1", "--capacity", share, *options, "--", str(file)]
            others.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        with _rare_collection():
            found = list(hit_ratios(loaded, capacities[::jobs], policies))
        for other in others:
            found += _result(other)
    finally:
        for other in others:
            other.kill()
            other.communicate()
    known = {(ratio.policy, ratio.capacity): ratio for ratio in found}
    return tuple(known[policy, capacity] for policy in policies for capacity in capacities)


@contextlib.contextmanager
def _rare_collection() -> Iterator[None]:
    """Looking through a hundred thousand living blocks for garbage, again and again, is a tenth of a replay's time."""
    before = gc.get_threshold()
    gc.set_threshold(ALLOCATIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _result(process: subprocess.Popen[bytes]) -> Sequence[HitRatio]:
    answer, errors = process.communicate()
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"]
        raise TraceError(f"a replay in another process ended: {lines[-1].removeprefix('moonpool: ')} (try --jobs 1)")
    return msgspec.json.decode(answer, type=_Answer).hit_ratios
