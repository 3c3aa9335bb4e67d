"""`make bench-engine`: the torch engine and vLLM on CPU side by side: same weights, float32, same threads.

Each runs in a process of its own, is driven a step at a time, and takes its turn, so that the ratios hold on a machine
that is not quiet. A ratio is the median over the turns, each side's figure beside the other's. On a CUDA device this
engine is measured alone: int8 and the peer are for CPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from moonpool.bench import vllm_cpu
from moonpool.bench.peer import Peer, PeerMissingError
from moonpool.bench.process import Worker, worker
from moonpool.bench.result import Bar, bar, print_result
from moonpool.engine.model import resolve
from moonpool.engine.runner import DTYPES
from moonpool.errors import MoonpoolError

OURS, INT8, PEER = "moonpool", "moonpool int8", "vLLM"
COMPILE_SECONDS = 900.0
"""vLLM compiles its model at its first start."""
POINT, MEAN, INT8_TIMES = 0.97, 1.0, 1.8
INT8_SHARE = 0.25
"""Of the bytes that a step reads."""
TABLE_COLUMNS = 110


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt of `size` tokens, or `size` streams."""

    do: str
    size: int

    def __str__(self) -> str:
        if self.do == "prefill":
            return f"prefill {self.size} tokens"
        return f"decode {self.size} stream{'s' if self.size > 1 else ''}"

    @property
    def tokens(self) -> int:
        """Of one timed step."""
        return self.size


CASES = (*(Case("prefill", tokens) for tokens in (512, 2048)), *(Case("decode", streams) for streams in (1, 4, 8, 16)))


@dataclass(slots=True)
class Figures:
    """Tokens a second of each turn."""

    rates: dict[tuple[Case, str], list[float]] = field(default_factory=dict)

    def add(self, case: Case, side: str, seconds: Sequence[float]) -> None:
        self.rates.setdefault((case, side), []).append(case.tokens / statistics.median(seconds))

    def ratio(self, case: Case, side: str, other: str) -> float | None:
        mine, theirs = self.rates.get((case, side)), self.rates.get((case, other))
        if mine is None or theirs is None:
            return None
        return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def main() -> int:
    options = _options()
    if lack := _lack_of(options.device):
        print(lack, file=sys.stderr)
        return 2
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = TABLE_COLUMNS
    figures = Figures()
    peer, lack = _peer(console, options)
    cases = [case for case in CASES if options.only in (None, case.do)]
    try:
        path = resolve("smollm2")
        with tempfile.TemporaryDirectory(prefix="moonpool-bench-") as folder, Progress(console=console) as progress:
            task = progress.add_task("measuring", total=len(cases) * (options.repetitions + 1))
            with _sides(path, options, peer, Path(folder)) as sides:
                read = sides[OURS].order("read")[0]
                for case in cases:
                    for turn in range(options.repetitions + 1):
                        _measure(figures, sides, case, turn, options.steps)
                        progress.advance(task)
    except MoonpoolError as error:
        console.print(f"the bench failed: {error}", soft_wrap=True, markup=False)
        return 1
    _print(console, figures, cases, read, f"{options.dtype} on {options.device}")
    if lack:
        console.print(f"without vLLM: {lack}", soft_wrap=True, markup=False)
    about = {"device": options.device, "dtype": options.dtype, "threads": options.threads}
    print_result(_bars(figures, cases, lack), **about, peer=lack or f"vLLM {vllm_cpu.VERSION}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-engine", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of each (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=5, help="turns of each case (%(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a turn (%(default)s)")
    parser.add_argument("--only", choices=("prefill", "decode"), help="half of the cases")
    parser.add_argument("--no-peer", action="store_true", help="this engine alone")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda or cuda:1 (%(default)s)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="float32 on a CPU, else bfloat16, by default")
    options = parser.parse_args()
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    return options


