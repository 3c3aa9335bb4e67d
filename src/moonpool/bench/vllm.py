"""`make bench-vllm`: what the KVCache pool and this gateway are worth to two real vLLM servers, on this machine's CPUs.

First two plain servers: what an idle one takes gives the limits that all are held to, and then the slice of a trace
comes to both by round-robin. Then two servers with the connector, on one node: the first token of a prompt cold, found
in the server's own prefix cache, and loaded from the pool, where the other server has put it; and the same slice, as
fast, behind the gateway with one server for prefill and one for decode. Then the same with vLLM's own example connector
and the proxy that goes with it. Every server has one thread, and one system is up at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from moonpool.bench import vllm_cpu
from moonpool.bench.peer import Peer, PeerMissingError
from moonpool.bench.result import Bar, bar, print_result
from moonpool.bench.vllm_first_token import COLD, LOCAL, POOL, Seconds, cold, first_tokens, limits
from moonpool.bench.vllm_front import front
from moonpool.bench.vllm_server import start_server
from moonpool.bench.vllm_stand import Stand
from moonpool.bench.vllm_traffic import at_rate, offer, slice_of
from moonpool.core.vocabulary import Slo
from moonpool.engine.model import resolve
from moonpool.errors import MoonpoolError
from moonpool.interrupts import heed_interrupts
from moonpool.report.run import Run
from moonpool.trace.request import TraceRequest

TOKENS = 2048
CONTEXT_TOKENS = 4096
BLOCK_TOKENS = 32
"""Of all servers' KVCache: what of a prompt fills no block is computed again at decode, whatever the connector, and of
blocks of 128 tokens, which are vLLM's own on CPU, that is half a second."""
BLOCKS = ("--block-size", str(BLOCK_TOKENS))
EXAMPLE_OPTIONS = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", str(CONTEXT_TOKENS))
"""Of servers with vLLM's ExampleConnector. It stores what a prompt's first step computes as the whole prompt: what it
loads of a prompt that took two has the wrong shape, and that is the end of the engine (docs/benchmarks.md)."""
REPETITIONS = 5
ONE_IN = 250
"""Conversations of the trace."""
LOAD = 1.0
"""Of what two idle servers would serve one request at a time, without any hit."""
DRAM = "3GiB"
PLAIN = "cold, without a connector"
ROUND_ROBIN = "two servers, round-robin"
OURS = "prefill, decode and the pool, Moonpool's gateway"
BOTH = "two servers and the pool, Moonpool's gateway"
EXAMPLE = "prefill and decode, vLLM's ExampleConnector and proxy"
ERROR = re.compile(r"\b\w*(Error|Exception): .+")
BAR_TTFT = "first token at 2,048 tokens: hit in the pool, of cold"
BAR_GOODPUT = f"goodput: {OURS}, times {ROUND_ROBIN}"


class Results(Struct):
    first: Seconds = {}
    """To the first token, by where it came from."""
    slo: Slo = Slo()
    requests: list[TraceRequest] = []
    """As they are sent."""
    runs: dict[str, Run] = {}
    busy: dict[str, float] = {}
    """Of the machine while a system was measured: processes that could run at its end, over a minute."""
    lacks: dict[str, str] = {}
    """By system: why it was not measured."""


