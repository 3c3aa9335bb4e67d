"""`make bench-streams`: one gateway with thousands of streams at once, and then with thousands of requests that wait.

A real `moonpool serve` on the timed engine as an H200, whose tokens follow from the prompt alone: each stream is held
to its own reference, so one that lost a token or got another's is found. First `--streams` streams that are all open at
the same time: processor time of the gateway's process (the Conductor is in it) for each token, and what the gateway
adds to a token's way: the client's times less the gateway's own, which end when a worker's token has come. Then
`--queued` requests behind a prompt so long that they all wait, and a tenth more that are beyond the gateway's bound and
must be refused: anonymous memory of its process for each that waits. Then all that waited is served.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import msgspec
import psutil
from msgspec import Struct
from rich.console import Console

from moonpool.bench.cluster import RunningCluster, running_cluster
from moonpool.bench.endpoint import Endpoint, Reply, base_of, room_for
from moonpool.bench.open_loop import prompt_of
from moonpool.bench.process import anonymous_bytes
from moonpool.bench.result import Bar, bar, print_result
from moonpool.engine.timed import TimedConfig, reference_tokens
from moonpool.errors import MoonpoolError

HARDWARE, SHRINK_KV = "h200-llama2-70b", 5120.0
ENGINE = TimedConfig(layers=4, words_per_half=1)
"""As which the timed engine takes it: 64 bytes of KV a token."""
BLOCK_TOKENS = 64
PROMPT_TOKENS = 12
STREAM_TOKENS, QUEUED_TOKENS = 64, 2
STREAM_SLOW_DOWN = 2.0
"""Of the hardware: the first stream's steps, with few others, are so slow that the last one begins before it ends."""
MOST_STREAMS = 4096
"""As many as `--max-batch` can be."""
LONG_TOKENS = 120_000
"""Of the prompt that holds all others up: one prefill step, `HOLD_SECONDS` long."""
HOLD_SECONDS = 21.8
QUEUED_A_SECOND = 120
"""So slow is the hardware that this many come while it computes the long prompt: far fewer than a gateway takes in."""
LEAST_SLOW_DOWN = 0.5
SENT_A_SECOND = 360
"""To the queue. From one client all at once, the last ones would be connected for longer than a gateway waits for a
request's head."""
BEYOND = 10
"""One in so many more than the gateway takes."""
ANSWER_SECONDS = 600.0
"""A hang guard, as that of `_until`."""
QUEUE_SECONDS = 200.0
LOOK_SECONDS = 0.1
CPU_MS = 1.0
"""Of the gateway for each token, at most."""
KIB = 64
"""Of memory for each request that waits, at most."""


class Got(Struct, frozen=True):
    """One request, its answer, and the tokens in it."""

    prompt: tuple[int, ...]
    tokens: int
    """That were asked for."""
    sent: float
    reply: Reply
    ids: tuple[int, ...]

    @property
    def complete(self) -> bool:
        return self.reply.completed and len(self.ids) == self.tokens

    @property
    def refused(self) -> bool:
        return self.reply.status in (429, 503) and self.reply.retry_after is not None and self.reply.named


class Sums(Struct, frozen=True):
    """What the gateway's process has measured and used so far."""

    ttft: float
    e2e: float
    """Seconds, over all requests."""
    cpu: float


Measure = Callable[["Gateway", int, random.Random, Console], Awaitable[list[Bar]]]


