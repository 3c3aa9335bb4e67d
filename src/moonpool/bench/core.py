"""`make bench-core`: how fast the simulator is, how long the Conductor takes to decide, how large its directory gets.

Beside them, in the same run and on the same trace, NVIDIA Dynamo's index and its offline replay (`bench/dynamo.py`).
The simulator is measured as its users run it, `moonpool simulate` in a process of its own; the start of that process,
which a run of few requests shows, is not counted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from moonpool.bench import dynamo
from moonpool.bench.decisions import Decided, index, measure
from moonpool.bench.dynamo import PeerFigures
from moonpool.bench.peer import PeerMissingError
from moonpool.bench.result import Bar, bar, print_result
from moonpool.bench.scale import measure_directory
from moonpool.bench.traffic import BLOCK_TOKENS, DAY_SECONDS, repeated, sessions, write
from moonpool.errors import MoonpoolError
from moonpool.trace.read import TraceFile

INSTANCES = (16, 256, 1024)
DECISIONS = {16: 4000, 256: 2000, 1024: 500}
SYNTHETIC = 6000
SYNTHETIC_RATE = 4.0
FEW = 200
"""Requests of the run that shows what a process's start takes."""
DAY_NODES = 64
DAY_REQUESTS = 300_000
DAY_LIMIT_SECONDS = 600.0
REPLAY_TIMES = 8.0
LOOKUP_TIMES = 20.0
DECISION_LOOKUPS = {16: 20.0, 256: 100.0}
INSERT_LIMIT_MS = 5.0
FLAT = 1.5
"""A day's peak of memory by that of its first fifth."""


class Indexed(NamedTuple):
    """Microseconds, the mean of each repetition."""

    find: tuple[float, ...]
    store: tuple[float, ...]


class Simulated(NamedTuple):
    requests: int
    seconds: float
    peak_bytes: int


def simulated(trace: Path, prefill: int, decode: int, requests: int, *more: str) -> Simulated:
    """One process, one run. Raises MoonpoolError where it fails."""
    command = [sys.executable, "-m", "moonpool", "simulate", str(trace), "--first", str(requests), "--json"]
    command += ["--prefill", str(prefill), "--decode", str(decode), "--ttft", "30", "--tbt", "0.1", *more]
    began = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - began
        if process.returncode:
            errors.seek(0)
            raise MoonpoolError(f"moonpool simulate failed: {errors.read().decode(errors='replace').strip()}")
    return Simulated(requests, seconds, usage.ru_maxrss * 1024)


def rate(trace: Path, requests: int) -> float:
    """Simulated requests a second, on 8 prefill and 8 decode instances with the default policies."""
    few = simulated(trace, 8, 8, FEW)
    all_ = simulated(trace, 8, 8, requests)
    return (requests - FEW) / (all_.seconds - few.seconds)


def main() -> None:
    chosen = _arguments()
    console = Console()
    bars: list[Bar] = []
    table = Table("measure", "value", title="the scheduler and its simulator")
    figures: dict[str, object] = {}
    # First, in a process that has not grown yet: its memory is what this one grows by.
    _directory(chosen.entries, chosen.most_entries, table, bars)
    with tempfile.TemporaryDirectory(prefix="moonpool-core-") as folder:
        made = Path(folder) / "synthetic.jsonl"
        write(made, islice(sessions(SYNTHETIC_RATE), chosen.synthetic))
        trace = chosen.trace or made
        length = sum(1 for _ in TraceFile(trace))
        of_trace = rate(trace, length)
        of_synthetic = rate(made, chosen.synthetic) if chosen.trace else of_trace
        table.add_row(f"simulated requests a second, {trace.name}", f"{of_trace:.0f}")
        table.add_row("simulated requests a second, synthetic", f"{of_synthetic:.0f}")
        figures |= {"simulated": round(of_trace), "simulated_synthetic": round(of_synthetic)}
        decided = _decisions(trace, chosen.instances, table, bars)
        peer, lack = _peer(trace, chosen.peer, console)
        _against_peer(peer, lack, of_trace, _indexed(trace), table, bars)
        if chosen.day:
            _day(Path(folder) / "day.jsonl", chosen.day, table, bars)
    console.print(table)
    for each in decided:
        figures[f"decision_us_{each.instances}"] = round(each.decision.mean, 1)
    print_result(bars, trace=trace.name, requests=length, **figures)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The scheduler and its simulator, beside Dynamo's.")
    parser.add_argument("--trace", type=Path, help="a Mooncake JSONL file; without it a synthetic one is taken")
    parser.add_argument("--synthetic", type=int, default=SYNTHETIC, help="requests of the synthetic trace")
    parser.add_argument("--instances", type=int, nargs="*", default=INSTANCES, help="of the fleets that decide")
    parser.add_argument("--entries", type=int, default=5_000_000, help="of the directory whose memory is measured")
    parser.add_argument("--most-entries", type=int, default=10_000_000, help="up to which inserts are timed")
    parser.add_argument("--day", type=int, default=DAY_REQUESTS, help="requests of the simulated day; 0: none")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="without Dynamo")
    return parser.parse_args()