class Bench:
    def __init__(self, peer: Peer, options: argparse.Namespace, console: Console) -> None:
        self._peer = peer
        self._options = options
        self._console = console
        self._model = resolve("smollm2")
        self.results = Results()

    def run(self) -> None:
        """Raises MoonpoolError, PeerMissingError or TraceError."""
        slice_ = slice_of(self._options.trace, self._options.one_in)
        self._plain(slice_)
        self._pooled()
        try:
            self._example()
        except MoonpoolError as e:
            self.results.lacks[EXAMPLE] = str(e)

    def _plain(self, slice_: Sequence[TraceRequest]) -> None:
        with self._servers("plain", lambda _: ()) as (urls, folder):
            r, repetitions = self.results, self._options.repetitions
            with self._console.status("first tokens of plain servers"):
                r.first[PLAIN], _ = asyncio.run(cold(urls, TOKENS, repetitions))
                tokens = round(statistics.mean(each.input_tokens for each in slice_))
                firsts, intervals = asyncio.run(cold(urls, tokens, repetitions))
            first, interval = statistics.median(firsts), statistics.median(intervals)
            r.slo = limits(first, interval)
            answer = statistics.mean(each.output_tokens for each in slice_)
            r.requests = at_rate(slice_, self._options.load * len(urls) / (first + answer * interval))
            with front("round-robin", urls, folder) as url:
                self._offer(ROUND_ROBIN, url)

    def _pooled(self) -> None:
        with contextlib.ExitStack() as stack:
            folder, run_dir = (Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-"))) for _ in range(2))
            with self._console.status("two vLLM servers start, with Moonpool's connector"):
                where = folder, run_dir, self._model, self._peer, stack
                stand = Stand(*where, context_tokens=CONTEXT_TOKENS, dram=DRAM, options=BLOCKS)
            with self._console.status("first tokens: cold, and of hits"):
                found = first_tokens(stand.urls, TOKENS, BLOCK_TOKENS, self._options.repetitions)
                self.results.first |= asyncio.run(found)
            with stand.gateway("prefill", "decode") as gateway:
                self._offer(OURS, gateway.url)

    def _example(self) -> None:
        """Raises MoonpoolError where it does not run here."""
        with contextlib.ExitStack() as stack:
            shared = stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-"))

            def options(at: int) -> tuple[str, ...]:
                connector = {
                    "kv_connector": "ExampleConnector",
                    "kv_role": ("kv_producer", "kv_consumer")[at],
                    "kv_connector_extra_config": {"shared_storage_path": shared},
                }
                return "--kv-transfer-config", json.dumps(connector), *EXAMPLE_OPTIONS

            urls, folder = stack.enter_context(self._servers("example", options))
            self._offer(EXAMPLE, stack.enter_context(front("pair", urls, folder)))
            if (live := self.results.runs[EXAMPLE].live) is not None and live.errors:
                self.results.lacks[EXAMPLE] = first_error(folder)

    @contextlib.contextmanager
    def _servers(self, name: str, options: Callable[[int], tuple[str, ...]]) -> Iterator[tuple[list[str], Path]]:
        """Two without our connector: their URLs, and a folder for logs."""
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-")))
            with self._console.status(f"two vLLM servers start: {name}"):
                servers = [
                    start_server(
                        *(folder / f"{name}-{at}.log", self._peer, self._model, stack, (*BLOCKS, *options(at))),
                        context_tokens=CONTEXT_TOKENS,
                    )
                    for at in range(2)
                ]
                for server in servers:
                    server.wait_well()
            yield [server.url for server in servers], folder

    def _offer(self, name: str, url: str) -> None:
        r = self.results
        with self._console.status(f"{len(r.requests)} requests to {name}"):
            r.runs[name] = asyncio.run(offer(name, url, r.requests, r.slo))
            r.busy[name] = os.getloadavg()[0]
        s = r.runs[name].summary
        self._console.print(f"{name}: {s.attained} of {s.requests} attained, {s.goodput_requests:.3f} a second")


def main() -> int:
    """The exit status."""
    console = Console(width=140)
    heed_interrupts()
    options = _options()
    try:
        peer = vllm_cpu.set_up(console)
        vllm_cpu.connector_needs(peer)
    except PeerMissingError as e:
        console.print(f"left out: vLLM cannot be installed here: {e}")
        print_result(bars(Results(), str(e)))
        return 0
    try:
        bench = Bench(peer, options, console)
        bench.run()
    except KeyboardInterrupt:
        return 130
    except MoonpoolError as e:
        console.print(f"moonpool: {e}")
        return 1
    _print(console, bench.results, options)
    print_result(bars(bench.results), vllm=vllm_cpu.VERSION, trace=str(options.trace or "synthetic"))
    return 0


def bars(results: Results, lack: str = "") -> list[Bar]:
    """`lack`: why nothing was measured."""
    first, runs = results.first, results.runs
    share = None
    if POOL in first:
        share = statistics.median(first[POOL]) / statistics.median(first[COLD])
    times = None
    if OURS in runs and ROUND_ROBIN in runs:
        theirs = runs[ROUND_ROBIN].summary.goodput_requests
        times = runs[OURS].summary.goodput_requests / theirs if theirs else None
    return [
        bar(BAR_TTFT, share, 1.0, at_most=True, reason=lack),
        bar(BAR_GOODPUT, times, 1.0, reason=lack or "nothing attained behind round-robin"),
    ]


def first_error(folder: Path) -> str:
    """The first error in the logs of vLLM's servers: what a client is told says nothing."""
    for log in sorted(folder.glob("*.log")):
        for line in log.read_text(errors="replace").splitlines():
            if (found := ERROR.search(line)) is not None:
                return f"{log.stem}: {found[0][:160]}"
    return ""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-vllm", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation_trace.jsonl; without it, a synthetic one")
    parser.add_argument("--one-in", type=int, default=ONE_IN, help="of its conversations (%(default)s)")
    parser.add_argument("--load", type=float, default=LOAD, help="of what two idle servers bear (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, help="of each first token (%(default)s)")
    return parser.parse_args()


def _print(console: Console, results: Results, options: argparse.Namespace) -> None:
    first = Table("first token", "s", "min - max", "of cold", title=f"a prompt of {TOKENS} tokens, one at a time")
    base = statistics.median(results.first[COLD])
    for name in (PLAIN, COLD, LOCAL, POOL):
        seconds = results.first[name]
        middle = statistics.median(seconds)
        first.add_row(name, f"{middle:.3f}", f"{min(seconds):.3f} - {max(seconds):.3f}", f"{middle / base:.2f}")
    console.print(first)
    sent, slo = results.requests, results.slo
    source = options.trace.name if options.trace else "a synthetic trace (give --trace conversation_trace.jsonl)"
    tokens = [statistics.mean(getattr(each, name) for each in sent) for name in ("input_tokens", "output_tokens")]
    console.print(
        f"one in {options.one_in} conversations of {source}, an eighth as long: {len(sent)} requests of "
        f"{tokens[0]:.0f} tokens in and {tokens[1]:.0f} out, {len(sent) / sent[-1].arrival:.2f} a second; "
        f"limits, 10 and 5 times an idle server's: TTFT {slo.ttft:.1f} s, TBT {(slo.tbt or 0) * 1e3:.0f} ms"
    )
    console.print(_goodput(results))


def _goodput(results: Results) -> Table:
    shown = Table("system", title="the slice: one system after another on the same cores")
    for column in (
        "attained",
        "goodput\nrequests/s",
        "TTFT (s)\np50, p90",
        "slowest tenth (ms)\np50, p90",
        "cached",
        "load",
    ):
        shown.add_column(column, justify="right")
    shown.add_column("else")
    for name in (ROUND_ROBIN, EXAMPLE, OURS):
        if (run := results.runs.get(name)) is None:
            shown.add_row(name, *["–"] * 6, results.lacks.get(name, "not measured"))
            continue
        s, live = run.summary, run.live
        why = results.lacks.get(name, "")
        wrong = [f"{count} refused: {reason}" for reason, count in s.refused.items()]
        wrong += [f"{count} failed: {reason}" for reason, count in (live.errors if live else {}).items()]
        shown.add_row(
            name,
            f"{s.attained} of {s.requests}",
            f"{s.goodput_requests:.3f}",
            f"{s.ttft.p50:.2f}, {s.ttft.p90:.2f}",
            f"{s.slowest_tenth.p50 * 1e3:.0f}, {s.slowest_tenth.p90 * 1e3:.0f}",
            f"{s.cached_share:.0%}",
            f"{results.busy[name]:.1f}",
            "; ".join([*wrong, *([why] if why else [])]),
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