def _lack_of(device: str) -> str:
    """Why there is no such device, in one line; empty: there is."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        return f"no device {device} here: {str(error).splitlines()[0]}"
    return ""


def _is_compared(options: argparse.Namespace) -> bool:
    """With int8 and with the peer."""
    return bool(options.device == "cpu" and options.dtype == "float32")


def _peer(console: Console, options: argparse.Namespace) -> tuple[Peer | None, str]:
    """The peer, or why there is none."""
    if options.no_peer:
        return None, "left out"
    if not _is_compared(options):
        return None, f"the peer computes float32 on a CPU, this is {options.dtype} on {options.device}"
    try:
        return vllm_cpu.set_up(console), ""
    except PeerMissingError as error:
        return None, str(error)


@contextlib.contextmanager
def _sides(path: Path, options: argparse.Namespace, peer: Peer | None, folder: Path) -> Iterator[dict[str, Worker]]:
    threads, where = options.threads, [options.device, options.dtype]
    ours = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    engines = ((OURS, "none"), (INT8, "int8")) if _is_compared(options) else ((OURS, "none"),)
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, quantize in engines:
            start = ("moonpool.bench.engine_side", [str(path), str(threads), quantize, *where], sys.executable, ours)
            sides[name] = stack.enter_context(worker(name, folder, *start))
        if peer is not None:
            environment = vllm_cpu.environment(peer, threads)
            other = ("moonpool.bench.peer_vllm", [str(path)], str(peer.python), environment)
            sides[PEER] = stack.enter_context(worker(PEER, folder, *other, start_seconds=COMPILE_SECONDS))
        yield sides


def _measure(figures: Figures, sides: dict[str, Worker], case: Case, turn: int, steps: int) -> None:
    """One turn of every side, the first one changing. Turn 0 warms up, and starts the streams of a case."""
    for name in sorted(sides, reverse=turn % 2 == 1):
        side = sides[name]
        if case.do == "decode" and turn == 0:
            side.order("start", streams=case.size)
        seconds = side.order(case.do, seed=turn, tokens=case.size, steps=steps)
        if turn:
            figures.add(case, name, seconds)


def _print(console: Console, figures: Figures, cases: Sequence[Case], read: float, how: str) -> None:
    """`read`: seconds for the weights once, the least that a step of one stream can take. `how`: dtype and device."""
    names = [name for name in (OURS, INT8, PEER) if (cases[0], name) in figures.rates]
    count = len(figures.rates[cases[0], OURS])
    table = Table("tokens/s", title=f"SmolLM2-135M, {how}: median (min–max) of {count} turns")
    for name in names:
        table.add_column(name, justify="right")
    if PEER in names:
        table.add_column("times vLLM", justify="right")
        table.add_column("int8", justify="right")
    for case in cases:
        cells = [_spread(figures.rates[case, name]) for name in names]
        ratios = [figures.ratio(case, name, PEER) for name in (OURS, INT8)]
        table.add_row(str(case), *cells, *[f"{ratio:.2f}" for ratio in ratios if ratio])
    console.print(table)
    console.print(f"reading the weights once takes {read * 1e3:.1f} ms: at most {1 / read:.1f} tokens/s of one stream")
    for name in names:
        if alone := figures.rates.get((Case("decode", 1), name)):
            share, of = (INT8_SHARE, "a fourth of the bytes") if name == INT8 else (1.0, "these bytes")
            console.print(f"  {name} reaches {statistics.median(alone) * read * share:.2f} of what {of} allow")


def _spread(rates: Sequence[float]) -> str:
    return f"{statistics.median(rates):.1f} ({min(rates):.1f}–{max(rates):.1f})"


def _bars(figures: Figures, cases: Sequence[Case], lack: str) -> list[Bar]:
    ratios = [figures.ratio(case, OURS, PEER) for case in cases]
    found = [bar(f"{case}, times vLLM", ratio, POINT, reason=lack) for case, ratio in zip(cases, ratios, strict=True)]
    known = [ratio for ratio in ratios if ratio is not None]
    mean = statistics.geometric_mean(known) if known else None
    found += [
        bar(f"{case}, int8, times vLLM float32", figures.ratio(case, INT8, PEER), INT8_TIMES, reason=lack)
        for case in cases
        if case.do == "decode" and case.size in (1, 8)
    ]
    return [*found, bar("all, times vLLM, geometric mean", mean, MEAN, reason=lack)]


if __name__ == "__main__":
    sys.exit(main())