class Gateway:
    """Its process, and a client of it. Use it as a context from `opened`."""

    def __init__(self, cluster: RunningCluster, endpoint: Endpoint) -> None:
        self._cluster = cluster
        self._endpoint = endpoint
        children = psutil.Process(cluster.process.pid).children()
        self._process = next(child for child in children if "gateway" in child.cmdline())

    async def ask(self, prompt: Sequence[int], tokens: int) -> Got:
        body = {
            "model": "smollm2",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        sent, ids = asyncio.get_running_loop().time(), list[int]()
        reply = await self._endpoint.stream("/completions", msgspec.json.encode(body), ids=ids)
        return Got(tuple(prompt), tokens, sent, reply, tuple(ids))

    async def sums(self) -> Sums:
        text = (await asyncio.to_thread(self._cluster.get, "/metrics", 60.0)).decode()
        times = self._process.cpu_times()
        return Sums(
            _metric(text, "time_to_first_token_seconds_sum"),
            _metric(text, "e2e_request_latency_seconds_sum"),
            times.user + times.system,
        )

    async def waiting(self) -> int:
        text = (await asyncio.to_thread(self._cluster.get, "/metrics", 60.0)).decode()
        return int(_metric(text, "num_requests_waiting") + _metric(text, "num_requests_running"))

    def anonymous(self) -> int:
        """Bytes."""
        return anonymous_bytes(self._process.pid)


@contextlib.asynccontextmanager
async def opened(cluster: RunningCluster) -> AsyncIterator[Gateway]:
    async with Endpoint(base_of(cluster.url), timeout=ANSWER_SECONDS) as endpoint:
        yield Gateway(cluster, endpoint)


async def measure_streams(gateway: Gateway, count: int, rng: random.Random, console: Console) -> list[Bar]:
    prompts = [prompt_of(PROMPT_TOKENS, rng) for _ in range(count)]
    lags: list[float] = []
    before = await gateway.sums()
    watch = asyncio.create_task(_lag(lags))
    got = await asyncio.gather(*(gateway.ask(prompt, STREAM_TOKENS) for prompt in prompts))
    watch.cancel()
    after = await gateway.sums()
    tokens = sum(len(one.ids) for one in got)
    if not tokens:
        raise MoonpoolError(f"no stream brought a token: {_why(got)}")
    cpu = (after.cpu - before.cpu) / tokens * 1e3
    first = sum(one.reply.times[0] - one.sent for one in got if one.reply.times) - (after.ttft - before.ttft)
    last = sum(one.reply.ended - one.sent for one in got) - (after.e2e - before.e2e)
    together = open_at_once(got)
    seconds = max(one.reply.ended for one in got) - min(one.sent for one in got)
    console.print(f"{count} streams: {together} open at once, {tokens} tokens in {seconds:.1f} s; {_why(got)}")
    console.print(
        f"  gateway and Conductor: {cpu:.3f} ms of processor time a token; added on average: {first / count * 1e3:.0f} "
        f"ms to a first token, {last / count * 1e3:.0f} ms to a last one (the client itself is late by {_shown(lags)})"
    )
    return [
        bar("streams open at once", together, count),
        bar("streams lost or cut short", sum(not one.complete for one in got), 0, at_most=True),
        bar("streams with a wrong token", wrong(got), 0, at_most=True),
        bar("gateway ms of processor time a token", cpu, CPU_MS, at_most=True),
    ]


async def measure_queue(gateway: Gateway, count: int, rng: random.Random, console: Console) -> list[Bar]:
    """`count` is the gateway's bound."""
    long = asyncio.create_task(gateway.ask(prompt_of(LONG_TOKENS, rng), QUEUED_TOKENS))
    await _until(gateway, 1)
    before = gateway.anonymous()
    sent = count - 1 + count // BEYOND
    prompts = [prompt_of(PROMPT_TOKENS, rng) for _ in range(sent)]
    asked = []
    for prompt in prompts:
        asked.append(asyncio.create_task(gateway.ask(prompt, QUEUED_TOKENS)))
        await asyncio.sleep(1 / SENT_A_SECOND)
    waiting = await _until(gateway, count)
    most = gateway.anonymous()
    got = await asyncio.gather(long, *asked)
    after = gateway.anonymous()
    kib = (most - before) / waiting / 1024
    served, refused = sum(one.complete for one in got), sum(one.refused for one in got)
    console.print(f"{len(got)} requests: {waiting} waited at once, {served} served, {refused} refused; {_why(got)}")
    console.print(
        f"  anonymous memory of the gateway's process: {before >> 20} MiB before, {most >> 20} MiB with all that "
        f"waited ({kib:.1f} KiB each), {after >> 20} MiB after"
    )
    return [
        bar("requests that waited at once", waiting, count),
        bar("neither served nor refused", len(got) - served - refused, 0, at_most=True),
        bar("refused though there was room", refused - count // BEYOND, 0, at_most=True),
        bar("served with a wrong token", wrong(got[1:]), 0, at_most=True),
        bar("KiB of memory a waiting request", kib, KIB, at_most=True),
    ]


async def _until(gateway: Gateway, count: int) -> int:
    """Most that have been in flight at one moment, when those are `count` or become fewer again."""
    most = 0
    async with asyncio.timeout(QUEUE_SECONDS):
        while True:
            waiting = await gateway.waiting()
            if waiting >= count or waiting < most:
                return max(waiting, most)
            most = waiting
            await asyncio.sleep(LOOK_SECONDS)


async def _lag(lags: list[float]) -> None:
    """By how much the client's own event loop is late."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LOOK_SECONDS
        await asyncio.sleep(LOOK_SECONDS)
        lags.append(loop.time() - due)


def open_at_once(got: Sequence[Got]) -> int:
    """Most streams that had begun and not ended at one moment."""
    moments = [(one.reply.times[0], 1) for one in got if one.reply.times]
    moments += [(one.reply.ended, -1) for one in got if one.reply.times]
    most = now = 0
    for _, change in sorted(moments):
        now += change
        most = max(most, now)
    return most


def wrong(got: Sequence[Got]) -> int:
    """Those with a token that does not follow from their prompt."""
    return sum(list(one.ids) != reference_tokens(one.prompt, len(one.ids), ENGINE) for one in got)


def _why(got: Sequence[Got]) -> str:
    """What came of them, with counts."""
    kinds = [f"{one.reply.status} {one.reply.reason}".strip() for one in got]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in sorted(set(kinds)))


def _metric(text: str, name: str) -> float:
    found = re.search(rf"^moonpool:{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def _shown(lags: Sequence[float]) -> str:
    if len(lags) < 2:
        return "unknown"
    return (
        f"{statistics.median(lags) * 1e3:.0f} ms (median), {statistics.quantiles(lags, n=100)[-1] * 1e3:.0f} ms (p99)"
    )


async def _measured(measure_one: Measure, count: int, options: Mapping[str, str], seed: int) -> list[Bar]:
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    rng = random.Random(seed)
    with running_cluster("--engine", "timed", *words) as cluster:
        async with opened(cluster) as gateway:
            await gateway.ask(prompt_of(PROMPT_TOKENS, rng), STREAM_TOKENS)
            return await measure_one(gateway, count, rng, Console(width=170))


def measure(streams: int, queued: int, seed: int) -> list[Bar]:
    """Each on a cluster of its own. Raises MoonpoolError where this process may not open as many connections."""
    connections = max(streams, queued + queued // BEYOND)
    if (room := room_for(connections)) < connections:
        raise MoonpoolError(
            f"{connections} connections need more open files than the hard limit (ulimit -Hn) allows: enough for {room}"
        )
    sizes = {
        "hardware": HARDWARE,
        "shrink-kv": f"{SHRINK_KV:g}",
        "block-size": str(BLOCK_TOKENS),
        "dram-per-node": "512MiB",
        "max-batch": str(MOST_STREAMS),
    }
    bars: list[Bar] = []
    if streams:
        bounds = {"max-requests": str(streams), "queue-bound": str(streams), "slow-down": f"{STREAM_SLOW_DOWN:g}"}
        bars += asyncio.run(_measured(measure_streams, streams, sizes | bounds, seed))
    if queued:
        slow_down = max(queued / QUEUED_A_SECOND / HOLD_SECONDS, LEAST_SLOW_DOWN)
        bounds = {"max-requests": str(queued), "queue-bound": str(queued)}
        waits = {"slow-down": f"{slow_down:.3f}", "prefill-chunk": str(LONG_TOKENS)}
        bars += asyncio.run(_measured(measure_queue, queued, sizes | bounds | waits, seed))
    return bars


def main() -> None:
    chosen = _arguments()
    bars = measure(chosen.streams, chosen.queued, chosen.seed)
    print_result(bars, streams=chosen.streams, queued=chosen.queued)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One gateway with thousands of streams, and of requests that wait.")
    parser.add_argument(
        "--streams",
        type=int,
        default=2000,
        choices=range(MOST_STREAMS + 1),
        metavar="N",
        help=f"open at once, at most {MOST_STREAMS} (0: none)",
    )
    parser.add_argument("--queued", type=int, default=10_000, help="requests that wait at once (0: none)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts")
    return parser.parse_args()


if __name__ == "__main__":
    main()
