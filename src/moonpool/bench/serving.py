"""`make bench`: what this machine gets out of one default cluster (1 prefill, 1 decode, 1 node).

How fast it comes up and goes, time to first token cold and with the prefix cached, tokens a second at 1 and 8 streams,
and what the whole path (gateway, decode worker, sockets) adds to a token against the same engine called directly in
this process, in turn. A step of the real model varies by several ms from one to the next on a shared machine, so the
added latency is taken on the timed engine, whose steps are sleeps of equal length; the real model's two figures stand
beside it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from moonpool.bench.cluster import RunningCluster, running_cluster
from moonpool.bench.lifetime import lifetime_bars, measure_lifetime
from moonpool.bench.result import bar, print_result
from moonpool.engine.engine import Engine
from moonpool.engine.local import generate
from moonpool.engine.model import resolve
from moonpool.engine.runner import TorchEngine
from moonpool.engine.timed import TimedEngine
from moonpool.wire.messages import Sampling

REPETITIONS = 7
PROMPT_TOKENS = 1024
ADDED_LATENCY_LIMIT_MS = 1.0
DECODE_TOKENS = 64


async def stream(client: httpx.AsyncClient, prompt: Sequence[int], tokens: int) -> AsyncIterator[float]:
    """The times at which the tokens of a greedy completion arrive."""
    body = {
        "model": "smollm2",
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield time.perf_counter()


async def first_token_ms(client: httpx.AsyncClient, prompt: Sequence[int]) -> float:
    began = time.perf_counter()
    arrivals = [at async for at in stream(client, prompt, 1)]
    return (arrivals[0] - began) * 1e3


async def interval_ms(client: httpx.AsyncClient, prompt: Sequence[int], tokens: int) -> float:
    """Median time between tokens of one stream."""
    return median_interval_ms([at async for at in stream(client, prompt, tokens)])


def median_interval_ms(times: Sequence[float]) -> float:
    """The gap to the second token is left out: it holds the hand-over (or the end of prefill)."""
    return statistics.median(b - a for a, b in itertools.pairwise(times[1:])) * 1e3


async def tokens_a_second(client: httpx.AsyncClient, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Decode throughput of all streams together, from the last first token to the first last one."""

    async def arrivals(prompt: Sequence[int]) -> list[float]:
        return [at async for at in stream(client, prompt, tokens)]

    streams = await asyncio.gather(*(arrivals(p) for p in prompts))
    begin = max(s[1] for s in streams)
    end = min(s[-1] for s in streams)
    return sum(sum(begin < at <= end for at in s) for s in streams) / (end - begin)


def direct_interval_ms(engine: Engine, prompt: list[int], tokens: int) -> float:
    """The same decode on an engine of our own."""
    times: list[float] = []
    sampling = Sampling(seed=0, temperature=0.0, max_tokens=tokens, ignore_eos=True)
    generate(engine, [prompt], [sampling], chunk=512, on_draw=lambda *_: times.append(time.perf_counter()))
    return median_interval_ms(times)


class Figures:
    """Rows of the table, in the order measured."""

    def __init__(self) -> None:
        self.rows: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        self.rows.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.rows[name])

    def table(self) -> Table:
        table = Table("measure", "median", "min", "max", "n", title="moonpool serve on this machine")
        for name, values in self.rows.items():
            cells = (f"{v:.2f}" for v in (statistics.median(values), min(values), max(values)))
            table.add_row(name, *cells, str(len(values)))
        return table


COLD = f"TTFT cold, {PROMPT_TOKENS} tokens (ms)"
CACHED = f"TTFT prefix cached, {PROMPT_TOKENS} tokens (ms)"
ONE = "tokens/s, 1 stream"
EIGHT = "tokens/s, 8 streams"
SERVED = "time between tokens, served (ms)"
DIRECT = "time between tokens, called directly (ms)"
TIMED_SERVED = "the same on the timed engine, served (ms)"
TIMED_DIRECT = "the same on the timed engine, called directly (ms)"
ADDED = "added by the path, per token (ms)"


async def measure(cluster: RunningCluster, engine: TorchEngine, figures: Figures, progress: Iterator[int]) -> None:
    rng = random.Random(0)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(100, 40_000) for _ in range(tokens)]

    async with httpx.AsyncClient(base_url=cluster.url, timeout=600) as client:
        for warm_up in (True, *[False] * REPETITIONS):
            long, short = prompt(PROMPT_TOKENS), prompt(32)
            cold = await first_token_ms(client, long)
            await asyncio.sleep(0.5)  # the blocks are announced while the stores drain
            cached = await first_token_ms(client, [*long[:-8], *prompt(8)])
            one = await tokens_a_second(client, [prompt(32)], DECODE_TOKENS)
            eight = await tokens_a_second(client, [prompt(32) for _ in range(8)], DECODE_TOKENS)
            served = await interval_ms(client, short, DECODE_TOKENS)
            direct = await asyncio.to_thread(direct_interval_ms, engine, short, DECODE_TOKENS)
            next(progress, None)
            if warm_up:
                continue
            for name, value in (
                (COLD, cold),
                (CACHED, cached),
                (ONE, one),
                (EIGHT, eight),
                (SERVED, served),
                (DIRECT, direct),
            ):
                figures.add(name, value)


async def measure_path(cluster: RunningCluster, figures: Figures, progress: Iterator[int]) -> None:
    """On a cluster of the timed engine: what is not sleep is the path."""
    engine = TimedEngine(page_count=64)
    prompt = list(range(100, 132))
    async with httpx.AsyncClient(base_url=cluster.url, timeout=600) as client:
        for warm_up in (True, *[False] * REPETITIONS):
            served = await interval_ms(client, prompt, DECODE_TOKENS)
            direct = await asyncio.to_thread(direct_interval_ms, engine, prompt, DECODE_TOKENS)
            next(progress, None)
            if not warm_up:
                for name, value in ((TIMED_SERVED, served), (TIMED_DIRECT, direct), (ADDED, served - direct)):
                    figures.add(name, value)


def main() -> None:
    console = Console()
    figures = Figures()
    console.print("starting and stopping default clusters …")
    path: Path = resolve("smollm2")
    measure_lifetime(figures.add)
    with running_cluster() as cluster:
        engine = TorchEngine(path, page_count=64)
        progress = iter(track(range(REPETITIONS + 1), description="measuring", console=console))
        next(progress)
        asyncio.run(measure(cluster, engine, figures, progress))
        del engine
    with running_cluster("--engine", "timed") as cluster:
        progress = iter(track(range(REPETITIONS + 1), description="measuring the path", console=console))
        next(progress)
        asyncio.run(measure_path(cluster, figures, progress))
    console.print(figures.table())
    added = figures.median(ADDED)
    speedup = figures.median(COLD) / figures.median(CACHED)
    print_result(
        [
            bar("median latency added per token, ms", added, ADDED_LATENCY_LIMIT_MS, at_most=True),
            bar("cached over cold first token, times faster", speedup, 1),
            *lifetime_bars(figures.rows),
        ]
    )


if __name__ == "__main__":
    main()
