"""`make bench-layerwise`: what layer-wise prefill costs and gains (PAPER §3), on this machine.

- Storing and streaming each layer while the next one computes, into this node's pool and to another node, against a
  prefill that stores nothing, and against storing all of it at the end.
- The first token with the prefix in this node's DRAM, on another node, on SSD, and computed; beside it what loading
  alone takes, and what loading first and computing then would.
- The longest gap between tokens of running streams while a long prompt is computed and joins them: prefill and decode
  apart, against coupled workers on the same cores.

Every repetition measures all sides, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moonpool.bench.gaps import gap_bars, gap_table, measure_gaps
from moonpool.bench.result import Bar, bar, print_result
from moonpool.bench.stand import Stand, stand
from moonpool.core.actions import Demote, DropReplica, Fetch, ReleaseRoom
from moonpool.core.blocks import block_keys
from moonpool.core.events import Registered
from moonpool.core.vocabulary import BlockKey, NodePeer
from moonpool.engine.engine import Row
from moonpool.engine.model import resolve
from moonpool.engine.runner import TorchEngine
from moonpool.live.sink import Sink
from moonpool.messenger.tcp import TcpMessenger
from moonpool.store.client import NodeClient
from moonpool.store.pending import awaited
from moonpool.store.views import Stream
from moonpool.wire.messages import Sampling, Work

CHUNK = 512
TAIL_TOKENS = 64
"""Computed behind a cached prefix."""
OVERHEAD_PERCENT = 3.0
NOTHING, LAYERWISE, AFTER = "stores nothing", "layer by layer", "all at the end"
COMPUTED, DRAM, REMOTE, SSD = "computed", "in local DRAM", "on another node", "on SSD"
LOAD_REMOTE, LOAD_SSD = "loading alone, from another node", "loading alone, from SSD"
Rows = dict[tuple[int, str], list[float]]
"""(tokens, what) -> seconds."""


def prompt_of(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(100, 40_000) for _ in range(tokens)]


class Overhead:
    """Prefill in this process, on an engine of its own, into two nodes."""

    def __init__(self, made: Stand, here: NodePeer, there: NodePeer, threads: int, most_tokens: int) -> None:
        self._stand, self._here, self._there = made, here, there
        pages = -(-most_tokens // 64) + 1
        self._engine = TorchEngine(resolve("smollm2"), page_count=pages, threads=threads)
        self._node = NodeClient.connect(here.socket_path, name="bench", incarnation="overhead")
        self._messenger = TcpMessenger(None)
        self._threads = {name: ThreadPoolExecutor(1, name) for name in ("engine", "store")}

    async def measure(self, prompt: list[int], what: str) -> float:
        """Seconds until all is computed and, where it is stored, delivered."""
        engine, space = self._engine, self._engine.space
        request = self._stand.request()
        lacking = await self._stand.reserve(self._there, request, space, prompt)
        work = self._stand.work(request, prompt, space, self._here, self._there, lacking)
        reader = await asyncio.to_thread(
            NodeClient.connect, self._there.socket_path, name="bench", incarnation=str(request)
        )
        sink = Sink(engine, self._node, self._here, self._messenger, work)
        await sink.open(0)
        began = time.perf_counter()
        await asyncio.get_running_loop().run_in_executor(self._threads["engine"], self._compute, work, sink, what)
        await sink.drain()
        seconds = time.perf_counter() - began
        if what != NOTHING:
            contents = await awaited(reader.await_room(request, 1, 60.0))
            assert contents is not None, "it was not delivered"
            contents.close()
        await asyncio.to_thread(reader.close)
        self._stand.tell(self._there, ReleaseRoom(self._there, request, 1))
        self._forget(block_keys(prompt, space, ""))
        return seconds

    def _compute(self, work: Work, sink: Sink, what: str) -> None:
        engine, block = self._engine, self._engine.space.block_tokens
        tokens = list(work.tokens)
        pages = list(range(-(-len(tokens) // block)))
        for start in range(0, len(tokens), CHUNK):
            count = min(CHUNK, len(tokens) - start)
            done = [(index, index) for index in range(start // block, (start + count) // block)]

            def on_layer(layer: int, done: list[tuple[int, int]] = done) -> None:
                sink.after(self._threads["store"].submit(sink.store_blocks, layer, done, 60.0))

            is_last = start + count == len(tokens)
            row = Row(tokens, len(tokens), start, count, pages, Sampling(0, temperature=0.0) if is_last else None)
            engine.step([row], on_layer if what == LAYERWISE else None)
        if what == AFTER:
            whole = [(index, index) for index in range(len(tokens) // block)]
            for layer in engine.layers:
                sink.after(self._threads["store"].submit(sink.store_blocks, layer, whole, 60.0))

    def _forget(self, keys: Sequence[BlockKey]) -> None:
        for node in (self._here, self._there):
            self._stand.tell(node, DropReplica(node, self._engine.space, tuple(keys)))

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()
        self._messenger.close()
        self._node.close()


async def measure_overhead(made: Stand, rows: Rows, sizes: Sequence[int], repetitions: int, threads: int) -> None:
    here = await made.start_node("node-0", "--dram-per-node", "512MiB")
    there = await made.start_node("node-1", "--dram-per-node", "512MiB")
    overhead = await asyncio.to_thread(Overhead, made, here, there, threads, max(sizes))
    rng = random.Random(0)
    try:
        await overhead.measure(prompt_of(rng, min(sizes)), LAYERWISE)
        for tokens in sizes:
            for turn in range(repetitions):
                sides = [NOTHING, LAYERWISE, AFTER]
                for what in sides[turn % 3 :] + sides[: turn % 3]:
                    seconds = await overhead.measure(prompt_of(rng, tokens), what)
                    rows.setdefault((tokens, what), []).append(seconds)
    finally:
        await asyncio.to_thread(overhead.close)


class FirstToken:
    """One prefill worker on one node, a second node, and where a prefix lies."""

    def __init__(self, made: Stand, worker: Registered, here: NodePeer, there: NodePeer) -> None:
        assert worker.space is not None
        self._stand, self._worker, self._here, self._there, self._space = made, worker, here, there, worker.space
        self._client = NodeClient.connect(here.socket_path, name="bench", incarnation="first")

    async def measure(self, rng: random.Random, tokens: int, rows: Rows) -> None:
        """All places in turn; the prefix is a new one."""
        prefix = prompt_of(rng, tokens)
        keys = tuple(block_keys(prefix, self._space, ""))
        fetch = Fetch(self._there, 0, len(keys))

        async def ask(what: str, cached: int, source: Fetch | None = None) -> None:
            prompt = [*prefix, *prompt_of(rng, TAIL_TOKENS)]
            seconds, found = await self._stand.first_token(self._worker, prompt, self._there, source)
            assert found == cached, f"{what}: {found} tokens cached instead of {cached}"
            rows.setdefault((tokens, what), []).append(seconds)

        whole = len(keys) * self._space.block_tokens
        await ask(COMPUTED, 0)
        await ask(DRAM, whole)
        await self._settle(DropReplica(self._here, self._space, keys), 0)
        await ask(REMOTE, whole, fetch)
        await self._settle(DropReplica(self._here, self._space, keys), 0)
        rows.setdefault((tokens, LOAD_REMOTE), []).append(await self._load(keys, self._there))
        await self._settle(Demote(self._here, self._space, keys), len(keys))
        await ask(SSD, whole)
        await self._settle(Demote(self._here, self._space, keys), len(keys))
        rows.setdefault((tokens, LOAD_SSD), []).append(await self._load(keys, None))

    async def _settle(self, order: DropReplica | Demote, kept: int) -> None:
        """Until the node has done it: none of the blocks is in DRAM, so many of them on SSD."""
        until = time.monotonic() + 30.0
        await asyncio.sleep(0.1)
        self._stand.tell(self._here, order)
        while True:
            whole, found = await self._found(order.keys)
            if (whole, found) == (0, kept):
                break
            if time.monotonic() > until:
                raise RuntimeError(f"{type(order).__name__} left {whole} of {found} blocks in DRAM")
            await asyncio.sleep(0.2)
            self._stand.tell(self._here, order)
        if kept:
            self._stand.tell(self._here, order)
            await asyncio.sleep(0.5)

    async def _found(self, keys: tuple[BlockKey, ...]) -> tuple[int, int]:
        """How many leading blocks are in DRAM, and how many in any tier; those are loaded by that."""
        stream = await awaited(self._client.stream(self._space, keys, None, 0, 0.0))
        found = stream.whole, len(stream.views)
        await _over(stream)
        stream.close()
        return found

    async def _load(self, keys: tuple[BlockKey, ...], source: NodePeer | None) -> float:
        began = time.perf_counter()
        stream = await awaited(self._client.stream(self._space, keys, source, len(keys), 60.0))
        await _over(stream)
        seconds = time.perf_counter() - began
        assert stream.whole == len(keys)
        stream.close()
        return seconds

    def close(self) -> None:
        self._client.close()


async def _over(stream: Stream) -> None:
    over, loop = asyncio.Event(), asyncio.get_running_loop()

    def change() -> None:
        if stream.is_over:
            loop.call_soon_threadsafe(over.set)

    stream.tell(change)
    await over.wait()


async def measure_first(made: Stand, rows: Rows, sizes: Sequence[int], repetitions: int, folder: Path) -> None:
    ssd = ("--ssd-per-node", "2GiB", "--ssd-dir", str(folder / "ssd"))
    here = await made.start_node("node-2", "--dram-per-node", "512MiB", *ssd)
    there = await made.start_node("node-3", "--dram-per-node", "512MiB")
    worker = await made.start_prefill("prefill-0", "node-2")
    first = FirstToken(made, worker, here, there)
    rng = random.Random(1)
    try:
        await first.measure(rng, min(sizes), {})
        for tokens in sizes:
            for _ in range(repetitions):
                await first.measure(rng, tokens, rows)
    finally:
        first.close()


def table(title: str, rows: Rows, base: str) -> Table:
    found = Table("tokens", "", "median ms", "min", "max", "n", f"over {base}", title=title)
    for (tokens, what), seconds in rows.items():
        values = [statistics.median(seconds), min(seconds), max(seconds)]
        ratio = "" if what == base else f"{paired(rows, tokens, what, base):.3f}"
        found.add_row(f"{tokens}", what, *(f"{value * 1e3:.1f}" for value in values), f"{len(seconds)}", ratio)
    return found


def paired(rows: Rows, tokens: int, what: str, base: str) -> float:
    """The median of the ratios of each repetition."""
    return statistics.median(a / b for a, b in zip(rows[tokens, what], rows[tokens, base], strict=True))


def overhead_bars(rows: Rows) -> list[Bar]:
    return [
        bar(
            f"prefill of {tokens} tokens that stores layer by layer, per cent over one that stores nothing",
            100 * (paired(rows, tokens, LAYERWISE, NOTHING) - 1),
            OVERHEAD_PERCENT,
            at_most=True,
        )
        for tokens, what in rows
        if what == LAYERWISE
    ]


def first_bars(rows: Rows) -> list[Bar]:
    """Loaded while it is computed: nearer to the longer of both than to both together."""
    found = []
    for tokens, what in rows:
        load = {REMOTE: LOAD_REMOTE, SSD: LOAD_SSD}.get(what)
        if load is not None:
            together = [a + b for a, b in zip(rows[tokens, load], rows[tokens, DRAM], strict=True)]
            value = statistics.median(a / b for a, b in zip(rows[tokens, what], together, strict=True))
            found.append(bar(f"first token, {tokens} tokens {what}, over loading first", value, 1.0, at_most=True))
    return found


async def measure(
    console: Console, parts: Sequence[str], sizes: Sequence[int], repetitions: int, threads: int
) -> list[Bar]:
    bars: list[Bar] = []
    if "overhead" in parts:
        with tempfile.TemporaryDirectory(prefix="mp-") as folder:
            async with stand(Path(folder)) as made:
                rows: Rows = {}
                await measure_overhead(made, rows, sizes, repetitions, threads)
        console.print(table("storing and streaming while it computes", rows, NOTHING))
        bars += overhead_bars(rows)
    if "first" in parts:
        with tempfile.TemporaryDirectory(prefix="mp-") as folder:
            async with stand(Path(folder)) as made:
                rows = {}
                await measure_first(made, rows, sizes, repetitions, Path(folder))
        console.print(table(f"first token, {TAIL_TOKENS} tokens behind a prefix", rows, COMPUTED))
        bars += first_bars(rows)
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="overhead,first,gaps", help="of overhead, first, gaps")
    parser.add_argument("--tokens", default="512,1024,2048,4096", help="prompt lengths")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the prompt that joins running streams")
    options = parser.parse_args()
    console, parts = Console(), options.parts.split(",")
    sizes = [int(tokens) for tokens in options.tokens.split(",")]
    resolve("smollm2")
    bars = asyncio.run(measure(console, parts, sizes, options.repetitions, options.threads))
    if "gaps" in parts:
        gaps = measure_gaps(options.repetitions, options.prompt)
        console.print(gap_table(gaps))
        bars += gap_bars(gaps)
    print_result(bars)


if __name__ == "__main__":
    main()
