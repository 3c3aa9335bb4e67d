"""`make bench-overload`: what a live cluster does with three times the load that it can serve.

A real `moonpool serve`, on the timed engine and then on the real model. First the medians of an idle cluster, from
which the limits follow: ten times the time to first token and five times that between tokens, for each bucket of prompt
lengths, sent with each request (`x-slo-ttft-ms`, `x-slo-tpot-ms`). Then the 90 % point, by probes on a grid of rates;
then three times that rate, then two priority classes at one and two times it. The load is open: requests come when they
are due.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from rich.console import Console

from moonpool.bench.cluster import RunningCluster, running_cluster
from moonpool.bench.open_loop import Answer, Asked, Client, Lengths, drawn, poisson, prompt_of
from moonpool.bench.overload_figures import (
    Comeback,
    by_bucket,
    by_class,
    class_bars,
    comebacks_table,
    overload_bars,
    row_of,
    table,
)
from moonpool.bench.result import Bar, print_result
from moonpool.core.vocabulary import Slo
from moonpool.errors import MoonpoolError

BUCKETS = (Lengths(16, 48, 0.5), Lengths(49, 160, 0.3), Lengths(161, 512, 0.2))
OUTPUT = (8, 48)
TTFT_TIMES = 10.0
TBT_TIMES = 5.0
UNLOADED = 5
"""Requests of each bucket; one more before them is not counted."""
UNLOADED_OUTPUT = 16
WANTED = 0.9
GRID = 1.25
"""Between two rates that are probed."""
FIRST_PROBE = 0.8
"""Of what the prefill instances compute."""
MOST_PROBES = 4
PROBE_SECONDS = 15.0
WARM_SECONDS = 3.0
"""Of a probe or run: those that come first meet an idle cluster and are not counted."""
OVERLOAD_TIMES = 3.0
BURSTS = 2
BURST_SECONDS = 18.0
LAST_SECONDS = 1.5
"""Of a burst: those refused in it come again, each once."""
PATIENCE = (0.0, 0.5, 1.0)
CLASSES = "classes: [{name: high, rank: 0, share: 0.6}, {name: low, rank: 10}]"
MIX = (("high", 0.25), ("low", 0.75))
"""Twice the 90 % point has half of it for the high class: less than its share."""
CLASS_OPTIONS = ("--prefill-chunk", "128")
"""A step of 512 tokens takes as long as the limit of a short prompt that waits for its end."""
CLASS_SECONDS = 18.0
LEARNING_SECONDS = 6.0
REST_SECONDS = 60.0

PREFILL = {"timed": 2, "torch": 1}
"""Workers: as many as the machine lets compute at the same time. The timed engine only sleeps."""
OPTIONS = {
    engine: ("--engine", engine, "--nodes", str(prefill), "--prefill", str(prefill), "--decode", "1")
    for engine, prefill in PREFILL.items()
}


class Setting(Struct, frozen=True):
    """What one engine is measured with."""

    engine: str
    limits: tuple[Slo, ...]
    rate: float
    """The 90 % point, requests a second."""


class Load:
    """Offers load to one cluster."""

    def __init__(self, cluster: RunningCluster, seed: int) -> None:
        self.client = Client(cluster.url, "smollm2")
        self._cluster = cluster
        self._rng = random.Random(seed)

    async def unloaded(self) -> tuple[Slo, ...]:
        """Limits of each bucket, from one request at a time."""
        limits = []
        for bucket in BUCKETS:
            ttfts: list[float] = []
            intervals: list[float] = []
            for number in range(UNLOADED + 1):
                prompt = prompt_of(drawn(bucket.shortest, bucket.longest, self._rng), self._rng)
                answer = await self.client.ask(Asked(0.0, 0, prompt, UNLOADED_OUTPUT))
                if not answer.completed or answer.ttft is None:
                    raise MoonpoolError(f"an idle cluster did not serve a request: {answer.status} {answer.reason}")
                if number:
                    ttfts.append(answer.ttft)
                    intervals += answer.intervals
            limits.append(Slo(TTFT_TIMES * statistics.median(ttfts), TBT_TIMES * statistics.median(intervals)))
        return tuple(limits)

    async def offer(
        self, rate: float, seconds: float, limits: Sequence[Slo], mix: Sequence[tuple[str, float]] = (("", 1.0),)
    ) -> list[Answer]:
        """Those that were due after WARM_SECONDS, when the cluster is at rest again."""
        answers = await self.client.offer(poisson(rate, seconds, BUCKETS, OUTPUT, limits, self._rng, mix))
        await self.rest()
        return [answer for answer in answers if answer.asked.due >= WARM_SECONDS]

    async def burst(self, rate: float, limits: Sequence[Slo]) -> tuple[list[Answer], list[Comeback]]:
        again: list[asyncio.Task[Comeback]] = []

        def answered(answer: Answer) -> None:
            if answer.refused and answer.asked.due > BURST_SECONDS - LAST_SECONDS:
                patience = PATIENCE[len(again) % len(PATIENCE)]
                again.append(asyncio.create_task(self._again(answer, patience)))

        asked = poisson(rate, BURST_SECONDS, BUCKETS, OUTPUT, limits, self._rng)
        answers = await self.client.offer(asked, answered)
        comebacks = await asyncio.gather(*again)
        await self.rest()
        return [answer for answer in answers if answer.asked.due >= WARM_SECONDS], comebacks

    async def _again(self, answer: Answer, patience: float) -> Comeback:
        await asyncio.sleep(patience * (answer.retry_after or 0.0))
        return Comeback(patience, await self.client.ask(answer.asked))

    async def rest(self) -> None:
        """Until no request is left. Raises MoonpoolError after REST_SECONDS."""
        until = time.monotonic() + REST_SECONDS
        while True:
            state = await asyncio.to_thread(self._cluster.describe)
            requests = state["requests"]
            assert isinstance(requests, dict)
            if not any(requests.values()):
                return
            if time.monotonic() > until:
                raise MoonpoolError(f"{REST_SECONDS:g} s after the last answer the cluster still has {requests}")
            await asyncio.sleep(0.2)


async def find_rate(load: Load, limits: Sequence[Slo], console: Console, start: float) -> float:
    """The highest rate of the grid at which the wanted share of what is offered attains."""
    rate, best, over = start, 0.0, float("inf")
    for _ in range(MOST_PROBES):
        row = row_of(await load.offer(rate, PROBE_SECONDS, limits))
        share = row.attained_of_sent
        console.print(f"  {rate:.2f} requests/s: {row.sent} sent, {row.accepted} accepted, {share:.1%} attain")
        if share >= WANTED:
            best = max(best, rate)
            rate *= GRID
        else:
            over = min(over, rate)
            rate /= GRID
        if best * GRID * 1.01 >= over:
            break
    if not best:
        raise MoonpoolError(f"not even at {over:.2f} requests/s did {WANTED:.0%} attain")
    return best


async def measure(cluster: RunningCluster, engine: str, seed: int, console: Console) -> tuple[Setting, list[Bar]]:
    load = Load(cluster, seed)
    limits = await load.unloaded()
    seconds = sum(bucket.share * (slo.ttft or 0.0) for bucket, slo in zip(BUCKETS, limits, strict=True)) / TTFT_TIMES
    console.print(f"{engine}: an idle cluster takes {seconds:.3f} s to the first token on average")
    rate = await find_rate(load, limits, console, FIRST_PROBE * PREFILL[engine] / seconds)
    setting = Setting(engine, limits, rate)
    answers: list[Answer] = []
    comebacks: list[Comeback] = []
    for _ in range(BURSTS):
        found, again = await load.burst(OVERLOAD_TIMES * rate, limits)
        answers += found
        comebacks += again
    title = f"{engine}: {OVERLOAD_TIMES:g} times the 90 % point of {rate:.2f} requests/s"
    rows = by_bucket(answers, BUCKETS)
    console.print(table(title, rows, limits))
    console.print(f"the client was late in sending by {rows[-1][1].lag_ms:.1f} ms (p99)")
    console.print(comebacks_table(comebacks))
    return setting, overload_bars(engine, rows[-1][1], comebacks)


async def measure_classes(cluster: RunningCluster, setting: Setting, seed: int, console: Console) -> list[Bar]:
    load = Load(cluster, seed)
    # What the last cluster has learned of its engine is gone with it.
    await load.offer(setting.rate / 2, LEARNING_SECONDS, setting.limits)
    high = []
    for times in (1.0, 2.0):
        answers = await load.offer(times * setting.rate, CLASS_SECONDS, setting.limits, MIX)
        rows = by_class(answers)
        console.print(table(f"{setting.engine}: priority classes at {times:g} times the 90 % point", rows))
        high.append(dict(rows)[MIX[0][0]])
    return class_bars(setting.engine, *high)


def main() -> None:
    chosen = _arguments()
    console = Console(width=170)
    bars: list[Bar] = []
    rates: dict[str, object] = {}
    for engine in chosen.engine:
        with running_cluster(*OPTIONS[engine]) as cluster:
            setting, found = asyncio.run(measure(cluster, engine, chosen.seed, console))
        bars += found
        rates[f"rate_{engine}"] = round(setting.rate, 3)
        if chosen.classes:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "classes.yaml"
                file.write_text(CLASSES)
                with running_cluster(*OPTIONS[engine], *CLASS_OPTIONS, "--classes", str(file)) as cluster:
                    bars += asyncio.run(measure_classes(cluster, setting, chosen.seed, console))
    print_result(bars, **rates)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A live cluster at three times the load that it can serve.")
    parser.add_argument("--engine", nargs="+", choices=tuple(OPTIONS), default=tuple(OPTIONS), help="to be measured")
    parser.add_argument("--no-classes", dest="classes", action="store_false", help="without the priority classes")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals and lengths")
    return parser.parse_args()


if __name__ == "__main__":
    main()
