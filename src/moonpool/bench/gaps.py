"""How long running streams wait for a token while a long prompt is computed and joins them, for `make bench-layerwise`.

Prefill and decode apart (a worker each), and two coupled workers: the same two threads. Both clusters are asked the
same, one after the other, as often as repetitions are wanted.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time

import httpx
from rich.table import Table

from moonpool.bench.cluster import running_cluster
from moonpool.bench.result import Bar, bar
from moonpool.bench.serving import stream

STREAMS = 4
RUN_SECONDS = 60.0
"""A hang guard: until all streams run."""
SHORT_TOKENS = 32
TOKENS_AFTER = 16
"""Of the long prompt's answer, while the streams go on."""
APART, COUPLED = "prefill and decode apart", "coupled"
CLUSTERS = {APART: ("--prefill", "1", "--decode", "1"), COUPLED: ("--coupled", "2")}
Gaps = dict[str, list[list[float]]]
"""Of each cluster, for each repetition: all gaps of all running streams, seconds."""


def measure_gaps(repetitions: int, prompt_tokens: int) -> Gaps:
    gaps: Gaps = {}
    for name, options in CLUSTERS.items():
        with running_cluster(*options, "--admission", "none") as cluster:
            gaps[name] = asyncio.run(_measure(cluster.url, repetitions, prompt_tokens))
    return gaps


async def _measure(url: str, repetitions: int, prompt_tokens: int) -> list[list[float]]:
    rng = random.Random(2)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await _once(client, rng, prompt_tokens // 4)
        return [await _once(client, rng, prompt_tokens) for _ in range(repetitions)]


async def _once(client: httpx.AsyncClient, rng: random.Random, prompt_tokens: int) -> list[float]:
    """The gaps of the running streams from the long prompt's arrival until some tokens after its first."""
    arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
    all_run = asyncio.Event()

    async def run(times: list[float]) -> None:
        async for at in stream(client, [rng.randrange(100, 40_000) for _ in range(SHORT_TOKENS)], 4000):
            times.append(at)
            if len(times) > 8 and all(len(others) > 8 for others in arrivals):
                all_run.set()

    running = [asyncio.create_task(run(times)) for times in arrivals]
    try:
        async with asyncio.timeout(RUN_SECONDS):
            await all_run.wait()
        began = time.perf_counter()
        async for _ in stream(client, [rng.randrange(100, 40_000) for _ in range(prompt_tokens)], TOKENS_AFTER):
            pass
        ended = time.perf_counter()
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    for task in running:
        if not task.cancelled() and task.exception() is not None:
            task.result()
    return [b - a for times in arrivals for a, b in itertools.pairwise(times) if a < ended and b > began]


def gap_table(gaps: Gaps) -> Table:
    columns = ("", "p50 ms", "p90", "p99", "longest", "longest of each repetition, median", "n")
    table = Table(*columns, title="gaps between tokens of running streams while a long prompt is computed and joins")
    for name, repetitions in gaps.items():
        ordered = sorted(gap for found in repetitions for gap in found)
        cells = [ordered[min(len(ordered) - 1, int(len(ordered) * part))] for part in (0.5, 0.9, 0.99)]
        cells += [ordered[-1], longest(gaps, name)]
        table.add_row(name, *(f"{cell * 1e3:.1f}" for cell in cells), f"{len(ordered)}")
    return table


def longest(gaps: Gaps, name: str) -> float:
    return statistics.median(max(found) for found in gaps[name])


def gap_bars(gaps: Gaps) -> list[Bar]:
    value = longest(gaps, COUPLED) / longest(gaps, APART)
    return [bar("longest gap of running streams, coupled over prefill and decode apart", value, 1.0)]