def _decisions(trace: Path, instances: list[int], table: Table, bars: list[Bar]) -> list[Decided]:
    found = [measure(n, repeated(list(TraceFile(trace))), DECISIONS.get(n, 500)) for n in instances]
    for each in found:
        decision, lookup = each.decision, each.lookup
        of = f"{each.instances} instances, {each.blocks:,} blocks known"
        table.add_row(f"decision, {of}: mean, p99 (µs)", f"{decision.mean:.0f}, {decision.p99:.0f}")
        table.add_row(f"lookup, {of}: mean, p99 (µs)", f"{lookup.mean:.1f}, {lookup.p99:.1f}")
        if each.instances in DECISION_LOOKUPS:
            name = f"decision, {each.instances} instances: mean, in lookups among {found[0].instances}"
            target = DECISION_LOOKUPS[each.instances]
            bars.append(bar(name, decision.mean / found[0].lookup.mean, target, at_most=True))
    return found


def _peer(trace: Path, wanted: bool, console: Console) -> tuple[PeerFigures | None, str]:
    """Its figures, or why there are none."""
    if not wanted:
        return None, "left out by --no-peer"
    try:
        return dynamo.measure(dynamo.set_up(console), trace, BLOCK_TOKENS), ""
    except PeerMissingError as error:
        console.print(f"Dynamo is not measured: {error}")
        return None, str(error)


def _against_peer(
    peer: PeerFigures | None, lack: str, simulated_rate: float, indexed: Indexed, table: Table, bars: list[Bar]
) -> None:
    table.add_row("the directory: find a prompt's blocks (µs)", _median_of(indexed.find))
    table.add_row("the directory: store them (µs)", _median_of(indexed.store))
    if peer is not None:
        table.add_row("Dynamo: RadixTree, find (µs)", _median_of(peer.find_us))
        table.add_row("Dynamo: RadixTree, store (µs)", _median_of(peer.store_us))
        table.add_row("Dynamo: simulated requests a second", f"{peer.replayed:.0f}")
    times = simulated_rate / peer.replayed if peer else None
    bars.append(bar("simulated requests a second, times Dynamo's", times, REPLAY_TIMES, reason=lack))
    faster = median(peer.find_us) / median(indexed.find) if peer else None
    bars.append(bar("lookup, times faster than Dynamo's", faster, LOOKUP_TIMES, reason=lack))


def _indexed(trace: Path) -> Indexed:
    """As often as the peer's."""
    found = [index(TraceFile(trace), dynamo.WORKERS) for _ in range(dynamo.REPETITIONS)]
    return Indexed(tuple(find for find, _ in found), tuple(store for _, store in found))


def _median_of(means: Sequence[float]) -> str:
    return f"{median(means):.1f} ({min(means):.1f} to {max(means):.1f})"


def _directory(entries: int, most: int, table: Table, bars: list[Bar]) -> None:
    _, figures = measure_directory(entries)
    table.add_row(f"directory of {entries:,} blocks, bytes an entry", f"{figures['bytes']:.0f}")
    worst = figures["worst"]
    if most > entries:
        worst = measure_directory(most)[1]["worst"]
    table.add_row(f"longest insert up to {max(most, entries):,} blocks (ms)", f"{worst:.2f}")
    bars.append(bar("longest insert into the directory, ms", worst, INSERT_LIMIT_MS, at_most=True))


def _day(path: Path, requests: int, table: Table, bars: list[Bar]) -> None:
    """A day on DAY_NODES machines."""
    write(path, islice(sessions(requests / DAY_SECONDS), requests))
    half = DAY_NODES // 2
    fifth = simulated(path, half, half, max(requests // 5, 1))
    whole = simulated(path, half, half, requests)
    table.add_row(f"a day of {requests:,} requests on {DAY_NODES} machines (s)", f"{whole.seconds:.0f}")
    peaks = f"{fifth.peak_bytes / 2**20:.0f}, {whole.peak_bytes / 2**20:.0f}"
    table.add_row("  peak of memory, of its first fifth and of all (MiB)", peaks)
    bars.append(bar("a simulated day, s", whole.seconds, DAY_LIMIT_SECONDS, at_most=True))
    grown = whole.peak_bytes / fifth.peak_bytes
    bars.append(bar("a simulated day's peak of memory, by its first fifth's", grown, FLAT, at_most=True))


if __name__ == "__main__":
    main()
