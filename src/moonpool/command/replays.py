"""Replays of one trace on several cores: each core takes some of them, the others in processes of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from moonpool.core.eviction import EvictionPolicy
from moonpool.errors import TraceError
from moonpool.trace import elsewhere
from moonpool.trace.hits import HitRatio, Load, hit_ratios, rare_collection

BLOCKS_A_JOB = 1_000_000
"""Replays of fewer blocks are done before another process is up and has read the trace."""


def replay(
    loaded: Load,
    file: Path,
    skip_bad: bool,
    capacities: Sequence[int | None],
    policies: Sequence[EvictionPolicy],
    jobs: int,
) -> tuple[HitRatio, ...]:
    """The hit ratios of a trace that was loaded from `file`, policies outermost, by up to `jobs` processes.

    Raises TraceError.
    """
    wanted = [(policy, capacity) for policy in policies for capacity in capacities]
    # Where nothing has to go there is nothing to share out.
    limited = [(policy, size) for policy, size in wanted if size is not None and size < loaded.distinct_blocks]
    # What is no regular file cannot be read again.
    jobs = min(jobs, max(1, loaded.blocks * len(limited) // BLOCKS_A_JOB)) if file.is_file() else 1
    others: list[subprocess.Popen[bytes]] = []
    try:
        for job in range(1, jobs):
            share = elsewhere.Job(str(file), skip_bad, loaded.block_tokens, tuple(limited[job::jobs]))
            others.append(subprocess.Popen(elsewhere.command(share), stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        own = limited[::jobs]
        with rare_collection():
            found = list(hit_ratios(loaded, [*own, *(each for each in wanted if each not in limited)]))
        for other in others:
            found += _result(other)
    finally:
        for other in others:
            other.kill()
            other.communicate()
    known = {(ratio.policy, ratio.capacity): ratio for ratio in found}
    return tuple(known[each] for each in wanted)


def _result(process: subprocess.Popen[bytes]) -> Sequence[HitRatio]:
    answer, errors = process.communicate()
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"]
        raise TraceError(f"a replay in another process ended: {lines[-1]} (try --jobs 1)")
    try:
        return elsewhere.read_answer(answer)
    except msgspec.MsgspecError as e:
        raise TraceError(f"a replay in another process answered nonsense: {e} (try --jobs 1)") from None
